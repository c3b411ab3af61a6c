/** Colour tokens resolved for canvas drawing; reread when the theme changes. */

import { useSyncExternalStore } from "react";

const cache = new Map<string, string>();
const listeners = new Set<() => void>();
let version = 0;
let probe: HTMLElement | null = null;

export function themeChanged(): void {
  cache.clear();
  version += 1;
  for (const listener of listeners) listener();
}

if (typeof matchMedia === "function") matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);

/** Whether there is a canvas to draw on: a browser may refuse one, for want of memory or because of its settings. */
export function canDraw(): boolean {
  return document.createElement("canvas").getContext("2d") !== null;
}

/** "accent" → the current value of `--color-accent`. */
export function colorOf(token: string): string {
  const known = cache.get(token);
  if (known !== undefined) return known;
  if (probe === null) {
    probe = document.createElement("span");
    probe.style.display = "none";
    document.body.append(probe);
  }
  probe.style.color = `var(--color-${token})`;
  const color = getComputedStyle(probe).color;
  cache.set(token, color);
  return color;
}

/** A number that changes with the colours. */
export function useThemeVersion(): number {
  return useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => version,
  );
}
