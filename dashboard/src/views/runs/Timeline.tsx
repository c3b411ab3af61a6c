/** The run timeline: workers as rows, time across, generations as full-height lines, checkpoints as ladders that fill tier by tier. */

import { useQuery } from "@tanstack/react-query";
import { useNavigate } from "@tanstack/react-router";
import { useEffect, useLayoutEffect, useMemo, useRef, useState, type PointerEvent } from "react";
import { createPortal } from "react-dom";

import { get } from "../../api/client";
import type { Checkpoint } from "../../api/types";
import { useThemeVersion } from "../../components/colors";
import { Status } from "../../components/Status";
import { bytes, clock, count, duration, plural } from "../../format";
import { hasSurvived } from "../../state/runs";
import { allSaves, draw, GUTTER, hitAt, layoutOf, PHASE_COLORS, tiersOf, timeAt, type Hit, type TimelineData } from "./drawing";

export function Timeline(props: { data: TimelineData; from: number; to: number; onZoom: (from: number, to: number) => void; label: string }) {
  const { from, to } = props;
  const data = useAllSaves(props.data);
  const canvas = useRef<HTMLCanvasElement>(null);
  const host = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  const [pointer, setPointer] = useState<{ x: number; y: number; pageX: number; pageY: number } | null>(null);
  const [dragFrom, setDragFrom] = useState<number | null>(null);
  const theme = useThemeVersion();
  const navigate = useNavigate();

  useEffect(() => {
    const element = host.current;
    if (!element) return;
    const watcher = new ResizeObserver(() => setWidth(element.clientWidth));
    watcher.observe(element);
    setWidth(element.clientWidth);
    return () => watcher.disconnect();
  }, []);

  const layout = layoutOf(width, data.rows.length, from, to);
  useLayoutEffect(() => {
    const element = canvas.current;
    const ctx = element?.getContext("2d");
    if (!element || !ctx || width === 0) return;
    const ratio = window.devicePixelRatio || 1;
    const w = Math.round(width * ratio);
    const h = Math.round(layout.height * ratio);
    if (element.width !== w || element.height !== h) {
      element.width = w;
      element.height = h;
    }
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw(ctx, layout, data, pointer && pointer.x > GUTTER ? pointer.x : null);
  });
  void theme;

  const hit: Hit = pointer ? hitAt(layout, data, pointer.x, pointer.y) : null;
  const place = (event: PointerEvent) => {
    const box = event.currentTarget.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top, pageX: event.clientX, pageY: event.clientY };
  };
  const open = () => {
    if (!hit) return;
    if (hit.kind === "save") void navigate({ to: "/checkpoints", search: { checkpoint: hit.checkpoint.id } });
    else if (hit.kind === "row") void navigate({ to: "/workers", search: { worker: hit.workerId } });
  };
  return (
    <div className="relative max-h-[560px] overflow-y-auto" tabIndex={0} role="group" aria-label="Timeline">
      <div ref={host} className="relative">
        <canvas
          ref={canvas}
          role="img"
          aria-label={props.label}
          className={`block w-full touch-pan-y ${hit?.kind === "save" || hit?.kind === "row" ? "cursor-pointer" : dragFrom === null ? "" : "cursor-ew-resize"}`}
          style={{ height: layout.height }}
          onPointerDown={(event) => {
            const { x } = place(event);
            if (x > GUTTER && event.button === 0) {
              setDragFrom(x);
              event.currentTarget.setPointerCapture(event.pointerId);
            }
          }}
          onPointerMove={(event) => setPointer(place(event))}
          onPointerLeave={() => setPointer(null)}
          onPointerCancel={() => { setPointer(null); setDragFrom(null); }}
          onPointerUp={(event) => {
            const { x } = place(event);
            const start = dragFrom;
            setDragFrom(null);
            if (start !== null && Math.abs(x - start) > 8) props.onZoom(timeAt(layout, Math.min(x, start)), timeAt(layout, Math.max(x, start)));
            else open();
          }}
        />
        {dragFrom !== null && pointer && Math.abs(pointer.x - dragFrom) > 3 && (
          <div aria-hidden className="pointer-events-none absolute inset-y-0 bg-accent/15" style={{ left: Math.min(dragFrom, pointer.x), width: Math.abs(pointer.x - dragFrom) }} />
        )}
        {hit && pointer && createPortal(<Tip hit={hit} data={data} x={pointer.pageX} y={pointer.pageY} />, document.body)}
      </div>
    </div>
  );
}

/** The state keeps only the newest checkpoints of all runs; older ones of this run are fetched. */
function useAllSaves(data: TimelineData): TimelineData {
  const { jobId, checkpoints } = data;
  const { data: all } = useQuery({ queryKey: ["checkpoints"], queryFn: ({ signal }) => get<Checkpoint[]>("/checkpoints", {}, signal), staleTime: 60_000 });
  return useMemo(() => {
    const saves = allSaves(checkpoints, (all ?? []).filter((c) => c.job_id === jobId));
    return saves.length === checkpoints.length ? data : { ...data, checkpoints: saves, tiers: tiersOf(saves) };
  }, [data, checkpoints, all, jobId]);
}

/** Rendered outside the timeline, which would clip it. */
function Tip({ hit, data, x, y }: { hit: NonNullable<Hit>; data: TimelineData; x: number; y: number }) {
  const row = hit.kind === "row" ? data.rows.find((r) => r.workerId === hit.workerId) : undefined;
  const survived = row ? data.recoveries.filter((r) => hasSurvived(row, r)).length : 0;
  const side = x > innerWidth - 340 ? { right: Math.max(8, innerWidth - x + 14) } : { left: x + 14 };
  const height = y > innerHeight - 160 ? { bottom: innerHeight - y + 12 } : { top: y + 12 };
  return (
    <div role="tooltip" className="pointer-events-none fixed z-50 flex max-w-[min(20rem,calc(100vw-1rem))] flex-col gap-0.5 rounded-md border bg-surface px-3 py-2 text-sm shadow-lg" style={{ ...side, ...height }}>
      {hit.kind === "save" && (
        <>
          <p className="flex items-center gap-3 font-medium">Step {count(hit.checkpoint.step)}<Status value={hit.checkpoint.status} /></p>
          <p className="text-muted">{clock(hit.checkpoint.created_at)}, {bytes(hit.checkpoint.size)}{hit.checkpoint.completed_at !== null && `, completed in ${duration(hit.checkpoint.completed_at - hit.checkpoint.created_at)}`}</p>
          <p className="text-muted">{data.tiers.length > 0 ? data.tiers.map((t) => `${t} ${hit.checkpoint.tiers.includes(t) ? "✓" : "–"}`).join("   ") : hit.checkpoint.reason}</p>
        </>
      )}
      {hit.kind === "phase" && (
        <>
          <p className="flex items-center gap-2 font-medium"><span className="size-2 rounded-full" style={{ background: `var(--color-${PHASE_COLORS[hit.name] ?? "idle"})` }} />{hit.name.replace("_", " ")}: {duration(hit.seconds)}</p>
          <p className="text-muted">Recovered in {duration(hit.recovery.total_s)} from {hit.recovery.tier || "storage"}; {plural(hit.recovery.lost_steps, "step")} lost, {hit.recovery.world_before} → {hit.recovery.world_after} workers</p>
          {hit.recovery.who_survived && <p className="foreign">{hit.recovery.who_survived}</p>}
          {hit.recovery.cause && <p className="foreign break-words text-muted">{hit.recovery.cause}</p>}
        </>
      )}
      {hit.kind === "generation" && (
        <>
          <p className="font-medium">Generation {hit.number}</p>
          <p className="text-muted">{clock(hit.at)}: {hit.text}</p>
        </>
      )}
      {hit.kind === "row" && (
        <>
          <p className="foreign flex items-center gap-3 font-medium"><span className="truncate">{hit.workerId}</span>{data.statuses.get(hit.workerId) ? <Status value={data.statuses.get(hit.workerId) ?? ""} /> : <span className="text-muted">left</span>}</p>
          <p className="text-muted">{clock(hit.at)}</p>
          {survived > 0 && <p className="text-muted">survived {plural(survived, "recovery", "recoveries")} in process</p>}
        </>
      )}
    </div>
  );
}

export function TimelineLegend() {
  return (
    <ul className="flex flex-wrap items-center gap-x-4 gap-y-1 text-sm text-muted">
      <li className="flex items-center gap-1.5"><span aria-hidden className="h-3 w-4 rounded-sm bg-good/30" />up</li>
      <li className="flex items-center gap-1.5"><span aria-hidden className="h-3 w-4 rounded-sm border border-bad bg-bad-soft" />lost</li>
      <li className="flex items-center gap-1.5"><span aria-hidden className="flex items-center"><span className="size-1.5 rounded-full bg-good" /><span className="h-px w-2 bg-good" /><span className="size-1.5 rounded-full bg-good" /></span>survived in process</li>
      <li className="flex items-center gap-1.5"><span aria-hidden className="h-3.5 w-px bg-bad" />generation</li>
      <li className="flex items-center gap-1.5"><span aria-hidden className="flex flex-col gap-px"><span className="h-1.5 w-2 border border-edge" /><span className="h-1.5 w-2 bg-accent" /></span>checkpoint, by tier</li>
      {Object.entries(PHASE_COLORS).map(([name, color]) => (
        <li key={name} className="flex items-center gap-1.5"><span aria-hidden className="size-2.5 rounded-sm" style={{ background: `var(--color-${color})` }} />{name.replace("_", " ")}</li>
      ))}
    </ul>
  );
}
