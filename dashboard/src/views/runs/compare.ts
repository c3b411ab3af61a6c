/** Comparison of runs: IDs, colours, final values and configuration differences. Pure. */

import type { RunMetrics } from "../../api/types";

/** More overlaid lines cannot be distinguished. */
export const RUNS_COMPARED = 8;

/** Distinguished by colour and dashes: colour is not the only cue. */
export const LOOKS: readonly { color: string; dash?: readonly number[] }[] = [
  { color: "run-1" },
  { color: "run-2", dash: [7, 3] },
  { color: "run-3", dash: [2, 3] },
  { color: "run-4", dash: [9, 3, 2, 3] },
  { color: "run-5" },
  { color: "run-6", dash: [7, 3] },
  { color: "run-7", dash: [2, 3] },
  { color: "run-8", dash: [9, 3, 2, 3] },
];

/** Unique IDs from a URL parameter. */
export function idsOf(text: string | undefined): string[] {
  const found = (text ?? "").split(",").filter(Boolean).map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return [...new Set(found)].slice(0, RUNS_COMPARED);
}

export function textOf(ids: readonly string[]): string | undefined {
  return ids.length === 0 ? undefined : ids.map(encodeURIComponent).join(",");
}

export interface DiffRow {
  key: string;
  /** One for each run; null where it has none. */
  values: (string | null)[];
  differs: boolean;
}

/** Every setting of any of the runs, by name. */
export function differences(configs: readonly (readonly (readonly [string, string])[])[]): DiffRow[] {
  const maps = configs.map((config) => new Map(config));
  const keys = [...new Set(maps.flatMap((map) => [...map.keys()]))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  return keys.map((key) => {
    const values = maps.map((map) => map.get(key) ?? null);
    return { key, values, differs: values.some((value) => value !== values[0]) };
  });
}

export interface ValueRow {
  name: string;
  /** One for each run; null where it has not logged this. */
  values: ({ last: number | null; min: number | null; max: number | null; step: number } | null)[];
}

/** Final values of each run. */
export function finalValues(runs: readonly (RunMetrics | null | undefined)[], names: readonly string[]): ValueRow[] {
  const maps = runs.map((run) => new Map(run?.metrics.map((m) => [m.name, m])));
  return names.map((name) => ({
    name,
    values: maps.map((map) => {
      const found = map.get(name);
      return found ? { last: found.last, min: found.min, max: found.max, step: found.last_step } : null;
    }),
  }));
}

/** Metrics that most runs have come first. */
export function comparable(runs: readonly (RunMetrics | null | undefined)[]): string[] {
  const seen = new Map<string, number>();
  for (const run of runs) for (const { name } of run?.metrics ?? []) seen.set(name, (seen.get(name) ?? 0) + 1);
  return [...seen.keys()].sort((a, b) => (seen.get(b) ?? 0) - (seen.get(a) ?? 0));
}
