/** Charts of series over time. The plotting code is loaded with the first chart; a placeholder keeps its space. */

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
  /** Unix seconds, or steps with `x="number"`; ascending. */
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
  /** Timestamps marked with a vertical line, with a colour token. */
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

