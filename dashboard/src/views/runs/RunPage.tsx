/** One run: metrics, timeline, details and logs. */

import { Link, useParams } from "@tanstack/react-router";
import { Activity, ArrowLeft, GitCompareArrows } from "lucide-react";
import { useEffect, useMemo } from "react";

import type { RunMetrics } from "../../api/types";
import { Card, Stat } from "../../components/Card";
import { Chart } from "../../components/Chart";
import { Button, Segmented } from "../../components/controls";
import { CopyButton } from "../../components/Copy";
import { EventList } from "../../components/EventList";
import { LastLines } from "../../components/LastLines";
import { Page } from "../../components/Page";
import { Empty, ErrorNote, Loading } from "../../components/states";
import { Status } from "../../components/Status";
import { Ago } from "../../components/values";
import { age, clock, compact, count, duration, number, plural } from "../../format";
import { useFilters } from "../../search";
import { generationLines, runsOf, timelineRows, type Run } from "../../state/runs";
import { throughputOf } from "../../state/series";
import { useServerNow, useStore, useStory } from "../../state/store";
import { RiskStat } from "../checkpoints/Safety";
import { Restart, Stop } from "../Tasks";
import { hasEnded } from "../tasks/progress";
import { DrainRun, RunDrains } from "../workers/Drain";
import { marksOf } from "./curves";
import { Details, Tags } from "./Details";
import { GUTTER, phasesOf, tiersOf } from "./drawing";
import { GoodputBar } from "./GoodputBar";
import { useGoodput, useRunHistory } from "./history";
import { panelsOf } from "./layout";
import { useIncidents, useIsLogged, useRunInfo, useRunMetrics } from "./metrics";
import { Panel, preloadPlot, type PanelRun } from "./Panel";
import { GRID, Panels, useLayout, type Kept } from "./Panels";
import { RunLogs } from "./RunLogs";
import { useSettings } from "./settings";
import { Timeline, TimelineLegend } from "./Timeline";

const BUTTON = "inline-flex h-8 items-center gap-1.5 rounded-md border px-3 font-medium whitespace-nowrap hover:bg-hover";

const TABS = [["overview", "Overview"], ["charts", "Charts"], ["details", "Details"], ["logs", "Logs"]] as const;
type Tab = (typeof TABS)[number][0];
const PINNED_SHOWN = 3;

export function RunDetail() {
  const { job } = useParams({ from: "/runs/$job" });
  return <RunPage key={job} id={job} />;
}

/** `id`: of a job (its latest run), or of a run with logged metrics. */
function RunPage({ id }: { id: string }) {
  const state = useStory();
  const [filters, set] = useFilters();
  const run = useMemo(() => runsOf(state).find((r) => r.id === id) ?? null, [state, id]);
  const live = run !== null && run.alive > 0;
  const isLogged = useIsLogged(id);
  const metrics = useRunMetrics(id, isLogged, live);
  const info = useRunInfo(id, isLogged);
  const incidents = useIncidents(run === null ? null : id);
  const kept = useLayout(id);
  useEffect(preloadPlot, []);
  const label = run?.name ?? info.data?.jobs.at(-1) ?? id;
  const saves = run?.checkpoints ?? [];
  const savesKey = `${saves.length} ${saves[0]?.id ?? ""} ${saves[0]?.status ?? ""}`;
  const marks = useMemo(() => marksOf(incidents, saves), [incidents, savesKey]);
  const origin = metrics.data?.starts[0]?.started_at ?? null;
  const shown = useMemo<PanelRun>(() => ({ id, label, color: "accent", origin, live, marks }), [id, label, origin, live, marks]);

  const back = <Link to="/runs" className="inline-flex items-center gap-1 text-sm font-medium text-muted hover:text-ink"><ArrowLeft aria-hidden className="size-3.5" />All runs</Link>;
  const isKnown = state.coordinator !== null;
  // Charts do not wait for the snapshot.
  if (!isKnown && (!info.data || !metrics.data || filters["tab"] !== "charts")) return <Page title={id}><Loading rows={8} /></Page>;
  if (run === null && info.data === undefined && !info.error) return <Page title={id} actions={back}><Loading rows={8} /></Page>;
  if (run === null && !info.data) return <Page title={id} actions={back}>{info.error ? <ErrorNote error={info.error} /> : <Empty icon={Activity} title="Run not found">No worker, checkpoint, recovery or metric has this run ID.</Empty>}</Page>;

  const tab: Tab = TABS.find(([value]) => value === filters["tab"])?.[0] ?? "overview";
  const hasMetrics = (metrics.data?.metrics.length ?? 0) > 0;
  return (
    <Page
      title={label}
      subtitle={
        <span className="flex flex-wrap items-center gap-x-3 gap-y-1">
          {isKnown && <Status value={run?.status ?? "ended"} pill />}
          {label !== id && <span className="inline-flex min-w-0 items-center"><span className="foreign max-w-60 truncate" title={id}>{id}</span><CopyButton text={id} label="run ID" /></span>}
          {run !== null && <Started run={run} />}
          <Tags tags={info.data?.tags ?? []} />
        </span>
      }
      actions={
        <>
          {back}
          {hasMetrics && <Link to="/compare" search={{ runs: encodeURIComponent(id) }} className={BUTTON}><GitCompareArrows aria-hidden className="size-4" />Compare</Link>}
          {run?.task && <Link to="/runs/$job" params={{ job: run.id }} search={{ task: run.task.id }} className={BUTTON}>Task</Link>}
          {run !== null && isKnown && <DrainRun run={run} />}
          {run?.task && (hasEnded(run.task) ? <Restart task={run.task} /> : <Stop task={run.task} />)}
        </>
      }
    >
      <Segmented label="View" value={tab} options={TABS} onChange={(next) => set({ tab: next === "overview" ? undefined : next })} />
      {tab === "overview" && (run === null ? <Charts run={shown} metrics={metrics} kept={kept} /> : <Story run={run} shown={shown} metrics={metrics.data} kept={kept} />)}
      {tab === "charts" && <Charts run={shown} metrics={metrics} kept={kept} />}
      {tab === "details" && <Details id={id} info={info.data} task={run?.task ?? null} labels={run?.risk.safe?.metadata ?? {}} metrics={metrics.data} />}
      {tab === "logs" && <RunLogs job={run?.task?.id ?? run?.id ?? info.data?.jobs.at(-1) ?? id} />}
    </Page>
  );
}

function Started({ run }: { run: Run }) {
  const now = useServerNow();
  return run.startedAt !== null && run.alive > 0 ? <span className="whitespace-nowrap">started {age(now - run.startedAt)} ago</span> : null;
}

function Charts(props: { run: PanelRun; metrics: ReturnType<typeof useRunMetrics>; kept: Kept }) {
  const { data, error } = props.metrics;
  const [settings, change] = useSettings();
  if (data === undefined) return error ? <ErrorNote error={error} /> : <Loading rows={8} />;
  if (data === null || data.metrics.length === 0) return <Empty icon={Activity} title="No metrics logged">Log them in the training loop: <code className="font-mono text-sm">job.log(&#123;"loss": loss&#125;)</code>. Metrics are stored by step and survive restarts.</Empty>;
  return (
    <>
      {data.dropped > 0 && <p className="rounded-md bg-warn-soft px-4 py-2">{count(data.dropped)} logged values were dropped: the coordinator was unreachable too long, or there were too many metric names.</p>}
      {data.missing_batches > 0 && <p className="rounded-md bg-warn-soft px-4 py-2">{count(data.missing_batches)} metric batches are missing: they are stored on another coordinator. With an archive they arrive when it is back.</p>}
      <Panels run={props.run} metrics={data.metrics} kept={props.kept} settings={settings} change={change} />
    </>
  );
}

/** Pinned panels, else the first ones in the usual order. */
function PinnedPanels(props: { run: PanelRun; metrics: RunMetrics; kept: Kept }) {
  const { metrics, kept } = props;
  const [settings, change] = useSettings();
  const [, set] = useFilters();
  const all = useMemo(() => panelsOf(metrics.metrics.map((m) => m.name), kept.layout), [metrics.metrics, kept.layout]);
  const pinned = all.filter((name) => kept.layout.pinned.includes(name));
  const names = pinned.length > 0 ? pinned : all.slice(0, PINNED_SHOWN);
  const runs = useMemo(() => [props.run], [props.run]);
  return (
    <section aria-label="Metrics" className="flex flex-col gap-2">
      <div className={GRID}>
        {names.map((name) => <Panel key={name} eager name={name} runs={runs} settings={settings} change={change} nonfinite={metrics.metrics.find((m) => m.name === name)?.nonfinite ?? 0} />)}
      </div>
      <p className="flex items-center gap-3 text-sm text-faint">
        <button type="button" className="font-medium text-accent underline decoration-accent/40 underline-offset-2 hover:decoration-accent" onClick={() => set({ tab: "charts" })}>{metrics.metrics.length > names.length ? `All ${plural(metrics.metrics.length, "metric")}` : "Charts"}</button>
        {settings.zoom && <Button onClick={() => change({ zoom: null })}>Reset zoom</Button>}
        {pinned.length === 0 && <span>Pinned panels appear here.</span>}
      </p>
    </section>
  );
}

const RANGES = [["300", "5 m"], ["900", "15 m"], ["3600", "1 h"], ["all", "All"]] as const;
type Range = (typeof RANGES)[number][0];

function Story({ run, shown, metrics, kept }: { run: Run; shown: PanelRun; metrics: RunMetrics | null | undefined; kept: Kept }) {
  const now = useServerNow();
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
  const logs = metrics !== null && metrics !== undefined && metrics.metrics.length > 0;
  return (
    <>
      <div className="grid grid-cols-2 gap-4 sm:grid-cols-3 xl:grid-cols-6">
        <Stat label="Step" value={count(run.step)} hint={`${run.task?.total_steps ? `of ${count(run.task.total_steps)}, ` : ""}epoch ${count(run.epoch)}`} />
        <Stat label="Loss" value={number(run.loss, 4)} />
        <Stat label="Throughput" value={compact(run.throughput)} unit={run.throughput === null ? "" : run.throughputUnit} />
        <Stat label="Workers" value={count(run.alive)} hint={run.failed > 0 ? `${count(run.failed)} lost` : `generation ${count(run.generation)}`} />
        <RiskStat run={run} />
        <Stat label="Recoveries" value={count(run.recoveries.length)} hint={run.recoveries[0] ? `last: ${duration(run.recoveries[0].total_s)}` : "none"} />
      </div>
      <RunDrains run={run} />
      {logs && <PinnedPanels run={shown} metrics={metrics} kept={kept} />}
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
        {!logs && <div className="mt-5 grid gap-4">
          <Chart label="Loss over time" sync="run" gutter={GUTTER} times={times} range={view} marks={marks} lines={[{ label: "loss", color: "accent", values: series?.loss ?? [] }]} format={(v) => number(v, 4)} height={130} empty="No loss reported" />
          <Chart label="Throughput over time" sync="run" gutter={GUTTER} times={times} range={view} marks={marks} lines={[{ label: "throughput", color: "busy", values: throughput.values, fill: true }]} unit={throughput.unit} format={compact} height={110} empty="No throughput reported" />
        </div>}
      </Card>
      <div className="grid items-start gap-4 xl:grid-cols-2">
        <div className="flex min-w-0 flex-col gap-4">
          <Card title="Goodput" hint="worker time by activity">{goodput ? <GoodputBar goodput={goodput} /> : <p className="text-muted">No goodput reported yet.</p>}</Card>
          <Card title="Events" flush><EventList items={mine} height={420} /></Card>
        </div>
        <div className="flex min-w-0 flex-col gap-4">
          <Card title="Recoveries" flush><Recoveries run={run} /></Card>
          <Card title="Latest log lines"><LastLines of={{ task_id: run.task?.id ?? run.id }} /></Card>
        </div>
      </div>
    </>
  );
}

function summary(run: Run): string {
  return `${plural(run.alive, "worker")} up, ${count(run.failed)} lost, ${plural(run.checkpoints.length, "checkpoint")}, ${plural(run.recoveries.length, "recovery", "recoveries")}. Also listed under Events.`;
}

function Recoveries({ run }: { run: Run }) {
  if (run.recoveries.length === 0) return <Empty title="No recoveries">Recoveries appear here with the duration of each phase.</Empty>;
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
          {r.who_survived && <p className="foreign text-sm break-words">{r.who_survived}</p>}
          {r.cause && <p className="foreign text-sm break-words text-muted">{r.cause}</p>}
          {r.reason && !r.reason.startsWith("recovered in") && <p className="foreign text-sm break-words text-faint">{r.reason}</p>}
        </li>
      ))}
    </ol>
  );
}
