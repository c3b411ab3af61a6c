/** Dense series over time on a canvas (uPlot). The last values are also shown as text. */

import { useEffect, useMemo, useRef, useState } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import { clock, compact } from "../format";
import { GAP_S } from "../state/series";
import type { ChartProps, Line } from "./Chart";
import { canDraw, colorOf, useThemeVersion } from "./colors";
import { RIGHT, timeTicks } from "./ticks";

/** Time labels closer to the left end would overlap the y axis. */
const CORNER = 26;

export function Plot(props: ChartProps) {
  const { times, lines, height = 160, x = "time", range, marks } = props;
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const live = useRef({ range, marks, format: props.format ?? compact });
  live.current = { range, marks, format: props.format ?? compact };
  const [cursor, setCursor] = useState<number | null>(null);
  const theme = useThemeVersion();
  const shape = lines.map((l) => `${l.label}:${l.color}:${l.fill ? 1 : 0}`).join("|");
  const data = useMemo(() => [times, ...lines.map((l) => l.values)] as unknown as uPlot.AlignedData, [times, lines]);
  const latest = useRef(data);
  latest.current = data;

  useEffect(() => {
    const element = host.current;
    if (!element || !canDraw()) return;
    const grid = { stroke: colorOf("line"), width: 1 };
    const axis: uPlot.Axis = { stroke: colorOf("faint"), grid, ticks: { show: false }, font: "11px ui-sans-serif, system-ui, sans-serif" };
    const floor = lines.some((l) => l.fill) ? 0 : null; // A filled area starts at zero.
    const options: uPlot.Options = {
      width: Math.max(80, element.clientWidth),
      height,
      padding: [8, RIGHT, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        points: { size: 6 },
        drag: { setScale: false, x: false },
        ...(props.sync ? { sync: { key: props.sync } } : {}),
      },
      scales: {
        x: { time: x === "time", range: (_, min, max) => (live.current.range ? [...live.current.range] : [min, max === min ? min + 1 : max]) },
        y: { range: (_, low, max) => { const min = floor === null ? low : Math.min(floor, low); return (min === max ? [Math.min(0, min), max === 0 ? 1 : max * 1.25] : uPlot.rangeNum(Math.min(min, min > 0 && min < max * 0.5 ? 0 : min), max, 0.12, true)); } },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 20, gap: 2, space: 90, ...(x === "time" ? { splits: (u: uPlot, _: number, from: number, to: number) => timeTicks(from, to, u.bbox.width / devicePixelRatio).filter((at) => u.valToPos(at, "x") > CORNER) } : {}), values: (_, splits) => splits.map((v) => (x === "time" ? clock(v) : compact(v))) },
        { ...axis, size: props.gutter ?? 48, gap: 6, space: 34, values: (_, splits, __, ___, step) => splits.map((v) => axisNumber(v, step, splits.at(-1) ?? v)) },
      ],
      series: [
        {},
        ...lines.map((line): uPlot.Series => ({
          label: line.label,
          stroke: colorOf(line.color),
          width: 1.75,
          spanGaps: false,
          points: { show: false },
          ...(line.fill ? { fill: translucent(colorOf(line.color), 0.12) } : {}),
        })),
      ],
      hooks: {
        setCursor: [(u) => setCursor(u.cursor.idx ?? null)],
        drawClear: [
          (u) => {
            for (const mark of live.current.marks ?? []) {
              const at = Math.round(u.valToPos(mark.at, "x", true));
              if (at < u.bbox.left || at > u.bbox.left + u.bbox.width) continue;
              u.ctx.strokeStyle = colorOf(mark.color);
              u.ctx.globalAlpha = 0.55;
              u.ctx.beginPath();
              u.ctx.moveTo(at, u.bbox.top);
              u.ctx.lineTo(at, u.bbox.top + u.bbox.height);
              u.ctx.stroke();
              u.ctx.globalAlpha = 1;
            }
          },
        ],
      },
    };
    const created = new uPlot(options, latest.current, element);
    plot.current = created;
    const watcher = new ResizeObserver(() => {
      if (element.clientWidth > 0) created.setSize({ width: element.clientWidth, height });
    });
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      created.destroy();
      plot.current = null;
    };
    // Rebuilt only for another shape or theme; data is set below.
  }, [shape, theme, height, x, props.sync, props.gutter]);

  useEffect(() => {
    plot.current?.setData(data);
  }, [data, range]);

  const format = live.current.format;
  const index = cursor ?? lastKnown(times, lines);
  const enough = times.length >= 2 && lines.some((l) => l.values.some((v) => v !== null));
  return (
    <figure className="relative flex min-w-0 flex-col gap-1" aria-label={props.label}>
      <figcaption className="flex flex-wrap items-baseline gap-x-4 text-sm text-muted">
        {lines.map((line) => (
          <span key={line.label} className="inline-flex items-center gap-1.5">
            <span aria-hidden className="h-0.5 w-3 rounded-full" style={{ background: `var(--color-${line.color})` }} />
            {line.label}
            <span className="font-medium text-ink">{format(index === null ? null : (line.values[index] ?? null))}</span>
            {props.unit}
          </span>
        ))}
        {cursor !== null && times[cursor] !== undefined && <span className="ml-auto text-faint">{x === "time" ? clock(times[cursor]) : `step ${compact(times[cursor])}`}</span>}
      </figcaption>
      <div ref={host} aria-hidden className={enough ? "" : "invisible"} style={{ height }} />
      {!enough && <p className="absolute inset-0 grid place-items-center text-sm text-faint">{props.empty ?? "No data yet"}</p>}
    </figure>
  );
}

/** Index of the newest value, unless it is stale. */
function lastKnown(times: readonly number[], lines: readonly Line[]): number | null {
  const values = lines[0]?.values ?? [];
  for (let i = values.length - 1; i >= 0; i -= 1) {
    if ((times.at(-1) ?? 0) - (times[i] ?? 0) > GAP_S) return null;
    if (values[i] !== null) return i;
  }
  return null;
}

/** Short, unless neighbouring labels would be equal. */
function axisNumber(value: number, step: number, largest: number): string {
  const scale = Math.max(Math.abs(value), Math.abs(largest));
  return step > 0 && scale / step > 200 ? value.toLocaleString("en-US", { maximumFractionDigits: Math.max(0, Math.ceil(-Math.log10(step))) }) : compact(value);
}

export function translucent(color: string, alpha: number): string {
  return `color-mix(in oklab, ${color} ${alpha * 100}%, transparent)`;
}
