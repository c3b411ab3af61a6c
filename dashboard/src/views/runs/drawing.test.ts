import { describe, expect, it } from "vitest";

import { timeTicks } from "../../components/ticks";
import { checkpoint, NOW, recovery } from "../../state/samples";
import { allSaves, hitAt, layoutOf, phasesOf, rungsOf, tiersOf, timeAt, xOf, type TimelineData } from "./drawing";

it("a recovery's phases fill its time in their order, and end when it was recorded", () => {
  const phases = phasesOf(recovery({ phases_s: { load: 0.5, detect: 1, unknown_phase: 0.25 }, total_s: 1.75, at: NOW }));
  expect(phases.map((p) => [p.name, p.from - NOW, p.to - NOW])).toEqual([["detect", -1.75, -0.75], ["load", -0.75, -0.25], ["unknown_phase", -0.25, 0]]);
});

it("tiers go from near to far, whatever case they are written in", () => {
  expect(tiersOf([checkpoint({ tiers: ["S3", "tape"] }), checkpoint({ tiers: ["NVME", "MEMORY"] })])).toEqual(["MEMORY", "NVME", "S3", "tape"]);
  expect(tiersOf([checkpoint({ tiers: ["S3", "file", "PEER", "MEMORY"] })])).toEqual(["MEMORY", "PEER", "file", "S3"]);
});

it("a ladder has a rung for every tier: beyond three, tiers of one kind share it", () => {
  expect(rungsOf(["NVME", "S3"])).toEqual([["nvme", ["NVME"]], ["s3", ["S3"]]]);
  expect(rungsOf(["MEMORY", "PEER", "NVME", "S3", "GCS"])).toEqual([["memory", ["MEMORY", "PEER"]], ["disk", ["NVME"]], ["bucket", ["S3", "GCS"]]]);
});

describe("what is under the pointer", () => {
  const layout = layoutOf(1000, 2, NOW - 100, NOW);
  const data: TimelineData = {
    jobId: "job",
    rows: [{ workerId: "a", spans: [] }, { workerId: "b", spans: [] }],
    lines: [{ at: NOW - 50, number: 4, text: "1 failed", bad: true }],
    checkpoints: [checkpoint({ id: "near", created_at: NOW - 20 }), checkpoint({ id: "far", created_at: NOW - 80 })],
    recoveries: [recovery({ at: NOW - 40 })],
    tiers: ["local"],
    statuses: new Map(),
  };
  const row = (n: number) => layout.rowsTop + (n + 0.5) * layout.rowHeight;

  it("timeAt and xOf are inverse", () => expect(timeAt(layout, xOf(layout, NOW - 33))).toBeCloseTo(NOW - 33));
  it("a worker, by name or by row", () => {
    expect(hitAt(layout, data, 10, row(1))).toMatchObject({ kind: "row", workerId: "b" });
    expect(hitAt(layout, data, xOf(layout, NOW - 10), row(0))).toMatchObject({ kind: "row", workerId: "a" });
  });
  it("the nearest save", () => expect(hitAt(layout, data, xOf(layout, NOW - 20) + 6, layout.rowsTop - 40)).toMatchObject({ kind: "save", checkpoint: { id: "near" } }));
  it("a phase of a recovery", () => expect(hitAt(layout, data, xOf(layout, NOW - 43.5), layout.rowsTop - 10)).toMatchObject({ kind: "phase", name: "detect" }));
  it("a generation", () => expect(hitAt(layout, data, xOf(layout, NOW - 50) + 2, row(0))).toMatchObject({ kind: "generation", number: 4 }));
  it("nothing below the last row", () => expect(hitAt(layout, data, 500, layout.height - 2)).toBeNull());
});

it("fits up to a thousand workers", () => {
  for (const rows of [1, 12, 13, 27, 28, 100, 1000]) expect(layoutOf(1000, rows, 0, 1).height).toBeLessThanOrEqual(560);
  const crowd = layoutOf(1000, 1000, NOW - 100, NOW);
  const rows = Array.from({ length: 1000 }, (_, n) => ({ workerId: `w${n}`, spans: [] }));
  const data: TimelineData = { jobId: "job", rows, lines: [], checkpoints: [], recoveries: [], tiers: [], statuses: new Map() };
  expect(hitAt(crowd, data, 500, crowd.rowsTop + 700.5 * crowd.rowHeight)).toMatchObject({ kind: "row", workerId: "w700" });
});

it("time axes have round ticks, as many as fit", () => {
  expect(timeTicks(100, 220, 500)).toEqual([100, 120, 140, 160, 180, 200, 220]);
  for (const span of [3, 47, 600, 86_400, 9e6]) {
    const ticks = timeTicks(NOW, NOW + span, 700);
    expect(ticks.length).toBeGreaterThan(0);
    expect(ticks.length).toBeLessThanOrEqual(10);
  }
});

it("the timeline merges streamed and fetched checkpoints, without removed ones", () => {
  const save = (id: string, at: number) => checkpoint({ id, created_at: at });
  const recent = [save("new", NOW), save("old", NOW - 100)];
  expect(allSaves(recent, [save("old", NOW - 100), save("removed", NOW - 50), save("older", NOW - 900)]).map((c) => c.id)).toEqual(["new", "old", "older"]);
  expect(allSaves([], [save("only", NOW)]).map((c) => c.id)).toEqual(["only"]);
});
