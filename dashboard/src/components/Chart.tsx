/** Charts of series over time. What draws them is loaded when the first one is shown: until then its place is kept. */

import { lazy, Suspense } from "react";

export { RIGHT } from "./ticks";

export interface Line {
  label: string;
  /** A colour token: "accent", "busy", "good", "warn". */
  color: string;
  /** Parallel to `times`; null where nothing was measured. */
  values: readonly (number | null)[];
  fill?: boolean;
}

export interface ChartProps {
  label: string;
  /** Unix seconds, or steps with `x="number"`; growing. */
  times: readonly number[];
  lines: readonly Line[];
  unit?: string;
  format?: (value: number | null) => string;
  height?: number;
  x?: "time" | "number";
  /** Fixed horizontal range, so that charts under one another agree. */
  range?: readonly [number, number] | undefined;
  /** Charts with the same key share one cursor. */
  sync?: string;
  /** Shown until there are two points. */
  empty?: string;
  /** Moments marked with a vertical line, with a colour token. */
  marks?: readonly { at: number; color: string }[];
  /** Space for the numbers at the left, so that charts and a timeline line up. */
  gutter?: number;
}

const Plot = lazy(() => import("./Plot").then((module) => ({ default: module.Plot })));

export function Chart(props: ChartProps) {
  return (
    <Suspense fallback={<div aria-hidden style={{ height: (props.height ?? 160) + 24 }} />}>
      <Plot {...props} />
    </Suspense>
  );
}

/** A line without axes, for a card. */
export function Sparkline(props: { values: readonly (number | null)[]; color?: string; label: string }) {
  const known = props.values.filter((v): v is number => v !== null);
  if (known.length < 2) return <p className="h-7 text-sm text-faint">{known.length === 0 ? "no data yet" : ""}</p>;
  const low = Math.min(...known, 0);
  const high = Math.max(...known);
  const span = high - low || 1;
  const step = 100 / (props.values.length - 1);
  let path = "";
  let pen = false;
  props.values.forEach((value, i) => {
    if (value === null) {
      pen = false;
      return;
    }
    path += `${pen ? "L" : "M"}${(i * step).toFixed(2)} ${(26 - ((value - low) / span) * 24).toFixed(2)}`;
    pen = true;
  });
  return (
    <svg role="img" aria-label={props.label} viewBox="0 0 100 28" preserveAspectRatio="none" className="h-7 w-full">
      <path d={path} fill="none" stroke={`var(--color-${props.color ?? "accent"})`} strokeWidth="1.5" vectorEffect="non-scaling-stroke" strokeLinejoin="round" />
    </svg>
  );
}
