import { expect, test } from "vitest";

import type { Drain, Worker } from "../../api/types";
import { deadlineText, drainText, machinesOf } from "./machines";

const worker = (job: string, ip: string, status = "training") => ({ job_id: job, ip, status }) as Worker;
const WORKERS = [worker("a", "node-10"), worker("a", "node-2"), worker("a", "node-2"), worker("b", "node-2"), worker("a", "node-3", "failed"), worker("a", "node-4"), worker("a", "node-5")];
const AGENTS = ["node-2", "node-3", "node-4", "node-10"].map((host) => ({ host, agents: 1 }));
const DRAINS = [{ host: "node-4", state: "draining" } as Drain];

test("a machine can be drained where it has a connected agent and no drain yet", () => {
  const found = machinesOf("a", WORKERS, AGENTS, DRAINS);
  expect(found.map((one) => [one.host, one.workers, one.refusal])).toEqual([
    ["node-2", 2, undefined],
    ["node-4", 1, "is draining"],
    ["node-5", 1, "no agent connected"],
    ["node-10", 1, undefined],
  ]);
  expect(found[0]!.others).toEqual(["b"]);
  expect(machinesOf("a", WORKERS, undefined, []).every((one) => one.refusal !== undefined)).toBe(true);
});

test("a deadline that has passed is said to have passed", () => {
  expect(deadlineText(100, 40)).toBe("deadline in 1 m");
  expect(deadlineText(100, 100)).toBe("deadline now");
  expect(deadlineText(100, 175)).toBe("deadline passed 1 m 15 s ago");
});

test("the text depends on the remaining machines", () => {
  const [two, ten] = machinesOf("a", [...WORKERS.slice(0, 4)], AGENTS, []);
  expect(drainText("run", [ten!], [two!, ten!])).toBe("run saves, 1 worker leaves, and it continues on node-2 or with a standby machine.");
  expect(drainText("run", [two!, ten!], [two!, ten!])).toBe("All machines of run are drained: it saves and ends, unless a standby machine takes over. Workers of b on the same machines leave too.");
});
