/** Panel layout: visible metrics, order and pins, stored in the browser for all runs or for one. Pure except `load` and `save`. */

import { store, stored } from "../../mode";

export interface Layout {
  /** Manually placed panels, in order. Other metrics follow in the usual order. */
  order: string[];
  removed: string[];
  /** Shown first, and on the overview of the run. */
  pinned: string[];
}

export const EMPTY: Layout = { order: [], removed: [], pinned: [] };
/** More panels are shown only on request. */
export const PANELS_SHOWN = 60;
const NAMES_KEPT = 500;
const KEY = "strata.panels";

/** Loss first, system metrics last. */
export function usualOrder(names: readonly string[]): string[] {
  const weight = (name: string) => (/^(train[/_.-])?loss$/i.test(name) ? 0 : /loss/i.test(name) ? 1 : name.startsWith("system/") ? 3 : 2);
  return [...names].sort((a, b) => weight(a) - weight(b) || a.localeCompare(b, "en", { numeric: true }));
}

/** The panels of a run that has these metrics. */
export function panelsOf(names: readonly string[], layout: Layout): string[] {
  const known = new Set(names);
  const removed = new Set(layout.removed);
  const placed = [...new Set([...layout.pinned, ...layout.order])].filter((name) => known.has(name) && !removed.has(name));
  const seen = new Set(placed);
  const rest = usualOrder(names).filter((name) => !seen.has(name) && !removed.has(name));
  return [...placed, ...rest.slice(0, Math.max(0, PANELS_SHOWN - placed.length))];
}

export function withPanel(layout: Layout, name: string): Layout {
  return { ...layout, removed: layout.removed.filter((n) => n !== name), order: [name, ...layout.order.filter((n) => n !== name)] };
}

export function withoutPanel(layout: Layout, name: string): Layout {
  return { removed: [...layout.removed.filter((n) => n !== name), name], order: layout.order.filter((n) => n !== name), pinned: layout.pinned.filter((n) => n !== name) };
}

export function togglePin(layout: Layout, name: string): Layout {
  const isPinned = layout.pinned.includes(name);
  return { ...layout, pinned: isPinned ? layout.pinned.filter((n) => n !== name) : [...layout.pinned, name] };
}

/** Moves `name` to the position of `target`; a pinned panel stays among the pinned. */
export function moved(layout: Layout, shown: readonly string[], name: string, target: string): Layout {
  const isPinned = layout.pinned.includes(name);
  if (name === target || isPinned !== layout.pinned.includes(target)) return layout;
  const list = shown.filter((n) => layout.pinned.includes(n) === isPinned);
  const to = list.indexOf(target);
  if (to < 0 || !list.includes(name)) return layout;
  const next = list.filter((n) => n !== name);
  next.splice(to, 0, name);
  return isPinned ? { ...layout, pinned: next } : { ...layout, order: next };
}

// --- stored ----------------------------------------------------------------------------------------------------

export type Scope = "all" | "run";

export function load(run: string): { scope: Scope; layout: Layout } {
  const own = parsed(stored(`${KEY}:${run}`));
  return own ? { scope: "run", layout: own } : { scope: "all", layout: parsed(stored(KEY)) ?? EMPTY };
}

export function save(run: string, scope: Scope, layout: Layout | null): void {
  store(scope === "run" ? `${KEY}:${run}` : KEY, layout === null ? null : JSON.stringify(layout));
}

/** It may be edited by hand or written by an earlier version. */
export function parsed(text: string | null): Layout | null {
  try {
    const found = JSON.parse(text ?? "null") as Partial<Record<keyof Layout, unknown>> | null;
    if (found === null || typeof found !== "object") return null;
    const names = (value: unknown) => (Array.isArray(value) ? value.filter((n): n is string => typeof n === "string").slice(0, NAMES_KEPT) : []);
    return { order: names(found.order), removed: names(found.removed), pinned: names(found.pinned) };
  } catch {
    return null;
  }
}
