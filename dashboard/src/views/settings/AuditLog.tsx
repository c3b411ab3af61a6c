/** Audit log: actor, action, target and outcome; newest first. For admins. */

import { useMutation, useQuery } from "@tanstack/react-query";
import { Download, RefreshCw, ScrollText } from "lucide-react";
import { useEffect, useState } from "react";

import { get } from "../../api/client";
import type { AuditEntry } from "../../api/types";
import { Card } from "../../components/Card";
import { Button, Input } from "../../components/controls";
import { Empty, ErrorNote, Loading } from "../../components/states";
import { Status } from "../../components/Status";
import { Table, type Column } from "../../components/Table";
import { Name, Time } from "../../components/values";
import { saveLines } from "../../download";
import { count } from "../../format";
import { useFilters } from "../../search";

const FIRST = 200;
const MOST = 10_000;
const PAUSE_MS = 250;

type Row = AuditEntry & { key: string };

const COLUMNS: readonly Column<Row>[] = [
  { id: "at", header: "Time", cell: (entry) => <Time at={entry.at} />, width: "136px" },
  { id: "who", header: "Actor", cell: (entry) => <Name>{entry.who}</Name>, width: "minmax(9rem, 1.2fr)" },
  { id: "role", header: "Role", cell: (entry) => entry.role || "–", width: "80px" },
  { id: "outcome", header: "Outcome", cell: (entry) => <Status value={entry.outcome} title={entry.reason} />, width: "100px" },
  { id: "action", header: "Action", cell: (entry) => <Name mono>{entry.count > 1 ? `${entry.action} ×${count(entry.count)}` : entry.action}</Name>, width: "minmax(13rem, 2fr)" },
  { id: "target", header: "Target", cell: (entry) => <Name>{entry.target}</Name>, width: "minmax(7rem, 1fr)" },
  { id: "client", header: "Client", cell: (entry) => <Name>{entry.client}</Name>, width: "minmax(6rem, 0.7fr)" },
  { id: "reason", header: "Reason", cell: (entry) => <Name>{entry.reason}</Name>, width: "minmax(10rem, 1.5fr)" },
];

export function AuditLog() {
  const [search, setFilters] = useFilters();
  const text = search["audit"] ?? "";
  const asked = useSettled(text);
  const [limit, setLimit] = useState(FIRST);
  const entries = useQuery({
    queryKey: ["audit-log", asked, limit],
    queryFn: async ({ signal }) => withKeys(await get<AuditEntry[]>("/audit-log", { q: asked, limit }, signal)),
    placeholderData: (before) => before,
  });
  const exporting = useMutation({ mutationFn: async () => saveLines("strata-audit-log", (await get<AuditEntry[]>("/audit-log", { q: text, limit: MOST })).reverse()) });
  const isCut = entries.data?.length === limit && limit < MOST;
  return (
    <Card
      title="Audit log"
      actions={
        <>
          <Button disabled={entries.isFetching} onClick={() => void entries.refetch()}><RefreshCw aria-hidden className="size-4" />Refresh</Button>
          <Button disabled={exporting.isPending} onClick={() => exporting.mutate()}><Download aria-hidden className="size-4" />Export</Button>
        </>
      }
      flush
    >
      <div className="flex flex-col gap-3 px-4 pb-3">
        <Input type="search" data-search aria-label="Search audit log" placeholder="Actor, action, target, reason" className="w-full sm:w-80" maxLength={256} value={text} onChange={(event) => setFilters({ audit: event.target.value || undefined }, { replace: true })} />
        {exporting.isError && <ErrorNote error={exporting.error} onRetry={() => exporting.mutate()} />}
        {entries.isError && <ErrorNote error={entries.error} onRetry={() => void entries.refetch()} />}
        {entries.isPending && <Loading rows={5} />}
      </div>
      {entries.data && (
        <Table label="Audit log" rows={entries.data} columns={COLUMNS} rowId={(entry) => entry.key} rowHeight={34} height={380} empty={<Empty icon={ScrollText} title={asked ? "No matching entries" : "No entries yet"}>Changes, sign-ins and refused requests appear here.</Empty>} />
      )}
      {isCut && <div className="border-t p-2 text-center"><Button look="ghost" onClick={() => setLimit((before) => Math.min(MOST, before * 5))}>Show older</Button></div>}
    </Card>
  );
}

/** Entries have no IDs: the key is the position from the end. */
function withKeys(entries: AuditEntry[]): Row[] {
  return entries.map((entry, place) => ({ ...entry, key: String(entries.length - place) }));
}

/** The text, debounced. */
function useSettled(text: string): string {
  const [settled, settle] = useState(text);
  useEffect(() => {
    const timer = setTimeout(() => settle(text), PAUSE_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return settled;
}
