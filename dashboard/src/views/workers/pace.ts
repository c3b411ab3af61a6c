/** Who is slow: each worker's own time of a step beside that of the others of its run. Pure. */

import type { Worker } from "../../api/types";
import { LATE_S } from "../../state/health";

export type PaceClass = "failed" | "other" | "unknown" | "fast" | "even" | "slow" | "slowest";

export interface Pace {
  worker: Worker;
  /** Seconds of a step that were its own work; null where it reports none. */
  ownS: number | null;
  /** Seconds it waited for the others; null where that is not measured. */
  waitS: number | null;
  /** Its own time over the median of its run; null where it has none. */
  ratio: number | null;
  class: PaceClass;
}

/** From best to worst, with the words and colours for each. */
export const PACES: readonly (readonly [PaceClass, string, string])[] = [
  ["fast", "faster than the median", "bg-good"],
  ["even", "at the median", "bg-good/60"],
  ["slow", "over 10 % slower", "bg-warn/70"],
  ["slowest", "over 30 % slower", "bg-bad"],
  ["other", "not training", "bg-busy/60"],
  ["unknown", "no step time", "bg-idle/40"],
  ["failed", "failed", "bg-bad"],
];

const WORKING: ReadonlySet<string> = new Set(["training", "checkpointing", "active"]);

export function ownTime(worker: Worker): { ownS: number | null; waitS: number | null } {
  const stepS = worker.metrics["step_time_s"] ?? null;
  const waitS = worker.metrics["sync_wait_s"] ?? null;
  if (stepS === null || worker.status === "failed") return { ownS: null, waitS: null };
  return { ownS: waitS === null ? stepS : Math.max(0, stepS - waitS), waitS };
}

function median(values: number[]): number | null {
  const sorted = values.sort((a, b) => a - b);
  const middle = Math.floor(sorted.length / 2);
  if (sorted.length === 0) return null;
  return sorted.length % 2 === 1 ? (sorted[middle] ?? null) : ((sorted[middle - 1] ?? 0) + (sorted[middle] ?? 0)) / 2;
}

export function pacesOf(workers: readonly Worker[]): Pace[] {
  const own = new Map<string, number[]>();
  for (const worker of workers) {
    const { ownS } = ownTime(worker);
    if (ownS !== null && WORKING.has(worker.status)) own.set(worker.job_id, [...(own.get(worker.job_id) ?? []), ownS]);
  }
  const medians = new Map([...own].map(([job, values]) => [job, values.length < 2 ? null : median(values)]));
  return workers.map((worker) => {
    const { ownS, waitS } = ownTime(worker);
    const middle = medians.get(worker.job_id) ?? null;
    const ratio = ownS === null || middle === null || middle <= 0 ? null : ownS / middle;
    return { worker, ownS, waitS, ratio, class: classOf(worker, ownS, ratio) };
  });
}

function classOf(worker: Worker, ownS: number | null, ratio: number | null): PaceClass {
  if (worker.status === "failed") return "failed";
  if (!WORKING.has(worker.status)) return "other";
  if (ownS === null) return "unknown";
  if (ratio === null) return "even";
  return ratio > 1.3 ? "slowest" : ratio > 1.1 ? "slow" : ratio < 0.95 ? "fast" : "even";
}

/** The slowest first, of runs where there is anybody to compare with. */
export function slowest(paces: readonly Pace[], most: number): Pace[] {
  return paces
    .filter((p) => p.ratio !== null)
    .sort((a, b) => (b.ratio ?? 0) - (a.ratio ?? 0))
    .slice(0, most);
}

/** Those that are not as they should be: lost, slow, silent, or doing something else than most. */
export function exceptions(paces: readonly Pace[], now: number): Pace[] {
  const counts = new Map<string, number>();
  for (const p of paces) counts.set(p.worker.status, (counts.get(p.worker.status) ?? 0) + 1);
  const usual = [...counts].filter(([, n]) => 10 * n >= paces.length).map(([status]) => status);
  const rank = (p: Pace) => (p.class === "failed" ? 0 : p.worker.slow ? 1 : p.class === "slowest" ? 2 : p.class === "slow" ? 4 : 3);
  return paces
    .filter((p) => p.class === "failed" || p.worker.slow || p.class === "slowest" || now - p.worker.last_heartbeat > LATE_S || !usual.includes(p.worker.status))
    .sort((a, b) => rank(a) - rank(b) || (b.ratio ?? 0) - (a.ratio ?? 0));
}

/** The machines of a fleet, by name, each with its workers. */
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
