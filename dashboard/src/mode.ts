/** Live or demo mode, and the theme, stored in the browser. */

import { useSyncExternalStore } from "react";

import { setTransport } from "./api/client";
import { themeChanged } from "./components/colors";
import type { Backend } from "./state/backend";
import { live } from "./state/connection";
import { dispatch, reset } from "./state/store";

export type Mode = "live" | "demo";
export type Theme = "system" | "dark" | "light";

const listeners = new Set<() => void>();

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function stored(key: string): string | null {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

/** Null removes the entry. */
export function store(key: string, value: string | null): void {
  try {
    if (value === null) localStorage.removeItem(key);
    else localStorage.setItem(key, value);
  } catch {
    // Without local storage everything still works.
  }
}

/** Earlier versions stored tokens where scripts could read them. */
export function forgetTokens(): void {
  try {
    sessionStorage.removeItem("strata.token");
    localStorage.removeItem("strata.token");
  } catch {
    // No storage, no token.
  }
}

// --- mode -------------------------------------------------------------------------------------------------------

/** A demo build has no coordinator. */
export const DEMO_ONLY = import.meta.env["VITE_DEMO"] === "1";

let mode: Mode = DEMO_ONLY || new URLSearchParams(location.search).has("demo") || stored("strata.mode") === "demo" ? "demo" : "live";
let stop: () => void = () => undefined;
let starts = 0;

export function startBackend(): void {
  void start();
}

async function start(): Promise<void> {
  const current = ++starts;
  const backend: Backend = mode === "demo" ? (await import("./demo")).demo : live;
  if (current !== starts) return;
  stop();
  reset();
  setTransport(backend.transport);
  stop = backend.start(dispatch);
}

export function setMode(next: Mode): void {
  if (next === mode || DEMO_ONLY) return;
  mode = next;
  store("strata.mode", next);
  for (const listener of listeners) listener();
  void start();
}

/** After signing in or out: reconnect as the new user, in live mode. */
export function restart(): void {
  if (mode === "live") startBackend();
  else setMode("live");
}

export function useMode(): Mode {
  return useSyncExternalStore(subscribe, () => mode);
}

// --- theme ------------------------------------------------------------------------------------------------------

let theme: Theme = (stored("strata.theme") as Theme | null) ?? "system";

export function applyTheme(): void {
  if (theme === "system") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = theme;
  themeChanged();
}

export function setTheme(next: Theme): void {
  theme = next;
  store("strata.theme", next);
  applyTheme();
  for (const listener of listeners) listener();
}

export function useTheme(): Theme {
  return useSyncExternalStore(subscribe, () => theme);
}
