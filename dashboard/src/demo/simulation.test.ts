import { describe, expect, it } from "vitest";

import type { ShardPlan } from "../api/types";
import { initialState, reduce } from "../state/reducer";
import { DATASET, JOB, Simulation } from "./simulation";
import { transportFor } from "./transport";

const START = 1_700_000_000;

function played(seconds: number, seed = 7): { simulation: Simulation; kinds: Map<string, number>; events: ReturnType<Simulation["advance"]> } {
  const simulation = new Simulation({ startedAt: START, seed });
  const events = simulation.advance(START + seconds);
  const kinds = new Map<string, number>();
  for (const event of events) kinds.set(event.kind, (kinds.get(event.kind) ?? 0) + 1);
  return { simulation, kinds, events };
}

describe("the simulated run", () => {
  it("is the same for the same seed", () => {
    expect(played(120).events).toEqual(played(120).events);
    expect(played(120, 8).events).not.toEqual(played(120).events);
  });

  it("fails and recovers, saves tier by tier, and continues", () => {
    const { simulation, kinds } = played(420);
    expect(kinds.get("worker_failed")).toBe(2);
    expect(kinds.get("worker_left")).toBe(2);
    expect(kinds.get("recovery_recorded")).toBe(6);
    expect(kinds.get("barrier_broken")).toBe(2);
    const tiers = new Set(simulation.checkpoints.map((checkpoint) => checkpoint.tiers.length));
    expect(tiers.has(3)).toBe(true);
    expect(tiers.has(2)).toBe(true);
    expect(simulation.names()).toHaveLength(8);
    expect(simulation.recoveries.every((recovery) => recovery.lost_steps >= 0 && recovery.lost_steps <= 15)).toBe(true);
  });

  it("plays through the same reducer as a coordinator", () => {
    const { simulation, events } = played(420);
    let state = reduce(initialState(), { type: "snapshot", snapshot: new Simulation({ startedAt: START }).snapshot(), atMs: START * 1000 });
    state = reduce(state, { type: "events", events, atMs: (START + 420) * 1000 });
    expect([...state.workers.keys()].sort()).toEqual([...simulation.workers.keys()].sort());
    expect(state.checkpoints[0]?.id).toBe(simulation.checkpoints[0]?.id);
    expect(state.recoveries).toHaveLength(simulation.recoveries.length);
    expect(state.generations.some((generation) => generation.kind === "failed" && generation.jobId === JOB)).toBe(true);
  });

  it("assigns every shard, evenly", async () => {
    const { simulation } = played(160);
    const plan = (await transportFor(() => simulation)(`/datasets/${DATASET}/shards`, {})) as ShardPlan;
    const counts = new Map<string | null, number>();
    for (const shard of plan.shards) counts.set(shard.worker_id, (counts.get(shard.worker_id) ?? 0) + 1);
    expect(counts.has(null)).toBe(false);
    expect(Math.max(...counts.values()) - Math.min(...counts.values())).toBeLessThanOrEqual(1);
  });

  it("serves what views request, and rejects the rest like a coordinator", async () => {
    const { simulation } = played(30);
    const ask = transportFor(() => simulation);
    const created = (await ask("/tasks", { method: "POST", body: { name: "mine", type: "training", config: {} } })) as { task_id: string };
    simulation.advance(START + 40);
    expect(simulation.tasks.find((task) => task.id === created.task_id)?.status).toBe("running");
    await ask(`/tasks/${created.task_id}/stop`, { method: "POST" });
    expect(simulation.tasks.find((task) => task.id === created.task_id)?.status).toBe("stopped");
    await expect(ask("/nothing", {})).rejects.toMatchObject({ status: 404 });
  });
});
