/** One metric of one run or several, overlaid. Data is fetched when the panel comes into view. */

import { Ellipsis, GripVertical, Pin, TriangleAlert } from "lucide-react";
import { lazy, memo, Suspense, useEffect, useMemo, useRef, useState, type DragEvent } from "react";

import type { Curve, MetricCurves } from "../../api/types";
import { colorOf } from "../../components/colors";
import { IconButton } from "../../components/controls";
import { Dialog } from "../../components/Dialog";
import { Menu, type MenuItem } from "../../components/Menu";
import { ErrorNote } from "../../components/states";
import { fileName, saveBlob } from "../../download";
import { bytes, count, duration, timestamp, number, plural } from "../../format";
import { curvesCsv, lastOf, nearest, NO_CURVE, NOTHING, originOf, placeOf, pointsOf, positive, smoothed, stepsOf, valueAt, type Axis, type Mark, type Zoom } from "./curves";
import { fanOf, isHistogram, label, PERCENTS, shapeOf, type Spread } from "./histograms";
import { finerOf, lookAhead, useCurves, useFullCurve } from "./metrics";
import type { PlotLine, PlotMark } from "./MetricPlot";
import type { Change, Settings } from "./settings";

const loadPlot = () => import("./MetricPlot");
const MetricPlot = lazy(loadPlot);
/** Loads the plotting code in parallel with the data. */
export const preloadPlot = () => void loadPlot();

export interface PanelRun {
  /** The coordinator's ID. */
  id: string;
  label: string;
  color: string;
  dash?: readonly number[];
  /** Time of its first start; null where unknown. */
  origin: number | null;
  /** Whether more data is expected. */
  live: boolean;
  marks: readonly Mark[];
}

export interface PanelActions {
  isPinned: boolean;
  onPin: () => void;
  onRemove: () => void;
  /** Neighbouring panels; null at the ends. */
  before: string | null;
  after: string | null;
  onMove: (name: string, target: string) => void;
}

interface Props {
  name: string;
  runs: readonly PanelRun[];
  settings: Settings;
  change: Change;
  actions?: PanelActions | undefined;
  /** How many of the values were NaN or infinite. */
  nonfinite?: number;
  height?: number;
  /** Probably in view at once: data is fetched without waiting for that. */
  eager?: boolean;
}

const HEIGHT = 180;
const HEAD = 20;
/** Panels in view on most screens before scrolling. */
export const EAGER = 9;
const BRANCHES_DRAWN = 30;
const AHEAD_AFTER_MS = 400;
const SHAPE = 44;
const POINTS = 500;
const DRAGGED = "application/x-strata-panel";

/** A panel that was never in view is only a placeholder with its name. */
export const Panel = memo(function Panel(props: Props) {
  const frame = useRef<HTMLElement>(null);
  const [inView, wasInView] = useInView(frame, props.eager ?? false);
  const [isTarget, setTarget] = useState(false);
  const { name, actions } = props;
  const drop = actions && {
    onDragOver: (event: DragEvent) => { if (event.dataTransfer.types.includes(DRAGGED)) { event.preventDefault(); setTarget(true); } },
    onDragLeave: (event: DragEvent) => { if (!event.currentTarget.contains(event.relatedTarget as Node | null)) setTarget(false); },
    onDrop: (event: DragEvent) => {
      setTarget(false);
      const dragged = event.dataTransfer.getData(DRAGGED);
      if (dragged) { event.preventDefault(); actions.onMove(dragged, name); }
    },
  };
  return (
    <section
      ref={frame}
      aria-label={label(name)}
      data-panel={name}
      className={`group flex min-w-0 flex-col rounded-lg border bg-surface px-3 pt-1.5 pb-2 ${isTarget ? "border-accent shadow-[0_0_0_1px_var(--color-accent)]" : ""}`}
      {...drop}
    >
      {wasInView ? <Content {...props} frame={frame} inView={inView} /> : <><header className="flex min-h-8 items-center"><h3 className="foreign min-w-0 truncate font-medium">{label(name)}</h3></header><div style={{ height: (props.height ?? HEIGHT) + HEAD }} /></>}
    </section>
  );
});

function Content(props: Props & { frame: { current: HTMLElement | null }; inView: boolean }) {
  const { name, actions, frame, inView } = props;
  const [isWide, setWide] = useState(false);
  const canvas = useRef<HTMLCanvasElement | null>(null);
  const full = useFullCurve();
  const [failure, setFailure] = useState<unknown>(null);

  const saveCsv = async () => {
    setFailure(null);
    try {
      const found = await Promise.all(props.runs.map(async (run) => ({ run: run.label, curves: await full(run.id, name, props.settings.zoom) })));
      saveBlob(`${fileName(...props.runs.map((r) => r.label), label(name))}.csv`, new Blob([curvesCsv(found)], { type: "text/csv" }));
    } catch (error) {
      setFailure(error);
    }
  };
  const savePng = () => {
    if (canvas.current) picture(canvas.current, label(name), props.runs).toBlob((blob) => { if (blob) saveBlob(`${fileName(...props.runs.map((r) => r.label), label(name))}.png`, blob); });
  };
  const items: MenuItem[] = [
    { label: "Enlarge", onSelect: () => setWide(true) },
    { label: "Export CSV", onSelect: () => void saveCsv() },
    { label: "Export PNG", onSelect: savePng },
    ...(actions
      ? [
          { label: "Move left", disabled: actions.before === null, onSelect: () => actions.before !== null && actions.onMove(name, actions.before) },
          { label: "Move right", disabled: actions.after === null, onSelect: () => actions.after !== null && actions.onMove(name, actions.after) },
          { label: "Remove panel", onSelect: actions.onRemove },
        ]
      : []),
  ];
  return (
    <>
      <header className="flex min-h-8 items-center gap-1">
        <h3 className="foreign min-w-0 truncate font-medium" title={label(name)}>{label(name)}</h3>
        {(props.nonfinite ?? 0) > 0 && <span className="inline-flex shrink-0 items-center gap-1 text-sm text-warn" title={`${count(props.nonfinite)} values were NaN or infinite`}><TriangleAlert aria-hidden className="size-3.5" />{count(props.nonfinite)} NaN/Inf</span>}
        <span className="ml-auto flex shrink-0 items-center">
          {actions && (
          <span
            draggable
            aria-hidden
            title="Drag to reorder"
            className="hidden cursor-grab text-faint opacity-0 group-focus-within:opacity-100 group-hover:opacity-100 active:cursor-grabbing sm:inline-flex"
            onDragStart={(event) => {
              event.dataTransfer.setData(DRAGGED, name);
              event.dataTransfer.effectAllowed = "move";
              if (frame.current) event.dataTransfer.setDragImage(frame.current, 12, 12);
            }}
          >
            <GripVertical className="size-4" />
          </span>
        )}
          {actions && <IconButton label={`${actions.isPinned ? "Unpin" : "Pin"} ${label(name)}`} aria-pressed={actions.isPinned} className={`size-7 ${actions.isPinned ? "text-accent" : ""}`} onClick={actions.onPin}><Pin aria-hidden className="size-3.5" fill={actions.isPinned ? "currentColor" : "none"} /></IconButton>}
          <Menu label={`Actions for ${label(name)}`} icon={<Ellipsis aria-hidden className="size-4" />} items={items} />
        </span>
      </header>
      {failure !== null && <ErrorNote error={failure} onRetry={() => void saveCsv()} />}
      <Body {...props} height={props.height ?? HEIGHT} enabled={inView} onCanvas={(created) => { canvas.current = created; }} />
      {isWide && (
        <Dialog open wide="most" onClose={() => setWide(false)} title={label(name)} description={props.runs.map((r) => r.label).join(", ")}>
          <Body {...props} height={Math.max(240, Math.round(window.innerHeight * 0.55))} enabled points={2 * POINTS} onCanvas={() => undefined} />
        </Dialog>
      )}
    </>
  );
}

function Body(props: Props & { height: number; enabled: boolean; points?: number; onCanvas: (canvas: HTMLCanvasElement | null) => void }) {
  const { name, runs, settings, change, height, enabled } = props;
  const { axis, log, smooth, zoom } = settings;
  const { curves, isPending, isOld, error } = useCurves(runs, name, { zoom, points: props.points ?? POINTS, enabled });
  const drawn = useMemo(() => drawingOf(runs, curves, { axis, log, smooth, marks: settings.marks }), [runs, curves, axis, log, smooth, settings.marks]);
  const range = useMemo(() => rangeOf(curves, axis, drawn.origins, zoom), [curves, axis, drawn.origins, zoom]);

  useEffect(() => {
    if (!enabled || isPending || isOld) return;
    const timer = setTimeout(() => { for (const run of runs) lookAhead(run.id, name, zoom); }, AHEAD_AFTER_MS);
    return () => clearTimeout(timer);
  }, [enabled, isPending, isOld, runs, name, zoom]);

  const shape = useRef<SVGSVGElement>(null);
  const values = useRef<(HTMLSpanElement | null)[]>([]);
  const place = useRef<HTMLSpanElement>(null);
  const note = useRef<HTMLParagraphElement>(null);
  // Bypasses React: the cursor moves on many panels at once, many times a second.
  const show = useMemo(
    () => (x: number | null, marks: readonly PlotMark[]) => {
      drawn.heads.forEach((head, i) => {
        const element = values.current[i];
        const spread = curves[i]?.quantiles;
        if (element) element.textContent = (x === null ? valueText(name, lastOf(head.values)) : valueText(name, valueAt(head, x))) + (spread ? middleOf(name, spread, head.xs, x) : "");
      });
      if (shape.current) drawShape(shape.current, runs, curves, drawn.heads, x);
      if (place.current) place.current.textContent = x === null ? "" : placeText(drawn.heads, x, axis);
      if (note.current) {
        note.current.textContent = [...new Set(marks.map((m) => m.text))].slice(0, 3).join(" · ");
        note.current.hidden = marks.length === 0;
      }
    },
    [drawn, axis, name, runs, curves],
  );
  useEffect(() => show(null, []), [show]);

  const zoomTo = (from: number, to: number) => {
    for (const [i, each] of curves.entries()) {
      const steps = each && stepsOf(each.committed, axis, drawn.origins[i] ?? null, from, to);
      if (!steps) continue;
      afterPaint(() => change({ zoom: steps }));
      return steps;
    }
    return null;
  };
  const finer = (steps: Zoom) => {
    const found = runs.map((run) => finerOf(run.id, name, steps, props.points ?? POINTS));
    return found.every((each) => each !== undefined) ? drawingOf(runs, found, { axis, log, smooth, marks: false }).lines : null;
  };
  const known = drawn.lines.some((line) => line.points.values.some((v) => v !== null));
  return (
    <div className="relative flex min-w-0 flex-col" data-old={isOld || undefined}>
      <p className="flex min-h-5 flex-wrap items-center gap-x-3 text-sm text-muted">
        {runs.map((run, i) => (
          <span key={run.id} className="inline-flex min-w-0 items-center gap-1.5">
            {runs.length > 1 && <Swatch color={run.color} dash={run.dash} />}
            {runs.length > 1 && <span className="foreign max-w-40 truncate" title={run.label}>{run.label}</span>}
            <span ref={(element) => { values.current[i] = element; }} data-value className="font-medium text-ink" />
          </span>
        ))}
        <span ref={place} className="ml-auto text-faint" />
      </p>
      {error ? (
        <div className="grid place-items-center" style={{ height }}><ErrorNote error={error} /></div>
      ) : known ? (
        <Suspense fallback={<div style={{ height }} />}>
          {enabled ? (
            <MetricPlot lines={drawn.lines} marks={drawn.marks} axis={axis} log={log} range={range} height={height - (isHistogram(name) ? SHAPE : 0)} sync="metrics" onZoom={zoomTo} finer={finer} onReset={() => zoom && change({ zoom: null })} onCursor={show} onCanvas={props.onCanvas} />
          ) : (
            <div style={{ height }} />
          )}
        </Suspense>
      ) : (
        <p className="grid place-items-center text-sm text-faint" style={{ height }}>{isPending || !enabled ? "" : zoom ? "No values in this range" : log && drawn.hidden > 0 ? "No values above zero" : "No values"}</p>
      )}
      {known && !error && isHistogram(name) && <svg ref={shape} aria-hidden data-shape viewBox="0 0 480 44" preserveAspectRatio="none" className="w-full" style={{ height: SHAPE }} />}
      <p ref={note} hidden className="foreign pointer-events-none absolute inset-x-0 bottom-6 z-10 mx-auto w-fit max-w-full rounded-md border bg-surface px-2 py-0.5 text-sm break-words shadow-lg" />
      <p className="sr-only">{summary(name, runs, curves, drawn.marks)}</p>
      {log && drawn.hidden > 0 && known && <p className="text-sm text-faint">{count(drawn.hidden)} points ≤ 0 not shown on a log scale</p>}
    </div>
  );
}

/** The 5 to 95 % range of the values at the point nearest to `x`, or at the last one. */
function middleOf(name: string, quantiles: readonly Curve[], xs: readonly number[], x: number | null): string {
  const at = x === null ? xs.length - 1 : nearest(xs, x);
  const [low, high] = [quantiles[PERCENTS.indexOf(5)]?.values[at], quantiles[PERCENTS.indexOf(95)]?.values[at]];
  return low == null || high == null ? "" : ` (90 %: ${valueText(name, low)} to ${valueText(name, high)})`;
}

/** The distribution of each run at the point nearest to `x`, or at its last one; bypasses React like the values. */
function drawShape(svg: SVGSVGElement, runs: readonly PanelRun[], curves: readonly (Spread | undefined)[], heads: Drawn["heads"], x: number | null): void {
  const shapes = runs.map((_, i) => {
    const xs = heads[i]?.xs ?? [];
    const at = x === null ? xs.length - 1 : nearest(xs, x);
    return shapeOf((curves[i]?.quantiles ?? []).map((curve) => curve.values[at]));
  });
  const from = Math.min(...shapes.flatMap((s) => (s ? [s.from] : [])));
  const to = Math.max(...shapes.flatMap((s) => (s ? [s.to] : [])));
  svg.replaceChildren(
    ...shapes.flatMap((found, i) => {
      if (!found) return [];
      const highest = Math.max(...found.bars);
      const at = (n: number) => (to > from ? (480 * (found.from + ((found.to - found.from) * n) / found.bars.length - from)) / (to - from) : 240 + 4 * n);
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", found.bars.map((bar, n) => `M${at(n)} 44V${44 - (40 * bar) / highest}H${at(n + 1)}V44`).join(""));
      path.setAttribute("fill", `var(--color-${runs[i]?.color ?? "accent"})`);
      path.setAttribute("fill-opacity", runs.length > 1 ? "0.45" : "0.7");
      return [path];
    }),
  );
}

export function Swatch(props: { color: string; dash?: readonly number[] | undefined }) {
  return (
    <svg aria-hidden viewBox="0 0 16 4" className="h-1 w-4 shrink-0">
      <line x1="0" y1="2" x2="16" y2="2" stroke={`var(--color-${props.color})`} strokeWidth="2.5" strokeDasharray={props.dash?.join(" ")} />
    </svg>
  );
}

interface Drawn {
  lines: PlotLine[];
  /** Per run, the line whose values are shown as text. */
  heads: { xs: number[]; values: (number | null)[] }[];
  marks: PlotMark[];
  origins: (number | null)[];
  hidden: number;
}

function drawingOf(runs: readonly PanelRun[], curves: readonly (Spread | undefined)[], look: { axis: Axis; log: boolean; smooth: number; marks: boolean }): Drawn {
  const { axis, log } = look;
  const drawn: Drawn = { lines: [], heads: [], marks: [], origins: [], hidden: 0 };
  runs.forEach((run, i) => {
    const each = curves[i];
    const origin = run.origin ?? (each ? originOf([each]) : null);
    drawn.origins.push(origin);
    const scaled = (curve: MetricCurves["committed"]) => (log ? positive(pointsOf(curve, axis, origin)) : pointsOf(curve, axis, origin));
    const points = each ? scaled(each.committed) : NOTHING;
    if (each && log) drawn.hidden += each.committed.values.filter((v) => v !== null && v <= 0).length;
    const smooth = look.smooth > 0 && !each?.quantiles ? smoothed(points.values, look.smooth) : null;
    drawn.heads.push({ xs: points.xs, values: smooth ?? points.values });
    const shape = { color: run.color, ...(run.dash ? { dash: run.dash } : {}) };
    for (const [n, branch] of (each?.abandoned.slice(-BRANCHES_DRAWN) ?? []).entries()) {
      // Not keyed by its first step, which changes with the zoom.
      drawn.lines.push({ ...shape, key: `${run.id} ${branch.generation} ${n}`, points: scaled(branch), smooth: null, isAbandoned: true });
    }
    drawn.lines.push({ ...shape, key: run.id, points, smooth, isAbandoned: false });
    fanOf(each ?? { name: "", committed: NO_CURVE, abandoned: [] }).forEach((curve, n) => drawn.lines.push({ ...shape, key: `${run.id} fan ${n}`, points: scaled(curve), smooth: null, isAbandoned: false }));
    for (const mark of look.marks && each ? run.marks : []) {
      const x = placeOf(mark, axis, origin, each?.committed ?? NO_CURVE);
      if (x !== null) drawn.marks.push({ x, kind: mark.kind, text: mark.text });
    }
  });
  return drawn;
}

/** The zoom on the axis: its steps, or their times. */
function rangeOf(curves: readonly (MetricCurves | undefined)[], axis: Axis, origins: readonly (number | null)[], zoom: Settings["zoom"]): readonly [number, number] | null {
  if (zoom === null || axis === "step") return zoom;
  let from = Number.POSITIVE_INFINITY;
  let to = Number.NEGATIVE_INFINITY;
  curves.forEach((each, i) => {
    const { steps, times } = each?.committed ?? NO_CURVE;
    const [first, last] = [nearest(steps, zoom[0]), nearest(steps, zoom[1])];
    if (first < 0) return;
    const shift = axis === "relative" ? (origins[i] ?? 0) : 0;
    from = Math.min(from, (times[first] ?? 0) - shift);
    to = Math.max(to, (times[last] ?? 0) - shift);
  });
  return to > from ? [from, to] : null;
}

/** In the unit given by the metric's name. */
export function valueText(name: string, value: number | null | undefined): string {
  return /(^|[/_.])bytes$/.test(name) ? bytes(value) : number(value, 4);
}

function placeText(heads: Drawn["heads"], x: number, axis: Axis): string {
  // Snap to an existing step.
  const xs = heads.find((head) => head.xs.length > 0)?.xs ?? [];
  const at = axis === "step" ? (xs[nearest(xs, x)] ?? x) : x;
  return axisText(at, axis);
}

function axisText(x: number, axis: Axis): string {
  return axis === "step" ? `step ${count(x)}` : axis === "wall" ? timestamp(x) : duration(x);
}

/** Text alternative for screen readers. */
function summary(name: string, runs: readonly PanelRun[], curves: readonly (MetricCurves | undefined)[], marks: readonly PlotMark[]): string {
  const failures = marks.filter((mark) => mark.kind === "incident").length;
  const markers = marks.length === 0 ? "" : ` Markers: ${plural(failures, "failure")}, ${plural(marks.length - failures, "checkpoint")}.`;
  const text = runs
    .map((run, i) => {
      const { steps, values } = curves[i]?.committed ?? NO_CURVE;
      const finite = values.filter((v) => v !== null);
      if (finite.length === 0) return "";
      const branches = curves[i]?.abandoned.length ?? 0;
      return `${isHistogram(name) ? `Median of ${label(name)}` : name} of ${run.label}: ${number(finite[0], 4)} at step ${count(steps[0])}, ${number(lastOf(values), 4)} at step ${count(steps.at(-1))}, ${number(Math.min(...finite), 4)} to ${number(Math.max(...finite), 4)}.${branches > 0 ? ` ${plural(branches, "abandoned branch", "abandoned branches")}.` : ""}`;
    })
    .join(" ");
  return text + markers;
}

/** After the browser has painted. */
function afterPaint(then: () => void): void {
  requestAnimationFrame(() => setTimeout(then));
}

function useInView(frame: { current: HTMLElement | null }, eager: boolean): readonly [now: boolean, ever: boolean] {
  const [seen, setSeen] = useState({ now: eager, ever: eager });
  useEffect(() => {
    const element = frame.current;
    if (!element) return;
    const watcher = new IntersectionObserver(([entry]) => {
      const now = entry?.isIntersecting ?? false;
      setSeen((before) => (before.now === now ? before : { now, ever: before.ever || now }));
    }, { root: element.closest("main"), rootMargin: "120px 0px" });
    watcher.observe(element);
    return () => watcher.disconnect();
  }, [frame]);
  return [seen.now, seen.ever];
}

/** The plot with title and legend on the page's background, for export. */
function picture(plot: HTMLCanvasElement, name: string, runs: readonly PanelRun[]): HTMLCanvasElement {
  const ratio = devicePixelRatio;
  const head = (26 + 18 * runs.length) * ratio;
  const created = document.createElement("canvas");
  created.width = plot.width + 16 * ratio;
  created.height = plot.height + head + 8 * ratio;
  const ctx = created.getContext("2d");
  if (!ctx) return created;
  ctx.fillStyle = colorOf("surface");
  ctx.fillRect(0, 0, created.width, created.height);
  ctx.fillStyle = colorOf("ink");
  ctx.font = `600 ${13 * ratio}px ui-sans-serif, system-ui, sans-serif`;
  ctx.fillText(name, 12 * ratio, 19 * ratio);
  ctx.font = `${11 * ratio}px ui-sans-serif, system-ui, sans-serif`;
  runs.forEach((run, i) => {
    const y = (36 + 18 * i) * ratio;
    ctx.strokeStyle = colorOf(run.color);
    ctx.lineWidth = 2 * ratio;
    ctx.setLineDash((run.dash ?? []).map((d) => d * ratio));
    ctx.beginPath();
    ctx.moveTo(12 * ratio, y - 4 * ratio);
    ctx.lineTo(28 * ratio, y - 4 * ratio);
    ctx.stroke();
    ctx.fillStyle = colorOf("muted");
    ctx.fillText(run.label, 34 * ratio, y);
  });
  ctx.drawImage(plot, 8 * ratio, head);
  return created;
}
