import { describe, expect, it } from "vitest";

import { initialState } from "./reducer";
import { hasSurvived, rankOf, runsOf } from "./runs";
import { NOW, recovery } from "./samples";
import type { State } from "./types";

describe("the rank of a worker", () => {
  const of = (id: string, rank: number | null) => rankOf({ id, job_id: "job", rank });

  it("is the one in its name, whatever the order of joining", () => {
    expect(of("job-rank0", 2)).toBe(0);
    expect(of("job-rank12", 0)).toBe(12);
  });

  it("is the coordinator's for any other name", () => {
    for (const id of ["node-7", "rank3-job", "job-rank3b", "job-frank3", "another-rank3"]) expect(of(id, 1)).toBe(1);
  });

  it("is none for a worker that is lost", () => {
    expect(of("job-rank0", null)).toBeNull();
  });
});

describe("who survived a recovery", () => {
  it("marks the rows of processes that were there before and after", () => {
    const r = recovery({ at: NOW, total_s: 1, survived: 1, lost: ["lost"] });
    const row = (workerId: string, from: number, to: number | null) => ({ workerId, spans: [{ from, to, kind: "up" as const, reason: "" }] });
    expect(hasSurvived(row("stays", NOW - 60, null), r)).toBe(true);
    expect(hasSurvived(row("lost", NOW - 60, null), r)).toBe(false);
    expect(hasSurvived(row("left before", NOW - 60, NOW - 30), r)).toBe(false);
    expect(hasSurvived(row("came later", NOW + 5, null), r)).toBe(false);
    expect(hasSurvived(row("stays", NOW - 60, null), { ...r, survived: 0 })).toBe(false);
  });
});

it("a run without workers and checkpoints keeps its last report", () => {
  const state = { ...initialState(), jobs: new Map([["over", { id: "over", at: NOW - 60, step: 42, loss: 5, goodput: 0.5, tokens_per_second: null, samples_per_second: null, step_time_s: null }]]) };
  expect(runsOf(state as State)).toMatchObject([{ id: "over", status: "ended", step: 42, loss: 5, goodput: 0.5, alive: 0 }]);
});
