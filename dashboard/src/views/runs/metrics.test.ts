import { afterEach, describe, expect, it } from "vitest";

import { httpTransport, setTransport, withQuery, type Call } from "../../api/client";
import { NO_CURVE } from "./curves";
import { curveOf } from "./metrics";

afterEach(() => setTransport(httpTransport));

describe("curves requested together", () => {
  it("share one request for at most ten names", async () => {
    const asked: [string, Call][] = [];
    setTransport(async (path, call) => {
      asked.push([path, call]);
      const names = call.query?.["name"] as readonly string[];
      return { run: "r", series: names.filter((n) => n !== "m3").map((name) => ({ name, committed: { ...NO_CURVE, steps: [1] }, abandoned: [] })) };
    });
    const names = Array.from({ length: 12 }, (_, i) => `m${i}`);
    const found = await Promise.all([...names.map((name) => curveOf("a/b", name, null, 500)), curveOf("a/b", "m0", [5, 9], 500)]);
    expect(found.map((each) => each.name)).toEqual([...names, "m0"]);
    expect(found[3]?.committed.steps).toEqual([]);
    expect(asked.map(([path, { query }]) => [path, (query?.["name"] as readonly string[]).length, query?.["from"]])).toEqual([
      ["/runs/a%2Fb/metrics/series", 10, undefined],
      ["/runs/a%2Fb/metrics/series", 2, undefined],
      ["/runs/a%2Fb/metrics/series", 1, 5],
    ]);
  });

  it("fail together, and are requested again the next time", async () => {
    let fails = true;
    setTransport(async () => {
      if (fails) throw new Error("away");
      return { run: "r", series: [] };
    });
    await expect(Promise.all([curveOf("r", "a", null, 5), curveOf("r", "b", null, 5)])).rejects.toThrow("away");
    fails = false;
    expect((await curveOf("r", "a", null, 5)).name).toBe("a");
  });
});

it("a list in a query becomes one parameter per value", () => {
  expect(withQuery("/x", { name: ["a", "b c"], points: 5 })).toBe("/x?name=a&name=b+c&points=5");
});
