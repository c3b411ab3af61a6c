/** Runs, present and past; and one run on its timeline. */

import { Link, useNavigate, useParams } from "@tanstack/react-router";
import { Activity, ArrowLeft, Play } from "lucide-react";
import { useMemo } from "react";

import { Card, Facts, Figure } from "../components/Card";
import { Chart } from "../components/Chart";
import { Button, Input, Segmented } from "../components/controls";
import { EventList } from "../components/EventList";
import { LastLines } from "../components/LastLines";
import { Page } from "../components/Page";
import { Empty, Loading } from "../components/states";
import { Status } from "../components/Status";
import { Table, type Column } from "../components/Table";
import { Ago, Name } from "../components/values";
import { age, clock, compact, count, duration, number, plural } from "../format";
import { useFilters } from "../search";
import { generationLines, runsOf, timelineRows, whoSurvived, type Run } from "../state/runs";
import { throughputOf } from "../state/series";
import { useServerNow, useStore, useStory } from "../state/store";
import { GoodputBar } from "./runs/GoodputBar";
import { GUTTER, phasesOf, tiersOf } from "./runs/drawing";
import { Timeline, TimelineLegend } from "./runs/Timeline";
import { useGoodput, useRunHistory } from "./runs/history";

const COLUMNS: readonly Column<Run>[] = [
  { id: "id", header: "Run", value: (r) => r.name, cell: (r) => <RunName run={r} />, width: "minmax(10rem, 3fr)" },
  { id: "status", header: "Status", value: (r) => r.status, cell: (r) => <Status value={r.status} />, width: "120px" },
  { id: "workers", header: "Workers", value: (r) => r.alive, cell: (r) => (r.failed > 0 ? `${count(r.alive)} + ${count(r.failed)} lost` : count(r.alive)), width: "100px", align: "right" },
  { id: "step", header: "Step", value: (r) => r.step, cell: (r) => count(r.step), width: "100px", align: "right" },
  { id: "epoch", header: "Epoch", value: (r) => r.epoch, cell: (r) => count(r.epoch), width: "70px", align: "right" },
  { id: "loss", header: "Loss", value: (r) => r.loss, cell: (r) => number(r.loss, 4), width: "90px", align: "right" },
  { id: "throughput", header: "Throughput", value: (r) => r.throughput, cell: (r) => (r.throughput === null ? "–" : `${compact(r.throughput)} ${r.throughputUnit}`), width: "140px", align: "right" },
  { id: "safe", header: "Checkpoint", value: (r) => r.risk.safe?.created_at ?? null, cell: (r) => (r.risk.safe ? <Ago at={r.risk.safe.created_at} /> : "never"), width: "120px", align: "right" },
  { id: "recoveries", header: "Recoveries", value: (r) => r.recoveries.length, cell: (r) => count(r.recoveries.length), width: "110px", align: "right" },
  { id: "generation", header: "Generation", value: (r) => r.generation, cell: (r) => count(r.generation), width: "110px", align: "right" },
];

function RunName({ run }: { run: Run }) {
  return run.name === run.id ? <Name>{run.id}</Name> : <span className="flex items-baseline gap-2"><span className="foreign truncate" title={run.name}>{run.name}</span><span className="truncate text-sm text-faint">{run.id}</span></span>;
}

export function Runs() {
  const [filters, set] = useFilters();
  const state = useStory();
  const runs = useMemo(() => runsOf(state), [state]);
  const words = filters["q"]?.toLowerCase() ?? "";
  const shown = useMemo(() => runs.filter((r) => `${r.name} ${r.id}`.toLowerCase().includes(words)), [runs, words]);
  return (
    <Page title="Runs" fill actions={<><Button look="primary" needs="operator" onClick={() => set({ start: "1" })}><Play aria-hidden className="size-4" />Start task</Button><Input data-search type="search" aria-label="Search runs" placeholder="Search runs" value={filters["q"] ?? ""} onChange={(e) => set({ q: e.target.value || undefined }, { replace: true })} className="w-52" /></>}>
      {state.coordinator === null ? (
        <Loading rows={6} height={28} />
      ) : (
        <div className="flex min-h-0 flex-1 flex-col overflow-hidden rounded-lg border bg-surface">
          <RunTable runs={shown} sort={filters["sort"]} onSort={(sort) => set({ sort }, { replace: true })} none={runs.length === 0} />
        </div>
      )}
    </Page>
  );
}

function RunTable(props: { runs: readonly Run[]; sort: string | undefined; onSort: (sort: string | undefined) => void; none: boolean }) {
  const navigate = useNavigate();
  return (
    <Table
      label="Runs"
      rows={props.runs}
      columns={COLUMNS}
      rowId={(r) => r.id}
      sort={props.sort}
      onSort={props.onSort}
      onOpen={(r) => void navigate({ to: "/runs/$job", params: { job: r.id } })}
      rowHeight={44}
      empty={<Empty icon={Activity} title={props.none ? "No runs yet" : "No matching runs"}>{props.none && <>A run appears when its first worker joins. Start a task, or run <code className="font-mono text-sm">strata demo</code>.</>}</Empty>}
    />
  );
}

const BUTTON = "inline-flex h-8 items-center rounded-md border px-3 font-medium hover:bg-hover";

const RANGES = [["300", "5 m"], ["900", "15 m"], ["3600", "1 h"], ["all", "All"]] as const;
type Range = (typeof RANGES)[number][0];

export function RunDetail() {
  const { job } = useParams({ from: "/runs/$job" });
  const state = useStory();
  const now = useServerNow();
  const run = useMemo(() => runsOf(state).find((r) => r.id === job) ?? null, [state, job]);
  const back = <Link to="/runs" className="inline-flex items-center gap-1 text-sm font-medium text-muted hover:text-ink"><ArrowLeft aria-hidden className="size-3.5" />All runs</Link>;
  if (state.coordinator === null) return <Page title={job}><Loading rows={8} /></Page>;
  if (run === null) return <Page title={job} actions={back}><Empty icon={Activity} title="Run not found">No worker, checkpoint or recovery has this run name.</Empty></Page>;
  return (
    <Page
      title={run.name}
      subtitle={<span className="flex items-center gap-3"><Status value={run.status} pill />{run.name !== run.id && <span className="foreign">{run.id}</span>}{run.startedAt !== null && run.alive > 0 && <span>started {age(now - run.startedAt)} ago</span>}</span>}
      actions={<>{back}{run.task && <Link to="/runs/$job" params={{ job: run.id }} search={{ task: run.task.id }} className={BUTTON}>Task</Link>}<LogsLink run={run} /></>}
    >
      <Story run={run} now={now} />
    </Page>
  );
}

function LogsLink({ run }: { run: Run }) {
  const worker = run.workers[0];
  const search = run.task ? { task: run.task.id } : worker ? { worker: worker.id } : {};
  return <Link to="/logs" search={search} className={BUTTON}>Logs</Link>;
}

/** Of its task; of a run that was started elsewhere, of its first worker. */
function RunLines({ run }: { run: Run }) {
  const worker = run.workers[0];
  if (run.task) return <LastLines of={{ task_id: run.task.id }} />;
  if (worker) return <LastLines of={{ worker_id: worker.id }} />;
  return <p className="text-muted">No workers left.</p>;
}

function Story({ run, now }: { run: Run; now: number }) {
  const [filters, set] = useFilters();
  const generations = useStore((s) => s.generations);
  const eventLines = useStore((s) => s.eventLines);
  const series = useStore((s) => s.runSeries.get(run.id));
  useRunHistory(run.id);
  const goodput = useGoodput(run.id);

  const range: Range = (RANGES.find(([value]) => value === filters["range"])?.[0]) ?? "900";
  const zoomed = filters["from"] !== undefined && filters["to"] !== undefined;
  const end = run.alive > 0 ? now : Math.max(run.checkpoints[0]?.created_at ?? 0, run.recoveries[0]?.at ?? 0, ...run.workers.map((w) => w.last_heartbeat)) + 5;
  const begin = run.startedAt ?? end - 60;
  const to = zoomed ? Number(filters["to"]) : end;
  const from = zoomed ? Number(filters["from"]) : range === "all" ? begin - 2 : Math.max(begin - 2, end - Number(range));
  const view = useMemo(() => [from, to] as const, [from, to]);

  const data = useMemo(
    () => ({
      jobId: run.id,
      rows: timelineRows(run, generations).filter((row) => row.spans.some((s) => (s.to ?? to) >= from && s.from <= to)),
      lines: generationLines(generations, run.id, (to - from) / 120),
      checkpoints: run.checkpoints,
      recoveries: run.recoveries,
      tiers: tiersOf(run.checkpoints),
      statuses: new Map(run.workers.map((w) => [w.id, w.status])),
    }),
    [run, generations, from, to],
  );
  const marks = useMemo(() => data.lines.map((l) => ({ at: l.at, color: l.bad ? "bad" : "edge" })), [data.lines]);
  const mine = useMemo(() => eventLines.filter((h) => h.jobId === run.id).slice(0, 200), [eventLines, run.id]);
  const times = series?.times ?? [];
  const throughput = throughputOf(series);
  return (
    <>
      <div className="grid grid-cols-2 gap-4 sm:grid-cols-3 xl:grid-cols-6">
        <Figure label="Step" value={count(run.step)} hint={`${run.task?.total_steps ? `of ${count(run.task.total_steps)}, ` : ""}epoch ${count(run.epoch)}`} />
        <Figure label="Loss" value={number(run.loss, 4)} />
        <Figure label="Throughput" value={compact(run.throughput)} unit={run.throughput === null ? "" : run.throughputUnit} />
        <Figure label="Workers" value={count(run.alive)} hint={run.failed > 0 ? `${count(run.failed)} lost` : `generation ${count(run.generation)}`} />
        <Figure label="Work at risk" value={run.risk.since === null ? "none" : age(now - run.risk.since)} hint={run.risk.since === null ? "not training" : plural(run.risk.steps, "step")} />
        <Figure label="Recoveries" value={count(run.recoveries.length)} hint={run.recoveries[0] ? `last: ${duration(run.recoveries[0].total_s)}` : "none"} />
      </div>
      <Card
        title="Timeline"
        hint={`${clock(from)} to ${clock(to)}`}
        actions={
          <>
            {zoomed && <Button onClick={() => set({ from: undefined, to: undefined })}>Reset zoom</Button>}
            <Segmented label="Range" value={range} options={RANGES} onChange={(next) => set({ range: next === "900" ? undefined : next, from: undefined, to: undefined })} />
          </>
        }
      >
        <Timeline data={data} from={from} to={to} label={summary(run)} onZoom={(a, b) => set({ from: a.toFixed(2), to: b.toFixed(2) })} />
        <div className="mt-2"><TimelineLegend /></div>
        <div className="mt-5 grid gap-4">
          <Chart label="Loss over time" sync="run" gutter={GUTTER} times={times} range={view} marks={marks} lines={[{ label: "loss", color: "accent", values: series?.loss ?? [] }]} format={(v) => number(v, 4)} height={130} empty="No loss reported" />
          <Chart label="Throughput over time" sync="run" gutter={GUTTER} times={times} range={view} marks={marks} lines={[{ label: "throughput", color: "busy", values: throughput.values, fill: true }]} unit={throughput.unit} format={compact} height={110} empty="No throughput reported" />
        </div>
      </Card>
      <div className="grid items-start gap-4 xl:grid-cols-2">
        <div className="flex min-w-0 flex-col gap-4">
          <Card title="Goodput" hint="worker time by activity">{goodput ? <GoodputBar goodput={goodput} /> : <p className="text-muted">No goodput reported yet.</p>}</Card>
          <Card title="Events" flush><EventList items={mine} height={420} /></Card>
        </div>
        <div className="flex min-w-0 flex-col gap-4">
          <Card title="Recoveries" flush><Recoveries run={run} /></Card>
          <Card title="Latest log lines" hint={run.task || run.workers.length < 2 ? undefined : "first worker"}><RunLines run={run} /></Card>
          <Card title="Configuration"><Configuration run={run} /></Card>
        </div>
      </div>
    </>
  );
}

function summary(run: Run): string {
  return `${plural(run.alive, "worker")} up, ${count(run.failed)} lost, ${plural(run.checkpoints.length, "checkpoint")}, ${plural(run.recoveries.length, "recovery", "recoveries")}. The events below list the same.`;
}

function Recoveries({ run }: { run: Run }) {
  if (run.recoveries.length === 0) return <Empty title="No recoveries">Each recovery is listed here with the duration of its phases.</Empty>;
  return (
    <ol className="max-h-80 divide-y divide-line/60 overflow-y-auto border-t" tabIndex={0} aria-label="Recoveries">
      {run.recoveries.map((r) => (
        <li key={`${r.at} ${r.worker_id}`} className="flex flex-col gap-0.5 px-4 py-2.5">
          <p className="flex items-baseline justify-between gap-3">
            <span className="shrink-0 font-medium">{duration(r.total_s)}</span>
            <span className="text-muted">{plural(r.lost_steps, "step")} lost, resumed at step {count(r.resumed_step)} from {r.tier || "storage"}, {r.world_before} → {r.world_after} workers</span>
            <span className="shrink-0 text-sm text-faint"><Ago at={r.at} /></span>
          </p>
          <p className="flex flex-wrap gap-x-3 text-sm text-muted">{phasesOf(r).map((phase) => <span key={phase.name}>{phase.name.replace("_", " ")} {duration(phase.to - phase.from)}</span>)}</p>
          {r.survived > 0 && <p className="foreign text-sm break-words">{whoSurvived(r)}</p>}
          {r.cause && <p className="foreign text-sm break-words text-muted">{r.cause}</p>}
          {r.reason && !r.reason.startsWith("recovered in") && <p className="foreign text-sm break-words text-faint">{r.reason}</p>}
        </li>
      ))}
    </ol>
  );
}

function flatten(value: unknown, path: string): (readonly [string, string])[] {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) return Object.entries(value).flatMap(([key, v]) => flatten(v, path ? `${path}.${key}` : key));
  return [[path, typeof value === "string" ? value : JSON.stringify(value)]];
}

function Configuration({ run }: { run: Run }) {
  const task = run.task;
  const labels = Object.entries(run.risk.safe?.metadata ?? {});
  if (!task && labels.length === 0) return <p className="text-muted">Not started as a task, so its configuration is not known here.</p>;
  const items: (readonly [string, string])[] = task ? [["task", task.name], ["recipe", task.type], ...(task.dataset_id ? [["dataset", task.dataset_id] as const] : []), ["workers", count(task.worker_count)], ...flatten(task.config, "")] : labels;
  return <Facts items={items} />;
}
