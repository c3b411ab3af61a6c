import { expect, it } from "vitest";

import type { Run } from "../state/runs";
import { incident, task } from "../state/samples";
import { newsOf, signOf } from "./attention";

const run = { id: "a", name: "gpt", status: "training", alive: 2 } as Run;

it("the title names the run and its state, and counts undismissed incidents", () => {
  expect(signOf("/runs/a", [run], "good", [])).toEqual({ title: "gpt: training · Strata", icon: "/favicon.svg" });
  expect(signOf("/", [run], "good", [incident()])).toEqual({ title: "(1) gpt: training · Strata", icon: "/favicon-bad.svg" });
  expect(signOf("/logs", [run], "bad", [])).toEqual({ title: "(!) Logs · Strata", icon: "/favicon-bad.svg" });
  expect(signOf("/", [], "idle", [incident({ subject: "slow_rank" })])).toEqual({ title: "(1) Strata", icon: "/favicon-warn.svg" });
  expect(signOf("/compare", [], "idle", []).title).toBe("Compare runs · Strata");
  expect(signOf("/nowhere", [], "idle", []).title).toBe("Page not found · Strata");
});

it("failures and stops notify once; slow ranks, completed tasks and known incidents do not", () => {
  const before = { incidents: [incident()], tasks: [task({ id: "t", name: "gpt" }), task({ id: "u" })] };
  expect(newsOf(before, before)).toEqual([]);
  const after = {
    incidents: [incident({ id: 2, failure_class: "oom", text: "rank 0 ran out of memory" }), incident({ id: 3, subject: "slow_rank" }), incident()],
    tasks: [task({ id: "t", name: "gpt", status: "stopped", reason: "stop requested" }), task({ id: "u", status: "completed" })],
  };
  expect(newsOf(before, after).map((news) => [news.title, news.body])).toEqual([["job: Out of memory", "rank 0 ran out of memory"], ["gpt stopped", "stop requested"]]);
});
