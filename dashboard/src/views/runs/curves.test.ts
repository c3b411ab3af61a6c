import { describe, expect, it } from "vitest";

import type { Checkpoint, Curve, Incident } from "../../api/types";
import { aligned, csvOf, curvesCsv, lastOf, marksOf, nearest, originOf, parseZoom, placeOf, pointsOf, positive, smoothed, stepsOf, valueAt } from "./curves";

const curve = (steps: number[], values: (number | null)[], start = 100): Curve => ({ steps, times: steps.map((s) => start + s), values, low: [], high: [] });

describe("points", () => {
  it("are by step, by time, or by time since the run started", () => {
    const one = curve([1, 2], [5, 6]);
    expect(pointsOf(one, "step", 101).xs).toEqual([1, 2]);
    expect(pointsOf(one, "wall", 101).xs).toEqual([101, 102]);
    expect(pointsOf(one, "relative", 101).xs).toEqual([0, 1]);
    expect(originOf([{ name: "a", committed: one, abandoned: [] }])).toBe(101);
    expect(originOf([])).toBeNull();
  });

  it("are sorted where clocks differ", () => {
    const one: Curve = { steps: [1, 2, 3], times: [30, 10, 20], values: [1, 2, 3], low: [0, 1, 2], high: [] };
    expect(pointsOf(one, "wall", null)).toEqual({ xs: [10, 20, 30], values: [2, 3, 1], low: [1, 2, 0], high: [] });
  });

  it("at or below zero are dropped on a log scale", () => {
    expect(positive({ xs: [1, 2, 3], values: [1, 0, -1], low: [], high: [] }).values).toEqual([1, null, null]);
  });
});

describe("smoothing", () => {
  it("starts at the first value and keeps gaps", () => {
    expect(smoothed([4, 4, null, 4], 0.9)).toEqual([4, 4, null, 4]);
    expect(smoothed([1, 3], 0)).toEqual([1, 3]);
    const [first, second] = smoothed([0, 10], 0.5);
    expect(first).toBe(0);
    expect(second).toBeCloseTo(10 * (0.5 / 0.75));
  });
});

describe("aligning", () => {
  it("aligns curves to one x axis without adding gaps", () => {
    expect(aligned([{ xs: [1, 3], values: [1, null] }, { xs: [2, 3], values: [5, 6] }])).toEqual([[1, 2, 3], [1, undefined, null], [undefined, 5, 6]]);
    expect(aligned([])).toEqual([[]]);
  });
});

describe("values at the cursor", () => {
  it("finds the nearest point, and nothing beyond the curve", () => {
    expect([0, 4, 6, 99].map((x) => nearest([2, 5, 7], x))).toEqual([0, 1, 1, 2]);
    expect(nearest([], 1)).toBe(-1);
    const points = { xs: [10, 20, 30], values: [1, null, 3] };
    expect([11, 19, 29, 500, -50].map((x) => valueAt(points, x))).toEqual([1, null, 3, null, null]);
    expect(lastOf([1, 2, null])).toBe(2);
    expect(lastOf([])).toBeNull();
  });
});

describe("zoom", () => {
  it("is two steps, the later one last, or nothing", () => {
    expect(parseZoom("10-20")).toEqual([10, 20]);
    for (const bad of [undefined, "", "20-10", "a-b", "5", "-1-4", "1.5-3", "1-99999999999999999999"]) expect(parseZoom(bad)).toBeNull();
  });

  it("is in steps whatever the axis", () => {
    const one = curve([10, 20, 30, 40], [1, 2, 3, 4]);
    expect(stepsOf(one, "step", null, 9.7, 20.2)).toEqual([9, 21]);
    expect(stepsOf(one, "wall", null, 115, 135)).toEqual([20, 30]);
    expect(stepsOf(one, "relative", 110, 5, 25)).toEqual([20, 30]);
    expect(stepsOf(one, "wall", null, 0, 1)).toBeNull();
    expect(stepsOf(one, "wall", null, 115, 125)).toBeNull();
  });
});

describe("marks", () => {
  const incident = (change: Partial<Incident>) => ({ text: "rank 1 was killed", opened_at: 125, resumed_step: 20, lost_steps: 5, ...change }) as Incident;
  const save = (change: Partial<Checkpoint>) => ({ id: "c", step: 30, status: "completed", tiers: ["memory", "nvme"], created_at: 130, ...change }) as Checkpoint;

  it("are failures, and saves that outlive their machine's memory", () => {
    const found = marksOf([incident({})], [save({}), save({ tiers: ["memory"] }), save({ tiers: ["MEMORY", "PEER"] }), save({ status: "failed" })]);
    expect(found.map((m) => [m.kind, m.step, m.at])).toEqual([["save", 30, 130], ["incident", 25, 125]]);
  });

  it("are placed where they happened on every axis", () => {
    const [mark] = marksOf([incident({ resumed_step: null })], []);
    const one = curve([10, 20, 30], [1, 2, 3]);
    expect(placeOf(mark!, "wall", 100, one)).toBe(125);
    expect(placeOf(mark!, "relative", 100, one)).toBe(25);
    expect(placeOf(mark!, "step", 100, one)).toBe(20);
    expect(placeOf(mark!, "step", 100, curve([], []))).toBeNull();
    expect(placeOf(mark!, "relative", null, one)).toBeNull();
  });
});

describe("export", () => {
  it("quotes special characters", () => {
    expect(csvOf([["a,b", 'say "x"', null, 1.5]])).toBe('"a,b","say ""x""",,1.5\n');
  });

  it("has every branch with min and max", () => {
    const text = curvesCsv([{ run: "r", curves: { name: "loss", committed: { ...curve([1], [0.5], 0), low: [0.25], high: [1] }, abandoned: [{ ...curve([2], [null], 0), generation: 3 }] } }]);
    expect(text.split("\n")).toEqual(["run,metric,branch,step,time,value,min,max", "r,loss,committed,1,1970-01-01T00:00:01.000Z,0.5,0.25,1", 'r,loss,"abandoned, generation 3",2,1970-01-01T00:00:02.000Z,,,', ""]);
  });
});
