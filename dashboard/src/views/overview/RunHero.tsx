/** Key numbers of a run: loss, progress and ETA, goodput, throughput, work at risk. */

import { Link } from "@tanstack/react-router";
import { lazy, Suspense, type ReactNode } from "react";

import { Meter } from "../../components/Card";
import { Sparkline } from "../../components/Sparkline";
import { Status } from "../../components/Status";
import { Ago } from "../../components/values";
import { age, compact, count, duration, number, percent, plural } from "../../format";
import { etaOf, goalOf } from "../../state/progress";
import type { Run } from "../../state/runs";
import { throughputOf } from "../../state/series";
import { useStore } from "../../state/store";
import { useRunHistory } from "../runs/history";

/** Loaded lazily to keep the first page small. */
const Chart = lazy(() => import("../../components/Chart").then((module) => ({ default: module.Chart })));

const RiskList = lazy(() => import("../checkpoints/Safety").then((module) => ({ default: module.RiskList })));

const WINDOW_S = 900;
const CHART_PX = 150;

export function RunHero({ run, now, alone }: { run: Run; now: number; alone: boolean }) {
  const series = useStore((s) => s.runSeries.get(run.id));
  useRunHistory(run.id);
  const from = series ? Math.max(0, series.times.findIndex((t) => t >= now - WINDOW_S)) : 0;
  const times = series?.times.slice(from) ?? [];
  const loss = series?.loss.slice(from) ?? [];
  const speed = throughputOf(series).values.slice(from);
  const goal = goalOf(run);
  const eta = etaOf(run);
  const window = [Math.max(now - WINDOW_S, Math.min(times[0] ?? now - 60, now - 60)), now] as const;
  const isLive = run.alive > 0;
  return (
    <section aria-label={`Run ${run.name}`} className="flex flex-col gap-3 rounded-lg border bg-surface px-4 py-4 sm:px-5">
      <header className="flex flex-wrap items-center gap-x-3 gap-y-1">
        <h2 className="min-w-0 text-lg font-semibold"><Link to="/runs/$job" params={{ job: run.id }} className="foreign break-words hover:underline">{run.name}</Link></h2>
        <Status value={run.status} pill />
        <span className="text-sm text-muted">{isLive ? `${plural(run.alive, "worker")}${run.failed > 0 ? `, ${count(run.failed)} lost` : ""}` : "last values"}{run.startedAt !== null && isLive && `, started ${age(now - run.startedAt)} ago`}</span>
      </header>
      <dl className="grid grid-cols-2 gap-x-6 gap-y-4 sm:grid-cols-3 xl:grid-cols-[repeat(4,minmax(0,1fr))_minmax(0,1.6fr)]">
        <Value label="Loss" value={number(run.loss, 4)}><Sparkline label={`Loss of ${run.name} over time`} values={loss} /></Value>
        <Value label="Step" value={count(run.step)} unit={goal === null ? "" : `of ${count(goal)}`}>
          {goal !== null && <Meter label={`Progress of ${run.name}`} value={run.step} max={goal} />}
          <p className="text-sm text-muted">{eta === null ? (goal === null ? "total steps unknown" : "ETA unknown") : `${duration(Math.round(eta))} left`}</p>
        </Value>
        <Value label="Goodput" value={run.goodput === null ? "–" : percent(100 * run.goodput, 1)}>{run.goodput !== null && <Meter label={`Goodput of ${run.name}`} value={100 * run.goodput} tone={run.goodput > 0.8 ? "good" : "warn"} />}</Value>
        <Value label="Throughput" value={compact(run.throughput)} unit={run.throughput === null ? "" : run.throughputUnit}><Sparkline label={`Throughput of ${run.name} over time`} values={speed} color="busy" /></Value>
        <div className="col-span-2 min-w-0 sm:col-span-2 xl:col-span-1"><RiskLines run={run} now={now} /></div>
      </dl>
      {alone && (
        <Suspense fallback={<div style={{ height: CHART_PX + 24 }} />}>
          <Chart label="Loss over time" range={window} times={times} lines={[{ label: "loss", color: "accent", values: loss }]} format={(v) => number(v, 4)} height={CHART_PX} empty="No loss reported" />
        </Suspense>
      )}
    </section>
  );
}

function Value(props: { label: string; value: string; unit?: string; children?: ReactNode }) {
  return (
    <div className="flex min-w-0 flex-col gap-1">
      <dt className="text-sm text-muted">{props.label}</dt>
      <dd className="flex flex-col gap-1">
        <span className="flex flex-wrap items-baseline gap-x-1.5"><span className="text-2xl font-semibold tracking-tight whitespace-nowrap">{props.value}</span>{props.unit && <span className="text-sm text-faint">{props.unit}</span>}</span>
        {props.children}
      </dd>
    </div>
  );
}

/** What would be lost now, by failure domain. */
function RiskLines({ run, now }: { run: Run; now: number }) {
  const { safe, isUnsaved, since } = run.risk;
  return (
    <>
      <dt className="text-sm text-muted">Work at risk</dt>
      {since === null ? (
        <dd className="text-muted">None: not training</dd>
      ) : (
        <dd>
          <Suspense fallback={<p className="text-sm text-muted">…</p>}><RiskList job={run.id} name={run.name} /></Suspense>
          <p className="mt-1 text-sm text-faint">{safe ? <>last checkpoint <Ago at={safe.created_at} /></> : isUnsaved ? `no checkpoint for ${age(now - since)}` : "none among the latest 100 checkpoints of all runs"}</p>
        </dd>
      )}
    </>
  );
}
