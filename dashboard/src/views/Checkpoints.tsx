/** All checkpoints: tiers, worker, and verification of their checksums. */

import { useQuery } from "@tanstack/react-query";
import { HardDriveDownload } from "lucide-react";
import { useMemo } from "react";

import { get } from "../api/client";
import type { Checkpoint } from "../api/types";
import { Facts } from "../components/Card";
import { Copyable } from "../components/Copy";
import { Input, RunFilter, Select } from "../components/controls";
import { Drawer } from "../components/Dialog";
import { Page } from "../components/Page";
import { Empty, ErrorNote, Loading } from "../components/states";
import { Status } from "../components/Status";
import { Table, type Column } from "../components/Table";
import { Ago, Bytes, Name, Path, RunLink, Time, WorkerLink } from "../components/values";
import { count, number, plural } from "../format";
import { useFilters } from "../search";
import { shortName } from "../state/runs";
import { useStore } from "../state/store";
import { Ladder } from "./checkpoints/Ladder";
import { Where } from "./checkpoints/Safety";
import { Verify } from "./checkpoints/Verify";
import { allSaves } from "./runs/drawing";

const COLUMNS: readonly Column<Checkpoint>[] = [
  { id: "step", header: "Step", value: (each) => each.step, cell: (each) => <span className="font-medium">{count(each.step)}</span>, align: "right", width: "80px" },
  { id: "status", header: "Status", value: (each) => each.status, cell: (each) => <Status value={each.status} title={each.reason} />, width: "118px" },
  { id: "tiers", header: "Tiers", value: (each) => each.tiers.length, cell: (each) => <Ladder tiers={each.tiers} status={each.status} />, width: "188px" },
  { id: "size", header: "Size", value: (each) => each.size, cell: (each) => <Bytes value={each.size} />, align: "right", width: "88px" },
  { id: "throughput", header: "Throughput", value: (each) => each.throughput_mb_s, cell: (each) => (each.throughput_mb_s === null ? "–" : `${number(each.throughput_mb_s)} MB/s`), align: "right", width: "112px" },
  { id: "created", header: "Created", value: (each) => each.created_at, cell: (each) => <Ago at={each.created_at} />, align: "right", width: "108px" },
  { id: "run", header: "Run", value: (each) => each.job_id, cell: (each) => <RunLink id={each.job_id} />, width: "minmax(9.75rem, 1fr)" },
  { id: "worker", header: "Worker", value: (each) => each.worker_id, cell: (each) => <Name full={each.worker_id}>{shortName(each.worker_id, each.job_id)}</Name>, width: "minmax(4.5rem, 1fr)" },
  { id: "path", header: "Path", value: (each) => each.path, cell: (each) => <Path>{each.path}</Path>, width: "minmax(8rem, 2fr)" },
  { id: "digest", header: "Digest", cell: (each) => <Name mono>{each.digest.split(":").at(-1)}</Name>, width: "minmax(5rem, 1fr)" },
];

export function Checkpoints() {
  const [search, setFilters] = useFilters();
  const recent = useStore((state) => state.checkpoints);
  const history = useQuery({
    queryKey: ["checkpoints"],
    queryFn: ({ signal }) => get<Checkpoint[]>("/checkpoints", {}, signal),
    staleTime: 60_000,
  });
  const all = useMemo(() => allSaves(recent, history.data ?? []), [recent, history.data]);
  const { job } = search;
  const jobs = useMemo(() => [...new Set(all.map((each) => each.job_id))].sort(), [all]);
  const status = search["status"] ?? "";
  const query = (search["q"] ?? "").toLowerCase();
  const shown = useMemo(
    () => all.filter((each) => (!job || each.job_id === job) && (!status || each.status === status) && (!query || `${each.step} ${each.id} ${each.job_id} ${each.worker_id} ${each.path}`.toLowerCase().includes(query))),
    [all, job, status, query],
  );
  const open = all.find((each) => each.id === search["checkpoint"]) ?? null;
  const last = all.find((each) => each.status === "completed" && (!job || each.job_id === job));

  return (
    <Page
      title="Checkpoints"
      fill
      subtitle={last ? <>latest: step {count(last.step)}, <Ago at={last.completed_at ?? last.created_at} /></> : history.isSuccess && "none completed yet"}
      actions={
        <>
          <Input type="search" data-search aria-label="Search checkpoints" placeholder="Step, run, worker, path" value={search["q"] ?? ""} onChange={(event) => setFilters({ q: event.target.value || undefined }, { replace: true })} />
          <Select aria-label="Status" value={status} onChange={(event) => setFilters({ status: event.target.value || undefined })}>
            <option value="">All statuses</option>
            <option value="completed">Completed</option>
            <option value="in_progress">In progress</option>
            <option value="failed">Failed</option>
          </Select>
          <RunFilter runs={jobs} value={job} onChange={(next) => setFilters({ job: next })} />
        </>
      }
    >
      {history.isError && <ErrorNote error={history.error} onRetry={() => void history.refetch()} />}
      <section className="flex min-h-0 flex-1 flex-col overflow-hidden rounded-lg border bg-surface" aria-label="History">
        {history.isPending && shown.length === 0 ? (
          <div className="p-4"><Loading rows={8} /></div>
        ) : (
          <Table
            label="Checkpoints"
            rows={shown}
            columns={COLUMNS}
            rowId={(each) => each.id}
            sort={search["sort"]}
            onSort={(sort) => setFilters({ sort })}
            selected={open?.id}
            onOpen={(each) => setFilters({ checkpoint: each.id })}
            empty={
              history.isError && all.length === 0 ? null : all.length === 0 ? (
                <Empty icon={HardDriveDownload} title="No checkpoints yet">A checkpoint appears when a run saves to disk or object storage.</Empty>
              ) : (
                <Empty icon={HardDriveDownload} title="No matching checkpoints">{plural(all.length, "checkpoint")} hidden. Clear filters to see them.</Empty>
              )
            }
          />
        )}
      </section>
      <Drawer
        open={search["checkpoint"] !== undefined}
        onClose={() => setFilters({ checkpoint: undefined })}
        title={open ? `Checkpoint at step ${count(open.step)}` : "Checkpoint"}
        description={open?.reason ? <span className="foreign">{open.reason}</span> : undefined}
      >
        {open ? <Details checkpoint={open} /> : history.isPending ? <Loading rows={8} /> : history.isError ? <ErrorNote error={history.error} /> : <Empty title="Checkpoint not found">It was removed, or it is not among the newest.</Empty>}
      </Drawer>
    </Page>
  );
}

function Details({ checkpoint }: { checkpoint: Checkpoint }) {
  return (
    <div className="flex flex-col gap-5">
      <div className="flex items-center gap-4"><Status value={checkpoint.status} pill /><Ladder tiers={checkpoint.tiers} status={checkpoint.status} /></div>
      <Facts
        items={[
          ["Run", <RunLink key="run" id={checkpoint.job_id} />],
          ["Worker", <WorkerLink key="worker" id={checkpoint.worker_id} />],
          ["Step", count(checkpoint.step)],
          ["Epoch", count(checkpoint.epoch)],
          ["Size", <Bytes key="size" value={checkpoint.size} />],
          ["Throughput", checkpoint.throughput_mb_s === null ? "–" : `${number(checkpoint.throughput_mb_s)} MB/s`],
          ["Started", <Time key="started" at={checkpoint.created_at} />],
          ["Completed", <Time key="completed" at={checkpoint.completed_at} />],
          ...Object.entries(checkpoint.metadata).map(([name, value]) => [name, value] as const),
        ]}
      />
      <Copyable label="Path" text={checkpoint.path} />
      <Copyable label="ID" text={checkpoint.id} />
      <Copyable label="Digest" text={checkpoint.digest} />
      {checkpoint.status === "completed" && <Where key={`where ${checkpoint.id}`} job={checkpoint.job_id} step={checkpoint.step} />}
      {checkpoint.status === "completed" && <Verify key={checkpoint.id} id={checkpoint.id} size={checkpoint.size} />}
    </div>
  );
}
