import { describe, expect, it } from "vitest";

import { age, ago, bytes, clockMs, compact, count, cut, duration, number, percent, plural } from "./format";

describe("an unknown value is a dash, never a zero", () => {
  it.each([count, number, compact, bytes, duration, ago, age, percent])("%o", (write) => {
    for (const nothing of [null, undefined, Number.NaN, Number.POSITIVE_INFINITY]) expect(write(nothing)).toBe("–");
  });
});

describe("durations show the two largest units", () => {
  it.each([
    [0, "0 s"], [0.0000034, "3.4 µs"], [0.0034, "3.4 ms"], [0.5, "500 ms"], [1.25, "1.3 s"], [59.4, "59 s"], [59.6, "1 m"], [75, "1 m 15 s"],
    [3600, "1 h"], [3725, "1 h 2 m"], [90_061, "1 d 1 h"], [-3, "0 s"],
  ])("%f s", (seconds, text) => expect(duration(seconds)).toBe(text));
});

describe("ages are in whole seconds, to avoid flicker", () => {
  it.each([[0.2, "now"], [1.9, "1 s ago"], [9.99, "9 s ago"], [61, "1 m 1 s ago"], [-5, "now"]])("%f s", (seconds, text) => expect(ago(seconds)).toBe(text));
  it("and without \"ago\"", () => expect([age(0.3), age(12.9), age(3600)]).toEqual(["0 s", "12 s", "1 h"]));
});

describe("sizes", () => {
  it.each([[0, "0 B"], [1023, "1023 B"], [1536, "1.5 KiB"], [1_486_000_000, "1.38 GiB"], [2 ** 60, "1024 PiB"]])("%d bytes", (size, text) => expect(bytes(size)).toBe(text));
});

describe("numbers keep three significant digits", () => {
  it.each([[0, "0"], [0.012345, "0.0123"], [1.2345, "1.23"], [12.345, "12.3"], [999.6, "1,000"], [4567.8, "4,568"], [-0.5, "-0.500"], [3e-7, "3.00e-7"]])("%f", (value, text) => expect(number(value)).toBe(text));
  it.each([[999, "999"], [1234, "1.23k"], [56_000, "56k"], [5_600_000, "5.6M"], [0.5, "0.5"], [-1500, "-1.5k"]])("compact %f", (value, text) => expect(compact(value)).toBe(text));
});

it("one is singular", () => expect([plural(1, "step"), plural(0, "step"), plural(1200, "step"), plural(2, "recovery", "recoveries")]).toEqual(["1 step", "0 steps", "1,200 steps", "2 recoveries"]));
it("milliseconds are padded", () => expect(clockMs(1_700_000_000.005)).toMatch(/:\d\d\.00[45]$/));

describe("a long name keeps both ends", () => {
  it("so that two workers of one run differ, and two runs do", () => {
    const [one, other] = [0, 1].map((rank) => cut(`task-d6d40b360a1e-rank${rank}`, 20));
    expect(one).toBe("task-d6d4…0a1e-rank0");
    expect(one).toHaveLength(20);
    expect(other).not.toBe(one);
    expect(cut("task-aaaaaaaaaaaa-rank0", 20)).not.toBe(cut("task-bbbbbbbbbbbb-rank0", 20));
  });
  it("a short one stays, and no character is split", () => {
    expect(cut("worker-7", 20)).toBe("worker-7");
    expect(cut("😀".repeat(30), 5)).toBe("😀😀…😀😀");
  });
});
