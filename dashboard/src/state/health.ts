/**
 * Is training healthy, and if not, why: one headline for everything the coordinator knows. Pure.
 *
 * The worst finding is the headline; the others are listed below. Each names its subject and links to it.
 */

import type { Worker } from "../api/types";
import { age, count, duration, plural } from "../format";
import { isStarting, runsOf, type Run } from "./runs";
import type { State } from "./types";

export type Level = "good" | "warn" | "bad" | "idle" | "unknown";

export interface Finding {
  level: "warn" | "bad";
  /** Short headline. */
  title: string;
  /** One sentence: why. */
  reason: string;
  /** Where to look next. */
  link: { to: "/workers" | "/runs" | "/checkpoints" | "/barriers"; search?: Record<string, string>; job?: string };
}

export interface Health {
  level: Level;
  headline: string;
  reason: string;
  findings: Finding[];
}

/** Heartbeats come every few seconds; after this long the worker is late, but not yet lost. */
export const LATE_S = 12;
export const BARRIER_SLOW_S = 30;
export const STALLED_S = 60;
/** A launcher usually restarts lost workers within this time. */
export const RETURN_S = 30;
const RECENT_S = 600;
/** This many times the usual interval without a checkpoint is a finding. */
const OVERDUE = 3;

export function assess(state: State, now: number): Health {
  if (state.coordinator === null) {
    return { level: "unknown", headline: state.connection.phase === "disconnected" ? "Not connected" : "Connecting", reason: state.connection.reason || "Waiting for the coordinator.", findings: [] };
  }
  const runs = runsOf(state);
  const findings = [
    ...runs.flatMap((run) => [...ofWorkers(run, now), ...ofSaves(run, now), ...ofProgress(run, state, now)]),
    ...ofBarriers(state, now),
    ...ofTasks(state, now),
  ].sort((a, b) => rank(a) - rank(b));
  const live = runs.filter((run) => run.status === "training" || run.status === "recovering" || run.status === "starting");
  const stale = state.connection.phase === "disconnected" ? "Last known: " : "";
  const worst = findings[0];
  if (worst) return { level: worst.level, headline: stale + worst.title, reason: worst.reason, findings };
  if (live.length === 0) {
    const present = runs.reduce((sum, run) => sum + run.alive, 0);
    return {
      level: "idle",
      headline: `${stale}No active runs`,
      reason: present > 0 ? `${plural(present, "worker")} connected and idle.` : "No workers connected. Start a task, or launch a job with this coordinator's address.",
      findings,
    };
  }
  const first = live[0];
  if (first && live.every((run) => run.status === "starting")) {
    return { level: "idle", headline: `${stale}${first.name} is starting`, reason: `${plural(first.alive, "worker")} joined, no steps completed yet.`, findings };
  }
  return { level: "good", headline: `${stale}Training is healthy`, reason: healthyReason(live, now), findings };
}

/** Counts from one list, so that they agree: up, total, and by status. */
export function workerCounts(workers: ReadonlyMap<string, Worker>): { present: number; total: number; text: string } {
  const counts = new Map<string, number>();
  for (const w of workers.values()) counts.set(w.status, (counts.get(w.status) ?? 0) + 1);
  const text = [...counts].sort((a, b) => b[1] - a[1]).map(([status, n]) => `${count(n)} ${status}`).join(", ");
  return { present: workers.size - (counts.get("failed") ?? 0), total: workers.size, text };
}

function rank(finding: Finding): number {
  return finding.level === "bad" ? 0 : 1;
}

function healthyReason(live: readonly Run[], now: number): string {
  const workers = live.reduce((sum, run) => sum + run.alive, 0);
  const who = live.length === 1 && live[0] ? `${plural(workers, "worker")} on ${live[0].name}` : `${plural(workers, "worker")} on ${plural(live.length, "run")}`;
  const oldest = live.map((run) => run.risk.since).filter((at) => at !== null).sort((a, b) => a - b)[0];
  const unsaved = live.filter((run) => run.risk.isUnsaved).map((run) => run.name);
  if (unsaved.length > 0) return `${who}, no checkpoint ${live.length === 1 ? "" : `of ${names(unsaved)} `}yet.`;
  return oldest === undefined || live.some((run) => run.risk.safe === null) ? `${who}.` : `${who}, last checkpoint ${age(now - oldest)} ago.`;
}

/** "w1", "w1 and w2", "w1, w2 and 5 more" */
export function names(ids: readonly string[]): string {
  if (ids.length <= 1) return ids[0] ?? "none";
  if (ids.length <= 3) return `${ids.slice(0, -1).join(", ")} and ${ids.at(-1) ?? ""}`;
  return `${ids.slice(0, 2).join(", ")} and ${count(ids.length - 2)} more`;
}

function ofWorkers(run: Run, now: number): Finding[] {
  const found: Finding[] = [];
  const failed = run.workers.filter((w) => w.status === "failed" && !replaced(w, run));
  const filter = { job: run.id, status: "failed" };
  if (run.status === "failed") {
    const lostS = now - Math.max(...run.workers.map((w) => w.last_heartbeat));
    const link = { to: "/workers" as const, search: filter };
    if (lostS < RETURN_S) found.push({ level: "warn", title: `${run.name} is recovering`, reason: `All workers lost ${age(lostS)} ago, none has rejoined yet. ${reasonOf(failed)}`, link });
    else if (lostS < RECENT_S || run.task?.status === "running") found.push({ level: "bad", title: `${run.name} stopped: all workers lost`, reason: reasonOf(failed), link });
    return found;
  }
  if (run.alive === 0) return found;
  const lost = failed.length === 0 ? "" : `${names(failed.map((w) => w.id))} failed`;
  if (run.status === "recovering") {
    const starting = run.workers.filter(isStarting);
    const back = `${count(starting.length)} of ${plural(run.alive, "worker")} restarting.`;
    found.push({ level: "warn", title: `${run.name} is recovering`, reason: lost ? `${lost}. ${reasonOf(failed)} ${back}` : back, link: { to: "/runs", job: run.id } });
  } else if (lost) {
    found.push({ level: "warn", title: lost, reason: `${run.name} continues with ${plural(run.alive, "worker")}. ${reasonOf(failed)}`, link: { to: "/workers", search: filter } });
  }
  const slow = run.workers.filter((w) => w.slow && w.status !== "failed");
  if (slow.length > 0) {
    found.push({ level: "warn", title: `${names(slow.map((w) => w.id))} ${slow.length === 1 ? "is" : "are"} slow`, reason: reasonOf(slow), link: { to: "/workers", search: { job: run.id, q: slow.length === 1 ? (slow[0]?.id ?? "") : "", sort: "-step_time", view: "table" } } });
  }
  const late = run.workers.filter((w) => w.status !== "failed" && now - w.last_heartbeat > LATE_S);
  if (late.length > 0) {
    const longest = Math.max(...late.map((w) => now - w.last_heartbeat));
    found.push({ level: "warn", title: `No heartbeat from ${names(late.map((w) => w.id))}`, reason: `Last heartbeat ${age(longest)} ago.`, link: { to: "/workers", search: { job: run.id, sort: "last_heartbeat" } } });
  }
  return found;
}

/** The run has recovered since this worker failed. */
function replaced(worker: Worker, run: Run): boolean {
  return run.recoveries.some((r) => r.at >= worker.last_heartbeat && r.world_after > 0) && run.status !== "failed";
}

function reasonOf(workers: readonly Worker[]): string {
  const reasons = new Set(workers.map((w) => w.reason).filter(Boolean));
  const first = [...reasons][0];
  if (!first) return "";
  const sentence = `${first.charAt(0).toUpperCase()}${first.slice(1)}`;
  return sentence.endsWith(".") ? sentence : `${sentence}.`;
}

function ofSaves(run: Run, now: number): Finding[] {
  if (run.alive === 0) return [];
  const link = { to: "/checkpoints" as const, search: { job: run.id } };
  const last = run.checkpoints.find((c) => c.status !== "in_progress");
  const found: Finding[] = [];
  if (last?.status === "failed" && now - last.created_at < RECENT_S) {
    found.push({ level: "bad", title: `Last checkpoint of ${run.name} failed`, reason: `Step ${count(last.step)}: ${last.reason || "no reason reported"}.`, link });
  }
  const rhythm = saveRhythm(run);
  if (rhythm !== null && run.risk.since !== null && run.status === "training") {
    const since = now - run.risk.since;
    if (since > Math.max(30, OVERDUE * rhythm)) {
      found.push({ level: "warn", title: `${run.name}: no checkpoint for ${age(since)}`, reason: `Usually every ${duration(Math.round(rhythm))}; ${plural(run.risk.steps, "step")} at risk.`, link });
    }
  }
  return found;
}

/** Median interval between checkpoints in seconds; null while there are too few. */
export function saveRhythm(run: Run): number | null {
  const times = run.checkpoints.filter((c) => c.status === "completed").slice(0, 10).map((c) => c.created_at);
  const gaps = times.slice(1).map((at, i) => (times[i] ?? at) - at).filter((gap) => gap > 0).sort((a, b) => a - b);
  return gaps.length < 2 ? null : (gaps[Math.floor(gaps.length / 2)] ?? null);
}

function ofProgress(run: Run, state: State, now: number): Finding[] {
  if (run.status !== "training") return [];
  const series = state.runSeries.get(run.id);
  if (!series) return [];
  let since: number | null = null;
  for (let i = series.times.length - 1; i >= 0; i -= 1) {
    const step = series.step[i];
    if (step === null || step === undefined) continue;
    if (step !== run.step) break;
    since = series.times[i] ?? since;
  }
  const stepS = Math.max(0, ...run.workers.map((w) => w.metrics["step_time_s"] ?? 0));
  const limit = Math.max(STALLED_S, 5 * stepS);
  if (since === null || now - since < limit) return [];
  return [{ level: "warn", title: `${run.name} is stalled`, reason: `At step ${count(run.step)} for ${age(now - since)}.`, link: { to: "/runs", job: run.id } }];
}

function ofBarriers(state: State, now: number): Finding[] {
  const slow = state.barriers.filter((b) => b.status === "waiting" && now - b.created_at > BARRIER_SLOW_S);
  const first = slow[0];
  if (!first) return [];
  const missing = first.missing.length > 0 ? `waiting for ${names(first.missing)}` : `${count(first.arrived)} of ${count(first.total)} arrived`;
  return [{ level: "warn", title: `Workers blocked at barrier ${first.name}`, reason: `Blocked for ${age(now - first.created_at)}, ${missing}.`, link: { to: "/barriers", search: { status: "waiting" } } }];
}

function ofTasks(state: State, now: number): Finding[] {
  const failed = state.tasks.filter((t) => t.status === "failed" && now - (t.completed_at ?? 0) < RECENT_S);
  const first = failed[0];
  if (!first) return [];
  return [{ level: "bad", title: `${first.name} failed`, reason: first.reason || "No reason reported.", link: { to: "/runs", job: first.id } }];
}
