// @vitest-environment happy-dom

import { expect, it } from "vitest";

import { barrier, checkpoint, NOW, snapshot, worker } from "../state/samples";
import { Barriers } from "./Barriers";
import { Checkpoints } from "./Checkpoints";
import { rowsIn, show } from "./rendering";
import { Workers } from "./Workers";

const chosen = (host: HTMLElement, label: string) => host.querySelector<HTMLSelectElement>(`select[aria-label="${label}"]`)?.value;

it("checkpoints of one run: the link of a finding filters, visibly, also where that run has none", async () => {
  const all = snapshot({ workers: [worker()], checkpoints: [checkpoint({ id: "a", job_id: "job" }), checkpoint({ id: "b", job_id: "other", step: 777 })] });
  const host = await show(Checkpoints, "/checkpoints?job=job", { snapshot: all, responses: { "/checkpoints": [] } });
  expect(rowsIn(host, "Checkpoints")).toBe(1);
  expect(chosen(host, "Run")).toBe("job");
  const none = await show(Checkpoints, "/checkpoints?job=new", { snapshot: all, responses: { "/checkpoints": [] } });
  expect(rowsIn(none, "Checkpoints")).toBe(0);
  expect(chosen(none, "Run")).toBe("new");
});

it("barriers of one status: the link of a finding shows only waiting ones", async () => {
  const all = snapshot({ barriers: [barrier({ id: "1", name: "epoch", status: "waiting", created_at: NOW - 60, ended_at: null }), barrier({ id: "2", status: "broken" }), barrier({ id: "3", status: "complete" })] });
  const waiting = await show(Barriers, "/barriers?status=waiting", { snapshot: all });
  expect(chosen(waiting, "Status")).toBe("waiting");
  expect(waiting.textContent).toContain("epoch");
  expect(rowsIn(waiting, "Ended barriers")).toBeNaN();
  const broken = await show(Barriers, "/barriers?status=broken", { snapshot: all });
  expect(broken.textContent).not.toContain("epoch");
  expect(rowsIn(broken, "Ended barriers")).toBe(1);
  expect(rowsIn(await show(Barriers, "/barriers", { snapshot: all }), "Ended barriers")).toBe(2);
});

it("filters of workers are visible and can be cleared, also those that no worker matches", async () => {
  const host = await show(Workers, "/workers?job=old&status=failed", { snapshot: snapshot() });
  expect(host.textContent).toContain("No matching workers");
  expect(chosen(host, "Run")).toBe("old");
  expect(host.querySelector("[aria-pressed=true]")?.textContent).toBe("failed 0");
});
