/**
 * Histograms: stored as quantiles, each a metric of its own (`grads#q50`); combined here into one metric named `grads#`.
 * Pure.
 */

import type { Curve, MetricCurves, MetricSummary } from "../../api/types";

export const MARK = "#";
export const PERCENTS = [0, 1, 5, 10, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90, 95, 99, 100] as const;
const REST = ["mean", "std", "count"];

export const isHistogram = (name: string) => name.endsWith(MARK);
/** The display name. */
export const label = (name: string) => (isHistogram(name) ? name.slice(0, -MARK.length) : name);
export const partsOf = (name: string) => PERCENTS.map((percent) => `${name}q${percent}`);

/** One metric for all parts of a histogram: its median, with the overall min and max. */
export function folded(metrics: readonly MetricSummary[]): MetricSummary[] {
  const known = new Map(metrics.map((m) => [m.name, m]));
  const stems = metrics.filter((m) => m.name.endsWith(`${MARK}q0`)).map((m) => m.name.slice(0, -2));
  const complete = stems.filter((stem) => [...partsOf(stem), ...REST.map((rest) => stem + rest)].every((part) => known.has(part)));
  const taken = new Set(complete.flatMap((stem) => [...partsOf(stem), ...REST.map((rest) => stem + rest)]));
  const merged = complete.flatMap((stem): MetricSummary[] => {
    const [median, low, high] = [known.get(`${stem}q50`), known.get(`${stem}q0`), known.get(`${stem}q100`)];
    return median ? [{ ...median, name: stem, min: low?.min ?? null, max: high?.max ?? null }] : [];
  });
  return [...metrics.filter((m) => !taken.has(m.name)), ...merged];
}

export interface Spread extends MetricCurves {
  /** Quantile curves in the order of `PERCENTS`; none for a scalar metric. */
  quantiles?: readonly Curve[];
}

/** A histogram from the curves of its parts. */
export function spreadOf(name: string, parts: readonly MetricCurves[]): Spread {
  const at = (percent: number) => parts[PERCENTS.indexOf(percent as (typeof PERCENTS)[number])];
  const [median, low, high] = [at(50), at(0), at(100)];
  if (!median || !low || !high) throw new Error(`${name} has no quantiles`);
  const between = (m: Curve, l: Curve | undefined, h: Curve | undefined): Curve => (l && h ? { ...m, low: lowest(l), high: highest(h) } : m);
  return {
    name: label(name),
    committed: between(median.committed, low.committed, high.committed),
    abandoned: median.abandoned,
    quantiles: parts.map((part) => part.committed),
  };
}

const lowest = (curve: Curve) => (curve.low.length > 0 ? curve.low : curve.values);
const highest = (curve: Curve) => (curve.high.length > 0 ? curve.high : curve.values);

/** Nested ranges around the median: 5 to 95 %, and the middle half. */
export function fanOf(spread: Spread): Curve[] {
  const { quantiles, committed } = spread;
  if (!quantiles) return [];
  return ([[5, 95], [25, 75]] as const).flatMap(([from, to]) => {
    const [low, high] = [quantiles[PERCENTS.indexOf(from)], quantiles[PERCENTS.indexOf(to)]];
    return low && high ? [{ ...committed, low: low.values, high: high.values }] : [];
  });
}

export interface Shape {
  from: number;
  to: number;
  /** Share of the values per bin. */
  bars: number[];
}

/** Histogram between the 1st and 99th percentile from these quantiles; null where incomplete. */
export function shapeOf(quantiles: readonly (number | null | undefined)[], bars = 48): Shape | null {
  const known = quantiles.filter((q): q is number => q !== null && q !== undefined);
  if (known.length < PERCENTS.length) return null;
  const [from, to] = [known[1] ?? 0, known[PERCENTS.length - 2] ?? 0];
  if (!(to > from)) return { from, to, bars: [1] };
  const below = (x: number) => {
    const i = known.findLastIndex((q) => q <= x);
    const [q0, q1] = [known[i] ?? from, known[i + 1]];
    const [p0, p1] = [PERCENTS[i] ?? 0, PERCENTS[i + 1] ?? 100];
    return q1 === undefined || q1 <= q0 ? p0 : p0 + ((p1 - p0) * (x - q0)) / (q1 - q0);
  };
  const edges = Array.from({ length: bars + 1 }, (_, i) => below(from + ((to - from) * i) / bars));
  return { from, to, bars: edges.slice(1).map((edge, i) => (edge - (edges[i] ?? 0)) / 100) };
}
