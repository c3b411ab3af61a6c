/** What happened, as the coordinator's own text: every event that is news brings its sentence. Pure. */

import type { FeedEvent } from "../api/events";
import { plural } from "../format";
import type { EventLine } from "./types";

const LEVELS = { info: "info", success: "good", warning: "warn", error: "bad" } as const;

/** The event as a line of the story; null for those that only change what is shown (metrics, logs, progress). */
export function eventLineOf({ id, kind, data }: FeedEvent): EventLine | null {
  if (!("severity" in data) || data.severity === "debug") return null;
  const about = "spec" in data ? data.spec : data;
  return {
    id,
    kind,
    at: data.at_s,
    jobId: ("job_id" in about && about.job_id) || null,
    workerId: ("worker_id" in about && about.worker_id) || null,
    generation: "incarnation" in data ? data.generation : null,
    text: data.text,
    level: LEVELS[data.severity],
  };
}

const FOLDED: Record<string, string> = { worker_joined: "joined", worker_failed: "failed", worker_left: "left" };
const TOGETHER_S = 10;

function togetherOf(first: EventLine, workers: number, times: number): EventLine {
  const did = FOLDED[first.kind] ?? "";
  if (workers === 1) return { ...first, text: `${first.workerId ?? "a worker"} ${did} ${times} times` };
  return { ...first, workerId: null, text: `${plural(workers, "worker")} of ${first.jobId ?? "a run"} ${did}` };
}

/** Newest first, with the same change of many workers as one. */
export function folded(items: readonly EventLine[]): EventLine[] {
  const result: EventLine[] = [];
  for (let i = 0; i < items.length; ) {
    const first = items[i];
    if (!first) break;
    let end = i + 1;
    const belongs = (h: EventLine | undefined, before: EventLine) => h !== undefined && h.kind === first.kind && h.jobId === first.jobId && before.at - h.at <= TOGETHER_S;
    if (first.kind in FOLDED) while (belongs(items[end], items[end - 1] ?? first)) end += 1;
    const who = new Set(items.slice(i, end).map((h) => h.workerId));
    if (end - i >= 3) result.push(togetherOf(first, who.size, end - i));
    else result.push(...items.slice(i, end));
    i = end;
  }
  return result;
}
