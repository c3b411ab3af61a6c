import { describe, expect, it } from "vitest";

import type { LogEntry } from "../../api/types";
import { incident } from "../../state/samples";
import { filterOf, LINES_SHOWN, matches, merged, searchOf, splitMatches } from "./filter";

function line(number: number, change: Partial<LogEntry> = {}): LogEntry {
  const id = `log_${number.toString(16).padStart(13, "0")}`;
  return { id, timestamp: number, level: "info", message: `message ${number}`, source: "worker", task_id: null, worker_id: null, ...change };
}

describe("log lines", () => {
  it("accepts only known levels from the URL", () => {
    expect(filterOf({ level: "warn", q: "x", task: "", worker: "w" })).toEqual({ level: "warn", task: undefined, worker: "w", text: "x" });
    expect(filterOf({ level: "<script>" }).level).toBeUndefined();
  });

  it("about an incident are those of its run", () => {
    const found = filterOf(searchOf(incident({ run: "a", rank: 1 })));
    expect(matches(line(1, { level: "error", task_id: "a", message: "rank 1 was killed" }), found)).toBe(true);
    expect(matches(line(1, { level: "error", task_id: "b", message: "rank 1 was killed" }), found)).toBe(false);
    expect(filterOf(searchOf(incident({ run: "a", rank: null })))).toEqual({ level: "warn", task: "a" });
    // Lines of workers without a job name no run.
    expect(matches(line(1, { level: "error", message: "rank 1 was killed" }), filterOf(searchOf(incident({ run: "default" }))))).toBe(true);
  });

  it("matches a level and everything above it", () => {
    expect(matches(line(1, { level: "error" }), { level: "warn" })).toBe(true);
    expect(matches(line(1, { level: "info" }), { level: "warn" })).toBe(false);
    expect(matches(line(1, { message: "Loss is NaN" }), { text: "loss IS" })).toBe(true);
    expect(matches(line(1, { worker_id: "a" }), { worker: "b" })).toBe(false);
  });

  it("joins what was fetched and what is streamed without repeating a line", () => {
    const fetched = [line(3), line(2), line(1)];
    const live = [line(2), line(3), line(4), line(5, { level: "error" })];
    expect(merged(fetched, live, {}).map((each) => each.timestamp)).toEqual([1, 2, 3, 4, 5]);
    expect(merged([], live, { level: "error" }).map((each) => each.timestamp)).toEqual([5]);
  });

  it("keeps a bounded number of lines, the newest", () => {
    const live = Array.from({ length: LINES_SHOWN + 5 }, (_, number) => line(number));
    const all = merged([], live, {});
    expect(all).toHaveLength(LINES_SHOWN);
    expect(all.at(-1)?.timestamp).toBe(LINES_SHOWN + 4);
  });

  it("highlights matches and loses no text", () => {
    const parts = splitMatches("Loss and loss, lossless", "loss");
    expect(parts.map((part) => part.text).join("")).toBe("Loss and loss, lossless");
    expect(parts.filter((part) => part.hit)).toHaveLength(3);
    expect(splitMatches("İstanbul", "i")).toEqual([{ text: "İstanbul", hit: false }]);
  });
});
