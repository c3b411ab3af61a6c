/** Where the marks of a time axis go: the same for charts and for the timeline. Pure. */

const STEPS_S = [1, 2, 5, 10, 15, 20, 30, 60, 120, 180, 240, 300, 600, 900, 1200, 1800, 3600, 7200, 10_800, 14_400, 21_600, 43_200, 86_400];
/** A time and some air. */
const SPACE_PX = 72;

/** Round moments between `from` and `to`, as many as `width` has space for. */
export function timeTicks(from: number, to: number, width: number): number[] {
  // Of two steps apart at least two are always in the range.
  const most = Math.max(2, Math.floor(width / SPACE_PX));
  const step = STEPS_S.find((s) => (to - from) / s <= most) ?? 86_400 * Math.ceil((to - from) / 86_400 / most);
  const ticks: number[] = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) ticks.push(at);
  return ticks;
}
