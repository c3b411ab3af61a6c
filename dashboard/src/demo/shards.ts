/** Shard assignment of the simulated dataset: balanced, with minimal moves. */

import type { Dataset } from "../api/types";

export interface Plan {
  version: number;
  reason: string;
  samples: number;
  shardSize: number;
  owners: string[];
  moved: Set<number>;
  counts: Map<string, number>;
  /** Share of the epoch that checkpoints have committed, 0 to 1. */
  done: number;
}

export function dealShards(dataset: Dataset, workers: string[], before: Plan | null, version: number, reason: string): Plan {
  const share = Math.ceil(dataset.shard_count / Math.max(1, workers.length));
  const counts = new Map(workers.map((name) => [name, 0]));
  const owners: string[] = new Array<string>(dataset.shard_count).fill("");
  for (let shard = 0; shard < dataset.shard_count; shard += 1) {
    const owner = before?.owners[shard];
    const assigned = owner === undefined ? undefined : counts.get(owner);
    if (owner === undefined || assigned === undefined || assigned >= share) continue;
    owners[shard] = owner;
    counts.set(owner, assigned + 1);
  }
  const moved = new Set<number>();
  for (let shard = 0; shard < dataset.shard_count; shard += 1) {
    if (owners[shard]) continue;
    const smallest = workers.reduce((one, other) => (counts.get(other)! < counts.get(one)! ? other : one), workers[0]!);
    owners[shard] = smallest;
    counts.set(smallest, counts.get(smallest)! + 1);
    moved.add(shard);
  }
  return {
    version, reason, samples: dataset.total_samples, shardSize: dataset.shard_size, owners, moved, counts, done: before?.done ?? 0,
  };
}

/** Shards per worker reassigned by the latest plan. */
export function movedShards(plan: Plan): Record<string, number> {
  const given: Record<string, number> = {};
  for (const shard of plan.moved) given[plan.owners[shard]!] = (given[plan.owners[shard]!] ?? 0) + 1;
  return given;
}
