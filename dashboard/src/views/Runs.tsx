/** Runs, present and past: those known to the coordinator, and those with only their metrics left. */

import { useNavigate } from "@tanstack/react-router";
import { Activity, GitCompareArrows, Play } from "lucide-react";
import { useMemo } from "react";

import type { LoggedRun } from "../api/types";
import { Button, Input } from "../components/controls";
import { Page } from "../components/Page";
import { Empty, Loading } from "../components/states";
import { Status } from "../components/Status";
import { Table, type Column } from "../components/Table";
import { Ago, Name } from "../components/values";
import { compact, count, number } from "../format";
import { useFilters } from "../search";
import { runsOf, type Run } from "../state/runs";
import { useStory } from "../state/store";
import { idsOf, RUNS_COMPARED, textOf } from "./runs/compare";
import { useLoggedRuns } from "./runs/metrics";

interface Row {
  id: string;
  name: string;
  /** Null: only its logged metrics are known. */
  run: Run | null;
  logged: LoggedRun | null;
  tags: readonly string[];
}

/** All known jobs, plus earlier runs and runs of jobs that are no longer known. */
function rowsOf(runs: readonly Run[], logged: readonly LoggedRun[]): Row[] {
  const latest = new Map<string, LoggedRun>();
  for (const one of logged) {
    const job = one.jobs.at(-1);
    if (job !== undefined && !latest.has(job)) latest.set(job, one);
  }
  const rows = runs.map((run): Row => ({ id: run.id, name: run.name, run, logged: latest.get(run.id) ?? null, tags: latest.get(run.id)?.tags ?? [] }));
  const shown = new Set(rows.map((row) => row.logged?.run));
  const past = logged.filter((one) => !shown.has(one.run)).map((one): Row => ({ id: one.run, name: one.jobs.at(-1) ?? one.run, run: null, logged: one, tags: one.tags }));
  return [...rows, ...past];
}

function columnsFor(picked: readonly string[], pick: (id: string) => void): readonly Column<Row>[] {
  const of = <T,>(value: (run: Run) => T) => (row: Row) => (row.run === null ? null : value(row.run));
  return [
    { id: "pick", header: "", width: "40px", cell: (row) => <Pick row={row} picked={picked} onPick={pick} /> },
    { id: "id", header: "Run", value: (row) => row.name, cell: (row) => <RunName row={row} />, width: "minmax(17rem, 3fr)" },
    { id: "status", header: "Status", value: (row) => row.run?.status ?? "ended", cell: (row) => <Status value={row.run?.status ?? "ended"} />, width: "130px" },
    { id: "workers", header: "Workers", value: of((r) => r.alive), cell: (row) => (row.run === null ? "–" : row.run.failed > 0 ? `${count(row.run.alive)} + ${count(row.run.failed)} lost` : count(row.run.alive)), width: "90px", align: "right" },
    { id: "step", header: "Step", value: of((r) => r.step), cell: (row) => count(row.run?.step), width: "80px", align: "right" },
    { id: "loss", header: "Loss", value: of((r) => r.loss), cell: (row) => number(row.run?.loss, 4), width: "80px", align: "right" },
    { id: "throughput", header: "Throughput", value: of((r) => r.throughput), cell: (row) => (row.run === null || row.run.throughput === null ? "–" : `${compact(row.run.throughput)} ${row.run.throughputUnit}`), width: "130px", align: "right" },
    { id: "safe", header: "Checkpoint", value: of((r) => r.risk.safe?.created_at ?? null), cell: (row) => (row.run === null ? "–" : row.run.risk.safe ? <Ago at={row.run.risk.safe.created_at} /> : row.run.risk.isUnsaved ? "never" : "–"), width: "120px", align: "right" },
    { id: "recoveries", header: "Recoveries", value: of((r) => r.recoveries.length), cell: (row) => count(row.run?.recoveries.length), width: "100px", align: "right" },
    { id: "logged", header: "Last logged", value: (row) => row.logged?.updated_at ?? null, cell: (row) => <Ago at={row.logged?.updated_at} />, width: "110px", align: "right" },
  ];
}

function Pick(props: { row: Row; picked: readonly string[]; onPick: (id: string) => void }) {
  const { row } = props;
  const checked = props.picked.includes(row.id);
  const why = row.logged === null ? "No metrics logged" : !checked && props.picked.length >= RUNS_COMPARED ? `At most ${RUNS_COMPARED} runs` : undefined;
  return <input type="checkbox" aria-label={`Compare ${row.name}`} title={why} disabled={why !== undefined} checked={checked} className="size-4 align-middle accent-accent" onClick={(event) => event.stopPropagation()} onChange={() => props.onPick(row.id)} />;
}

function RunName({ row }: { row: Row }) {
  return (
    <span className="flex items-baseline gap-x-2 max-sm:flex-wrap">
      <span className="min-w-0"><Name>{row.name}</Name></span>
      {row.name !== row.id && <span className="foreign min-w-16 shrink-100 truncate text-sm text-faint" title={row.id}>{row.id}</span>}
      {row.tags.slice(0, 3).map((tag) => <span key={tag} className="foreign max-w-28 shrink-0 truncate rounded-full border bg-raised px-1.5 text-xs text-muted" title={tag}>{tag}</span>)}
    </span>
  );
}

function toggled(ids: readonly string[], id: string): readonly string[] {
  return ids.includes(id) ? ids.filter((each) => each !== id) : [...ids, id];
}

export function Runs() {
  const [filters, set] = useFilters();
  const navigate = useNavigate();
  const state = useStory();
  const logged = useLoggedRuns();
  const rows = useMemo(() => rowsOf(runsOf(state), logged ?? []), [state, logged]);
  const query = filters["q"]?.toLowerCase() ?? "";
  const shown = useMemo(() => rows.filter((row) => `${row.name} ${row.id} ${row.tags.join(" ")}`.toLowerCase().includes(query)), [rows, query]);
  const picked = useMemo(() => idsOf(filters["pick"]), [filters]);
  const columns = useMemo(() => columnsFor(picked, (id) => set((before) => ({ pick: textOf(toggled(idsOf(before["pick"]), id)) }), { replace: true })), [picked, set]);
  return (
    <Page
      title="Runs"
      fill
      actions={
        <>
          {picked.length > 0 && <Button look="ghost" onClick={() => set({ pick: undefined }, { replace: true })}>Clear</Button>}
          <Button disabled={picked.length < 2} title={picked.length < 2 ? "Select at least two runs" : undefined} onClick={() => void navigate({ to: "/compare", search: { runs: textOf(picked) } })}><GitCompareArrows aria-hidden className="size-4" />{picked.length > 0 ? `Compare ${count(picked.length)}` : "Compare"}</Button>
          <Button look="primary" needs="operator" onClick={() => set({ start: "1" })}><Play aria-hidden className="size-4" />Start task</Button>
          <Input data-search type="search" aria-label="Search runs" placeholder="Name, ID or tag" value={filters["q"] ?? ""} onChange={(e) => set({ q: e.target.value || undefined }, { replace: true })} className="w-52" />
        </>
      }
    >
      {state.coordinator === null ? (
        <Loading rows={6} height={28} />
      ) : (
        <div className="flex min-h-0 flex-1 flex-col overflow-hidden rounded-lg border bg-surface">
          <Table
            label="Runs"
            rows={shown}
            columns={columns}
            rowId={(row) => row.id}
            sort={filters["sort"]}
            onSort={(sort) => set({ sort }, { replace: true })}
            onOpen={(row) => void navigate({ to: "/runs/$job", params: { job: row.id } })}
            rowHeight={44}
            empty={<Empty icon={Activity} title={rows.length === 0 ? "No runs yet" : "No matching runs"}>{rows.length === 0 && <>A run appears when its first worker joins. Start a task, or run <code className="font-mono text-sm">strata demo</code>.</>}</Empty>}
          />
        </div>
      )}
    </Page>
  );
}
