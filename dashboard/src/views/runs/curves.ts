/** Metric curves from the coordinator's response to a plot. Pure; values that were not logged are never drawn. */

import type { Checkpoint, Curve, Incident, MetricCurves } from "../../api/types";
import { isGrave } from "../../state/incidents";
import { rungOf } from "../../state/risk";

export type Axis = "step" | "wall" | "relative";

/** One line of a plot: columns of equal length, by ascending `xs`. */
export interface Points {
  xs: number[];
  values: (number | null)[];
  /** Minimum and maximum of the values that each point summarizes; empty where each is one value. */
  low: (number | null)[];
  high: (number | null)[];
}

export const NO_CURVE: Curve = { steps: [], times: [], values: [], low: [], high: [] };
export const NOTHING: Points = { xs: [], values: [], low: [], high: [] };

/** Time of the first logged point: the origin of relative time. */
export function originOf(curves: readonly MetricCurves[]): number | null {
  let first = Number.POSITIVE_INFINITY;
  for (const { committed, abandoned } of curves) for (const { times } of [committed, ...abandoned]) first = Math.min(first, times[0] ?? first);
  return Number.isFinite(first) ? first : null;
}

export function pointsOf(curve: Curve, axis: Axis, origin: number | null): Points {
  const { values, low, high } = curve;
  if (axis === "step") return { xs: curve.steps, values, low, high };
  const xs = axis === "wall" ? curve.times : curve.times.map((at) => at - (origin ?? at));
  return sorted({ xs, values, low, high });
}

/** Clocks of machines may differ; a plot needs ascending x values. */
function sorted(points: Points): Points {
  if (points.xs.every((x, i) => i === 0 || x >= (points.xs[i - 1] ?? x))) return points;
  const order = points.xs.map((_, i) => i).sort((a, b) => (points.xs[a] ?? 0) - (points.xs[b] ?? 0));
  const by = <T>(column: readonly T[]): T[] => (column.length === 0 ? [] : order.map((i) => column[i] as T));
  return { xs: by(points.xs), values: by(points.values), low: by(points.low), high: by(points.high) };
}

/** A log scale cannot show zero and below. */
export function positive(points: Points): Points {
  const only = (column: readonly (number | null)[]) => column.map((v) => (v !== null && v > 0 ? v : null));
  return { xs: points.xs, values: only(points.values), low: only(points.low), high: only(points.high) };
}

/** Debiased exponential moving average. A `weight` of 0 changes nothing; nulls stay. */
export function smoothed(values: readonly (number | null)[], weight: number): (number | null)[] {
  if (weight <= 0) return [...values];
  let mean = 0;
  let share = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

export type Aligned = [number[], ...(number | null | undefined)[][]];

/** Columns with their own x values, aligned to a common x axis: undefined where a column has no point, which is not a gap. */
export function aligned(columns: readonly { xs: readonly number[]; values: readonly (number | null)[] }[]): Aligned {
  const first = columns[0];
  if (first === undefined) return [[]];
  if (columns.every((c) => c.xs === first.xs)) return [[...first.xs], ...columns.map((c) => [...c.values])];
  const xs = [...new Set(columns.flatMap((c) => [...c.xs]))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const rows = columns.map(({ xs: own, values }) => {
    const row = new Array<number | null | undefined>(xs.length).fill(undefined);
    own.forEach((x, i) => { row[place.get(x) ?? 0] = values[i]; });
    return row;
  });
  return [xs, ...rows];
}

/** Index of the ascending number nearest to `x`; -1 for an empty list. */
export function nearest(xs: readonly number[], x: number): number {
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((xs[middle] ?? 0) < x) low = middle + 1;
    else high = middle;
  }
  if (low > 0 && x - (xs[low - 1] ?? 0) <= (xs[low] ?? 0) - x) return low - 1;
  return xs.length === 0 ? -1 : low;
}

/** The value at the point nearest to `x`; null outside the curve. */
export function valueAt(points: { xs: readonly number[]; values: readonly (number | null)[] }, x: number): number | null {
  const { xs, values } = points;
  const at = nearest(xs, x);
  if (at < 0) return null;
  const spacing = xs.length > 1 ? ((xs.at(-1) ?? 0) - (xs[0] ?? 0)) / (xs.length - 1) : 0;
  if (x < (xs[0] ?? 0) - spacing || x > (xs.at(-1) ?? 0) + spacing) return null;
  return values[at] ?? null;
}

/** The last value that is not null. */
export function lastOf(values: readonly (number | null)[]): number | null {
  return values.findLast((v) => v !== null) ?? null;
}

// --- ranges -----------------------------------------------------------------------------------------------------

/** First and last step, both included. */
export type Zoom = readonly [from: number, to: number];

export function parseZoom(text: string | undefined): Zoom | null {
  const [, first, last] = /^(\d+)-(\d+)$/.exec(text ?? "") ?? [];
  const [from, to] = [Number(first), Number(last)];
  return to > from && to <= 2 ** 53 ? [from, to] : null;
}

/** A selection on an axis in steps, since history is queried by step. Null without points inside. */
export function stepsOf(curve: Curve, axis: Axis, origin: number | null, from: number, to: number): Zoom | null {
  if (axis === "step") {
    const zoom: Zoom = [Math.max(0, Math.floor(from)), Math.ceil(to)];
    return zoom[1] > zoom[0] ? zoom : null;
  }
  const shift = axis === "relative" ? (origin ?? 0) : 0;
  const inside = curve.steps.filter((_, i) => { const at = (curve.times[i] ?? 0) - shift; return at >= from && at <= to; });
  const first = inside[0];
  const last = inside.at(-1);
  return first === undefined || last === undefined || last <= first ? null : [first, last];
}

/** The points of a range of steps. */
export function within(curve: Curve, [from, to]: Zoom): Curve {
  const first = curve.steps.findIndex((step) => step >= from);
  if (first < 0) return NO_CURVE;
  const stop = curve.steps.findLastIndex((step) => step <= to) + 1;
  const cut = <T>(column: T[]) => column.slice(first, Math.max(first, stop));
  return { steps: cut(curve.steps), times: cut(curve.times), values: cut(curve.values), low: cut(curve.low), high: cut(curve.high) };
}

// --- marks ------------------------------------------------------------------------------------------------------

export interface Mark {
  kind: "incident" | "save";
  step: number | null;
  at: number;
  text: string;
}

/** Failures and completed checkpoints of a run. Memory-only checkpoints are not marked: there may be one every few steps. */
export function marksOf(incidents: readonly Incident[], checkpoints: readonly Checkpoint[]): Mark[] {
  const failures = incidents.filter(isGrave).map((one): Mark => ({
    kind: "incident",
    step: one.resumed_step === null ? null : one.resumed_step + (one.lost_steps ?? 0),
    at: one.opened_at,
    text: one.text,
  }));
  const saves = checkpoints
    .filter((one) => one.status === "completed" && one.tiers.some((tier) => rungOf(tier) !== "memory"))
    .map((one): Mark => ({ kind: "save", step: one.step, at: one.created_at, text: `Checkpoint at step ${one.step.toLocaleString("en-US")}` }));
  return [...saves, ...failures];
}

/** Position of a marker; null where unknown. A failure without a step is placed at the step the curve had at that time. */
export function placeOf(mark: Mark, axis: Axis, origin: number | null, curve: Curve): number | null {
  if (axis === "wall") return mark.at;
  if (axis === "relative") return origin === null ? null : mark.at - origin;
  if (mark.step !== null) return mark.step;
  let step: number | null = null;
  for (let i = 0; i < curve.times.length && (curve.times[i] ?? 0) <= mark.at; i += 1) step = curve.steps[i] ?? step;
  return step;
}

// --- export -----------------------------------------------------------------------------------------------------

function cell(value: string | number | null | undefined): string {
  if (value === null || value === undefined) return "";
  const text = String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function csvOf(rows: readonly (readonly (string | number | null | undefined)[])[]): string {
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

/** Every point of the given curves, one per line. */
export function curvesCsv(runs: readonly { run: string; curves: MetricCurves }[]): string {
  const rows: (string | number | null)[][] = [["run", "metric", "branch", "step", "time", "value", "min", "max"]];
  for (const { run, curves } of runs) {
    const branches = [{ name: "committed", curve: curves.committed }, ...curves.abandoned.map((curve) => ({ name: `abandoned, generation ${curve.generation}`, curve }))];
    for (const { name, curve } of branches) {
      curve.steps.forEach((step, i) => {
        const value = curve.values[i] ?? null;
        rows.push([run, curves.name, name, step, new Date((curve.times[i] ?? 0) * 1000).toISOString(), value, curve.low[i] ?? value, curve.high[i] ?? value]);
      });
    }
  }
  return csvOf(rows);
}
