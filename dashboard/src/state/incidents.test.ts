import { describe, expect, it } from "vitest";

import { costOf, keyOf, matching, outcomeOf, undismissed, whoOf } from "./incidents";
import { incident, NOW } from "./samples";

describe("a card", () => {
  const shown = (...incidents: ReturnType<typeof incident>[]) => undismissed(incidents, new Set(), NOW).map((i) => i.id);

  it("stays until it is dismissed, however fast the recovery was", () => {
    const quick = incident({ opened_at: NOW - 30 * 86_400, closed_at: NOW - 30 * 86_400 + 1 });
    expect(shown(quick)).toEqual([1]);
    expect(undismissed([quick], new Set([keyOf(quick)]), NOW)).toEqual([]);
  });

  it("of a rank that is no longer slow stays ten minutes", () => {
    const slow = (closed: number) => incident({ subject: "slow_rank", closed_at: closed });
    expect(shown(slow(NOW - 599))).toEqual([1]);
    expect(shown(slow(NOW - 601))).toEqual([]);
  });

  it("with the same number from before a coordinator restart is another", () => {
    expect(undismissed([incident({ opened_at: NOW - 5 })], new Set([keyOf(incident())]), NOW)).toHaveLength(1);
  });

  it("of a failure comes before one of a slow rank", () => expect(shown(incident({ id: 2, subject: "slow_rank" }), incident())).toEqual([1, 2]));

  it("that is open stays, however old", () => expect(shown(incident({ state: "open", opened_at: NOW - 1e6, closed_at: null }))).toEqual([1]));
});

it("shows who, cost and outcome; nothing where unknown", () => {
  expect(whoOf(incident({ gpu: "GPU 1" }))).toBe("rank 1 on a, pid 7, GPU 1");
  expect(whoOf(incident({ rank: null, pid: 0 }))).toBe("");
  expect(costOf(incident({ phases_s: { detect: 1, load: 0.5 } }))).toBe("1.5 s to recover, 5 steps lost, 4 worker-seconds");
  expect(costOf(incident({ lost_steps: null, lost_gpu_s: null }))).toBe("");
  expect(outcomeOf(incident(), NOW)).toBe("recovered, resumed at step 80");
  expect(outcomeOf(incident({ state: "open" }), NOW)).toBe("open for 1 m");
});

it("filters by run, class, state and text", () => {
  const all = [incident(), incident({ id: 2, run: "other", failure_class: "oom", state: "open" }), incident({ id: 3, subject: "slow_rank", text: "rank 4 is slow" })];
  const ids = (filter: Parameters<typeof matching>[1]) => matching(all, filter).map((i) => i.id);
  expect(ids({})).toEqual([1, 2, 3]);
  expect(ids({ run: "other" })).toEqual([2]);
  expect(ids({ class: "oom" })).toEqual([2]);
  expect(ids({ class: "slow_rank" })).toEqual([3]);
  expect(ids({ state: "open" })).toEqual([2]);
  expect(ids({ q: "SIGKILL" })).toEqual([1, 2]);
});
