/** The fleet as a grid or a table, and a drawer for one worker. */

import { Boxes, LayoutGrid, Rows3 } from "lucide-react";
import { useMemo } from "react";

import type { Worker } from "../api/types";
import { Card, Meter } from "../components/Card";
import { Input, RunFilter, Segmented } from "../components/controls";
import { Page } from "../components/Page";
import { Empty, Loading } from "../components/states";
import { Status } from "../components/Status";
import { Table, type Column } from "../components/Table";
import { Ago, Bytes, Name } from "../components/values";
import { count, number, percent, plural } from "../format";
import { useFilters } from "../search";
import { rankOf, shortName } from "../state/runs";
import { useStore } from "../state/store";
import { Band } from "./workers/Band";
import { Heatmap, Legend, type HeatmapColor } from "./workers/Heatmap";
import { byPlace, loadOf, matches } from "./workers/load";
import { byHost, busyTime, pacesOf, type Pace } from "./workers/pace";
import { WorkerDrawer } from "./workers/WorkerDrawer";

/** With more workers, counts and the exceptions are shown instead of a grid. */
const GRID_MOST = 240;

const COLUMNS: readonly Column<Worker>[] = [
  { id: "rank", header: "Rank", value: rankOf, cell: (w) => count(rankOf(w)), width: "72px", align: "right" },
  { id: "id", header: "Worker", value: (w) => w.id, cell: (w) => <Name full={w.id}>{shortName(w.id, w.job_id)}</Name>, width: "minmax(8rem, 1fr)" },
  { id: "status", header: "Status", value: (w) => w.status, cell: (w) => <Status value={w.status} title={w.slow ? `slow: ${w.reason}` : w.reason} />, width: "140px" },
  { id: "job", header: "Run", value: (w) => w.job_id, cell: (w) => <Name>{w.job_id}</Name>, width: "minmax(9.75rem, 1fr)" },
  { id: "step", header: "Step", value: (w) => w.current_step, cell: (w) => count(w.current_step), width: "100px", align: "right" },
  { id: "load", header: "Load", value: (w) => loadOf(w).percent, cell: (w) => <LoadCell worker={w} />, width: "minmax(9rem, 1fr)" },
  { id: "memory", header: "Memory", value: (w) => w.resources?.memory_used_bytes ?? null, cell: (w) => <Bytes value={w.resources?.memory_used_bytes} />, width: "104px", align: "right" },
  { id: "step_time", header: "Busy time", value: (w) => busyTime(w).busyS, cell: (w) => millisOf(busyTime(w).busyS), width: "100px", align: "right" },
  { id: "wait", header: "Wait time", value: (w) => busyTime(w).waitS, cell: (w) => millisOf(busyTime(w).waitS), width: "96px", align: "right" },
  { id: "shards", header: "Shards", value: (w) => w.assigned_shards, cell: (w) => (w.assigned_shards === 0 ? "–" : count(w.assigned_shards)), width: "80px", align: "right" },
  { id: "last_heartbeat", header: "Last heartbeat", value: (w) => w.last_heartbeat, cell: (w) => <Ago at={w.last_heartbeat} />, width: "130px", align: "right" },
];

function millisOf(seconds: number | null): string {
  return seconds === null ? "–" : `${number(seconds * 1000)} ms`;
}

function LoadCell({ worker }: { worker: Worker }) {
  const { percent: value, of } = loadOf(worker);
  if (value === null) return <span className="text-faint">no data</span>;
  return <span className="flex items-center gap-2"><Meter label={`${of} load`} value={value} className="flex-1" /><span className="w-20 text-right">{of} {percent(value)}</span></span>;
}

export function Workers() {
  const [filters, set] = useFilters();
  const workers = useStore((s) => s.workers);
  const ready = useStore((s) => s.coordinator !== null);
  const view = filters["view"] === "table" ? "table" : "grid";
  const color: HeatmapColor = filters["color"] === "load" || filters["color"] === "status" ? filters["color"] : "pace";
  const { q, status, job } = filters;
  const all = useMemo(() => [...workers.values()].sort(byPlace), [workers]);
  const jobs = useMemo(() => [...new Set(all.map((w) => w.job_id))].sort(), [all]);
  const shown = useMemo(() => all.filter((w) => matches(w, { q, status, job })), [all, q, status, job]);
  // Compared with the whole run, whatever the filter.
  const paces = useMemo(() => pacesOf(all).filter((p) => matches(p.worker, { q, status, job })), [all, q, status, job]);
  const counts = useMemo(() => {
    const found = new Map<string, number>();
    for (const w of all) if (matches(w, { q, job })) found.set(w.status, (found.get(w.status) ?? 0) + 1);
    return new Map([...found].sort((a, b) => b[1] - a[1]));
  }, [all, q, job]);
  const open = (id: string | undefined) => set({ worker: id });
  const empty = <Empty icon={Boxes} title={all.length === 0 ? "No workers yet" : "No matching workers"}>{all.length === 0 ? "Workers appear here when they register with this coordinator." : "Clear filters to see all workers."}</Empty>;

  return (
    <Page
      title="Workers"
      fill
      subtitle={ready && plural(shown.length, "worker")}
      actions={
        <>
          <Input data-search type="search" aria-label="Search workers" placeholder="Search workers" value={q ?? ""} onChange={(e) => set({ q: e.target.value || undefined }, { replace: true })} className="w-52" />
          <RunFilter runs={jobs} value={job} onChange={(next) => set({ job: next })} />
          {view === "grid" && <Segmented label="Colour" value={color} options={[["pace", "Step time"], ["status", "Status"], ["load", "Load"]]} onChange={(next) => set({ color: next === "pace" ? undefined : next })} />}
          <Segmented
            label="Layout"
            value={view}
            options={[["grid", <><LayoutGrid key="i" aria-hidden className="size-3.5" />Grid</>], ["table", <><Rows3 key="i" aria-hidden className="size-3.5" />Table</>]]}
            onChange={(next) => set({ view: next === "grid" ? undefined : next })}
          />
        </>
      }
    >
      {!ready ? (
        <Loading rows={8} height={28} />
      ) : (
        <>
          {all.length > 0 && <Legend color={view === "grid" ? color : "status"} counts={counts} active={status} onPick={(next) => set({ status: next })} />}
          {view === "grid" ? (
            <Card className="min-h-0 flex-1 overflow-y-auto" flush>
              <div className="p-3">{shown.length === 0 ? empty : <Grid paces={paces} color={color} selected={filters["worker"]} onOpen={open} />}</div>
            </Card>
          ) : (
            <div className="flex min-h-0 flex-1 flex-col overflow-hidden rounded-lg border bg-surface">
              <Table label="Workers" rows={shown} columns={COLUMNS} rowId={(w) => w.id} sort={filters["sort"]} onSort={(sort) => set({ sort }, { replace: true })} selected={filters["worker"]} onOpen={(w) => open(w.id)} empty={empty} />
            </div>
          )}
        </>
      )}
      <WorkerDrawer id={filters["worker"]} onClose={() => open(undefined)} />
    </Page>
  );
}

function Grid(props: { paces: readonly Pace[]; color: HeatmapColor; selected: string | undefined; onOpen: (id: string) => void }) {
  const { paces } = props;
  const hosts = useMemo(() => byHost(paces), [paces]);
  if (paces.length > GRID_MOST) return <Band {...props} />;
  if (hosts.length === 1) return <Heatmap {...props} />;
  return (
    <div className="flex flex-col gap-4">
      {hosts.map(({ host, paces: found }) => (
        <section key={host} aria-label={host} className="flex flex-col gap-1.5">
          <h3 className="flex items-baseline gap-2 text-sm"><span className="foreign font-medium">{host}</span><span className="text-faint">{plural(found.length, "worker")}</span></h3>
          <Heatmap {...props} paces={found} label={`${host}: `} />
        </section>
      ))}
    </div>
  );
}
