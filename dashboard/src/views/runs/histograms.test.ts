import { describe, expect, it } from "vitest";

import type { MetricCurves, MetricSummary } from "../../api/types";
import { fanOf, folded, isHistogram, label, partsOf, PERCENTS, shapeOf, spreadOf } from "./histograms";

const summary = (name: string, value: number): MetricSummary => ({ name, count: 3, nonfinite: 0, last: value, last_step: 9, min: value - 1, max: value + 1 });
const parts = [...PERCENTS.map((p) => summary(`grads#q${p}`, p)), ...["mean", "std", "count"].map((rest) => summary(`grads#${rest}`, 1))];

describe("histograms", () => {
  it("are one metric each, beside scalars", () => {
    const found = folded([summary("loss", 2), ...parts]);
    expect(found.map((m) => m.name)).toEqual(["loss", "grads#"]);
    expect(found[1]).toMatchObject({ last: 50, min: -1, max: 101 });
    expect([label("grads#"), isHistogram("grads#"), isHistogram("loss")]).toEqual(["grads", true, false]);
  });

  it("are not folded where a part is missing", () => {
    expect(folded(parts.slice(1))).toHaveLength(parts.length - 1);
  });

  it("are a fan of ranges that keeps spikes", () => {
    const curves = partsOf("grads#").map((name, i): MetricCurves => {
      const q = PERCENTS[i] ?? 0;
      return { name, committed: { steps: [1], times: [1], values: [q], low: [q - 5], high: [q + 5] }, abandoned: [] };
    });
    const spread = spreadOf("grads#", curves);
    expect(spread.committed).toMatchObject({ values: [50], low: [-5], high: [105] });
    expect(fanOf(spread).map((c) => [c.low[0], c.high[0]])).toEqual([[5, 95], [25, 75]]);
  });

  it("have a shape of all values between the 1st and 99th percentile", () => {
    const shape = shapeOf(PERCENTS.map((p) => p), 10);
    expect(shape).toMatchObject({ from: 1, to: 99 });
    expect(shape?.bars.reduce((a, b) => a + b, 0)).toBeCloseTo(0.98);
    expect(shapeOf(PERCENTS.map(() => 3))).toEqual({ from: 3, to: 3, bars: [1] });
    expect(shapeOf(PERCENTS.map((p) => (p === 50 ? null : p)))).toBeNull();
  });
});
