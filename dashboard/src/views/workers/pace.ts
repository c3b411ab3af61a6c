/** Slow workers: busy time per step relative to the median of the run. Pure. */

import type { Worker } from "../../api/types";
import { LATE_S } from "../../state/health";

export type PaceClass = "failed" | "other" | "unknown" | "fast" | "even" | "slow" | "slowest";

export interface Pace {
  worker: Worker;
  /** Busy seconds of a step: step time without waiting for others; null where not reported. */
  busyS: number | null;
  /** Seconds waiting for others; null where not measured. */
  waitS: number | null;
  /** Busy time relative to the median of its run; null where it does not train, or no other worker has reported one. */
  ratio: number | null;
  class: PaceClass;
}

/** From best to worst, with labels and colours. */
export const PACES: readonly (readonly [PaceClass, string, string])[] = [
  ["fast", "faster than the median", "bg-good"],
  ["even", "at the median", "bg-good/60"],
  ["slow", "over 10 % slower", "bg-warn/70"],
  ["slowest", "over 30 % slower", "bg-bad"],
  ["other", "not training", "bg-busy/60"],
  ["unknown", "no step times to compare", "bg-idle/40"],
  ["failed", "failed", "bg-bad"],
];

const WORKING: ReadonlySet<string> = new Set(["training", "checkpointing", "active"]);

export function busyTime(worker: Worker): { busyS: number | null; waitS: number | null } {
  const stepS = worker.metrics["step_time_s"] ?? null;
  const waitS = worker.metrics["sync_wait_s"] ?? null;
  if (stepS === null || worker.status === "failed") return { busyS: null, waitS: null };
  return { busyS: waitS === null ? stepS : Math.max(0, stepS - waitS), waitS };
}

function median(values: number[]): number | null {
  const sorted = values.sort((a, b) => a - b);
  const middle = Math.floor(sorted.length / 2);
  if (sorted.length === 0) return null;
  return sorted.length % 2 === 1 ? (sorted[middle] ?? null) : ((sorted[middle - 1] ?? 0) + (sorted[middle] ?? 0)) / 2;
}

export function pacesOf(workers: readonly Worker[]): Pace[] {
  const busy = new Map<string, number[]>();
  for (const worker of workers) {
    const { busyS } = busyTime(worker);
    if (busyS !== null && WORKING.has(worker.status)) busy.set(worker.job_id, [...(busy.get(worker.job_id) ?? []), busyS]);
  }
  const medians = new Map([...busy].map(([job, values]) => [job, values.length < 2 ? null : median(values)]));
  return workers.map((worker) => {
    const { busyS, waitS } = busyTime(worker);
    const middle = WORKING.has(worker.status) ? (medians.get(worker.job_id) ?? null) : null;
    const ratio = busyS === null || middle === null || middle <= 0 ? null : busyS / middle;
    return { worker, busyS, waitS, ratio, class: classOf(worker, ratio) };
  });
}

function classOf(worker: Worker, ratio: number | null): PaceClass {
  if (worker.status === "failed") return "failed";
  if (!WORKING.has(worker.status)) return "other";
  if (ratio === null) return "unknown";
  return ratio > 1.3 ? "slowest" : ratio > 1.1 ? "slow" : ratio < 0.95 ? "fast" : "even";
}

/** Slowest first, of runs with at least two workers. */
export function slowest(paces: readonly Pace[], most: number): Pace[] {
  return paces
    .filter((p) => p.ratio !== null)
    .sort((a, b) => (b.ratio ?? 0) - (a.ratio ?? 0))
    .slice(0, most);
}

/** Workers that are lost, slow, late, or in an unusual state. */
export function exceptions(paces: readonly Pace[], now: number): Pace[] {
  const counts = new Map<string, number>();
  for (const p of paces) counts.set(p.worker.status, (counts.get(p.worker.status) ?? 0) + 1);
  const usual = [...counts].filter(([, n]) => 10 * n >= paces.length).map(([status]) => status);
  const rank = (p: Pace) => (p.class === "failed" ? 0 : p.worker.slow ? 1 : p.class === "slowest" ? 2 : p.class === "slow" ? 4 : 3);
  return paces
    .filter((p) => p.class === "failed" || p.worker.slow || p.class === "slowest" || now - p.worker.last_heartbeat > LATE_S || !usual.includes(p.worker.status))
    .sort((a, b) => rank(a) - rank(b) || (b.ratio ?? 0) - (a.ratio ?? 0));
}

/** Machines by name, each with its workers. */
export function byHost(paces: readonly Pace[]): { host: string; paces: Pace[] }[] {
  const hosts = new Map<string, Pace[]>();
  for (const p of paces) {
    const host = p.worker.ip || "unknown host";
    const known = hosts.get(host);
    if (known) known.push(p);
    else hosts.set(host, [p]);
  }
  return [...hosts].map(([host, found]) => ({ host, paces: found })).sort((a, b) => a.host.localeCompare(b.host, "en", { numeric: true }));
}
