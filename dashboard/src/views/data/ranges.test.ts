import { describe, expect, it } from "vitest";

import type { Audit, Shard, ShardPlan } from "../../api/types";
import { movedIn, positionOf, rowsOf } from "./ranges";

function shard(id: number, worker: string | null, change: Partial<Shard> = {}): Shard {
  return { id, start: id * 10, stop: id * 10 + 10, done: 0, reported: 0, worker_id: worker, moved: false, ...change };
}

function plan(shards: Shard[]): ShardPlan {
  return { dataset_id: "d", job_id: "j", epoch: 0, version: 1, reason: "", samples_done: 0, total_samples: shards.length * 10, shard_count: shards.length, by_shard: true, shards };
}

describe("shard map", () => {
  it("joins neighbours of one worker, and not across another's", () => {
    const rows = rowsOf(plan([shard(0, "w2"), shard(1, "w2"), shard(2, "w10"), shard(3, "w2")]));
    expect(rows.map((row) => row.workerId)).toEqual(["w2", "w10"]);
    expect(rows[0]!.ranges.map((range) => [range.firstShard, range.lastShard])).toEqual([[0, 1], [3, 3]]);
  });

  it("separates reassigned shards from the others", () => {
    const one = plan([shard(0, "a"), shard(1, "a", { moved: true, done: 4 }), shard(2, "a", { moved: true, done: 6 })]);
    expect(rowsOf(one)[0]!.ranges.map((range) => [range.moved, range.done])).toEqual([[false, 0], [true, 10]]);
    expect(movedIn(one)).toBe(2);
  });

  it("adds up every sample exactly once", () => {
    const one = plan(Array.from({ length: 100 }, (_, id) => shard(id, id % 7 === 0 ? null : `w${id % 5}`, { done: id % 10 })));
    const rows = rowsOf(one);
    expect(rows.reduce((sum, row) => sum + row.samples, 0)).toBe(1_000);
    expect(rows.at(-1)!.workerId).toBeNull();
    const joined = rows.flatMap((row) => row.ranges).reduce((sum, range) => sum + range.stop - range.start, 0);
    expect(joined).toBe(1_000);
  });
});

describe("progress of a run", () => {
  const audit = (epoch: number, samples: number): Audit =>
    ({ job_id: "j", dataset_id: "d", epoch, exact: samples === 30, total: 30, samples, lost: 0, repeated: 0, remaining: 30 - samples, commits: 1, reason: "" });
  const first = { ...plan([shard(0, "a"), shard(1, "a"), shard(2, "b")]), samples_done: 20 };

  it("comes from the plan, with the audits of its epoch and of earlier ones", () => {
    expect(positionOf(first, [])).toMatchObject({ epoch: 0, done: 20, total: 30, proof: undefined, past: [], isPlans: true });
    const third = { ...first, epoch: 2, samples_done: 5 };
    const now = positionOf(third, [audit(0, 30), audit(1, 30), audit(2, 4), audit(3, 1)]);
    expect(now).toMatchObject({ epoch: 2, done: 5, total: 30, proof: audit(2, 4), isPlans: true });
    expect(now.past.map((each) => each.epoch)).toEqual([0, 1]);
  });

  it("comes from the checkpoints where they count other samples than the plan", () => {
    const other = { ...audit(0, 7), total: 14 };
    expect(positionOf(first, [other])).toMatchObject({ epoch: 0, done: 7, total: 14, proof: other, isPlans: false });
  });

  it("is relative to the size of the sources for an endless mixture", () => {
    const endless = { ...audit(0, 75), total: Number.MAX_SAFE_INTEGER };
    expect(positionOf(first, [endless])).toMatchObject({ done: 75, total: 30 });
  });
});
