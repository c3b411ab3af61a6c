/** What happened, as the coordinator's own text: every event that is news brings its sentence. Pure. */

import type { FeedEvent } from "../api/events";
import { plural } from "../format";
import type { EventLine } from "./types";

const LEVELS = { info: "info", success: "good", warning: "warn", error: "bad" } as const;

/** The event as a line of the story; null for those that only change what is shown (metrics, logs, progress), and for
 * notifications, which are about events that have their own. */
export function eventLineOf({ id, kind, data }: FeedEvent): EventLine | null {
  if (kind === "notification" || !("severity" in data) || data.severity === "debug") return null;
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

/** Newest first, with the same change of many workers as one. */
export function folded(items: readonly EventLine[]): EventLine[] {
  const result: EventLine[] = [];
  for (let i = 0; i < items.length; ) {
    const first = items[i];
    if (!first) break;
    let end = i + 1;
    const belongs = (h: EventLine | undefined, before: EventLine) => h !== undefined && h.kind === first.kind && h.jobId === first.jobId && before.at - h.at <= TOGETHER_S;
    if (first.kind in FOLDED) while (belongs(items[end], items[end - 1] ?? first)) end += 1;
    const n = end - i;
    if (n >= 3) {
      const generation = first.generation === null ? "" : ` (generation ${first.generation})`;
      result.push({ ...first, workerId: null, text: `${plural(n, "worker")} of ${first.jobId ?? "a run"} ${FOLDED[first.kind] ?? ""}${generation}` });
    } else result.push(...items.slice(i, end));
    i = end;
  }
  return result;
}
