/** Curves of one metric on a canvas, for one run or several: abandoned branches dimmed, failures and checkpoints marked. */

import { useEffect, useMemo, useRef } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import { canDraw, colorOf, useThemeVersion } from "../../components/colors";
import { translucent } from "../../components/Plot";
import { logRange, logTexts, logTicks, tickText, timeTicks } from "../../components/ticks";
import { clock, compact, duration } from "../../format";
import { aligned, type Axis, type Points, type Zoom } from "./curves";

export interface PlotLine {
  /** Stable identity of the line. */
  key: string;
  /** A colour token. */
  color: string;
  dash?: readonly number[];
  points: Points;
  /** Drawn over the points, which are then dimmed; null: no smoothing. */
  smooth: (number | null)[] | null;
  /** A branch abandoned by a rollback. */
  isAbandoned: boolean;
}

export interface PlotMark {
  x: number;
  kind: "incident" | "save";
  text: string;
}

export interface PlotProps {
  lines: readonly PlotLine[];
  marks: readonly PlotMark[];
  axis: Axis;
  log: boolean;
  range: readonly [number, number] | null;
  height: number;
  /** Plots with the same key share one cursor. */
  sync: string;
  /** The steps in the selection, or null without any. Every plot shows them at once; `range` follows. */
  onZoom: (from: number, to: number) => Zoom | null;
  /** Lines with more points of these steps, where they are already loaded. */
  finer: (steps: Zoom) => readonly PlotLine[] | null;
  onReset: () => void;
  /** The pointer's x value, and the markers there. */
  onCursor: (x: number | null, marks: readonly PlotMark[]) => void;
  /** For the PNG export. */
  onCanvas: (canvas: HTMLCanvasElement | null) => void;
}

const GUTTER = 52;
const TICK_PX = 56;
const NEAR_PX = 5;
const LEAST_PX = 6;
const FONT = "11px ui-sans-serif, system-ui, sans-serif";

/** Show a range from loaded points, bypassing React: all plots are drawn before any panel renders. */
const rangeSetters = new WeakMap<uPlot, (range: readonly [number, number], steps: Zoom) => void>();

export default function MetricPlot(props: PlotProps) {
  const { lines, marks, axis, log, range, height } = props;
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const live = useRef(props);
  live.current = props;
  // The range already shown while `range` has not followed yet, and the range it replaces.
  const pending = useRef<{ range: readonly [number, number]; before: PlotProps["range"] } | null>(null);
  if (pending.current && String(pending.current.before) !== String(range)) pending.current = null;
  const theme = useThemeVersion();

  // Each line has a min-max band, its values and, on top, its smoothed values.
  const columns = useMemo(() => lines.flatMap((line) => columnsOf(line)), [lines]);
  const data = useMemo(() => aligned(columns) as unknown as uPlot.AlignedData, [columns]);
  const shape = shapeOf(columns);
  const latest = useRef({ data, columns });
  latest.current = { data, columns };

  useEffect(() => {
    const element = host.current;
    if (!element || !canDraw()) return;
    const created = new uPlot(optionsFor(latest.current.columns, live, () => pending.current?.range ?? live.current.range, Math.max(80, element.clientWidth), height), latest.current.data, element);
    plot.current = created;
    rangeSetters.set(created, (chosen, steps) => {
      pending.current = { range: chosen, before: live.current.range };
      const finer = live.current.finer(steps)?.flatMap(columnsOf);
      // Another shape would need another plot.
      if (finer && shapeOf(finer) === shape) created.setData(aligned(finer) as unknown as uPlot.AlignedData);
      else created.setScale("x", { min: chosen[0], max: chosen[1] });
      countPoints(element, created);
    });
    countPoints(element, created);
    live.current.onCanvas(created.ctx.canvas);
    const watcher = new ResizeObserver(() => {
      if (element.clientWidth > 0 && element.clientWidth !== created.width) created.setSize({ width: element.clientWidth, height });
    });
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      live.current.onCanvas(null);
      live.current.onCursor(null, []);
      created.destroy();
      plot.current = null;
    };
    // Rebuilt only for another shape, scale or theme; data is set below.
  }, [shape, theme, height, axis, log, props.sync]);

  useEffect(() => {
    plot.current?.setData(data);
    if (host.current && plot.current) countPoints(host.current, plot.current);
  }, [data, range, marks]);

  return <div ref={host} aria-hidden data-plot style={{ height }} />;
}

/** Number of points in the visible range, for tests. */
function countPoints(element: HTMLElement, plot: uPlot): void {
  queueMicrotask(() => {
    const { min, max } = plot.scales["x"] ?? {};
    element.dataset["points"] = String(plot.data[0].filter((x) => x >= (min ?? 0) && x <= (max ?? 0)).length);
  });
}

function shapeOf(columns: readonly Column[]): string {
  return columns.map((c) => `${c.key}:${c.role}:${c.line.color}`).join("|");
}

interface Column {
  key: string;
  role: "high" | "low" | "value" | "smooth";
  line: PlotLine;
  xs: readonly number[];
  values: readonly (number | null)[];
}

function columnsOf(line: PlotLine): Column[] {
  const { points, smooth, key } = line;
  const of = (role: Column["role"], values: readonly (number | null)[]): Column => ({ key, role, line, xs: points.xs, values });
  // Where each point is one value the band has no width; keeping it avoids rebuilding the plot.
  const isExact = points.low.length === 0;
  const band = line.isAbandoned ? [] : [of("high", isExact ? points.values : points.high), of("low", isExact ? points.values : points.low)];
  return [...band, of("value", points.values), ...(smooth ? [of("smooth", smooth)] : [])];
}

function optionsFor(columns: readonly Column[], live: { current: PlotProps }, rangeNow: () => PlotProps["range"], width: number, height: number): uPlot.Options {
  const { axis, log, sync } = live.current;
  const grid = { stroke: colorOf("line"), width: 1 };
  const look: uPlot.Axis = { stroke: colorOf("faint"), grid, ticks: { show: false }, font: FONT };
  const bands: uPlot.Band[] = columns.flatMap((c, i) => (c.role === "high" ? [{ series: [i + 1, i + 2] as [number, number], fill: translucent(colorOf(c.line.color), 0.22) }] : []));
  const xText = (v: number) => (axis === "step" ? compact(v) : axis === "wall" ? clock(v) : duration(v));
  return {
    width,
    height,
    padding: [8, 12, 0, 0],
    legend: { show: false },
    cursor: {
      y: false,
      points: { width: 0, size: (_, i) => (hasCursorPoint(columns[i - 1]) ? 7 : 0), fill: (_, i) => colorOf(columns[i - 1]?.line.color ?? "accent") },
      drag: { x: true, y: false, setScale: false },
      bind: { dblclick: () => () => { live.current.onReset(); return null; } },
      // The cursor is shared between charts; a selection belongs to one chart.
      sync: { key: sync, filters: { pub: isMove, sub: isMove } },
    },
    scales: {
      x: { time: false, range: (_, min, max) => { const shown = rangeNow(); return shown ? [...shown] : [min ?? 0, max === min ? (min ?? 0) + 1 : (max ?? 1)]; } },
      y: {
        distr: log ? 3 : 1,
        range: (_, min, max) => {
          if (min === null || max === null) return log ? [0.1, 1] : [0, 1];
          if (log) return logRange(min, max);
          return min === max ? [min - (Math.abs(min) * 0.1 || 1), max + (Math.abs(max) * 0.1 || 1)] : uPlot.rangeNum(min, max, 0.08, true);
        },
      },
    },
    bands,
    axes: [
      {
        ...look, grid: { show: false }, size: 20, gap: 2, space: 52,
        ...(axis === "step" ? {} : { splits: (u: uPlot, _: number, from: number, to: number) => timeTicks(from, to, u.bbox.width / devicePixelRatio, TICK_PX) }),
        values: (_, splits) => splits.map(xText),
      },
      {
        ...look, size: GUTTER, gap: 6, space: 30,
        ...(log ? { splits: (_: uPlot, __: number, min: number, max: number) => logTicks(min, max), values: (_: uPlot, splits: number[]) => logTexts(splits) } : { values: (_: uPlot, splits: number[], __: number, ___: number, step: number) => splits.map((v) => tickText(v, step, splits.at(-1) ?? v)) }),
      },
    ],
    series: [{}, ...columns.map(seriesOf)],
    hooks: {
      setCursor: [
        (u) => {
          const { left } = u.cursor;
          if (left === undefined || left === null || left < 0) return live.current.onCursor(null, []);
          // Only the hovered chart shows markers; the others follow with their values.
          const near = !u.over.matches(":hover") ? [] : live.current.marks.filter((mark) => Math.abs(u.valToPos(mark.x, "x") - left) <= NEAR_PX);
          live.current.onCursor(u.posToVal(left, "x"), near);
        },
      ],
      setSelect: [
        (u) => {
          const { left, width: chosen } = u.select;
          if (chosen < LEAST_PX) return;
          const [from, to] = [u.posToVal(left, "x"), u.posToVal(left + chosen, "x")];
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          const steps = live.current.onZoom(from, to);
          if (steps) for (const each of uPlot.sync(sync).plots) rangeSetters.get(each)?.([from, to], steps);
        },
      ],
      drawAxes: [(u) => drawMarks(u, live.current.marks)],
    },
  };
}

const isMove = (type: string) => type !== "mousedown" && type !== "mouseup" && type !== "dblclick";

/** Abandoned branches have no cursor point: it would snap to their nearest end. */
function hasCursorPoint(column: Column | undefined): boolean {
  return column !== undefined && !column.line.isAbandoned && column.role === (column.line.smooth ? "smooth" : "value");
}

function seriesOf(column: Column): uPlot.Series {
  const { role, line } = column;
  const color = colorOf(line.color);
  if (role === "high" || role === "low") return { stroke: "transparent", width: 0, points: { show: false } };
  const isDim = line.isAbandoned || (role === "value" && line.smooth !== null);
  const single = column.values.filter((v) => v !== null).length === 1;
  return {
    stroke: isDim ? translucent(color, line.isAbandoned ? 0.45 : 0.3) : color,
    width: isDim ? 1 : 1.75,
    spanGaps: false,
    points: { show: single, size: 5, fill: color },
    ...(line.isAbandoned ? { dash: [4, 3] } : line.dash ? { dash: [...line.dash] } : {}),
  };
}

/** Failures are lines with a head, checkpoints are ticks at the bottom: distinguishable without colour. */
function drawMarks(u: uPlot, marks: readonly PlotMark[]): void {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  ctx.save();
  for (const mark of marks) {
    const at = Math.round(u.valToPos(mark.x, "x", true));
    if (at < bbox.left || at > bbox.left + bbox.width) continue;
    const bottom = bbox.top + bbox.height;
    ctx.lineWidth = ratio;
    ctx.beginPath();
    if (mark.kind === "save") {
      ctx.strokeStyle = colorOf("busy");
      ctx.moveTo(at, bottom);
      ctx.lineTo(at, bottom - 6 * ratio);
      ctx.stroke();
      continue;
    }
    ctx.strokeStyle = ctx.fillStyle = colorOf("bad");
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bottom);
    ctx.globalAlpha = 0.6;
    ctx.stroke();
    ctx.globalAlpha = 1;
    ctx.beginPath();
    ctx.moveTo(at - 4 * ratio, bbox.top);
    ctx.lineTo(at + 4 * ratio, bbox.top);
    ctx.lineTo(at, bbox.top + 6 * ratio);
    ctx.fill();
  }
  ctx.restore();
}
