import { describe, expect, it } from "vitest";

import { rankOf } from "./runs";

describe("the rank of a worker", () => {
  const of = (id: string, rank: number | null) => rankOf({ id, job_id: "job", rank });

  it("is the one it is called by, whatever the order of joining", () => {
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
