/** Log filters, and merging of fetched and streamed lines. Pure. */

import type { Incident, LogEntry } from "../../api/types";
import type { Search } from "../../search";
import { DEFAULT_JOB } from "../../state/runs";

export interface LogFilter {
  level?: string | undefined;
  task?: string | undefined;
  worker?: string | undefined;
  text?: string | undefined;
}

export const LEVELS = ["debug", "info", "warn", "error"];
/** Lines kept on the page; the coordinator has more. */
export const LINES_SHOWN = 10_000;

export function filterOf(search: Search): LogFilter {
  const level = search["level"];
  return {
    level: level && LEVELS.includes(level) ? level : undefined,
    task: search["task"] || undefined,
    worker: search["worker"] || undefined,
    text: search["q"] || undefined,
  };
}

/** The filter of a run in the URL. */
export function taskOf(run: string): string | undefined {
  return run === DEFAULT_JOB ? undefined : run;
}

/** Warnings and errors of the run of an incident about its rank. */
export function searchOf(incident: Pick<Incident, "run" | "rank">): Search {
  return { task: taskOf(incident.run), q: incident.rank === null ? undefined : `rank ${incident.rank}`, level: "warn" };
}

export function matches(line: LogEntry, filter: LogFilter): boolean {
  if (filter.level && LEVELS.indexOf(line.level) < LEVELS.indexOf(filter.level)) return false;
  if (filter.task && line.task_id !== filter.task) return false;
  if (filter.worker && line.worker_id !== filter.worker) return false;
  return !filter.text || line.message.toLowerCase().includes(filter.text.toLowerCase());
}

/**
 * Oldest first. `fetched` is newest first and already filtered; `live` is oldest first and unfiltered. If there is a gap
 * between the two, `fetched` is dropped.
 */
export function merged(fetched: readonly LogEntry[], live: readonly LogEntry[], filter: LogFilter): LogEntry[] {
  const newest = fetched[0]?.id ?? "";
  const everything = !filter.level && !filter.task && !filter.worker && !filter.text;
  const isGap = fetched.length > 0 && live.length > 0 && live[0]!.id > newest && live.length >= LINES_SHOWN / 4;
  const before = isGap ? [] : [...fetched].reverse();
  const after = live.filter((line) => (isGap || line.id > newest) && (everything || matches(line, filter)));
  const all = before.concat(after);
  return all.length > LINES_SHOWN ? all.slice(-LINES_SHOWN) : all;
}

/** Splits a message at its matches, to highlight them. */
export function splitMatches(message: string, query: string): { text: string; hit: boolean }[] {
  const parts: { text: string; hit: boolean }[] = [];
  const low = message.toLowerCase();
  const wanted = query.toLowerCase();
  // Lower case may be longer than the original (İ): then offsets differ, and nothing is highlighted.
  if (!wanted || low.length !== message.length) return [{ text: message, hit: false }];
  let from = 0;
  for (let at = low.indexOf(wanted); at >= 0; at = low.indexOf(wanted, from)) {
    if (at > from) parts.push({ text: message.slice(from, at), hit: false });
    parts.push({ text: message.slice(at, at + wanted.length), hit: true });
    from = at + wanted.length;
  }
  if (from < message.length) parts.push({ text: message.slice(from), hit: false });
  return parts;
}
