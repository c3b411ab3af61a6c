// @vitest-environment happy-dom

import { describe, expect, it } from "vitest";

import { runsOf } from "../state/runs";
import { barrier, checkpoint, NOW, snapshot, worker } from "../state/samples";
import { getState } from "../state/store";
import { Barriers } from "./Barriers";
import { Checkpoints } from "./Checkpoints";
import { RiskStat } from "./checkpoints/Safety";
import { Incidents } from "./Incidents";
import { Logs } from "./Logs";
import { rowsIn, show } from "./rendering";
import { TaskDialogs } from "./Tasks";
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

it("the exceptions of a large fleet are coloured as chosen", async () => {
  const resources = { cpu_percent: 50, memory_used_bytes: 0, disk_read_bytes: 0, disk_write_bytes: 0, network_rx_bytes: 0, network_tx_bytes: 0, gpus: [] };
  const workers = Array.from({ length: 250 }, (_, i) => worker({ id: `w${i}`, resources, slow: i === 7, last_heartbeat: Date.now() / 1000 }));
  const host = await show(Workers, "/workers?color=load", { snapshot: snapshot({ workers }) });
  expect(host.querySelector("[data-id=w7]")?.textContent).toContain("CPU 50 %");
});

describe("what is not known is not said to be nothing", () => {
  const said = () => document.body.textContent ?? "";

  it("checkpoints and incidents that could not be fetched", async () => {
    const checkpoints = await show(Checkpoints, "/checkpoints", { snapshot: snapshot() });
    expect(checkpoints.textContent).toContain("refused: /checkpoints");
    expect(checkpoints.textContent).not.toMatch(/none completed|No checkpoints/);
    const incidents = await show(Incidents, "/incidents?incident=7", { snapshot: snapshot() });
    expect(incidents.textContent).toContain("refused: /incidents");
    expect(said()).not.toMatch(/No incidents|0 incidents|not found/);
  });

  it("log lines that could not be fetched", async () => {
    const host = await show(Logs, "/logs", { snapshot: snapshot() });
    expect(host.textContent).toContain("refused: /logs");
    expect(host.textContent).not.toContain("No log lines");
  });

  it("a checkpoint that does not exist, once all are known", async () => {
    await show(Checkpoints, "/checkpoints?checkpoint=x", { snapshot: snapshot(), responses: { "/checkpoints": [] } });
    expect(said()).toContain("Checkpoint not found");
  });

  it("a worker or a task before the first snapshot", async () => {
    await show(Workers, "/workers?worker=w0");
    expect(said()).not.toContain("not found");
    await show(() => <TaskDialogs starts={false} task="t" onChange={() => undefined} />, "/");
    expect(said()).not.toContain("not found");
    await show(Workers, "/workers?worker=w9", { snapshot: snapshot() });
    expect(said()).toContain("Worker not found");
  });

  it("work at risk of a run that trains", async () => {
    const risk = async (of: Parameters<typeof show>[2]) => (await show(() => <RiskStat run={runsOf(getState())[0]!} />, "/", of)).textContent;
    expect(await risk({ snapshot: snapshot() })).toBe("Work at risk–not available");
    const losses = [{ domain: "process", label: "Process dies", steps: 3, from_step: 97, text: "3 steps" }, { domain: "machine", label: "Machine dies", steps: null, from_step: null, text: "everything" }];
    expect(await risk({ snapshot: snapshot(), responses: { "/jobs/job/safety": { losses } } })).toBe("Work at risk3 stepsif a process dies; machine dies: all");
    expect(await risk({ snapshot: snapshot({ workers: [worker({ status: "idle" })] }) })).toBe("Work at risknonenot training");
  });
});
