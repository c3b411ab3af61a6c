/** The store: the reducer's state, passed to React at most once per frame. */

import { useRef, useSyncExternalStore } from "react";

import { initialState, reduce } from "./reducer";
import type { Action, State } from "./types";

let state: State = initialState();
let shown: State = state;
let waiting = false;
const listeners = new Set<() => void>();

export function dispatch(action: Action): void {
  state = reduce(state, action);
  if (waiting) return;
  waiting = true;
  // A hidden tab has no animation frames, but must not fall behind.
  if (document.hidden) setTimeout(show, 250);
  else requestAnimationFrame(show);
}

function show(): void {
  waiting = false;
  if (shown === state) return;
  shown = state;
  for (const listener of listeners) listener();
}

export function reset(): void {
  state = initialState();
  show();
}

export function getState(): State {
  return shown;
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** A part of the state. Rerenders when it changes according to `equal`. */
export function useStore<T>(select: (state: State) => T, equal: (a: T, b: T) => boolean = Object.is): T {
  const last = useRef<{ state: State; select: (state: State) => T; value: T } | null>(null);
  return useSyncExternalStore(subscribe, () => {
    const known = last.current;
    if (known !== null && known.state === shown && known.select === select) return known.value;
    const value = select(shown);
    const kept = known !== null && equal(known.value, value) ? known.value : value;
    last.current = { state: shown, select, value: kept };
    return kept;
  });
}

/** The state, without rerendering for log lines. */
export function useStory(): State {
  return useStore(everything, sameStory);
}

function everything(s: State): State {
  return s;
}

function sameStory(a: State, b: State): boolean {
  return (
    a.workers === b.workers && a.checkpoints === b.checkpoints && a.tasks === b.tasks && a.barriers === b.barriers && a.recoveries === b.recoveries && a.incidents === b.incidents && a.jobs === b.jobs &&
    a.eventLines === b.eventLines && a.generations === b.generations && a.series === b.series && a.runSeries === b.runSeries && a.metrics === b.metrics &&
    a.coordinator === b.coordinator && a.connection.phase === b.connection.phase && a.connection.reason === b.connection.reason
  );
}

// --- time --------------------------------------------------------------------------------------------------

let nowMs = Date.now();
const clocks = new Set<() => void>();
let ticking: ReturnType<typeof setInterval> | null = null;

function tick(): void {
  nowMs = Date.now();
  for (const listener of clocks) listener();
}

function subscribeClock(listener: () => void): () => void {
  clocks.add(listener);
  ticking ??= setInterval(tick, 1000);
  return () => {
    clocks.delete(listener);
    if (clocks.size === 0 && ticking !== null) {
      clearInterval(ticking);
      ticking = null;
    }
  };
}

/** Browser clock in ms, updated once a second, the same for the whole page. */
export function useNowMs(): number {
  return useSyncExternalStore(subscribeClock, () => nowMs);
}

/** The coordinator's clock in Unix seconds, updated once a second. Stops while disconnected. */
export function useServerNow(): number {
  const now = useNowMs();
  return useStore((s) => serverNow(s, now));
}

/** The same for a given state. Ages stop while disconnected: what happened since is unknown. */
export function serverNow(of: State, nowMs: number): number {
  const { phase, updatedAtMs } = of.connection;
  return ((phase === "disconnected" ? updatedAtMs : null) ?? nowMs) / 1000 + of.skewS;
}

/** Whether the data shown may be stale. */
export function useStale(): boolean {
  return useStore((s) => s.connection.phase === "disconnected" && s.connection.updatedAtMs !== null);
}
