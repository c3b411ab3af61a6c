/** One cell per worker. Smooth at a thousand: a cell rerenders only when it looks different. */

import { TriangleAlert } from "lucide-react";
import { memo, useRef, useState, type CSSProperties, type KeyboardEvent } from "react";

import { lookOf, TONE_SOFT, TONE_TEXT } from "../../components/Status";
import { duration, percent } from "../../format";
import { rankOf, shortName } from "../../state/runs";
import { loadOf } from "./load";
import { PACES, type Pace, type PaceClass } from "./pace";

export type HeatmapColor = "pace" | "status" | "load";

const SIZES = [
  { upTo: 24, cell: "h-[74px]", min: 228, gap: 8, detail: "tile" },
  { upTo: 240, cell: "h-10", min: 40, gap: 4, detail: "glyph" },
  { upTo: Number.POSITIVE_INFINITY, cell: "h-[22px]", min: 22, gap: 3, detail: "glyph" },
] as const;

type Detail = (typeof SIZES)[number]["detail"];

export function Heatmap(props: { paces: readonly Pace[]; color: HeatmapColor; selected: string | undefined; onOpen: (id: string) => void; small?: boolean; label?: string }) {
  const { paces } = props;
  const host = useRef<HTMLDivElement>(null);
  const [focused, setFocused] = useState(0);
  const size = SIZES.find((s) => paces.length <= s.upTo && !(props.small && s.detail === "tile")) ?? SIZES[2];
  const open = useRef(props.onOpen);
  open.current = props.onOpen;

  // One tab stop; arrow keys move inside.
  const onKeyDown = (event: KeyboardEvent) => {
    const cells = [...(host.current?.children ?? [])] as HTMLElement[];
    const top = cells[0]?.offsetTop;
    const columns = Math.max(1, cells.findIndex((cell) => cell.offsetTop !== top) < 0 ? cells.length : cells.findIndex((cell) => cell.offsetTop !== top));
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -focused, End: cells.length - 1 - focused }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const next = Math.min(cells.length - 1, Math.max(0, focused + by));
    setFocused(next);
    cells[next]?.focus();
  };

  return (
    <div
      ref={host}
      role="group"
      aria-label={`${props.label ?? ""}${paces.length} workers; arrow keys move, Enter opens`}
      onKeyDown={onKeyDown}
      onClick={(event) => {
        const cell = (event.target as HTMLElement).closest<HTMLElement>("[data-id]");
        if (cell?.dataset["id"] !== undefined) open.current(cell.dataset["id"]);
      }}
      className="grid content-start"
      style={{ gridTemplateColumns: `repeat(auto-fill, minmax(${size.min}px, ${size.detail === "tile" ? "1fr" : `${size.min}px`}))`, gap: size.gap }}
    >
      {paces.map((pace, i) => {
        const { worker } = pace;
        const load = loadOf(worker);
        return (
          <Cell
            key={worker.id}
            id={worker.id}
            name={shortName(worker.id, worker.job_id)}
            status={worker.status}
            load={load.percent === null || worker.status === "failed" ? -1 : Math.round(load.percent / 5) * 5}
            of={load.of}
            pace={pace.class}
            ratio={pace.ratio === null ? -1 : Math.round(pace.ratio * 20) / 20}
            busy={size.detail === "tile" ? duration(pace.busyS === null ? null : round(pace.busyS)) : ""}
            wait={size.detail === "tile" && pace.waitS !== null ? duration(round(pace.waitS)) : ""}
            slow={worker.slow}
            step={size.detail === "tile" ? worker.current_step : 0}
            rank={size.detail === "tile" ? rankOf(worker) : null}
            color={props.color}
            detail={size.detail}
            height={size.cell}
            selected={worker.id === props.selected}
            stop={i === Math.min(focused, paces.length - 1)}
          />
        );
      })}
    </div>
  );
}

/** Two significant digits, to avoid rerendering a cell for invisible changes. */
function round(seconds: number): number {
  return Number(seconds.toPrecision(2));
}

interface CellProps {
  id: string;
  name: string;
  status: string;
  /** Percent; -1 where unknown. */
  load: number;
  of: "GPU" | "CPU";
  pace: PaceClass;
  /** Over the median; -1 when there is none. */
  ratio: number;
  busy: string;
  wait: string;
  slow: boolean;
  step: number;
  rank: number | null;
  color: HeatmapColor;
  detail: Detail;
  height: string;
  selected: boolean;
  stop: boolean;
}

const Cell = memo(function Cell(props: CellProps) {
  const { id, status, load, of, detail } = props;
  const look = lookOf(status);
  const Icon = look.icon;
  const known = load >= 0;
  const pace = PACES.find(([name]) => name === props.pace);
  const timed = props.ratio >= 0 ? `, ${props.ratio.toFixed(2)}× the median step` : "";
  const label = `${id}: ${look.label}${props.slow ? ", slow" : ""}${timed}${known ? `, ${of} ${percent(load)}` : ""}`;
  const byLoad = props.color === "load";
  const common = {
    type: "button" as const,
    "data-id": id,
    tabIndex: props.stop ? 0 : -1,
    title: label,
  };
  const ring = props.selected ? "outline-2 outline-offset-1 outline-accent" : "";
  if (detail === "tile") {
    return (
      <button {...common} aria-label={undefined} className={`flex min-w-0 flex-col justify-between rounded-md border bg-raised px-3 py-2 text-left hover:bg-hover ${props.height} ${ring}`}>
        <span className="flex items-center gap-2">
          <Icon aria-hidden className={`size-3.5 shrink-0 ${TONE_TEXT[look.tone]}`} />
          <span className="foreign min-w-0 flex-1 truncate font-medium">{props.name}</span>
          {props.rank !== null && <span className="text-sm text-faint">#{props.rank}</span>}
        </span>
        <span className="flex items-baseline justify-between gap-2 text-sm">
          <span className={TONE_TEXT[look.tone]}>{look.label}</span>
          <span className="truncate text-muted">step {props.step.toLocaleString("en-US")}</span>
        </span>
        {props.color === "pace" ? (
          <span className="flex items-center gap-2 text-xs text-muted">
            <span aria-hidden className={`size-2 shrink-0 rounded-full ${pace?.[2] ?? ""}`} />
            <span className="min-w-0 flex-1 truncate">{props.busy === "–" ? "no step time" : `${props.busy} busy${props.wait ? `, ${props.wait} wait` : ""}`}</span>
            {props.ratio >= 0 && <span className="shrink-0 text-ink">{props.ratio.toFixed(2)}×</span>}
          </span>
        ) : (
        <span className="flex items-center gap-2 text-xs text-muted">
          <span className="h-1 flex-1 overflow-hidden rounded-full bg-hover"><span className="block h-full rounded-full bg-accent" style={{ width: `${Math.max(0, load)}%` }} /></span>
          <span className="w-16 text-right">{known ? `${of} ${percent(load)}` : "no data"}</span>
        </span>
        )}
      </button>
    );
  }
  const glyph = look.tone === "good" ? null : <Icon aria-hidden className="size-3" strokeWidth={2.5} />;
  if (byLoad && known) {
    // Higher load, stronger accent colour.
    const style: CSSProperties = { background: `color-mix(in oklab, var(--color-accent) ${load}%, var(--color-hover))`, color: load > 55 ? "var(--color-on-accent)" : "var(--color-ink)" };
    return <button {...common} aria-label={label} style={style} className={`grid place-items-center rounded-[4px] text-xs hover:brightness-110 ${props.height} ${ring}`}>{props.height === "h-10" ? Math.round(load) : glyph}</button>;
  }
  if (props.color === "pace" && props.pace !== "failed" && props.pace !== "other") {
    return <button {...common} aria-label={label} className={`grid place-items-center rounded-[4px] text-xs hover:brightness-110 ${pace?.[2] ?? ""} ${props.height} ${ring}`}>{props.pace === "slowest" || props.slow ? <TriangleAlert aria-hidden className="size-3 text-surface" strokeWidth={2.5} /> : null}</button>;
  }
  const tone = look.tone === "good" ? "bg-good/80" : TONE_SOFT[look.tone];
  return <button {...common} aria-label={label} className={`grid place-items-center rounded-[4px] hover:brightness-110 ${tone} ${props.height} ${ring} ${look.tone === "bad" ? "shadow-[inset_0_0_0_1.5px_var(--color-bad)]" : ""}`}>{glyph}</button>;
});

/** Legend and status filter; the active status is listed also where no worker has it any more. */
export function Legend(props: { color: HeatmapColor; counts: ReadonlyMap<string, number>; active: string | undefined; onPick: (status: string | undefined) => void }) {
  const counts = !props.active || props.counts.has(props.active) ? props.counts : new Map([...props.counts, [props.active, 0]]);
  return (
    <div className="flex flex-wrap items-center gap-x-1 gap-y-1">
      {[...counts].map(([status, n]) => {
        const look = lookOf(status);
        const on = props.active === status;
        return (
          <button
            key={status}
            type="button"
            aria-pressed={on}
            onClick={() => props.onPick(on ? undefined : status)}
            className={`inline-flex h-7 items-center gap-1.5 rounded-full px-2.5 text-sm font-medium ${on ? TONE_SOFT[look.tone] : "text-muted hover:bg-hover"}`}
          >
            <look.icon aria-hidden className={`size-3.5 ${TONE_TEXT[look.tone]}`} strokeWidth={2.25} />
            {look.label} <span className="text-ink">{n.toLocaleString("en-US")}</span>
          </button>
        );
      })}
      {props.color === "pace" && (
        <span className="ml-3 inline-flex flex-wrap items-center gap-x-3 text-sm text-muted">
          {PACES.filter(([name]) => name !== "failed" && name !== "other").map(([name, label, tone]) => <span key={name} className="inline-flex items-center gap-1.5"><span aria-hidden className={`size-2.5 rounded-sm ${tone}`} />{label}</span>)}
        </span>
      )}
      {props.color === "load" && (
        <span className="ml-3 inline-flex items-center gap-2 text-sm text-muted">
          0 %<span aria-hidden className="h-2 w-24 rounded-full" style={{ background: "linear-gradient(90deg, var(--color-hover), var(--color-accent))" }} />100 %
        </span>
      )}
    </div>
  );
}
