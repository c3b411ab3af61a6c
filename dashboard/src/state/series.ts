/** Time series: points are appended, thinned when there are too many, never invented. Pure. */

import type { History, Metrics, Worker } from "../api/types";
import type { RunSeries, Series } from "./types";

export const POINTS_KEPT = 1_800;
export const RUNS_KEPT = 50;
/** Fewer missing seconds than this are not a gap. */
const SKIPPED_S = 4;
/** A gap this long breaks the line. */
export const GAP_S = 15;

export function emptySeries(): Series {
  return { times: [], rps: [], activeWorkers: [], throughput: [], barrierP99: [], checkpointMbS: [], planMs: [] };
}

export function emptyRunSeries(): RunSeries {
  return { times: [], step: [], loss: [], tokensPerS: [], samplesPerS: [], stepsPerS: [] };
}

type Table = { times: number[] } & Record<string, (number | null)[]>;

function append<T extends { times: number[] }>(series: T, at: number, point: Omit<{ [K in keyof T]: number | null }, "times">): T {
  const table = series as unknown as Table;
  const last = table.times.at(-1);
  if (last !== undefined && at <= last) return series;
  const gap = last !== undefined && at - last > GAP_S;
  const grown: Record<string, (number | null)[]> = {};
  for (const key of Object.keys(table)) {
    const values = table[key] ?? [];
    const next = key === "times" ? at : ((point as Record<string, number | null>)[key] ?? null);
    const middle = gap ? [key === "times" ? (last + at) / 2 : null] : [];
    grown[key] = [...values, ...middle, next];
  }
  return thin(grown as unknown as T);
}

/** When full, the older half keeps every other point: older history is coarser, nothing is cut off. */
function thin<T extends { times: number[] }>(series: T): T {
  if (series.times.length <= POINTS_KEPT) return series;
  const half = Math.floor(series.times.length / 2);
  const table = series as unknown as Table;
  const thinned: Record<string, (number | null)[]> = {};
  for (const key of Object.keys(table)) thinned[key] = (table[key] ?? []).filter((_, i) => i >= half || i % 2 === 0);
  return thin(thinned as unknown as T);
}

export function addSample(series: Series, metrics: Metrics, runs: ReadonlyMap<string, RunSeries>, at: number): Series {
  return append(series, at, {
    rps: metrics.coordinator_rps,
    activeWorkers: metrics.active_workers,
    throughput: totalThroughput(runs, at),
    barrierP99: metrics.barrier_latency_p99,
    checkpointMbS: metrics.checkpoint_throughput,
    planMs: metrics.shard_assignment_time,
  });
}

/** Total over all runs with recent reports. */
function totalThroughput(runs: ReadonlyMap<string, RunSeries>, at: number): number | null {
  let total: number | null = null;
  for (const run of runs.values()) {
    const last = throughputOf(run).values.at(-1);
    if (last !== null && last !== undefined && at - (run.times.at(-1) ?? 0) < GAP_S) total = (total ?? 0) + last;
  }
  return total;
}

/** Tokens/s where reported, else samples/s, else steps/s. One unit per series. */
export function throughputOf(run: RunSeries | undefined): { unit: string; values: (number | null)[] } {
  if (!run) return { unit: "", values: [] };
  const measured = (values: readonly (number | null)[]) => values.some((v) => v !== null);
  if (measured(run.tokensPerS)) return { unit: "tokens/s", values: run.tokensPerS };
  if (measured(run.samplesPerS)) return { unit: "samples/s", values: run.samplesPerS };
  return { unit: "steps/s", values: run.stepsPerS };
}

type RunPoint = { [K in keyof Omit<RunSeries, "times">]: number | null };

/** One point from the reports of a run's workers: the highest step, and the mean of run-wide metrics. */
export function runPoint(workers: readonly Worker[]): RunPoint {
  const alive = workers.filter((w) => w.status !== "failed");
  const working = alive.some((w) => w.status === "training" || w.status === "checkpointing" || w.status === "active") ? alive : [];
  const of = (among: readonly Worker[], name: string) => mean(among.map((w) => w.metrics[name]));
  const stepS = of(working, "step_time_s");
  return {
    step: alive.length === 0 ? null : Math.max(...alive.map((w) => w.current_step)),
    loss: of(alive, "loss"),
    tokensPerS: of(working, "tokens_per_second"),
    samplesPerS: of(working, "samples_per_second"),
    stepsPerS: stepS === null || stepS <= 0 ? null : 1 / stepS,
  };
}

function mean(values: readonly (number | null | undefined)[]): number | null {
  let sum = 0;
  let n = 0;
  for (const value of values) {
    if (typeof value !== "number" || !Number.isFinite(value)) continue;
    sum += value;
    n += 1;
  }
  return n === 0 ? null : sum / n;
}

export function addRunPoints(known: ReadonlyMap<string, RunSeries>, workers: Iterable<Worker>, at: number): ReadonlyMap<string, RunSeries> {
  const byJob = new Map<string, Worker[]>();
  for (const worker of workers) {
    const list = byJob.get(worker.job_id);
    if (list) list.push(worker);
    else byJob.set(worker.job_id, [worker]);
  }
  if (byJob.size === 0) return known;
  const grown = new Map(known);
  for (const [job, list] of byJob) {
    const series = append(grown.get(job) ?? emptyRunSeries(), at, runPoint(list));
    grown.delete(job); // The one that reported last comes last.
    grown.set(job, series);
  }
  for (const job of grown.keys()) {
    if (grown.size <= RUNS_KEPT) break;
    if (!byJob.has(job)) grown.delete(job);
  }
  return grown;
}

/** Fetched history followed by the points seen on this page. */
export function mergeSeries(past: Partial<Series> & { times: number[] }, seen: Series): Series {
  return joined(past, seen);
}

export function mergeRunHistory(past: RunSeries, seen: RunSeries | undefined): RunSeries {
  return joined(past, seen ?? emptyRunSeries());
}

function joined<T extends { times: number[] }>(past: Partial<T> & { times: number[] }, seen: T): T {
  const first = seen.times[0] ?? Number.POSITIVE_INFINITY;
  const kept = past.times.filter((at) => at < first).length;
  const table = seen as unknown as Table;
  const before = past as unknown as Partial<Table>;
  const result: Record<string, (number | null)[]> = {};
  for (const key of Object.keys(table)) {
    const old = (before[key] ?? []).slice(0, kept);
    while (old.length < kept) old.push(null);
    result[key] = [...old, ...(table[key] ?? [])];
  }
  return thin(result as unknown as T);
}

/** The coordinator's history as series; its names differ from ours. */
export function fleetHistory(history: History): Partial<Series> & { times: number[] } {
  const of = (name: string) => history.series[name]?.values ?? [];
  return trimmed({
    times: timesOf(history),
    rps: of("coordinator_rps"),
    activeWorkers: of("active_workers"),
    barrierP99: of("barrier_latency_p99"),
    checkpointMbS: of("checkpoint_throughput"),
    planMs: of("shard_assignment_time"),
  });
}

export function runHistory(history: History): RunSeries {
  const of = (name: string) => history.series[name]?.values ?? [];
  const stepsPerS = of("step_time").map((s) => (s === null || s <= 0 ? null : 1 / s));
  return trimmed({ times: timesOf(history), step: of("step"), loss: of("loss"), tokensPerS: of("tokens_per_second"), samplesPerS: of("samples_per_second"), stepsPerS });
}

function timesOf(history: History): number[] {
  const length = Math.max(0, ...Object.values(history.series).map((s) => s.values.length));
  return Array.from({ length }, (_, i) => history.start + i * history.step);
}

/**
 * Without the empty ends, and without single missing seconds, which come from clock differences; longer stretches stay
 * gaps.
 */
function trimmed<T extends { times: number[] }>(series: T): T {
  const table = series as unknown as Table;
  const keys = Object.keys(table);
  const measured = table.times.map((_, i) => keys.some((key) => key !== "times" && (table[key]?.[i] ?? null) !== null));
  const last = measured.lastIndexOf(true);
  const kept: number[] = [];
  let missed = 0;
  for (let i = measured.indexOf(true); i >= 0 && i <= last; i += 1) {
    missed = measured[i] ? 0 : missed + 1;
    if (missed === 0 || missed === SKIPPED_S) kept.push(i);
  }
  const cut: Record<string, (number | null)[]> = {};
  for (const key of keys) cut[key] = kept.map((i) => table[key]?.[i] ?? null);
  return cut as unknown as T;
}
