/** How far a run is to go, and how long that takes at the pace of now. Pure. */

import type { Run } from "./runs";

/** How many steps it is to make altogether; null where nobody has reported. */
export function goalOf(run: Run): number | null {
  const reported = run.workers.map((w) => w.metrics["total_steps"] ?? 0).find((steps) => steps > 0);
  return run.task?.total_steps ?? reported ?? null;
}

/** Seconds left; null where that is not known. */
export function etaOf(run: Run): number | null {
  const goal = goalOf(run);
  if (run.status !== "training" || goal === null) return null;
  const stepS = run.workers.map((w) => w.metrics["step_time_s"] ?? 0).filter((s) => s > 0);
  const perStepS = run.task?.steps_per_s ? 1 / run.task.steps_per_s : stepS.length === 0 ? null : stepS.reduce((sum, s) => sum + s, 0) / stepS.length;
  return perStepS === null ? null : Math.max(0, goal - run.step) * perStepS;
}
