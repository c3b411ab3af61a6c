/** Layout and drawing of the run timeline. No React, no clock; colours come from the tokens. */

import type { Checkpoint, Recovery } from "../../api/types";
import { RIGHT } from "../../components/Chart";
import { colorOf } from "../../components/colors";
import { timeTicks } from "../../components/ticks";
import { clock, count } from "../../format";
import { rungOf } from "../../state/risk";
import { hasSurvived, PHASES, shortName, type GenerationLine, type Span, type TimelineRow } from "../../state/runs";

export const GUTTER = 148;
const FONT = "11px ui-sans-serif, system-ui, sans-serif";
const TOP = 22;
const SAVES = 46;
const RECOVERIES = 22;
const BOTTOM = 24;
/** Maximum height of all rows together, so that every worker is visible. */
const ROWS_MOST = 440;
/** A lost worker stays visible among a thousand. */
const LOST_MIN_PX = 2;
const RUNG_W = 9;
const RUNG_H = 8;
const RUNG = RUNG_H + 3;
/** Very short recoveries stay visible. */
const SURVIVOR_W = 8;

export const PHASE_COLORS: Record<string, string> = { detect: "bad", abort: "warn", regroup: "busy", rendezvous: "warn", spawn: "busy", load: "accent", first_step: "good" };

/** Near to far. Unknown tiers come last. */
const TIER_ORDER = ["memory", "peer", "local", "nvme", "disk", "file", "s3", "gcs", "azure"];
const RUNGS_MOST = 3;

export interface TimelineData {
  jobId: string;
  rows: readonly TimelineRow[];
  lines: readonly GenerationLine[];
  checkpoints: readonly Checkpoint[];
  recoveries: readonly Recovery[];
  tiers: readonly string[];
  statuses: ReadonlyMap<string, string>;
}

export interface Layout {
  width: number;
  height: number;
  rowHeight: number;
  rowsTop: number;
  from: number;
  to: number;
}

export function tiersOf(checkpoints: readonly Checkpoint[]): string[] {
  const found = new Set(checkpoints.flatMap((c) => c.tiers));
  const place = (tier: string) => {
    const at = TIER_ORDER.indexOf(tier.toLowerCase());
    return at < 0 ? TIER_ORDER.length : at;
  };
  return [...found].sort((a, b) => place(a) - place(b) || a.localeCompare(b));
}

/** The rungs of a ladder, near to far: label and tiers. One for each tier where they fit, else one for each kind. */
export function rungsOf(tiers: readonly string[]): (readonly [label: string, tiers: readonly string[]])[] {
  if (tiers.length <= RUNGS_MOST) return tiers.map((tier) => [tier.toLowerCase(), [tier]]);
  return [...new Set(tiers.map(rungOf))].map((rung) => [rung, tiers.filter((tier) => rungOf(tier) === rung)]);
}

/** Checkpoints from the stream, plus older fetched ones. Newest first. */
export function allSaves(recent: readonly Checkpoint[], asked: readonly Checkpoint[]): Checkpoint[] {
  const known = new Set(recent.map((c) => c.id));
  const oldest = recent.at(-1)?.created_at ?? Number.POSITIVE_INFINITY;
  // A fetched one within the stream's range but not in it was removed.
  return [...recent, ...asked.filter((c) => !known.has(c.id) && c.created_at <= oldest)];
}

export function layoutOf(width: number, rows: number, from: number, to: number): Layout {
  const rowHeight = rows <= 12 ? 26 : rows <= 27 ? 16 : ROWS_MOST / rows;
  const rowsTop = TOP + SAVES + RECOVERIES;
  return { width, rowHeight, rowsTop, height: rowsTop + rows * rowHeight + BOTTOM, from, to: Math.max(to, from + 1) };
}

export function xOf(layout: Layout, at: number): number {
  return GUTTER + ((at - layout.from) / (layout.to - layout.from)) * (layout.width - GUTTER - RIGHT);
}

export function timeAt(layout: Layout, x: number): number {
  return layout.from + ((x - GUTTER) / (layout.width - GUTTER - RIGHT)) * (layout.to - layout.from);
}

/** Phases of a recovery as time ranges; the last one ends when it was recorded. */
export function phasesOf(recovery: Recovery): { name: string; from: number; to: number }[] {
  const known = PHASES.filter((p) => p in recovery.phases_s);
  const others = Object.keys(recovery.phases_s).filter((p) => !(PHASES as readonly string[]).includes(p));
  let at = recovery.at - recovery.total_s;
  return [...known, ...others].map((name) => {
    const from = at;
    at += recovery.phases_s[name] ?? 0;
    return { name, from, to: at };
  });
}

const TONES: Record<string, string> = {
  training: "good", active: "good", checkpointing: "busy", recovering: "warn", loading: "busy", initializing: "busy", idle: "idle", failed: "bad",
};

export function draw(ctx: CanvasRenderingContext2D, layout: Layout, data: TimelineData, hoverX: number | null): void {
  const { width, height, rowHeight, rowsTop } = layout;
  ctx.clearRect(0, 0, width, height);
  const rowsBottom = rowsTop + data.rows.length * rowHeight;
  const right = width - RIGHT;
  ctx.font = FONT;
  ctx.textBaseline = "middle";

  drawAxis(ctx, layout, rowsBottom);
  drawNames(ctx, layout, data);

  ctx.save();
  ctx.beginPath();
  ctx.rect(GUTTER, 0, right - GUTTER, height);
  ctx.clip();
  drawRows(ctx, layout, data);
  drawRecoveries(ctx, layout, data, rowsBottom);
  drawGenerations(ctx, layout, data, rowsBottom);
  drawSaves(ctx, layout, data);
  ctx.restore();

  if (hoverX !== null) {
    ctx.strokeStyle = colorOf("edge");
    line(ctx, hoverX, TOP, hoverX, rowsBottom);
  }
}

function line(ctx: CanvasRenderingContext2D, x1: number, y1: number, x2: number, y2: number): void {
  ctx.beginPath();
  ctx.moveTo(Math.round(x1) + 0.5, y1);
  ctx.lineTo(Math.round(x2) + 0.5, y2);
  ctx.stroke();
}

function drawAxis(ctx: CanvasRenderingContext2D, layout: Layout, bottom: number): void {
  ctx.strokeStyle = colorOf("line");
  ctx.fillStyle = colorOf("faint");
  ctx.textAlign = "center";
  ctx.lineWidth = 1;
  for (const at of timeTicks(layout.from, layout.to, layout.width - GUTTER - RIGHT)) {
    const x = xOf(layout, at);
    ctx.globalAlpha = 0.6;
    line(ctx, x, TOP, x, bottom);
    ctx.globalAlpha = 1;
    ctx.fillText(clock(at), x, bottom + 14);
  }
}

function drawNames(ctx: CanvasRenderingContext2D, layout: Layout, data: TimelineData): void {
  ctx.textAlign = "right";
  ctx.fillStyle = colorOf("faint");
  ctx.font = "10px ui-sans-serif, system-ui, sans-serif";
  rungsOf(data.tiers).forEach(([label], i) => ctx.fillText(label, GUTTER - 10, TOP + SAVES - 6 - i * RUNG - RUNG_H / 2));
  ctx.font = FONT;
  if (data.tiers.length === 0) ctx.fillText("checkpoints", GUTTER - 10, TOP + SAVES / 2);
  ctx.fillText("recovery", GUTTER - 10, TOP + SAVES + RECOVERIES / 2 - 2);
  if (layout.rowHeight < 12) {
    ctx.fillText(`${count(data.rows.length)} workers`, GUTTER - 10, layout.rowsTop + 8);
    return;
  }
  data.rows.forEach((row, i) => {
    const y = layout.rowsTop + (i + 0.5) * layout.rowHeight;
    const status = data.statuses.get(row.workerId);
    ctx.fillStyle = colorOf(status ? (TONES[status] ?? "idle") : "line");
    if (status === "failed") {
      ctx.lineWidth = 2;
      ctx.strokeStyle = ctx.fillStyle;
      ctx.beginPath();
      ctx.moveTo(GUTTER - 13.5, y - 3.5);
      ctx.lineTo(GUTTER - 6.5, y + 3.5);
      ctx.moveTo(GUTTER - 6.5, y - 3.5);
      ctx.lineTo(GUTTER - 13.5, y + 3.5);
      ctx.stroke();
      ctx.lineWidth = 1;
    } else {
      ctx.beginPath();
      ctx.arc(GUTTER - 10, y, 3.5, 0, 2 * Math.PI);
      ctx.fill();
    }
    ctx.fillStyle = colorOf(status ? "ink" : "faint");
    ctx.fillText(shorten(ctx, shortName(row.workerId, data.jobId), GUTTER - 30), GUTTER - 20, y);
  });
}

/** Truncates at the start: workers share their prefix. */
function shorten(ctx: CanvasRenderingContext2D, text: string, widthPx: number): string {
  if (ctx.measureText(text).width <= widthPx) return text;
  let cut = 1;
  while (cut < text.length && ctx.measureText(`…${text.slice(cut)}`).width > widthPx) cut += 1;
  return `…${text.slice(cut)}`;
}

function drawRows(ctx: CanvasRenderingContext2D, layout: Layout, data: TimelineData): void {
  for (const kind of ["up", "down"] as const) {
    data.rows.forEach((row, i) => {
      for (const span of row.spans) if (span.kind === kind) drawSpan(ctx, layout, span, i);
    });
  }
}

function drawSpan(ctx: CanvasRenderingContext2D, layout: Layout, span: Span, row: number): void {
  const { rowHeight } = layout;
  const pad = rowHeight >= 12 ? Math.round(rowHeight * 0.2) : rowHeight >= 9 ? 1 : rowHeight >= 3 ? 0.5 : 0;
  const from = Math.max(GUTTER, xOf(layout, span.from));
  const to = xOf(layout, Math.min(span.to ?? layout.to, layout.to));
  if (to <= GUTTER || from > layout.width) return;
  const isUp = span.kind === "up";
  const y = layout.rowsTop + row * rowHeight + pad;
  const h = Math.max(isUp ? 0 : LOST_MIN_PX, rowHeight - 2 * pad);
  const w = Math.max(1.5, to - from);
  ctx.fillStyle = colorOf(isUp ? "good" : "bad");
  ctx.globalAlpha = isUp ? 0.28 : h < 4 ? 0.7 : 0.16;
  ctx.fillRect(from, y, w, h);
  ctx.globalAlpha = 0.85;
  ctx.fillRect(from, y, Math.min(2, w), h);
  if (!isUp && h > 8) hatch(ctx, from, y, w, h);
  ctx.globalAlpha = 1;
}

/** Marks lost workers without relying on colour. */
function hatch(ctx: CanvasRenderingContext2D, x: number, y: number, w: number, h: number): void {
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, y, w, h);
  ctx.clip();
  ctx.strokeStyle = colorOf("bad");
  ctx.globalAlpha = 0.35;
  for (let at = x - h; at < x + w; at += 7) {
    ctx.beginPath();
    ctx.moveTo(at, y + h);
    ctx.lineTo(at + h, y);
    ctx.stroke();
  }
  ctx.restore();
}

function drawRecoveries(ctx: CanvasRenderingContext2D, layout: Layout, data: TimelineData, bottom: number): void {
  const y = TOP + SAVES;
  const h = RECOVERIES - 8;
  for (const recovery of data.recoveries) {
    const phases = phasesOf(recovery);
    const first = phases[0];
    if (!first || recovery.at < layout.from || first.from > layout.to) continue;
    const left = xOf(layout, first.from);
    const right = xOf(layout, recovery.at);
    ctx.fillStyle = colorOf("warn");
    ctx.globalAlpha = 0.13;
    ctx.fillRect(left, y + h, Math.max(2, right - left), bottom - y - h);
    ctx.globalAlpha = 1;
    for (const phase of phases) {
      const from = xOf(layout, phase.from);
      const to = xOf(layout, phase.to);
      ctx.fillStyle = colorOf(PHASE_COLORS[phase.name] ?? "idle");
      ctx.fillRect(from, y, Math.max(1, to - from - (to - from > 4 ? 1 : 0)), h);
      if (to - from > ctx.measureText(phase.name).width + 8) {
        ctx.fillStyle = colorOf("surface");
        ctx.textAlign = "center";
        ctx.fillText(phase.name.replace("_", " "), (from + to) / 2, y + h / 2 + 0.5);
      }
    }
    drawSurvivors(ctx, layout, data, recovery, left, right);
  }
}

/** Two connected dots on the rows of processes that survived the recovery. */
function drawSurvivors(ctx: CanvasRenderingContext2D, layout: Layout, data: TimelineData, recovery: Recovery, left: number, right: number): void {
  if (recovery.survived === 0 || layout.rowHeight < 9) return;
  const middle = (left + right) / 2;
  const half = Math.max(SURVIVOR_W / 2, (right - left) / 2);
  ctx.fillStyle = colorOf("good");
  data.rows.forEach((row, i) => {
    if (!hasSurvived(row, recovery)) return;
    const y = layout.rowsTop + (i + 0.5) * layout.rowHeight;
    ctx.fillRect(middle - half, y - 0.75, 2 * half, 1.5);
    for (const x of [middle - half, middle + half]) {
      ctx.beginPath();
      ctx.arc(x, y, 2.5, 0, 2 * Math.PI);
      ctx.fill();
    }
  });
}

function drawGenerations(ctx: CanvasRenderingContext2D, layout: Layout, data: TimelineData, bottom: number): void {
  ctx.textAlign = "left";
  let free = Number.NEGATIVE_INFINITY;
  for (const generation of data.lines) {
    const x = xOf(layout, generation.at);
    if (x < GUTTER - 1 || x > layout.width) continue;
    ctx.strokeStyle = colorOf(generation.bad ? "bad" : "edge");
    ctx.globalAlpha = 0.8;
    ctx.setLineDash(generation.bad ? [] : [3, 3]);
    line(ctx, x, TOP - 6, x, bottom);
    ctx.setLineDash([]);
    ctx.globalAlpha = 1;
    const label = `g${generation.number}`;
    if (x > free) {
      ctx.fillStyle = colorOf(generation.bad ? "bad" : "muted");
      ctx.fillText(label, x + 3, TOP - 12);
      free = x + ctx.measureText(label).width + 8;
    }
  }
}

function drawSaves(ctx: CanvasRenderingContext2D, layout: Layout, data: TimelineData): void {
  const rungs = data.tiers.length > 0 ? rungsOf(data.tiers) : [["saved", []] as const];
  const base = TOP + SAVES - 6;
  for (const checkpoint of data.checkpoints) {
    const x = Math.round(xOf(layout, checkpoint.created_at));
    if (x < GUTTER - RUNG_W || x > layout.width) continue;
    const failed = checkpoint.status === "failed";
    rungs.forEach(([, tiers], i) => {
      const y = base - i * RUNG - RUNG_H;
      const filled = checkpoint.status === "completed" && (data.tiers.length === 0 || tiers.some((tier) => checkpoint.tiers.includes(tier)));
      if (filled) {
        ctx.fillStyle = colorOf("accent");
        ctx.fillRect(x - RUNG_W / 2, y, RUNG_W, RUNG_H);
      } else {
        ctx.strokeStyle = colorOf(failed ? "bad" : "edge");
        ctx.lineWidth = 1;
        ctx.strokeRect(x - RUNG_W / 2 + 0.5, y + 0.5, RUNG_W - 1, RUNG_H - 1);
      }
    });
    if (failed) {
      ctx.strokeStyle = colorOf("bad");
      ctx.lineWidth = 2;
      const top = base - RUNG_H * 2 - 1;
      ctx.beginPath();
      ctx.moveTo(x - 4, top);
      ctx.lineTo(x + 4, base - 1);
      ctx.moveTo(x + 4, top);
      ctx.lineTo(x - 4, base - 1);
      ctx.stroke();
      ctx.lineWidth = 1;
    }
  }
}

// --- what is under the pointer -------------------------------------------------------------------------------------

export type Hit =
  | { kind: "save"; checkpoint: Checkpoint }
  | { kind: "phase"; recovery: Recovery; name: string; seconds: number }
  | { kind: "generation"; number: number; text: string; at: number }
  | { kind: "row"; workerId: string; at: number }
  | null;

export function hitAt(layout: Layout, data: TimelineData, x: number, y: number): Hit {
  if (x < 0 || x > layout.width) return null;
  const row = Math.floor((y - layout.rowsTop) / layout.rowHeight);
  const worker = data.rows[row];
  if (x < GUTTER) return worker && y >= layout.rowsTop ? { kind: "row", workerId: worker.workerId, at: layout.to } : null;
  if (y >= TOP && y < TOP + SAVES) {
    let near: Checkpoint | null = null;
    let distance = 10;
    for (const c of data.checkpoints) {
      const away = Math.abs(xOf(layout, c.created_at) - x);
      if (away < distance) {
        near = c;
        distance = away;
      }
    }
    if (near) return { kind: "save", checkpoint: near };
  }
  if (y >= TOP + SAVES && y < layout.rowsTop) {
    const at = timeAt(layout, x);
    const slackS = (3 * (layout.to - layout.from)) / layout.width;
    for (const recovery of data.recoveries) {
      for (const phase of phasesOf(recovery)) {
        if (at >= phase.from - slackS && at <= phase.to + slackS) return { kind: "phase", recovery, name: phase.name, seconds: phase.to - phase.from };
      }
    }
  }
  for (const g of data.lines) if (Math.abs(xOf(layout, g.at) - x) < 4) return { kind: "generation", number: g.number, text: g.text, at: g.at };
  return worker && y >= layout.rowsTop ? { kind: "row", workerId: worker.workerId, at: timeAt(layout, x) } : null;
}
