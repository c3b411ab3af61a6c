/** A run is everything with one job ID: workers, checkpoints, recoveries and, if started as one, its task. Pure. */

import type { Checkpoint, LastReport, Recovery, Task, Worker } from "../api/types";
import { newest } from "./risk";
import { runPoint, throughputOf } from "./series";
import type { Generation, RunSeries, State } from "./types";

/** The job of workers that name none. Their log lines name no run. */
export const DEFAULT_JOB = "default";

export type RunStatus = "pending" | "starting" | "training" | "recovering" | "idle" | "completed" | "stopped" | "failed" | "ended";

export interface Run {
  id: string;
  /** The task's name, where it has one. */
  name: string;
  status: RunStatus;
  workers: Worker[];
  alive: number;
  failed: number;
  step: number;
  epoch: number;
  loss: number | null;
  throughput: number | null;
  throughputUnit: string;
  /** Share of worker time spent training; null where not measured. */
  goodput: number | null;
  generation: number;
  startedAt: number | null;
  /** Time of the last report of one of its workers. */
  reportedAt: number | null;
  /** Newest first. */
  checkpoints: Checkpoint[];
  /** Newest first. */
  recoveries: Recovery[];
  task: Task | null;
  risk: Risk;
}

/** What would be lost if everything stopped now. */
export interface Risk {
  /** The newest completed save; null where none is known. */
  safe: Checkpoint | null;
  /** There is none. False also where its saves may be older than those of the snapshot. */
  isUnsaved: boolean;
  /** When the safe state was taken; without one, when training started. Null while not training. */
  since: number | null;
  /** Steps completed since. */
  steps: number;
}

/** A snapshot has this many checkpoints of all runs together, the newest. */
const SNAPSHOT_CHECKPOINTS = 100;

const STARTING: ReadonlySet<string> = new Set(["recovering", "initializing", "loading"]);

/** It is training, or reports only that it is active and its step. */
export function isWorking(worker: Worker): boolean {
  return worker.status === "training" || worker.status === "checkpointing" || (worker.status === "active" && worker.current_step > 0 && !isStarting(worker));
}

/** Before its first step: it reports so, or has joined without a report yet. */
export function isStarting(worker: Worker): boolean {
  const silent = worker.resources === null && Object.keys(worker.metrics).length === 0;
  return STARTING.has(worker.status) || (worker.status === "active" && silent);
}

function runIds(state: State): string[] {
  const ids = new Set<string>();
  for (const worker of state.workers.values()) ids.add(worker.job_id);
  for (const checkpoint of state.checkpoints) ids.add(checkpoint.job_id);
  for (const recovery of state.recoveries) ids.add(recovery.job_id);
  for (const id of state.jobs.keys()) ids.add(id); // Last reports are kept.
  // A task is a run as soon as it is created: its workers join as a job of that name, or report it as their task.
  const working = new Set([...state.workers.values()].map((w) => w.current_task));
  for (const task of state.tasks) if (!working.has(task.id)) ids.add(task.id);
  return [...ids];
}

/** All runs: those with live workers first, then by latest activity. */
export function runsOf(state: State): Run[] {
  const runs = new Map<string, Run>(runIds(state).map((id) => [id, emptyRun(id, state)]));
  for (const worker of state.workers.values()) runs.get(worker.job_id)?.workers.push(worker);
  for (const checkpoint of state.checkpoints) runs.get(checkpoint.job_id)?.checkpoints.push(checkpoint);
  for (const recovery of state.recoveries) runs.get(recovery.job_id)?.recoveries.push(recovery);
  const started = new Map<string, number>();
  for (const g of state.generations) if (!started.has(g.jobId)) started.set(g.jobId, g.at);
  const finished = [...runs.values()].map((run) => complete(run, state, started.get(run.id)));
  return finished.sort((a, b) => Math.sign(b.alive) - Math.sign(a.alive) || lastActive(b) - lastActive(a) || a.id.localeCompare(b.id));
}

function emptyRun(id: string, state: State): Run {
  return {
    id, name: id, status: "ended", workers: [], alive: 0, failed: 0, step: 0, epoch: 0, loss: null, throughput: null, throughputUnit: "", goodput: null,
    generation: state.coordinator?.jobs[id] ?? 0, startedAt: null, reportedAt: null, checkpoints: [], recoveries: [], task: null, risk: { safe: null, isUnsaved: false, since: null, steps: 0 },
  };
}

function complete(run: Run, state: State, firstJoin: number | undefined): Run {
  const { workers } = run;
  const alive = workers.filter((w) => w.status !== "failed");
  const point = runPoint(workers);
  const series = state.runSeries.get(run.id);
  const last = state.jobs.get(run.id);
  const speed = alive.length > 0 ? throughputNow(point, throughputOf(series).unit) : lastThroughput(series, last);
  const named = new Set([run.id, ...workers.map((w) => w.current_task)]);
  const task = state.tasks.find((t) => named.has(t.id)) ?? null;
  const saves = run.checkpoints.map((c) => c.step);
  // A process that has just started reports 0; the run is at the last reported step.
  const step = point.step || (lastOf(series?.step) || last?.step || Math.max(0, task?.step ?? 0, ...workers.map((w) => w.current_step), ...saves));
  const starts = [firstJoin, ...workers.map((w) => w.joined_at), ...run.checkpoints.map((c) => c.created_at)].filter((at) => at !== undefined);
  const startedAt = starts.length === 0 ? null : Math.min(...starts);
  return {
    ...run,
    name: task?.name || run.id,
    status: statusOf(workers, alive, task, run.checkpoints.length > 0 || run.recoveries.length > 0 || alive.length < workers.length),
    // By name: a stable order when ranks are reassigned.
    workers: [...workers].sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true })),
    alive: alive.length,
    failed: workers.length - alive.length,
    step,
    epoch: Math.max(0, ...alive.map((w) => w.current_epoch), ...(alive.length === 0 ? run.checkpoints.map((c) => c.epoch) : [])),
    loss: point.loss ?? lastOf(series?.loss) ?? last?.loss ?? null,
    throughput: speed.value,
    throughputUnit: speed.unit,
    goodput: last?.goodput ?? null,
    startedAt,
    reportedAt: last?.at ?? null,
    task,
    risk: riskOf(run.checkpoints, state.checkpoints.length < SNAPSHOT_CHECKPOINTS, alive, step, startedAt),
  };
}

function lastOf(values: readonly (number | null)[] | undefined): number | undefined {
  return values?.findLast((value): value is number => value !== null && value !== 0);
}

interface Throughput {
  value: number | null;
  unit: string;
}

function throughputNow(point: ReturnType<typeof runPoint>, unit: string): Throughput {
  return { unit, value: { "tokens/s": point.tokensPerS, "samples/s": point.samplesPerS, "steps/s": point.stepsPerS }[unit] ?? null };
}

/** Throughput of a run without workers. */
function lastThroughput(series: RunSeries | undefined, last: LastReport | undefined): Throughput {
  const seen = throughputOf(series);
  const value = lastOf(seen.values);
  if (value !== undefined) return { unit: seen.unit, value };
  const stepsPerS = last?.step_time_s ? 1 / last.step_time_s : null;
  const reported: Throughput[] = [{ unit: "tokens/s", value: last?.tokens_per_second ?? null }, { unit: "samples/s", value: last?.samples_per_second ?? null }, { unit: "steps/s", value: stepsPerS }];
  return reported.find((each) => each.value !== null) ?? { unit: "", value: null };
}

function statusOf(workers: readonly Worker[], alive: readonly Worker[], task: Task | null, hasPast: boolean): RunStatus {
  if (alive.length === 0 && task !== null && (workers.length === 0 || (task.status !== "running" && task.status !== "pending"))) return task.status === "running" ? "starting" : task.status;
  if (workers.length === 0) return "ended";
  if (alive.length === 0) return "failed";
  // One late machine of a thousand is not a recovery.
  if (4 * alive.filter(isStarting).length >= alive.length) return hasPast ? "recovering" : "starting";
  if (alive.some(isWorking)) return "training";
  return "idle";
}

function riskOf(checkpoints: readonly Checkpoint[], isComplete: boolean, alive: readonly Worker[], step: number, startedAt: number | null): Risk {
  const safe = newestSafe(checkpoints);
  const training = alive.some((w) => isWorking(w) || isStarting(w));
  const steps = safe === null ? step : Math.max(0, step - safe.step);
  return { safe, isUnsaved: safe === null && isComplete, steps, since: training ? (safe?.created_at ?? startedAt) : null };
}

export function newestSafe(checkpoints: readonly Checkpoint[]): Checkpoint | null {
  return newest(checkpoints.filter((c) => c.status === "completed"));
}

function lastActive(run: Run): number {
  return Math.max(run.reportedAt ?? 0, run.task?.completed_at ?? run.task?.created_at ?? 0, ...run.workers.map((w) => w.last_heartbeat), run.checkpoints[0]?.created_at ?? 0, run.recoveries[0]?.at ?? 0);
}

/** The worker's name without the job prefix. */
export function shortName(id: string, job: string): string {
  return id.length > job.length + 1 && id.startsWith(job) && /[-_./:]/.test(id.charAt(job.length)) ? id.slice(job.length + 1) : id;
}

/**
 * Its rank in the run: the one in its name, where it has one. The coordinator numbers members in join order, which
 * changes after a recovery.
 */
export function rankOf(worker: Pick<Worker, "id" | "job_id" | "rank">): number | null {
  const called = /^rank(\d+)$/.exec(shortName(worker.id, worker.job_id));
  return worker.rank === null || called === null ? worker.rank : Number(called[1]);
}

// --- the timeline -----------------------------------------------------------------------------------------------

export interface Span {
  from: number;
  /** Null: ongoing. */
  to: number | null;
  kind: "up" | "down";
  reason: string;
}

export interface TimelineRow {
  workerId: string;
  spans: Span[];
}

/** When each worker was up, from membership changes as far back as known. */
export function timelineRows(run: Run, generations: readonly Generation[]): TimelineRow[] {
  const rows = new Map<string, Span[]>();
  const spansOf = (id: string) => {
    const known = rows.get(id);
    if (known) return known;
    const created: Span[] = [];
    rows.set(id, created);
    return created;
  };
  for (const worker of run.workers) spansOf(worker.id);
  for (const g of generations) {
    if (g.jobId !== run.id) continue;
    const spans = spansOf(g.workerId);
    const open = spans.at(-1);
    if (open && open.to === null) open.to = g.at;
    if (g.kind === "joined") spans.push({ from: g.at, to: null, kind: "up", reason: g.reason });
    else if (g.kind === "failed") spans.push({ from: g.at, to: null, kind: "down", reason: g.reason });
  }
  for (const worker of run.workers) {
    const spans = spansOf(worker.id);
    if (spans.length > 0) continue;
    spans.push({ from: worker.joined_at, to: worker.status === "failed" ? worker.last_heartbeat : null, kind: "up", reason: "" });
    if (worker.status === "failed") spans.push({ from: worker.last_heartbeat, to: null, kind: "down", reason: worker.reason });
  }
  return [...rows].map(([workerId, spans]) => ({ workerId, spans }));
}

export interface GenerationLine {
  at: number;
  number: number;
  text: string;
  bad: boolean;
}

/** Membership changes as lines on the timeline; changes within `withinS` are merged. */
export function generationLines(generations: readonly Generation[], jobId: string, withinS = 1): GenerationLine[] {
  const groups: { at: number; number: number; joined: Set<string>; failed: Set<string>; left: Set<string> }[] = [];
  for (const g of generations) {
    if (g.jobId !== jobId || g.number === 0) continue;
    const last = groups.at(-1);
    const group = last && g.at - last.at <= withinS ? last : { at: g.at, number: 0, joined: new Set<string>(), failed: new Set<string>(), left: new Set<string>() };
    if (group !== last) groups.push(group);
    group.at = g.at;
    group.number = Math.max(group.number, g.ordinal);
    group[g.kind].add(g.workerId);
  }
  return groups.map(({ at, number, joined, failed, left }) => {
    const parts = [failed.size && `${failed.size} failed`, left.size && `${left.size} left`, joined.size && `${joined.size} joined`].filter(Boolean);
    return { at, number, text: parts.join(", "), bad: failed.size > 0 };
  });
}

/** The phases of a recovery, in their order. */
export const PHASES = ["detect", "abort", "regroup", "rendezvous", "spawn", "load", "first_step"] as const;

/** Whether a worker's process was there before and after a recovery. */
export function hasSurvived(row: TimelineRow, r: Recovery): boolean {
  const isOther = r.survived > 0 && !r.lost.includes(row.workerId) && !r.joined.includes(row.workerId);
  return isOther && row.spans.some((s) => s.kind === "up" && s.from < r.at - r.total_s && (s.to ?? Number.POSITIVE_INFINITY) >= r.at);
}
