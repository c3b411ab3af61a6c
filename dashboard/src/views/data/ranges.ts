/** A shard plan as rows of ranges: one row per worker, neighbouring shards joined. Pure. */

import type { Audit, Shard, ShardPlan } from "../../api/types";

export interface Range {
  firstShard: number;
  lastShard: number;
  start: number;
  stop: number;
  /** Samples that a checkpoint has committed. */
  done: number;
  /** Samples read, committed or not. */
  reported: number;
  moved: boolean;
}

export interface Row {
  /** Null: unassigned. */
  workerId: string | null;
  shards: number;
  moved: number;
  samples: number;
  done: number;
  ranges: Range[];
}

export function rowsOf(plan: ShardPlan): Row[] {
  const rows = new Map<string | null, Row>();
  let last: { row: Row; shard: Shard } | undefined;
  for (const shard of plan.shards) {
    const row = rows.get(shard.worker_id) ?? { workerId: shard.worker_id, shards: 0, moved: 0, samples: 0, done: 0, ranges: [] };
    rows.set(shard.worker_id, row);
    row.shards += 1;
    row.moved += shard.moved ? 1 : 0;
    row.samples += shard.stop - shard.start;
    row.done += shard.done;
    const range = row.ranges.at(-1);
    if (range && last?.row === row && last.shard.moved === shard.moved) {
      range.lastShard = shard.id;
      range.stop = shard.stop;
      range.done += shard.done;
      range.reported += shard.reported;
    } else {
      row.ranges.push({
        firstShard: shard.id, lastShard: shard.id, start: shard.start, stop: shard.stop, done: shard.done, reported: shard.reported, moved: shard.moved,
      });
    }
    last = { row, shard };
  }
  return [...rows.values()].sort((a, b) => {
    if (a.workerId === null || b.workerId === null) return a.workerId === null ? 1 : -1;
    return a.workerId.localeCompare(b.workerId, "en", { numeric: true });
  });
}

export function movedIn(plan: ShardPlan): number {
  return plan.shards.reduce((sum, shard) => sum + (shard.moved ? 1 : 0), 0);
}

/** Progress of a run in the plan's epoch. */
export interface Position {
  epoch: number;
  done: number;
  total: number;
  /** Audit of that epoch by its checkpoints. */
  proof: Audit | undefined;
  /** The epochs before it. */
  past: readonly Audit[];
  /** Whether the plan and the checkpoints count the same samples. */
  isPlans: boolean;
}

export function positionOf(plan: ShardPlan, proofs: readonly Audit[]): Position {
  const proof = proofs.find((each) => each.epoch === plan.epoch);
  const isPlans = proof === undefined || proof.total === plan.total_samples;
  // A mixture whose sources repeat is endless: samples drawn are compared with the size of the sources.
  const isEndless = proof !== undefined && proof.total >= Number.MAX_SAFE_INTEGER;
  return {
    epoch: plan.epoch,
    done: isPlans ? plan.samples_done : proof.samples,
    total: isPlans || isEndless ? plan.total_samples : proof.total,
    proof,
    past: proofs.filter((each) => each.epoch < plan.epoch),
    isPlans,
  };
}
