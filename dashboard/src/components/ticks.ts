/** Where the marks of a time axis go: the same for charts and for the timeline. Pure. */

/** Space for half a time at the right end of the axis. */
export const RIGHT = 28;

const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400];
const SPACE_PX = 110;

/** Round moments between `from` and `to`, as many as `width` has space for. */
export function timeTicks(from: number, to: number, width: number, spacePx = SPACE_PX): number[] {
  const most = Math.max(1, Math.floor(width / spacePx));
  const step = STEPS_S.find((s) => (to - from) / s <= most) ?? 86_400 * Math.ceil((to - from) / 86_400 / most);
  const ticks: number[] = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) ticks.push(at);
  return ticks;
}
