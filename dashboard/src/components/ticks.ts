/** Axis ticks and their labels, shared by charts and the timeline. Pure. */

import { compact } from "../format";

/** Space for half a time label at the right end of the axis. */
export const RIGHT = 28;

const STEPS_S = [1, 2, 5, 10, 15, 20, 30, 60, 120, 180, 240, 300, 600, 900, 1200, 1800, 3600, 7200, 10_800, 14_400, 21_600, 43_200, 86_400];
/** Width of a time label with padding. */
const SPACE_PX = 72;

/** Round timestamps between `from` and `to`, as many as fit into `width`. */
export function timeTicks(from: number, to: number, width: number, spacePx = SPACE_PX): number[] {
  const most = Math.max(2, Math.floor(width / spacePx));
  const found = STEPS_S.findIndex((s) => (to - from) / s <= most);
  const step = STEPS_S[found] ?? 86_400 * Math.ceil((to - from) / 86_400 / most);
  const ticks = multiples(step, from, to);
  // A scale needs two ticks: rather slightly too close than a single one.
  return ticks.length < 2 && found > 0 ? multiples(STEPS_S[found - 1] ?? step, from, to) : ticks;
}

function multiples(step: number, from: number, to: number): number[] {
  const ticks: number[] = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) ticks.push(at);
  return ticks;
}

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]] as const;

function isWhole(value: number): boolean {
  return Math.abs(value - Math.round(value)) < 1e-6 * value;
}

/** Short, in one unit for the whole axis, with enough decimals to tell neighbours apart. */
export function tickText(value: number, step: number, largest: number): string {
  const [limit, letter] = UNITS.find(([from]) => Math.abs(largest) >= from) ?? [1, ""];
  const unit = letter === "k" ? 1e3 : limit;
  let places = 0;
  // As many decimals as the distance between two ticks has: 0.25 has two.
  while (places <= 5 && step > 0 && !isWhole((step / unit) * 10 ** places)) places += 1;
  if (value === 0) return "0";
  return places > 5 ? value.toExponential(1) : `${(value / unit).toFixed(places)}${letter}`;
}

/** The range of the values with padding, on a log scale. */
export function logRange(min: number, max: number): [number, number] {
  const space = max > min ? (max / min) ** 0.06 : 1.5;
  return [min / space, max * space];
}

const TICKS = 5;

/** Powers of ten, with 2 and 5 between them where they are few; round numbers where there are none. */
export function logTicks(min: number, max: number): number[] {
  const [low, high] = [Math.floor(Math.log10(min)), Math.ceil(Math.log10(max))];
  const every = Math.max(1, Math.ceil((high - low) / TICKS));
  const powers = Array.from({ length: high - low + 1 }, (_, i) => low + i).filter((power) => (power - low) % every === 0);
  for (const factors of [[1], [1, 2, 5]]) {
    const found = powers.flatMap((power) => factors.map((factor) => factor * 10 ** power)).filter((v) => v >= min && v <= max);
    if (found.length >= 3) return found;
  }
  const step = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10((max - min) / TICKS))).find((n) => (max - min) / n <= TICKS) ?? max - min;
  const first = Math.ceil(min / step);
  return Array.from({ length: Math.max(0, Math.floor(max / step) - first + 1) }, (_, i) => Number(((first + i) * step).toPrecision(6)));
}

/** Labels of those ticks, with enough decimals to tell near neighbours apart. */
export function logTexts(ticks: readonly number[]): string[] {
  const [first = 1, last = 1] = [ticks[0], ticks.at(-1)];
  const step = Math.min(...ticks.slice(1).map((tick, i) => tick - (ticks[i] ?? tick)));
  return ticks.map((tick) => (last / first < 10 && Number.isFinite(step) ? tickText(tick, step, last) : compact(tick)));
}
