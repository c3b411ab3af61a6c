/** Is training healthy; if not, why; how much work is at risk; who is slow or lost; what happened last. */

import { Link, useNavigate } from "@tanstack/react-router";
import { CircleCheck, CircleHelp, CirclePause, OctagonAlert, Play, ShieldCheck, TriangleAlert, type LucideIcon } from "lucide-react";
import { useMemo } from "react";

import type { Worker } from "../api/types";
import { Card, Figure } from "../components/Card";
import { Chart, Sparkline } from "../components/Chart";
import { EventList } from "../components/EventList";
import { Page } from "../components/Page";
import { Empty, Loading } from "../components/states";
import { Status, TONE_SOFT, TONE_TEXT, type Tone } from "../components/Status";
import { Ago, Name } from "../components/values";
import { age, compact, count, millis, number, plural } from "../format";
import { useRefusal } from "../session";
import { assess, exposure, saveRhythm, type Finding, type Health, type Level } from "../state/health";
import { runsOf, type Run } from "../state/runs";
import { throughputOf } from "../state/series";
import { useServerNow, useStore, useStory } from "../state/store";
import { useRunHistory } from "./runs/history";
import { Heatmap } from "./workers/Heatmap";
import { byPlace } from "./workers/load";

const LEVELS: Record<Level, { tone: Tone; icon: LucideIcon }> = {
  good: { tone: "good", icon: CircleCheck },
  warn: { tone: "warn", icon: TriangleAlert },
  bad: { tone: "bad", icon: OctagonAlert },
  idle: { tone: "idle", icon: CirclePause },
  unknown: { tone: "idle", icon: CircleHelp },
};

const WINDOW_S = 900;

export function Overview() {
  const state = useStory();
  const now = useServerNow();
  const runs = useMemo(() => runsOf(state), [state]);
  const health = useMemo(() => assess(state, now), [state, now]);
  const live = runs.filter((r) => r.alive > 0);
  const measured = live.filter((r) => r.throughput !== null);
  // The only one that trains, or the last that did.
  const only = measured.length === 1 ? measured[0] : live.length <= 1 ? runs[0] : undefined;
  useRunHistory(only?.id);
  if (state.coordinator === null) return <Page title="Overview"><Waiting health={health} /></Page>;
  const { metrics, series } = state;
  const recent = tail(series.times, now - WINDOW_S);
  const cut = <T,>(values: readonly T[]) => values.slice(recent);
  const times = cut(series.times);
  const window = [Math.max(now - WINDOW_S, Math.min(times[0] ?? now - 60, now - 60)), now] as const;
  const unit = (runs.find((r) => r.throughput !== null) ?? runs[0])?.throughputUnit ?? "";
  // One run has a curve of its own, with a past; several are added up as they report.
  const own = only ? state.runSeries.get(only.id) : undefined;
  const ownFrom = own ? tail(own.times, now - WINDOW_S) : 0;
  const throughput = own ? { times: own.times.slice(ownFrom), values: throughputOf(own).values.slice(ownFrom) } : { times, values: cut(series.throughput) };
  return (
    <Page title="Overview">
      <div className="grid gap-4 lg:grid-cols-[minmax(0,1.55fr)_minmax(0,1fr)]">
        <HealthPanel health={health} />
        <ExposurePanel runs={runs} now={now} />
      </div>
      <div className="grid grid-cols-2 gap-4 xl:grid-cols-4">
        <Figure label="Workers" value={metrics ? `${count(metrics.active_workers)} / ${count(metrics.total_workers)}` : "–"} unit="active" hint={<FleetHint />} />
        <Figure label="Barrier latency, p99" value={millis(metrics?.barrier_latency_p99)} unit="ms">
          <Sparkline label="Barrier latency over time" values={cut(series.barrierP99)} />
        </Figure>
        <Figure label="Shard assignment" value={millis(metrics?.shard_assignment_time)} unit="ms">
          <Sparkline label="Shard assignment time over time" values={cut(series.planMs)} />
        </Figure>
        <Figure label="Checkpoint throughput" value={number(metrics?.checkpoint_throughput)} unit="MB/s">
          <Sparkline label="Checkpoint throughput over time" values={cut(series.checkpointMbS)} />
        </Figure>
      </div>
      <div className="grid gap-4 xl:grid-cols-2">
        <Card title="Training throughput" hint={measured.length > 1 ? "sum over runs" : undefined}>
          <Chart label="Training throughput over time" sync="overview" range={window} times={throughput.times} lines={[{ label: "throughput", color: "accent", values: throughput.values, fill: true }]} unit={unit} format={compact} height={170} empty="No throughput reported" />
        </Card>
        <Card title="Coordinator requests">
          <Chart label="Coordinator requests per second over time" sync="overview" range={window} times={times} lines={[{ label: "requests", color: "busy", values: cut(series.rps), fill: true }]} unit="/s" format={compact} height={170} />
        </Card>
      </div>
      <div className="grid gap-4 xl:grid-cols-[minmax(0,1.2fr)_minmax(0,1fr)]">
        <div className="flex min-w-0 flex-col gap-4">
          <Card title="Runs" actions={<More to="/runs" />} flush>
            <RunList runs={runs.slice(0, 6)} />
          </Card>
          {state.workers.size > 0 && (
            <Card title="Fleet" actions={<More to="/workers" />}>
              <div className="max-h-60 overflow-y-auto p-0.5"><Fleet workers={state.workers} /></div>
            </Card>
          )}
        </div>
        <Card title="Recent events" actions={<More to="/logs" label="Logs" />} flush>
          <EventList items={state.eventLines.slice(0, 100)} height={300} />
        </Card>
      </div>
    </Page>
  );
}

function tail(times: readonly number[], since: number): number {
  const at = times.findIndex((t) => t >= since);
  return at < 0 ? times.length : at;
}

function Waiting({ health }: { health: Health }) {
  const away = useStore((s) => s.connection.phase === "disconnected");
  return (
    <>
      <HealthPanel health={health} />
      {away ? null : <div className="grid grid-cols-2 gap-4 xl:grid-cols-4">{[0, 1, 2, 3].map((i) => <div key={i} className="skeleton h-24" />)}</div>}
      <Loading rows={5} />
    </>
  );
}

function HealthPanel({ health }: { health: Health }) {
  const { tone, icon: Icon } = LEVELS[health.level];
  const [, ...others] = health.findings;
  const refused = useRefusal("operator") !== undefined;
  return (
    <section aria-label="Health" className="flex flex-col justify-center gap-3 rounded-lg border bg-surface px-5 py-4">
      <div className="flex items-start gap-4">
        <span className={`grid size-11 shrink-0 place-items-center rounded-full ${TONE_SOFT[tone]}`}><Icon aria-hidden className="size-6" /></span>
        <div className="min-w-0 flex-1" aria-live="polite">
          <h2 className="foreign text-2xl leading-tight font-semibold tracking-tight break-words">{health.headline}</h2>
          <p className="foreign mt-1 text-lg break-words text-muted">{health.reason}</p>
        </div>
        {health.findings[0] && <FindingLink finding={health.findings[0]} />}
        {health.level === "idle" && !refused && <Link to="/tasks" search={{ start: "1" }} className="inline-flex h-8 shrink-0 items-center gap-1.5 rounded-md bg-accent px-3 font-medium text-on-accent hover:opacity-90"><Play aria-hidden className="size-3.5" />Start task</Link>}
      </div>
      {others.length > 0 && (
        <ul className="flex flex-col gap-1 border-t pt-3">
          {others.slice(0, 4).map((finding) => {
            const look = LEVELS[finding.level];
            return (
              <li key={finding.title} className="flex items-center gap-2">
                <look.icon aria-hidden className={`size-4 shrink-0 ${TONE_TEXT[look.tone]}`} />
                <span className="foreign font-medium">{finding.title}</span>
                <span className="foreign min-w-0 flex-1 truncate text-muted" title={finding.reason}>{finding.reason}</span>
                <FindingLink finding={finding} />
              </li>
            );
          })}
          {others.length > 4 && <li className="text-muted">and {count(others.length - 4)} more</li>}
        </ul>
      )}
    </section>
  );
}

function FindingLink({ finding }: { finding: Finding }) {
  const look = "shrink-0 rounded-md border px-3 py-1 font-medium hover:bg-hover";
  const label = <>Show<span className="sr-only"> {finding.title}</span></>;
  if (finding.link.job !== undefined) return <Link to="/runs/$job" params={{ job: finding.link.job }} className={look}>{label}</Link>;
  return <Link to={finding.link.to} search={finding.link.search ?? {}} className={look}>{label}</Link>;
}

/** The number everybody asks for first when something breaks. */
function ExposurePanel({ runs, now }: { runs: readonly Run[]; now: number }) {
  const { run, seconds, steps } = exposure(runs, now);
  const rhythm = run ? saveRhythm(run) : null;
  return (
    <section aria-label="Work at risk" className="flex flex-col gap-1 rounded-lg border bg-surface px-5 py-4">
      <h2 className="flex items-center gap-2 text-muted"><ShieldCheck aria-hidden className="size-4" />Time since last checkpoint</h2>
      <p className="text-3xl font-semibold tracking-tight">{seconds === null ? <span className="text-muted">No work at risk</span> : age(seconds)}</p>
      {run ? (
        <p className="text-muted">
          {plural(steps, "step")} of <Link to="/runs/$job" params={{ job: run.id }} className="foreign text-accent underline decoration-accent/40 underline-offset-2 hover:decoration-accent">{run.name}</Link> at risk.{" "}
          {run.risk.safe ? <>Last checkpoint: step {count(run.risk.safe.step)}{run.risk.safe.tiers.length > 0 && <> in {run.risk.safe.tiers.join(", ")}</>}</> : "No checkpoint yet"}
          {rhythm !== null && <>; interval {age(rhythm)}</>}.
        </p>
      ) : (
        <p className="text-muted">No active run.</p>
      )}
    </section>
  );
}

function FleetHint() {
  const text = useStore((s) => {
    const counts = new Map<string, number>();
    for (const w of s.workers.values()) counts.set(w.status, (counts.get(w.status) ?? 0) + 1);
    return [...counts].sort((a, b) => b[1] - a[1]).map(([status, n]) => `${count(n)} ${status}`).join(", ");
  });
  return <>{text || "no workers yet"}</>;
}

function Fleet({ workers }: { workers: ReadonlyMap<string, Worker> }) {
  const navigate = useNavigate();
  const sorted = useMemo(() => [...workers.values()].sort(byPlace), [workers]);
  return <Heatmap workers={sorted} color="status" small selected={undefined} onOpen={(worker) => void navigate({ to: "/workers", search: { worker } })} />;
}

function RunList({ runs }: { runs: readonly Run[] }) {
  if (runs.length === 0) {
    return <Empty title="No runs yet">A run appears when its first worker joins. <code className="font-mono text-sm">strata demo</code> starts one on this machine.</Empty>;
  }
  return (
    <ul className="divide-y border-t">
      {runs.map((run) => (
        <li key={run.id}>
          <Link to="/runs/$job" params={{ job: run.id }} data-row className="grid grid-cols-[minmax(0,1fr)_7.5rem_5rem_4.5rem_6rem] items-center gap-3 px-4 py-2.5 hover:bg-hover focus-visible:-outline-offset-2">
            <span className="min-w-0"><Name>{run.name}</Name><span className="block truncate text-sm text-faint">{plural(run.alive, "worker")}, gen. {count(run.generation)}</span></span>
            <Status value={run.status} />
            <Cell label="step" value={count(run.step)} />
            <Cell label="loss" value={number(run.loss, 4)} />
            <Cell label="checkpoint" value={run.risk.safe ? <Ago at={run.risk.safe.created_at} /> : "never"} />
          </Link>
        </li>
      ))}
    </ul>
  );
}

function Cell(props: { label: string; value: React.ReactNode }) {
  return <span className="min-w-0 text-right"><span className="block truncate font-medium">{props.value}</span><span className="block text-sm text-faint">{props.label}</span></span>;
}

function More(props: { to: "/runs" | "/logs" | "/workers"; label?: string }) {
  return <Link to={props.to} className="text-sm font-medium text-accent hover:underline">{props.label ?? "All"}</Link>;
}
