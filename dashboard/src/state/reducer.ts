/**
 * The one place where the dashboard's state changes: a snapshot, and the events since. Pure.
 *
 * Every event can be applied twice with the same result, because a snapshot may or may not hold it already. All
 * lists are bounded, so that a page left open for weeks stays as small as one just opened.
 */

import type { DataOf, FeedEvent } from "../api/events";
import type { Barrier, Checkpoint, CoordinatorStatus, LogEntry, Recovery, Snapshot, Task, Worker } from "../api/types";
import { eventLineOf } from "./facts";
import { addRunPoints, addSample, emptySeries, mergeRunHistory, mergeSeries } from "./series";
import type { Action, Generation, EventLine, State } from "./types";

export const LIMITS = { logs: 5_000, eventLines: 500, generations: 2_000, checkpoints: 500, barriers: 100, tasks: 500, recoveries: 1_000 };

export function initialState(): State {
  return {
    connection: { phase: "connecting", reason: "", hint: "", nextAttemptAtMs: null, updatedAtMs: null },
    session: null,
    skewS: 0,
    coordinator: null,
    workers: new Map(),
    datasets: new Map(),
    checkpoints: [],
    barriers: [],
    tasks: [],
    recoveries: [],
    incidents: [],
    jobs: new Map(),
    metrics: null,
    logs: [],
    eventLines: [],
    generations: [],
    series: emptySeries(),
    runSeries: new Map(),
    planRevision: 0,
    logsSkipped: 0,
  };
}

export function reduce(state: State, action: Action): State {
  switch (action.type) {
    case "snapshot":
      return applyEvents(applySnapshot(state, action.snapshot, action.atMs), action.since ?? [], action.atMs, true);
    case "events":
      return applyEvents(state, action.events, action.atMs, false);
    case "past":
      return applyPast(state, action.events);
    case "recoveries":
      return { ...state, recoveries: action.recoveries.slice(0, LIMITS.recoveries) };
    case "incidents":
      return { ...state, incidents: action.incidents };
    case "history":
      return { ...state, series: mergeSeries(action.series, state.series) };
    case "runHistory": {
      const runSeries = new Map(state.runSeries);
      runSeries.set(action.jobId, mergeRunHistory(action.series, state.runSeries.get(action.jobId)));
      return { ...state, runSeries };
    }
    case "connection":
      return { ...state, connection: { ...state.connection, ...action.connection } };
    case "session":
      return { ...state, session: action.session };
    case "signedOut":
      return signedOut(state, action.reason);
  }
}

function signedOut(state: State, reason: string): State {
  if (state.connection.phase === "signed_out") return state;
  const { connection, ...empty } = initialState();
  const why = state.session?.signed_in ? "Your session has ended: it expired, or its token was revoked." : reason;
  return { ...empty, connection: { ...connection, phase: "signed_out", reason: why } };
}

// --- snapshot -------------------------------------------------------------------------------------------------

function applySnapshot(state: State, snapshot: Snapshot, atMs: number): State {
  const workers = new Map(snapshot.workers.map((w) => [w.id, w]));
  return {
    ...state,
    connection: { ...state.connection, updatedAtMs: atMs },
    skewS: settle(state, snapshot.coordinator.server_time - atMs / 1000),
    coordinator: snapshot.coordinator,
    workers,
    datasets: new Map(snapshot.datasets.map((d) => [d.id, d])),
    checkpoints: withOlder(snapshot.checkpoints, state.checkpoints, (c) => c.created_at, LIMITS.checkpoints),
    barriers: snapshot.barriers,
    tasks: withOlder(snapshot.tasks, state.tasks, (t) => t.created_at, LIMITS.tasks),
    metrics: snapshot.metrics,
    logs: appendLogs(state.logs, [...snapshot.logs].reverse()),
    generations: counted(withGuesses(state.generations, snapshot.workers), snapshot.coordinator),
    jobs: new Map(snapshot.jobs.map((j) => [j.id, j])),
    runSeries: addRunPoints(state.runSeries, workers.values(), snapshot.coordinator.server_time),
  };
}

/** The clock skew is kept unless it really changes: ages must not jitter. */
function settle(state: State, skewS: number): number {
  return state.coordinator !== null && Math.abs(skewS - state.skewS) < 2 ? state.skewS : skewS;
}

/** The snapshot holds only the newest entries; older ones that we know are kept. */
function withOlder<T extends { id: string }>(newest: readonly T[], known: readonly T[], at: (item: T) => number, limit: number): T[] {
  const end = newest.at(-1);
  if (end === undefined) return [...newest];
  const ids = new Set(newest.map((item) => item.id));
  return [...newest, ...known.filter((item) => at(item) < at(end) && !ids.has(item.id))].slice(0, limit);
}

/** For a job without known events, each worker's join time stands in. */
function withGuesses(known: readonly Generation[], workers: readonly Worker[]): readonly Generation[] {
  const reported = new Set(known.map((g) => g.jobId));
  const guesses = workers
    .filter((w) => !reported.has(w.job_id))
    .map((w): Generation => ({ jobId: w.job_id, number: 0, ordinal: 0, at: w.joined_at, kind: "joined", workerId: w.id, reason: "" }));
  return guesses.length === 0 ? known : [...known, ...guesses].sort(byTime).slice(-LIMITS.generations);
}

function byTime(a: Generation, b: Generation): number {
  return a.at - b.at || a.number - b.number;
}

/** Numbers the changes of each job from 1. A snapshot says how many there were by then. */
function counted(generations: readonly Generation[], status: CoordinatorStatus | null): readonly Generation[] {
  if (status === null) return generations;
  const next = new Map<string, number>();
  for (const g of generations) if (g.number > 0 && g.at <= status.server_time) next.set(g.jobId, (next.get(g.jobId) ?? (status.jobs[g.jobId] ?? 0) + 1) - 1);
  let changed = false;
  const numbered = generations.map((g) => {
    if (g.number === 0) return g;
    const ordinal = Math.max(1, next.get(g.jobId) ?? (status.jobs[g.jobId] ?? 0) + 1);
    next.set(g.jobId, ordinal + 1);
    changed ||= ordinal !== g.ordinal;
    return ordinal === g.ordinal ? g : { ...g, ordinal };
  });
  return changed ? numbered : generations;
}

// --- events ---------------------------------------------------------------------------------------------------

/** State that a batch of events mutates: copied once per batch. */
interface Draft {
  state: State;
  workers: Map<string, Worker> | null;
}

function applyEvents(state: State, events: readonly FeedEvent[], atMs: number, again: boolean): State {
  if (events.length === 0) return state;
  const draft: Draft = { state: { ...state, connection: again ? state.connection : { ...state.connection, updatedAtMs: atMs } }, workers: null };
  const eventLines: EventLine[] = [];
  const generations: Generation[] = [];
  const logs: LogEntry[] = [];
  for (const event of events) {
    if (event.kind === "logs") {
      logs.push(...event.data);
      continue;
    }
    if (event.kind === "metrics") {
      draft.state.metrics = event.data;
      if (!again) draft.state.series = addSample(draft.state.series, event.data, draft.state.runSeries, atMs / 1000 + state.skewS);
      continue;
    }
    if (event.kind === "logs_skipped") {
      if (!again) draft.state.logsSkipped += event.data.count;
      continue;
    }
    apply(draft, event);
    const line = eventLineOf(event);
    if (line) eventLines.push(line);
    const generation = generationOf(event);
    if (generation) generations.push(generation);
  }
  if (draft.workers) draft.state.workers = draft.workers;
  if (logs.length > 0) draft.state.logs = appendLogs(draft.state.logs, logs);
  if (eventLines.length > 0) draft.state.eventLines = prepend(eventLines.reverse(), draft.state.eventLines, LIMITS.eventLines);
  if (generations.length > 0) draft.state.generations = counted(addGenerations(draft.state.generations, generations), draft.state.coordinator);
  return draft.state;
}

function applyPast(state: State, events: readonly FeedEvent[]): State {
  const eventLines = events.map(eventLineOf).filter((h) => h !== null).reverse();
  const generations = events.map(generationOf).filter((g) => g !== null);
  return {
    ...state,
    eventLines: merged(eventLines, state.eventLines),
    generations: counted(addGenerations(state.generations, generations), state.coordinator),
  };
}

function apply(draft: Draft, event: FeedEvent): void {
  const { state } = draft;
  switch (event.kind) {
    case "worker_joined": {
      const d = event.data;
      const known = workersOf(draft).get(d.spec.worker_id);
      if (known && known.incarnation >= d.incarnation) break;
      workersOf(draft).set(d.spec.worker_id, {
        id: d.spec.worker_id, ip: d.spec.hostname, port: d.spec.port, status: "active", gpu_count: d.spec.gpu_count,
        last_heartbeat: d.at_s, assigned_shards: 0, current_epoch: known?.current_epoch ?? 0, current_step: known?.current_step ?? 0,
        current_task: null, resources: null, metrics: {}, job_id: d.spec.job_id, rank: null, incarnation: d.incarnation,
        connected: false, joined_at: d.at_s, memory_bytes: d.spec.memory_bytes, slow: false, reason: d.reason, metadata: d.spec.metadata,
        run_id: d.spec.run_id,
      });
      break;
    }
    case "worker_failed": {
      const d = event.data;
      const known = workersOf(draft).get(d.worker_id);
      if (known && known.incarnation <= d.incarnation) workersOf(draft).set(d.worker_id, { ...known, status: "failed", connected: false, rank: null, reason: d.reason });
      break;
    }
    case "worker_left": {
      const d = event.data;
      const known = workersOf(draft).get(d.worker_id);
      if (known && known.incarnation <= d.incarnation) workersOf(draft).delete(d.worker_id);
      break;
    }
    case "worker_slow":
    case "worker_caught_up": {
      const d = event.data;
      const known = workersOf(draft).get(d.worker_id);
      if (known) workersOf(draft).set(d.worker_id, { ...known, slow: d.slow, reason: d.reason });
      break;
    }
    case "worker_forgotten":
      workersOf(draft).delete(event.data.worker_id);
      break;
    case "dataset_registered": {
      const { spec, at_s } = event.data;
      const { dataset_id, files: _files, jobs: _jobs, ...rest } = spec;
      const dataset = { ...rest, readers: [], id: dataset_id, name: spec.metadata["name"] ?? dataset_id, shard_count: Math.ceil(spec.total_samples / spec.shard_size), registered_at: at_s };
      state.datasets = new Map(state.datasets).set(dataset_id, dataset);
      break;
    }
    case "dataset_removed": {
      const datasets = new Map(state.datasets);
      datasets.delete(event.data.dataset_id);
      state.datasets = datasets;
      break;
    }
    case "shards_moved":
      state.planRevision += 1;
      break;
    case "barrier_released": {
      const d = event.data;
      endBarrier(state, { ...barrierOf(d), total: d.arrived, status: "complete", missing: [] });
      break;
    }
    case "barrier_broken": {
      const d = event.data;
      endBarrier(state, { ...barrierOf(d), total: d.expected, status: "broken", missing: d.missing });
      break;
    }
    case "checkpoint_started": {
      const d = event.data;
      if (state.checkpoints.some((c) => c.id === d.checkpoint_id)) break;
      putCheckpoint(state, {
        id: d.checkpoint_id, step: d.step, epoch: d.epoch, size: d.size_bytes, path: d.path, created_at: d.at_s, completed_at: null, worker_id: d.worker_id,
        job_id: d.job_id, status: "in_progress", tiers: [], digest: "", throughput_mb_s: null, reason: d.reason, metadata: {},
        run_id: d.run_id, generation: d.generation,
      });
      break;
    }
    case "checkpoint_completed": {
      const d = event.data;
      const known = state.checkpoints.find((c) => c.id === d.checkpoint_id);
      putCheckpoint(state, {
        id: d.checkpoint_id, step: d.step, epoch: d.epoch, size: d.size_bytes, path: d.path, created_at: known?.created_at ?? d.at_s - d.duration_s,
        completed_at: known?.completed_at ?? d.at_s, worker_id: d.worker_id, job_id: d.job_id, status: "completed", tiers: d.tiers, digest: d.digest,
        throughput_mb_s: d.duration_s > 0 ? d.size_bytes / 1e6 / d.duration_s : null, reason: d.reason, metadata: d.metadata,
        run_id: d.run_id, generation: d.generation,
      });
      break;
    }
    case "checkpoint_failed": {
      const d = event.data;
      const known = state.checkpoints.find((c) => c.id === d.checkpoint_id);
      if (known?.status === "completed") break;
      putCheckpoint(state, {
        id: d.checkpoint_id, step: d.step, epoch: d.epoch, size: known?.size ?? 0, path: d.path, created_at: known?.created_at ?? d.at_s, completed_at: null,
        worker_id: d.worker_id, job_id: d.job_id, status: "failed", tiers: [], digest: "", throughput_mb_s: null, reason: d.reason, metadata: known?.metadata ?? {},
        run_id: d.run_id, generation: d.generation,
      });
      break;
    }
    case "checkpoint_removed": {
      const { checkpoint_id } = event.data;
      state.checkpoints = state.checkpoints.filter((c) => c.id !== checkpoint_id);
      break;
    }
    case "task_created": {
      const { spec, reason, at_s } = event.data;
      if (state.tasks.some((t) => t.id === spec.task_id)) break;
      const task: Task = {
        id: spec.task_id, name: spec.name, type: spec.type, status: "pending", stopping: false, worker_ids: [], worker_count: spec.worker_count,
        gpus_per_worker: spec.gpus_per_worker, dataset_id: spec.dataset_id, config: parsed(spec.config_json), created_at: at_s, started_at: null,
        completed_at: null, progress: 0, step: 0, total_steps: null, steps_per_s: null, eta_s: null, attempts: 0, max_retries: spec.max_retries,
        exit_cause: null, reason,
      };
      state.tasks = [task, ...state.tasks].slice(0, LIMITS.tasks);
      break;
    }
    case "task_changed": {
      const d = event.data;
      state.tasks = state.tasks.map((t) => (t.id === d.task_id ? changed(t, d) : t));
      break;
    }
    case "task_progressed": {
      const d = event.data;
      state.tasks = state.tasks.map((t) => (t.id === d.task_id && d.attempt >= t.attempts ? progressed(t, d) : t));
      break;
    }
    case "recovery_recorded": {
      const { at_s, severity: _severity, text: _text, ...d } = event.data;
      const recovery: Recovery = { ...d, at: at_s, total_s: Object.values(d.phases_s).reduce((sum, s) => sum + s, 0) };
      const known = state.recoveries.some((r) => r.at === recovery.at && r.job_id === recovery.job_id && r.worker_id === recovery.worker_id);
      if (!known) state.recoveries = [recovery, ...state.recoveries].slice(0, LIMITS.recoveries);
      break;
    }
  }
}

function workersOf(draft: Draft): Map<string, Worker> {
  draft.workers ??= new Map(draft.state.workers);
  return draft.workers;
}

function barrierOf(d: DataOf<"barrier_released" | "barrier_broken">) {
  return {
    id: `${d.job_id}/${d.barrier_id}@${d.step}#${d.round}`,
    name: d.barrier_id, job_id: d.job_id, step: d.step, arrived: d.arrived, created_at: d.opened_at_s, ended_at: d.at_s, reason: d.reason,
  };
}

function endBarrier(state: State, barrier: Barrier): void {
  const rest = state.barriers.filter((b) => b.id !== barrier.id);
  const open = rest.filter((b) => b.status === "waiting");
  const ended = rest.filter((b) => b.status !== "waiting");
  const at = ended.findIndex((b) => (b.ended_at ?? 0) <= (barrier.ended_at ?? 0));
  ended.splice(at < 0 ? ended.length : at, 0, barrier);
  state.barriers = [...open, ...ended.slice(0, LIMITS.barriers)];
}

function putCheckpoint(state: State, checkpoint: Checkpoint): void {
  const at = state.checkpoints.findIndex((c) => c.id === checkpoint.id);
  if (at >= 0) {
    state.checkpoints = state.checkpoints.with(at, checkpoint);
    return;
  }
  state.checkpoints = [checkpoint, ...state.checkpoints].slice(0, LIMITS.checkpoints);
}

const ENDED: ReadonlySet<string> = new Set(["completed", "failed", "stopped"]);

function changed(task: Task, d: DataOf<"task_changed">): Task {
  const { status } = d;
  return {
    ...task,
    status,
    stopping: d.stopping,
    attempts: Math.max(task.attempts, d.attempt),
    exit_cause: d.cause ?? task.exit_cause,
    eta_s: ENDED.has(status) ? null : task.eta_s,
    worker_ids: d.worker_ids.length > 0 || ENDED.has(status) ? d.worker_ids : task.worker_ids,
    started_at: status === "running" ? (task.started_at ?? d.at_s) : task.started_at,
    completed_at: ENDED.has(status) ? d.at_s : null,
    progress: status === "completed" ? 100 : task.progress,
    reason: d.reason,
  };
}

function progressed(task: Task, d: DataOf<"task_progressed">): Task {
  return {
    ...task,
    attempts: d.attempt,
    worker_ids: d.worker_ids.length > 0 ? d.worker_ids : task.worker_ids,
    step: d.step,
    total_steps: d.total_steps || null,
    steps_per_s: d.steps_per_s || null,
    eta_s: d.eta_s,
    progress: d.total_steps > 0 ? d.progress : task.progress,
  };
}

function parsed(json: string): Record<string, unknown> {
  try {
    return JSON.parse(json) as Record<string, unknown>;
  } catch {
    return {};
  }
}

// --- bounded lists --------------------------------------------------------------------------------------------

function logNumber(id: string): number {
  return Number.parseInt(id.slice(4), 16);
}

/** IDs ascend, so an entry is new exactly when its number is above the last one's. */
function appendLogs(known: readonly LogEntry[], entries: readonly LogEntry[]): readonly LogEntry[] {
  const last = known.at(-1);
  const after = last === undefined ? -1 : logNumber(last.id);
  const fresh = entries.filter((e) => logNumber(e.id) > after);
  if (fresh.length === 0) return known;
  const space = Math.max(0, LIMITS.logs - fresh.length);
  return [...(space === 0 ? [] : known.slice(-space)), ...fresh.slice(-LIMITS.logs)];
}

function prepend(fresh: readonly EventLine[], known: readonly EventLine[], limit: number): readonly EventLine[] {
  const ids = new Set(known.map((h) => h.id));
  const news = fresh.filter((h) => !ids.has(h.id));
  return news.length === 0 ? known : [...news, ...known].slice(0, limit);
}

function merged(past: readonly EventLine[], known: readonly EventLine[]): readonly EventLine[] {
  const ids = new Set(known.map((h) => h.id));
  return [...known, ...past.filter((h) => !ids.has(h.id))].sort((a, b) => b.at - a.at).slice(0, LIMITS.eventLines);
}

function generationOf(event: FeedEvent): Generation | null {
  switch (event.kind) {
    case "worker_joined": {
      const d = event.data;
      return { jobId: d.spec.job_id, number: d.generation, ordinal: 0, at: d.at_s, kind: "joined", workerId: d.spec.worker_id, reason: d.reason };
    }
    case "worker_failed":
    case "worker_left": {
      const d = event.data;
      return { jobId: d.job_id, number: d.generation, ordinal: 0, at: d.at_s, kind: event.kind === "worker_failed" ? "failed" : "left", workerId: d.worker_id, reason: d.reason };
    }
    default:
      return null;
  }
}

function addGenerations(known: readonly Generation[], fresh: readonly Generation[]): readonly Generation[] {
  const key = (g: Generation) => `${g.jobId}\n${g.number}\n${g.workerId}\n${g.kind}`;
  const keys = new Set(known.map(key));
  const news = fresh.filter((g) => !keys.has(key(g)));
  if (news.length === 0) return known;
  const reported = new Set(news.map((g) => g.jobId));
  // Events replace guesses.
  return [...known.filter((g) => g.number > 0 || !reported.has(g.jobId)), ...news].sort(byTime).slice(-LIMITS.generations);
}
