/** Barriers: waiting ones first, each with its missing workers and how long it blocks. */

import { Milestone } from "lucide-react";
import { useMemo } from "react";

import type { Barrier } from "../api/types";
import { Card, Meter } from "../components/Card";
import { Select } from "../components/controls";
import { Page } from "../components/Page";
import { Empty, Loading } from "../components/states";
import { Status } from "../components/Status";
import { Table, type Column } from "../components/Table";
import { Ago, Duration, Name, RunLink, Time, WorkerLink } from "../components/values";
import { age, count } from "../format";
import { useFilters } from "../search";
import { useServerNow, useStore } from "../state/store";

const MISSING_SHOWN = 12;
const WAITING_SHOWN = 20;

const COLUMNS: readonly Column<Barrier>[] = [
  { id: "status", header: "Status", value: (barrier) => barrier.status, cell: (barrier) => <Status value={barrier.status} />, width: "120px" },
  { id: "name", header: "Barrier", value: (barrier) => barrier.name, cell: (barrier) => <Name>{barrier.name}</Name> },
  { id: "run", header: "Run", value: (barrier) => barrier.job_id, cell: (barrier) => <RunLink id={barrier.job_id} /> },
  { id: "step", header: "Step", value: (barrier) => barrier.step, cell: (barrier) => count(barrier.step), align: "right", width: "90px" },
  { id: "arrived", header: "Arrived", value: (barrier) => barrier.arrived, cell: (barrier) => `${count(barrier.arrived)} of ${count(barrier.total)}`, align: "right", width: "120px" },
  { id: "duration", header: "Duration", value: durationS, cell: (barrier) => <Duration seconds={durationS(barrier)} />, align: "right", width: "100px" },
  { id: "ended", header: "Ended", value: (barrier) => barrier.ended_at, cell: (barrier) => <Time at={barrier.ended_at} />, align: "right", width: "130px" },
  { id: "reason", header: "Reason", cell: (barrier) => <Name>{barrier.reason}</Name>, width: "minmax(14rem, 3fr)" },
];

function durationS(barrier: Barrier): number | null {
  return barrier.ended_at === null ? null : barrier.ended_at - barrier.created_at;
}

export function Barriers() {
  const [search, setFilters] = useFilters();
  const barriers = useStore((state) => state.barriers);
  const status = search["status"] ?? "";
  const waiting = useMemo(() => barriers.filter((barrier) => barrier.status === "waiting"), [barriers]);
  const ended = useMemo(() => barriers.filter((barrier) => barrier.status !== "waiting"), [barriers]);
  const shown = useMemo(() => ended.filter((barrier) => !status || barrier.status === status), [ended, status]);
  const ready = useStore((state) => state.coordinator !== null);
  const broken = ended.filter((barrier) => barrier.status === "broken").length;
  return (
    <Page
      title="Barriers"
      fill
      subtitle={ready && `${count(waiting.length)} waiting, ${count(broken)} of last ${count(ended.length)} broken`}
      actions={
        <Select aria-label="Status" value={status} onChange={(event) => setFilters({ status: event.target.value || undefined })}>
          <option value="">All statuses</option>
          <option value="waiting">Waiting</option>
          <option value="complete">Complete</option>
          <option value="broken">Broken</option>
        </Select>
      }
    >
      {waiting.length > 0 && (!status || status === "waiting") && (
        <>
          <ul className="grid gap-3 lg:grid-cols-2" aria-label="Waiting barriers">
            {waiting.slice(0, WAITING_SHOWN).map((barrier) => <li key={barrier.id}><Waiting barrier={barrier} /></li>)}
          </ul>
          {waiting.length > WAITING_SHOWN && <p className="text-faint">and {count(waiting.length - WAITING_SHOWN)} more waiting</p>}
        </>
      )}
      {status === "waiting" && waiting.length === 0 && (ready ? <Empty icon={Milestone} title="No barrier is waiting" /> : <Loading rows={6} />)}
      {status !== "waiting" && <Card title="Ended" hint="last 100" flush className="min-h-64 flex-1">
        <div className="flex h-full min-h-0 flex-col">
          {!ready ? (
            <div className="p-4"><Loading rows={6} /></div>
          ) : (
            <Table
              label="Ended barriers"
              rows={shown}
              columns={COLUMNS}
              rowId={(barrier) => barrier.id}
              sort={search["sort"]}
              onSort={(sort) => setFilters({ sort })}
              empty={<Empty icon={Milestone} title={ended.length === 0 ? "No barrier has ended yet" : "No matching barriers"}>{ended.length === 0 ? "Barriers appear here after a script calls barrier()." : "Clear the filter to see all barriers."}</Empty>}
            />
          )}
        </div>
      </Card>}
    </Page>
  );
}

function Waiting(props: { barrier: Barrier }) {
  const { barrier } = props;
  const now = useServerNow();
  return (
    <Card
      title={<span className="foreign">{barrier.name}</span>}
      hint={<>step {count(barrier.step)} of <RunLink id={barrier.job_id} /></>}
      actions={<><Status value="waiting" pill /><span className="font-medium"><Ago at={barrier.created_at} bare /></span></>}
    >
      <div className="flex flex-col gap-3">
        <div className="flex items-center gap-3">
          <Meter label={`Arrived at ${barrier.name}`} value={barrier.arrived} max={barrier.total} />
          <span className="shrink-0 text-muted">{count(barrier.arrived)} of {count(barrier.total)}</span>
        </div>
        {barrier.missing.length > 0 ? (
          <div>
            <p className="mb-1 text-muted">Waiting {age(now - barrier.created_at)} for:</p>
            <ul className="flex flex-col gap-1">
              {barrier.missing.slice(0, MISSING_SHOWN).map((name) => <Missing key={name} name={name} now={now} />)}
            </ul>
            {barrier.missing.length > MISSING_SHOWN && <p className="mt-1 text-faint">and {count(barrier.missing.length - MISSING_SHOWN)} more</p>}
          </div>
        ) : (
          <p className="text-muted">All joined workers have arrived; more are expected to join.</p>
        )}
      </div>
    </Card>
  );
}

function Missing(props: { name: string; now: number }) {
  const worker = useStore((state) => state.workers.get(props.name));
  return (
    <li className="flex min-w-0 flex-wrap items-center gap-x-3">
      <span className="min-w-0 basis-full sm:flex-1 sm:basis-0"><WorkerLink id={props.name} /></span>
      {worker ? (
        <>
          <span className="text-faint">step {count(worker.current_step)}</span>
          <span className="text-muted">last heartbeat {age(props.now - worker.last_heartbeat)} ago</span>
          <Status value={worker.status} />
        </>
      ) : (
        <span className="text-faint">unknown worker</span>
      )}
    </li>
  );
}
