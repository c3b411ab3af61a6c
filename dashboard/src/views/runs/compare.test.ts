import { describe, expect, it } from "vitest";

import type { RunMetrics } from "../../api/types";
import { comparable, differences, finalValues, idsOf, RUNS_COMPARED, textOf } from "./compare";
import { matching, settingsOf } from "./settings";

const run = (metrics: Record<string, number | null>): RunMetrics => ({
  run: "r", jobs: ["r"], starts: [], dropped: 0, missing_batches: 0,
  metrics: Object.entries(metrics).map(([name, last]) => ({ name, count: 1, nonfinite: 0, last, last_step: 7, min: last, max: last })),
});

describe("a URL", () => {
  it("holds any names, each once, and not too many", () => {
    const names = ["a", "with,comma", "ü %", "a"];
    expect(idsOf(textOf(names))).toEqual(["a", "with,comma", "ü %"]);
    expect(idsOf("%E0%A4%A,b")).toEqual(["%E0%A4%A", "b"]);
    expect(idsOf(undefined)).toEqual([]);
    expect(textOf([])).toBeUndefined();
    expect(idsOf(Array.from({ length: 20 }, (_, i) => i).join())).toHaveLength(RUNS_COMPARED);
  });

  it("holds the chart settings; invalid values fall back to defaults", () => {
    expect(settingsOf({ x: "wall", log: "1", smooth: "0.6", marks: "0", zoom: "3-9", q: "loss" })).toEqual({ axis: "wall", log: true, smooth: 0.6, marks: false, zoom: [3, 9], query: "loss" });
    expect(settingsOf({ x: "y", smooth: "7", zoom: "9-3" })).toEqual({ axis: "step", log: false, smooth: 0, marks: true, zoom: null, query: "" });
    expect(matching(["eval/loss", "loss", "lr"], "LOSS ev")).toEqual(["eval/loss"]);
  });
});

describe("configurations", () => {
  it("are aligned by name", () => {
    expect(differences([[["lr", "1"], ["seed", "7"]], [["lr", "2"], ["seed", "7"]], []])).toEqual([
      { key: "lr", values: ["1", "2", null], differs: true },
      { key: "seed", values: ["7", "7", null], differs: true },
    ]);
    expect(differences([[["a", "1"]], [["a", "1"]]])[0]?.differs).toBe(false);
  });
});

describe("final values", () => {
  it("cover every run, with null where one has none", () => {
    const rows = finalValues([run({ loss: 1 }), null, run({ loss: null })], ["loss"]);
    expect(rows[0]?.values).toEqual([{ last: 1, min: 1, max: 1, step: 7 }, null, { last: null, min: null, max: null, step: 7 }]);
  });

  it("start with metrics that most runs have", () => {
    expect(comparable([run({ a: 1, b: 1 }), run({ b: 1 }), undefined])).toEqual(["b", "a"]);
  });
});
