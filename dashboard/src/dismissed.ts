/** Incidents dismissed in this browser. */

import { useSyncExternalStore } from "react";

import type { Incident } from "./api/types";
import { keyOf } from "./state/incidents";

const KEY = "strata.dismissed";
const KEPT = 500;
const listeners = new Set<() => void>();
let dismissed: ReadonlySet<string> = read();

function read(): ReadonlySet<string> {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return new Set(Array.isArray(found) ? found.filter((each): each is string => typeof each === "string") : []);
  } catch {
    return new Set();
  }
}

export function dismiss(incidents: readonly Incident[]): void {
  dismissed = new Set([...dismissed, ...incidents.map(keyOf)].slice(-KEPT));
  try {
    localStorage.setItem(KEY, JSON.stringify([...dismissed]));
  } catch {
    // Without local storage they reappear on the next page load.
  }
  for (const listener of listeners) listener();
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  // Dismissed in another tab of this browser.
  const elsewhere = (event: StorageEvent) => {
    if (event.key !== KEY) return;
    dismissed = read();
    listener();
  };
  addEventListener("storage", elsewhere);
  return () => {
    listeners.delete(listener);
    removeEventListener("storage", elsewhere);
  };
}

export function useDismissed(): ReadonlySet<string> {
  return useSyncExternalStore(subscribe, () => dismissed);
}
