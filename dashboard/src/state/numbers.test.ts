/** Regression tests for numbers: each of these was once wrong. */

import { describe, expect, it } from "vitest";

import type { DataOf, FeedEvent, Kind } from "../api/events";
import type { Snapshot } from "../api/types";
import { timeTicks } from "../components/ticks";
import { assess, workerCounts } from "./health";
import { filtered, folded } from "./facts";
import { initialState, reduce } from "./reducer";
import { generationLines, runsOf, type Run } from "./runs";
import { checkpoint, job, NOW, snapshot, task, worker } from "./samples";
import { serverNow } from "./store";
import type { Action, EventLine, State } from "./types";

function after(...actions: Action[]): State {
  return actions.reduce(reduce, initialState());
}

function shot(change: Partial<Snapshot> = {}, at = NOW): Action {
  const base = snapshot(change);
  return { type: "snapshot", snapshot: { ...base, coordinator: { ...base.coordinator, server_time: at } }, atMs: at * 1000 };
}

let number = 0;
function event<K extends Kind>(kind: K, data: Partial<DataOf<K>>): FeedEvent {
  number += 1;
  return { id: `boot-${number}`, kind, data: { severity: "info", text: kind, ...data } } as unknown as FeedEvent;
}

function joined(job_id: string, worker_id: string, generation: number, at_s: number, change = {}): FeedEvent {
  const spec = { worker_id, job_id, hostname: "h", port: 1, gpu_count: 0, memory_bytes: 0, metadata: {}, run_id: "", run_generation: 0 };
  return event("worker_joined", { spec, incarnation: generation, generation, superseded: 0, reason: "", at_s, ...change });
}

function onlyRun(state: State): Run {
  const [run] = runsOf(state);
  if (!run) throw new Error("there is no run");
  return run;
}

describe("two live runs", () => {
  it("keep the checkpoints of the slower one, however many the other has", () => {
    const slow = checkpoint({ id: "slow", job_id: "b", created_at: NOW - 500 });
    const fast = (from: number) => Array.from({ length: 99 }, (_, i) => checkpoint({ id: `f${from - i}`, created_at: NOW + from - i }));
    const state = after(shot({ checkpoints: [...fast(0), slow] }), shot({ checkpoints: [...fast(1), checkpoint({ id: "f-98", created_at: NOW - 98 })] }, NOW + 1));
    expect(state.checkpoints.some((c) => c.id === "slow")).toBe(true);
  });

  it("keep both histories when only one has events", () => {
    const workers = [worker({ id: "a0", job_id: "a" }), worker({ id: "b0", job_id: "b", joined_at: NOW - 300 })];
    const state = after(shot({ workers }), { type: "past", events: [joined("a", "a0", 7, NOW - 600)] });
    expect(state.generations.map((g) => g.jobId).sort()).toEqual(["a", "b"]);
    const later = after(shot({ workers: workers.slice(0, 1) }), shot({ workers }, NOW + 2));
    expect(later.generations.map((g) => g.jobId).sort()).toEqual(["a", "b"]);
  });
});

describe("generations", () => {
  it("are counted for each job by itself", () => {
    const base = snapshot({ workers: [worker({ id: "b0", job_id: "b" })] });
    const state = after(
      { type: "snapshot", snapshot: { ...base, coordinator: { ...base.coordinator, jobs: { a: 40, b: 1 } } }, atMs: NOW * 1000 },
      { type: "past", events: [joined("b", "b0", 41, NOW - 10)] },
      { type: "events", events: [joined("b", "b1", 42, NOW + 5)], atMs: (NOW + 5) * 1000 },
    );
    expect(generationLines(state.generations, "b").map((l) => l.number)).toEqual([1, 2]);
    expect(onlyRun(state).generation).toBe(1);
  });
});

describe("joins", () => {
  const line = (n: number, who: string): EventLine => ({ id: `b-${n}`, kind: "worker_joined", at: n, jobId: "job", workerId: who, text: `${who} joined`, level: "good" });

  it("are counted by worker: one that joins three times is one", () => {
    expect(folded([line(3, "w0"), line(2, "w0"), line(1, "w0")]).map((l) => l.text)).toEqual(["w0 joined 3 times"]);
    expect(folded([line(4, "w1"), line(3, "w2"), line(2, "w0"), line(1, "w0")]).map((l) => l.text)).toEqual(["3 workers of job joined"]);
    const change = (at: number, workerId: string, n: number) => ({ jobId: "job", number: n, ordinal: n, at, kind: "joined" as const, workerId, reason: "" });
    expect(generationLines([change(0, "w0", 1), change(0.5, "w0", 2), change(0.6, "w1", 3)], "job", 2)[0]?.text).toBe("2 joined");
  });
});

describe("while disconnected", () => {
  const away: Action = { type: "connection", connection: { phase: "disconnected" } };

  it("time stops: no heartbeat becomes late, no run stalls, no checkpoint is overdue", () => {
    const state = after(shot({ checkpoints: [checkpoint()] }), away);
    const now = serverNow(state, (NOW + 3_600) * 1000);
    expect(now).toBe(NOW);
    expect(assess(state, now)).toMatchObject({ level: "good", headline: "Last known: Training is healthy" });
    expect(serverNow(after(shot()), (NOW + 9) * 1000)).toBe(NOW + 9);
  });
});

describe("a stopped run", () => {
  it("keeps its last values, also on a page that was opened later", () => {
    const lived = after(shot({ workers: [worker({ current_step: 77 })], tasks: [task({ id: "job", status: "running" })] }), shot({ workers: [], tasks: [task({ id: "job", status: "stopped", completed_at: NOW })] }, NOW + 2));
    expect(onlyRun(lived)).toMatchObject({ status: "stopped", step: 77, loss: 2, throughput: 1000 });
    const opened = after(shot({ workers: [], tasks: [task({ id: "job", status: "stopped" })], jobs: [job({ id: "job", step: 77, loss: 2, tokens_per_second: 900 })] }));
    expect(onlyRun(opened)).toMatchObject({ status: "stopped", step: 77, loss: 2, throughput: 900, throughputUnit: "tokens/s", goodput: 0.9 });
  });

  it("is listed with its task before the first worker joins", () => {
    expect(onlyRun(after(shot({ workers: [], tasks: [task({ id: "job", status: "pending" })] })))).toMatchObject({ name: "t", status: "pending", alive: 0 });
  });
});

it("workers are counted once: active ones and all of them come from the same list", () => {
  const workers = [worker({ status: "active", metrics: {} }), worker({ id: "w1" }), worker({ id: "w2", status: "failed" })];
  expect(workerCounts(after(shot({ workers, metrics: { ...snapshot().metrics, active_workers: 0, total_workers: 2 } })).workers)).toEqual({ present: 2, total: 3, text: "1 active, 1 training, 1 failed" });
});

it("an axis of eight minutes has more than one tick wherever two have space", () => {
  for (let width = 160; width < 1200; width += 20) expect(timeTicks(NOW + 7, NOW + 487, width).length, `${width} px`).toBeGreaterThan(1);
});

describe("events", () => {
  const line = (n: number, kind: string, change: Partial<EventLine> = {}): EventLine => ({ id: `e-${n}`, kind, at: n, jobId: "job", workerId: null, text: `${kind} ${n}`, level: "info", ...change });

  it("successful checkpoints are one line; a failed one keeps its own", () => {
    const saves = [5, 4, 3].map((n) => line(n, "checkpoint_completed"));
    expect(folded([...saves, line(2, "checkpoint_failed", { level: "bad" }), line(1, "checkpoint_completed")]).map((l) => l.text)).toEqual(["checkpoint_completed 5; 2 earlier checkpoints", "checkpoint_failed 2", "checkpoint_completed 1"]);
  });

  it("are filtered by what they are about, and problems by how bad they are", () => {
    const all = [line(3, "worker_failed", { level: "bad" }), line(2, "checkpoint_completed"), line(1, "task_created")];
    const kinds = (filter: Parameters<typeof filtered>[1]) => filtered(all, filter).map((l) => l.kind);
    expect([kinds("all").length, kinds("problems"), kinds("saves"), kinds("workers"), kinds("tasks")]).toEqual([3, ["worker_failed"], ["checkpoint_completed"], ["worker_failed"], ["task_created"]]);
  });
});
