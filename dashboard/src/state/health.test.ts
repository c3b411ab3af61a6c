import { describe, expect, it } from "vitest";

import type { Snapshot } from "../api/types";
import { assess, names, saveRhythm } from "./health";
import { initialState, reduce } from "./reducer";
import { folded } from "./facts";
import { generationLines, runsOf } from "./runs";
import { barrier, checkpoint, NOW, recovery, snapshot, task, worker } from "./samples";
import type { EventLine, State } from "./types";

function stateOf(change: Partial<Snapshot>, ...recoveries: ReturnType<typeof recovery>[]): State {
  const state = reduce(initialState(), { type: "snapshot", snapshot: snapshot(change), atMs: NOW * 1000 });
  return reduce(state, { type: "recoveries", recoveries });
}

const saved = [checkpoint()];

describe("the headline", () => {
  it("is unknown before the first response", () => {
    expect(assess(initialState(), NOW).level).toBe("unknown");
  });

  it("is idle when nothing trains, and says what to do", () => {
    expect(assess(stateOf({ workers: [] }), NOW)).toMatchObject({ level: "idle", headline: "No active runs" });
    expect(assess(stateOf({ workers: [worker({ status: "idle" })] }), NOW)).toMatchObject({ level: "idle", reason: "1 worker connected and idle." });
  });

  it("is good when all train and the last checkpoint is recent", () => {
    const health = assess(stateOf({ checkpoints: saved }), NOW);
    expect(health).toMatchObject({ level: "good", headline: "Training is healthy" });
    expect(health.reason).toBe("1 worker on job, last checkpoint 20 s ago.");
  });

  it("names who failed and why while the others continue", () => {
    const workers = [worker(), worker({ id: "w1", status: "failed", reason: "its stream broke" })];
    expect(assess(stateOf({ workers, checkpoints: saved }), NOW)).toMatchObject({ level: "warn", headline: "w1 failed", reason: "job continues with 1 worker. Its stream broke." });
  });

  it("drops a failure once the run has recovered without that worker", () => {
    const workers = [worker(), worker({ id: "w1", status: "failed", last_heartbeat: NOW - 100 })];
    expect(assess(stateOf({ workers, checkpoints: saved }, recovery({ at: NOW - 60 })), NOW).level).toBe("good");
    expect(assess(stateOf({ workers, checkpoints: saved }, recovery({ at: NOW - 200 })), NOW).level).toBe("warn");
  });

  it("waits a while for lost workers to rejoin, then is bad", () => {
    const workers = [worker({ status: "failed", reason: "killed", last_heartbeat: NOW - 40 })];
    expect(assess(stateOf({ workers }), NOW - 30)).toMatchObject({ level: "warn", headline: "job is recovering", reason: "All workers lost 10 s ago, none has rejoined yet. Killed." });
    expect(assess(stateOf({ workers }), NOW)).toMatchObject({ level: "bad", headline: "job stopped: all workers lost", reason: "Killed." });
  });

  it("says that a run is recovering", () => {
    const workers = [worker({ status: "loading" }), worker({ id: "w1", status: "training" })];
    expect(assess(stateOf({ workers, checkpoints: saved }), NOW)).toMatchObject({ level: "warn", headline: "job is recovering" });
  });

  it("distinguishes a start from a recovery", () => {
    const silent = worker({ status: "active", metrics: {}, current_step: 0 });
    expect(assess(stateOf({ workers: [silent] }), NOW)).toMatchObject({ level: "idle", headline: "job is starting" });
    expect(assess(stateOf({ workers: [silent], checkpoints: saved }), NOW)).toMatchObject({ level: "warn", headline: "job is recovering" });
    expect(assess(stateOf({ workers: [worker({ status: "active" })], checkpoints: saved }), NOW).level).toBe("good");
  });

  it("reports a late heartbeat", () => {
    expect(assess(stateOf({ workers: [worker({ last_heartbeat: NOW - 25 })], checkpoints: saved }), NOW)).toMatchObject({ level: "warn", headline: "No heartbeat from w0", reason: "Last heartbeat 25 s ago." });
  });

  it("names who is slow", () => {
    expect(assess(stateOf({ workers: [worker(), worker({ id: "w1", slow: true, reason: "900 ms/step, 1.8× the median of 500 ms" })], checkpoints: saved }), NOW)).toMatchObject({ level: "warn", headline: "w1 is slow" });
  });

  it("a failed save outranks everything milder", () => {
    const health = assess(stateOf({ workers: [worker({ last_heartbeat: NOW - 25 })], checkpoints: [checkpoint({ status: "failed", reason: "disk full" }), checkpoint({ id: "b", created_at: NOW - 60 })] }), NOW);
    expect(health).toMatchObject({ level: "bad", headline: "Last checkpoint of job failed", reason: "Step 90: disk full." });
    expect(health.findings).toHaveLength(2);
  });

  it("knows the checkpoint interval, and when one is overdue", () => {
    const rhythm = [0, 1, 2, 3, 4].map((i) => checkpoint({ id: `c${i}`, step: 90 - i * 10, created_at: NOW - 200 - i * 20 }));
    const state = stateOf({ checkpoints: rhythm });
    expect(saveRhythm(runsOf(state)[0]!)).toBe(20);
    expect(assess(state, NOW)).toMatchObject({ level: "warn", headline: "job: no checkpoint for 3 m 20 s" });
    expect(assess(state, NOW - 150).level).toBe("good");
  });

  it("says no checkpoint only of runs that have none", () => {
    const two = [worker(), worker({ id: "x0", job_id: "other" })];
    expect(assess(stateOf({ workers: [worker()] }), NOW).reason).toBe("1 worker on job, no checkpoint yet.");
    expect(assess(stateOf({ workers: two, checkpoints: saved }), NOW).reason).toBe("2 workers on 2 runs, no checkpoint of other yet.");
    expect(assess(stateOf({ workers: two }), NOW).reason).toBe("2 workers on 2 runs, no checkpoint of job and other yet.");
    // The snapshot has the newest hundred of all runs: those of this one may be older.
    const many = Array.from({ length: 100 }, (_, i) => checkpoint({ id: `c${i}`, job_id: "other", created_at: NOW - 20 - i }));
    expect(assess(stateOf({ workers: [worker()], checkpoints: many }), NOW).reason).toBe("1 worker on job.");
  });

  it("names who is missing at a barrier that waits too long", () => {
    expect(assess(stateOf({ checkpoints: saved, barriers: [barrier({ created_at: NOW - 45 })] }), NOW)).toMatchObject({ level: "warn", reason: "Blocked for 45 s, waiting for w1." });
    expect(assess(stateOf({ checkpoints: saved, barriers: [barrier()] }), NOW).level).toBe("good");
  });

  it("notices a stalled run", () => {
    let state = stateOf({ checkpoints: saved });
    for (let s = 2; s <= 90; s += 2) {
      const next = snapshot({ workers: [worker({ last_heartbeat: NOW + s })], checkpoints: [checkpoint({ created_at: NOW + s })] });
      state = reduce(state, { type: "snapshot", snapshot: { ...next, coordinator: { ...next.coordinator, server_time: NOW + s } }, atMs: (NOW + s) * 1000 });
    }
    expect(assess(state, NOW + 90)).toMatchObject({ level: "warn", headline: "job is stalled", reason: "At step 100 for 1 m 30 s." });
  });

  it("reports a task that failed recently, not long ago", () => {
    const failed = (at: number) => stateOf({ checkpoints: saved, tasks: [task({ status: "failed", completed_at: at, reason: "exit code 1" })] });
    expect(assess(failed(NOW - 10), NOW)).toMatchObject({ level: "bad", headline: "t failed", reason: "exit code 1" });
    expect(assess(failed(NOW - 10_000), NOW).level).toBe("good");
  });

  it("is marked as last known while disconnected", () => {
    const state = reduce(stateOf({ checkpoints: saved }), { type: "connection", connection: { phase: "disconnected" } });
    expect(assess(state, NOW).headline).toBe("Last known: Training is healthy");
  });
});

/** Seconds and steps since the newest safe state of the first run. */
function exposure(runs: ReturnType<typeof runsOf>, now: number): { seconds: number | null; steps: number } {
  const risk = runs[0]?.risk ?? { since: null, steps: 0 };
  return { seconds: risk.since === null ? null : now - risk.since, steps: risk.steps };
}

describe("work at risk", () => {
  it("is the work since the newest safe state", () => {
    expect(exposure(runsOf(stateOf({ checkpoints: saved })), NOW)).toMatchObject({ seconds: 20, steps: 10 });
  });

  it("is everything when nothing was saved", () => {
    expect(exposure(runsOf(stateOf({})), NOW)).toMatchObject({ seconds: 600, steps: 100 });
  });

  it("a save that failed or is in progress makes nothing safe", () => {
    const state = stateOf({ checkpoints: [checkpoint({ id: "x", status: "in_progress", step: 99, created_at: NOW - 1 }), checkpoint({ id: "y", status: "failed", step: 98, created_at: NOW - 2 }), checkpoint()] });
    expect(exposure(runsOf(state), NOW).seconds).toBe(20);
  });

  it("counts by time: after a fallback the newest save may have the smaller step", () => {
    const state = stateOf({ workers: [worker({ current_step: 70 })], checkpoints: [checkpoint({ id: "new", step: 60, created_at: NOW - 5 }), checkpoint({ id: "lost", step: 90, created_at: NOW - 50 })] });
    expect(exposure(runsOf(state), NOW)).toMatchObject({ seconds: 5, steps: 10 });
  });

  it("remembers how far a run was while its processes start again", () => {
    const before = stateOf({ workers: [worker({ current_step: 97 })], checkpoints: saved });
    const again = snapshot({ workers: [worker({ status: "recovering", current_step: 0, metrics: {} })], checkpoints: saved });
    const state = reduce(before, { type: "snapshot", snapshot: { ...again, coordinator: { ...again.coordinator, server_time: NOW + 2 } }, atMs: (NOW + 2) * 1000 });
    expect(exposure(runsOf(state), NOW + 2)).toMatchObject({ seconds: 22, steps: 7 });
  });

  it("is nothing when nothing trains", () => {
    expect(exposure(runsOf(stateOf({ workers: [worker({ status: "idle" })] })), NOW).seconds).toBeNull();
  });
});

it("one late worker of a large run is not a recovery", () => {
  const many = Array.from({ length: 20 }, (_, i) => worker({ id: `w${i}`, status: i === 0 ? "loading" : "training" }));
  expect(runsOf(stateOf({ workers: many }))[0]?.status).toBe("training");
});

it("changes that follow each other closely are one line on the timeline", () => {
  const change = (at: number, kind: "joined" | "failed", number: number) => ({ jobId: "job", number: 30 + number, ordinal: number, at, kind, workerId: `w${number}`, reason: "" });
  const all = [change(0, "joined", 1), change(0.5, "joined", 2), change(60, "failed", 3), change(61, "joined", 4)];
  expect(generationLines(all, "job", 2)).toEqual([{ at: 0.5, number: 2, text: "2 joined", bad: false }, { at: 61, number: 4, text: "1 failed, 1 joined", bad: true }]);
  expect(generationLines(all, "other")).toEqual([]);
});

it("the same change of many workers is one line", () => {
  const line = (n: number, change: Partial<EventLine>): EventLine => ({ id: `b-${n}`, kind: "worker_joined", at: n, jobId: "job", workerId: `w${n}`, text: `w${n} joined`, level: "good", ...change });
  const saved = line(9, { kind: "checkpoint_completed", at: 50, workerId: null, text: "checkpoint completed" });
  expect(folded([line(4, { at: 104 }), line(3, { at: 103 }), line(2, { at: 102 }), saved, line(1, {})]).map((h) => h.text)).toEqual(["3 workers of job joined", "checkpoint completed", "w1 joined"]);
});

it("lists of names stay short", () => {
  expect([names(["a"]), names(["a", "b"]), names(["a", "b", "c"]), names(["a", "b", "c", "d", "e"])]).toEqual(["a", "a and b", "a, b and c", "a, b and 3 more"]);
});
