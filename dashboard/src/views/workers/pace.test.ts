import { expect, it } from "vitest";

import { NOW, worker } from "../../state/samples";
import { byHost, exceptions, pacesOf, slowest } from "./pace";

const of = (id: string, stepS: number, waitS: number | null, change = {}) => worker({ id, metrics: { step_time_s: stepS, ...(waitS === null ? {} : { sync_wait_s: waitS }) }, ...change });

it("busy time is step time without waiting: in lock step all steps take equally long", () => {
  const paces = pacesOf([of("a", 0.5, 0.4), of("b", 0.5, 0.4), of("c", 0.5, 0.02)]);
  expect(paces.map((p) => p.class)).toEqual(["even", "even", "slowest"]);
  expect(slowest(paces, 5)[0]).toMatchObject({ worker: { id: "c" }, waitS: 0.02 });
  expect(slowest(paces, 5)[0]?.ratio).toBeCloseTo(4.8);
});

it("each run has its own median, and a single worker is not compared", () => {
  const paces = pacesOf([of("a", 1, 0), of("b", 1, 0), of("x", 9, 0, { job_id: "other" })]);
  expect(paces.map((p) => p.ratio)).toEqual([1, 1, null]);
  expect(paces.at(-1)?.class).toBe("unknown");
});

it("a worker that is not training is not compared: its step time is of the past", () => {
  const paces = pacesOf([of("a", 1, 0), of("b", 1, 0), of("c", 9, 0, { status: "recovering" })]);
  expect(paces.map((p) => p.ratio)).toEqual([1, 1, null]);
  expect(slowest(paces, 5).map((p) => p.worker.id)).toEqual(["a", "b"]);
});

it("of a thousand workers only the exceptions are named", () => {
  const fleet = Array.from({ length: 1_000 }, (_, i) => of(`w${i}`, 0.5, 0.1, i === 7 ? { status: "failed" } : i === 8 ? { slow: true } : i === 9 ? { last_heartbeat: NOW - 60 } : i === 10 ? { status: "loading" } : {}));
  expect(exceptions(pacesOf(fleet), NOW).map((p) => p.worker.id).sort()).toEqual(["w10", "w7", "w8", "w9"]);
});

it("machines are sorted by name, each with its workers", () => {
  expect(byHost(pacesOf([of("a", 1, 0, { ip: "n10" }), of("b", 1, 0, { ip: "n2" }), of("c", 1, 0, { ip: "n10" })])).map((h) => [h.host, h.paces.length])).toEqual([["n2", 1], ["n10", 2]]);
});
