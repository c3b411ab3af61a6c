import { describe, expect, it } from "vitest";

import { logRange, logTexts, logTicks, tickText, timeTicks } from "./ticks";

describe("ticks", () => {
  it("have one unit and enough decimals to differ", () => {
    expect([60.6e9, 60.8e9, 61e9].map((v) => tickText(v, 2e8, 61e9))).toEqual(["60.6G", "60.8G", "61.0G"]);
    expect([0, 2, 4].map((v) => tickText(v, 2, 4))).toEqual(["0", "2", "4"]);
    expect([0, 0.25, 0.5].map((v) => tickText(v, 0.25, 0.75))).toEqual(["0", "0.25", "0.50"]);
    expect(tickText(0.0001, 0.0001, 0.0003)).toBe("0.0001");
    expect(tickText(3e-9, 1e-9, 5e-9)).toBe("3.0e-9");
    expect(tickText(305_000, 5_000, 325_000)).toBe("305k");
  });

  it("of time are round timestamps, as many as fit", () => {
    expect(timeTicks(333, 500, 206, 56)).toEqual([360, 420, 480]);
    expect(timeTicks(370, 560, 206, 56)).toEqual([420, 480, 540]);
    expect(timeTicks(0, 480, 500)).toEqual([0, 120, 240, 360, 480]);
  });

  it("of a logarithmic scale are powers of ten, or round numbers where there are none", () => {
    expect(logTicks(0.5, 2_000)).toEqual([1, 10, 100, 1_000]);
    expect(logTicks(1.5, 30)).toEqual([2, 5, 10, 20]);
    expect(logTicks(2.61, 2.83)).toEqual([2.65, 2.7, 2.75, 2.8]);
    expect(logTicks(1e-12, 1e12).length).toBeLessThanOrEqual(6);
    expect(logTexts([0.00027, 0.00028, 0.00029])).toEqual(["0.00027", "0.00028", "0.00029"]);
    expect(logTexts([1, 100, 10_000])).toEqual(["1", "100", "10k"]);
    const [low, high] = logRange(2, 2);
    expect(low).toBeLessThan(2);
    expect(high).toBeGreaterThan(2);
  });
});
