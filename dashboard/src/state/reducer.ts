/** The one place where the dashboard's state changes: a snapshot, and the events since. Pure. */

import type { Action, State } from "./types";

export function initialState(): State {
  return {
    connection: { phase: "connecting", reason: "", hint: "", nextTryAtMs: null, heardAtMs: null, needsToken: false },
    skewS: 0,
    coordinator: null,
    workers: new Map(),
    datasets: new Map(),
    checkpoints: [],
    barriers: [],
    tasks: [],
    recoveries: [],
    metrics: null,
    logs: [],
    happenings: [],
    generations: [],
    series: { times: [], rps: [], activeWorkers: [], throughput: [], barrierP99: [], checkpointMbS: [], planMs: [] },
    runSeries: new Map(),
  };
}

export function reduce(state: State, action: Action): State {
  if (action.type === "connection") return { ...state, connection: { ...state.connection, ...action.connection } };
  return state;
}
