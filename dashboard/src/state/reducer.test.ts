import { describe, expect, it } from "vitest";

import { initialState, LIMITS, reduce } from "./reducer";
import { runHistory, throughputOf } from "./series";
import { barrier, checkpoint, logEntry, metrics, NOW, recovery, snapshot, task, worker } from "./samples";
import type { DataOf, FeedEvent, Kind } from "../api/events";
import type { Action, State } from "./types";

const AT_MS = NOW * 1000;

function started(...actions: Action[]): State {
  return [{ type: "snapshot", snapshot: snapshot(), atMs: AT_MS } as Action, ...actions].reduce(reduce, initialState());
}

let number = 0;
/** Only as complete as a test needs. */
function event<K extends Kind>(kind: K, data: Partial<DataOf<K>>): FeedEvent {
  number += 1;
  return { id: `boot-${number}`, kind, data: Array.isArray(data) ? data : { severity: "info", text: kind, ...data } } as FeedEvent;
}

function after(...events: FeedEvent[]): State {
  return started({ type: "events", events, atMs: AT_MS });
}

const spec = { worker_id: "w1", job_id: "job", hostname: "h", port: 1, gpu_count: 2, memory_bytes: 3, metadata: {}, run_id: "", run_generation: 0 };
const joined = (change = {}) => event("worker_joined", { spec, incarnation: 2, generation: 2, superseded: 0, reason: "r", at_s: NOW, ...change });
const failed = (change = {}) => event("worker_failed", { worker_id: "w1", job_id: "job", incarnation: 2, generation: 3, reason: "its stream broke", at_s: NOW + 1, ...change });
const completed = (change = {}) =>
  event("checkpoint_completed", { checkpoint_id: "c9", job_id: "job", worker_id: "w0", step: 120, epoch: 1, path: "/p", size_bytes: 2e6, tiers: ["local"], digest: "d", duration_s: 2, metadata: {}, reason: "r", at_s: NOW, ...change });

describe("a snapshot", () => {
  it("replaces workers, keeps the older saves it does not reach back to, and corrects the clock", () => {
    const old = checkpoint({ id: "old", created_at: NOW - 900 });
    let state = reduce(initialState(), { type: "snapshot", snapshot: snapshot({ checkpoints: [checkpoint({ id: "new" }), old] }), atMs: AT_MS - 5_000 });
    expect(state.skewS).toBe(5);
    state = reduce(state, { type: "snapshot", snapshot: snapshot({ workers: [worker({ id: "other" })], checkpoints: [checkpoint({ id: "newer", created_at: NOW })] }), atMs: AT_MS - 4_900 });
    expect([...state.workers.keys()]).toEqual(["other"]);
    expect(state.checkpoints.map((c) => c.id)).toEqual(["newer", "new", "old"]);
    expect(state.skewS).toBe(5);
  });

  it("does not undo what was reported after it was asked for", () => {
    const news = failed({ worker_id: "w0", incarnation: 1 });
    const state = started({ type: "events", events: [news], atMs: AT_MS }, { type: "snapshot", snapshot: snapshot(), since: [news], atMs: AT_MS + 50 });
    expect(state.workers.get("w0")?.status).toBe("failed");
    expect(state.eventLines).toHaveLength(1);
  });

  it("adds a point to the curves of each run", () => {
    const state = started({ type: "snapshot", snapshot: { ...snapshot(), coordinator: { ...snapshot().coordinator, server_time: NOW + 2 } }, atMs: AT_MS + 2000 });
    expect(state.runSeries.get("job")).toMatchObject({ times: [NOW, NOW + 2], loss: [2, 2], tokensPerS: [1000, 1000], stepsPerS: [2, 2] });
  });
});

describe("every event can be applied twice", () => {
  const stories: Record<string, FeedEvent[]> = {
    "join, fail": [joined(), failed()],
    "join, fail, join again": [joined(), failed(), joined({ incarnation: 3, generation: 4, superseded: 2 })],
    "join, leave": [joined(), event("worker_left", { worker_id: "w1", job_id: "job", incarnation: 2, generation: 3, reason: "", at_s: NOW })],
    forget: [event("worker_forgotten", { worker_id: "w0", reason: "", at_s: NOW })],
    save: [event("checkpoint_started", { checkpoint_id: "c9", job_id: "job", worker_id: "w0", step: 120, epoch: 1, path: "/p", size_bytes: 2e6, reason: "", at_s: NOW - 2 }), completed(), completed({ tiers: ["local", "s3"], at_s: NOW + 5 })],
    "save, remove": [completed(), event("checkpoint_removed", { checkpoint_id: "c9", reason: "", at_s: NOW })],
    task: [
      event("task_created", { spec: { task_id: "t9", name: "t", type: "training", dataset_id: null, worker_count: 1, config_json: '{"lr":1}', gpus_per_worker: 0, max_retries: 0 }, reason: "", at_s: NOW }),
      event("task_changed", { task_id: "t9", status: "running", worker_ids: ["w1"], reason: "", at_s: NOW, attempt: 1 }),
      event("task_progressed", { task_id: "t9", attempt: 1, worker_ids: ["w1"], step: 10, total_steps: 40, steps_per_s: 2, progress: 25, eta_s: 15, reason: "", at_s: NOW }),
    ],
    barriers: [event("barrier_released", { job_id: "job", barrier_id: "b", step: 1, round: 0, arrived: 2, opened_at_s: NOW, waited_s: 0.1, reason: "", at_s: NOW }), event("barrier_broken", { job_id: "job", barrier_id: "b", step: 2, round: 0, arrived: 1, missing: ["w1"], expected: 2, opened_at_s: NOW, reason: "", at_s: NOW + 1 })],
    recovery: [event("recovery_recorded", { job_id: "job", worker_id: "w0", phases_s: { detect: 1, load: 2 }, resumed_step: 1, lost_steps: 2, tier: "local", world_before: 2, world_after: 2, reason: "", survived: 0, lost: [], joined: [], cause: "", who_survived: "", at_s: NOW })],
    logs: [event("logs", [logEntry(1), logEntry(2)])],
    dataset: [event("dataset_registered", { spec: { dataset_id: "d", path: "/d", format: "jsonl", total_samples: 101, shard_size: 10, shuffle: false, seed: 0, metadata: { name: "D" }, files: [], jobs: [] }, reason: "", at_s: NOW })],
    "dataset, remove": [event("dataset_registered", { spec: { dataset_id: "d", path: "/d", format: "jsonl", total_samples: 101, shard_size: 10, shuffle: false, seed: 0, metadata: {}, files: [], jobs: [] }, reason: "", at_s: NOW }), event("dataset_removed", { dataset_id: "d", reason: "", at_s: NOW })],
  };
  it.each(Object.entries(stories))("%s", (_, events) => {
    const once = after(...events);
    const twice = reduce(once, { type: "snapshot", snapshot: snapshotOf(once), since: events, atMs: AT_MS });
    const known = (s: State) => ({ workers: [...s.workers], checkpoints: s.checkpoints, barriers: s.barriers, tasks: s.tasks, recoveries: s.recoveries, logs: s.logs, datasets: [...s.datasets], events: s.eventLines, generations: s.generations });
    expect(known(twice)).toEqual(known(once));
  });
});

function snapshotOf(state: State) {
  return snapshot({ workers: [...state.workers.values()], datasets: [...state.datasets.values()], checkpoints: [...state.checkpoints], barriers: [...state.barriers], tasks: [...state.tasks], logs: [...state.logs].reverse() });
}

describe("facts", () => {
  it("a join of an old incarnation changes nothing", () => {
    const state = after(joined({ incarnation: 5 }), failed({ incarnation: 2 }), joined({ incarnation: 4 }));
    expect(state.workers.get("w1")).toMatchObject({ incarnation: 5, status: "active" });
  });

  it("a checkpoint fills tier by tier and keeps the time it became safe", () => {
    const state = after(completed(), completed({ tiers: ["local", "s3"], at_s: NOW + 30 }));
    expect(state.checkpoints[0]).toMatchObject({ tiers: ["local", "s3"], completed_at: NOW, created_at: NOW - 2, throughput_mb_s: 1 });
  });

  it("waiting barriers stay before ended ones", () => {
    const state = started(
      { type: "snapshot", snapshot: snapshot({ barriers: [barrier(), barrier({ id: "x", status: "complete", ended_at: NOW - 9 })] }), atMs: AT_MS },
      { type: "events", events: [event("barrier_broken", { job_id: "job", barrier_id: "step", step: 1, round: 0, arrived: 1, missing: ["w1"], expected: 2, opened_at_s: NOW - 5, reason: "lost", at_s: NOW })], atMs: AT_MS },
    );
    expect(state.barriers.map((b) => [b.id, b.status])).toEqual([["job/step@1#0", "broken"], ["x", "complete"]]);
  });

  it("progress of a task gives its ETA; that of an earlier attempt does not", () => {
    const progress = (attempt: number, step: number) => event("task_progressed", { task_id: "t1", attempt, worker_ids: [], step, total_steps: 100, steps_per_s: 2, progress: step, eta_s: (100 - step) / 2, reason: "", at_s: NOW });
    const state = started({ type: "snapshot", snapshot: snapshot({ tasks: [task({ attempts: 2 })] }), atMs: AT_MS }, { type: "events", events: [progress(2, 50), progress(1, 90)], atMs: AT_MS });
    expect(state.tasks[0]).toMatchObject({ step: 50, progress: 50, eta_s: 25 });
  });

});

describe("unbounded input is bounded", () => {
  it("logs, events, curves", () => {
    let state = started();
    for (let round = 0; round < 30; round += 1) {
      const lines = Array.from({ length: 500 }, (_, i) => logEntry(round * 500 + i));
      const moves = Array.from({ length: 100 }, (_, i) => joined({ incarnation: 10 + round * 100 + i, generation: 10 + round * 100 + i }));
      state = reduce(state, { type: "events", events: [event("logs", lines), ...moves, event("metrics", metrics)], atMs: AT_MS + round * 1000 });
    }
    expect(state.logs).toHaveLength(LIMITS.logs);
    expect(state.logs.at(-1)?.message).toBe("line 14999");
    expect(state.eventLines).toHaveLength(LIMITS.eventLines);
    expect(state.generations).toHaveLength(LIMITS.generations);
    for (let i = 0; i < 5_000; i += 1) state = reduce(state, { type: "events", events: [event("metrics", metrics)], atMs: AT_MS + 60_000 + i * 1000 });
    expect(state.series.times.length).toBeLessThanOrEqual(1_801);
    expect(state.series.times.every((at, i, all) => i === 0 || at > (all[i - 1] ?? 0))).toBe(true);
    expect(state.series.rps).toHaveLength(state.series.times.length);
  });

  it("runs that come and go", () => {
    let state = started();
    for (let i = 0; i < 80; i += 1) {
      const next = snapshot({ workers: [worker(), worker({ id: "x", job_id: `job-${i}` })] });
      state = reduce(state, { type: "snapshot", snapshot: { ...next, coordinator: { ...next.coordinator, server_time: NOW + i + 1 } }, atMs: AT_MS });
    }
    expect(state.runSeries.size).toBeLessThanOrEqual(51);
    expect(state.runSeries.get("job")?.times).toHaveLength(81);
    expect(state.runSeries.has("job-79")).toBe(true);
  });

  it("a flood larger than the list keeps its newest lines", () => {
    const state = after(event("logs", Array.from({ length: LIMITS.logs + 7 }, (_, i) => logEntry(i))));
    expect([state.logs.length, state.logs[0]?.message]).toEqual([LIMITS.logs, "line 7"]);
  });
});

describe("the past", () => {
  it("comes behind what was seen, once, and replaces guessed generations", () => {
    const first = joined({ at_s: NOW - 100 });
    const state = started({ type: "events", events: [failed()], atMs: AT_MS }, { type: "past", events: [first, failed()] });
    expect(state.eventLines.map((h) => h.kind)).toContain("worker_joined");
    expect(state.generations.filter((g) => g.number === 0)).toHaveLength(0);
    expect(state.generations[0]).toMatchObject({ number: 2, kind: "joined", workerId: "w1" });
  });

  it("recoveries are not shown twice", () => {
    const r = recovery({ at: NOW });
    const { at, total_s, ...data } = r;
    const state = started({ type: "recoveries", recoveries: [r] }, { type: "events", events: [event("recovery_recorded", { ...data, at_s: at })], atMs: AT_MS });
    expect(state.recoveries).toHaveLength(1);
    expect(total_s).toBe(4);
  });
});

it("a gap in what was reported is a gap in the curve", () => {
  const state = started({ type: "events", events: [event("metrics", metrics)], atMs: AT_MS }, { type: "events", events: [event("metrics", metrics)], atMs: AT_MS + 60_000 });
  expect(state.series.rps).toEqual([10, null, 10]);
});

it("history is drawn without its empty ends; a skipped second is no gap, a longer silence is", () => {
  const values = [null, null, 1, null, 2, null, null, null, null, null, 3, null];
  const series = runHistory({ start: 100, step: 1, job_id: "job", series: { loss: { unit: "1", values }, step_time: { unit: "s", values: values.map((v) => v && 0.5) } } });
  expect(series.times).toEqual([102, 104, 108, 110]);
  expect(series.loss).toEqual([1, 2, null, 3]);
  expect(series.stepsPerS).toEqual([2, 2, null, 2]);
  expect(throughputOf(series).unit).toBe("steps/s");
});

describe("event lines", () => {
  it("has the coordinator's own text, and no line for soft state", () => {
    const state = after(
      event("worker_failed", { worker_id: "w0", job_id: "job", incarnation: 1, generation: 3, reason: "r", at_s: NOW, severity: "error", text: "w0 failed: r" }),
      event("barrier_released", { job_id: "job", barrier_id: "b", step: 1, round: 0, arrived: 2, opened_at_s: NOW, waited_s: 0.1, reason: "", at_s: NOW, severity: "debug", text: "barrier b released" }),
      event("logs", [logEntry(1)]),
    );
    expect(state.eventLines).toEqual([{ id: expect.any(String), kind: "worker_failed", at: NOW, jobId: "job", workerId: "w0", level: "bad", text: "w0 failed: r" }]);
  });
});
