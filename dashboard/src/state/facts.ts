/** Events as lines, with the coordinator's own text. Pure. */

import type { FeedEvent } from "../api/events";
import { plural } from "../format";
import type { EventLine } from "./types";

const LEVELS = { info: "info", success: "good", warning: "warn", error: "bad" } as const;

/** The event as a line; null for those that only change state (metrics, logs, progress), and for notifications, which
 * repeat other events. */
export function eventLineOf({ id, kind, data }: FeedEvent): EventLine | null {
  if (kind === "notification" || !("severity" in data) || data.severity === "debug") return null;
  const about = "spec" in data ? data.spec : data;
  return {
    id,
    kind,
    at: data.at_s,
    jobId: ("job_id" in about && about.job_id) || null,
    workerId: ("worker_id" in about && about.worker_id) || null,
    text: data.text,
    level: LEVELS[data.severity],
  };
}

export type EventFilter = "all" | "problems" | "workers" | "saves" | "tasks";

const KINDS: Record<Exclude<EventFilter, "all" | "problems">, RegExp> = { workers: /^worker_|^recovery_|^barrier_/, saves: /^checkpoint_/, tasks: /^task_|^dataset_|^shards_/ };

export function filtered(items: readonly EventLine[], filter: EventFilter): readonly EventLine[] {
  if (filter === "all") return items;
  if (filter === "problems") return items.filter((item) => item.level === "bad" || item.level === "warn");
  return items.filter((item) => KINDS[filter].test(item.kind));
}

const FOLDED: Record<string, string> = { worker_joined: "joined", worker_failed: "failed", worker_left: "left" };
const TOGETHER_S = 10;

function togetherOf(first: EventLine, workers: number, times: number): EventLine {
  const did = FOLDED[first.kind] ?? "";
  if (workers === 1) return { ...first, text: `${first.workerId ?? "a worker"} ${did} ${times} times` };
  return { ...first, workerId: null, text: `${plural(workers, "worker")} of ${first.jobId ?? "a run"} ${did}` };
}

/** A successful checkpoint event: folded into one line. */
function isQuiet(line: EventLine): boolean {
  return line.kind.startsWith("checkpoint_") && line.level !== "bad" && line.level !== "warn";
}

/** End of the group of lines that starts at `from`. */
function endOf(items: readonly EventLine[], from: number): number {
  const first = items[from];
  let end = from + 1;
  if (!first) return end;
  const follows = (h: EventLine | undefined, before: EventLine) =>
    h !== undefined && h.jobId === first.jobId && (isQuiet(first) ? isQuiet(h) : h.kind === first.kind && before.at - h.at <= TOGETHER_S);
  if (first.kind in FOLDED || isQuiet(first)) while (follows(items[end], items[end - 1] ?? first)) end += 1;
  return end;
}

/** Newest first. Folds the same change of many workers, and successful checkpoints in a row, into one line. */
export function folded(items: readonly EventLine[]): EventLine[] {
  const result: EventLine[] = [];
  for (let i = 0; i < items.length; ) {
    const first = items[i];
    if (!first) break;
    const end = endOf(items, i);
    const group = items.slice(i, end);
    if (isQuiet(first)) {
      const saves = group.filter((h) => h.kind === "checkpoint_completed").length;
      const newest = group.find((h) => h.kind === "checkpoint_completed") ?? first;
      result.push(saves > 1 ? { ...newest, text: `${newest.text}; ${plural(saves - 1, "earlier checkpoint")}` } : newest);
    } else if (group.length >= 3) result.push(togetherOf(first, new Set(group.map((h) => h.workerId)).size, group.length));
    else result.push(...group);
    i = end;
  }
  return result;
}
