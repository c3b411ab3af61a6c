/** Demo mode: a simulated run that fails and recovers, played through the same reducer as a real one. */

import type { Backend } from "../state/backend";
import type { Action } from "../state/types";
import { JOB, Simulation } from "./simulation";
import { transportFor } from "./transport";

const PAST_S = 15 * 60;
const EVERY_MS = 250;
const SNAPSHOT_EVERY = 4;

let simulation: Simulation | null = null;

/** One run while the page is open, started 15 minutes ago. */
function current(): Simulation {
  simulation ??= new Simulation({ startedAt: Date.now() / 1000 - PAST_S });
  return simulation;
}

export const demo: Backend = {
  start(dispatch: (action: Action) => void): () => void {
    const run = current();
    const past = run.advance(Date.now() / 1000).filter((event) => event.kind !== "metrics" && event.kind !== "logs");
    dispatch({ type: "snapshot", snapshot: run.snapshot(), atMs: Date.now() });
    dispatch({ type: "past", events: past });
    dispatch({ type: "recoveries", recoveries: run.recoveries });
    dispatch({ type: "incidents", incidents: run.incidents });
    dispatch({ type: "history", series: structuredClone(run.series) });
    dispatch({ type: "runHistory", jobId: JOB, series: structuredClone(run.runSeries) });
    dispatch({ type: "connection", connection: { phase: "live", reason: "", hint: "", nextAttemptAtMs: null, updatedAtMs: Date.now() } });
    let turn = 0;
    const timer = setInterval(() => {
      const events = run.advance(Date.now() / 1000);
      if (events.length > 0) dispatch({ type: "events", events, atMs: Date.now() });
      turn += 1;
      if (events.some((event) => event.kind === "incident_reported" || event.kind === "recovery_recorded")) dispatch({ type: "incidents", incidents: run.incidents });
      if (turn % SNAPSHOT_EVERY === 0) {
        dispatch({ type: "snapshot", snapshot: run.snapshot(), atMs: Date.now() });
        dispatch({ type: "connection", connection: { updatedAtMs: Date.now() } });
      }
    }, EVERY_MS);
    return () => clearInterval(timer);
  },
  transport: transportFor(current),
};
