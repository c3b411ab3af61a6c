/** Total steps and ETA of a run. Pure. */

import type { Run } from "./runs";

/** Total steps; null where not reported. */
export function goalOf(run: Run): number | null {
  const reported = run.workers.map((w) => w.metrics["total_steps"] ?? 0).find((steps) => steps > 0);
  return run.task?.total_steps ?? reported ?? null;
}

/** ETA in seconds; null where unknown. */
export function etaOf(run: Run): number | null {
  const goal = goalOf(run);
  if (run.status !== "training" || goal === null) return null;
  const stepS = run.workers.map((w) => w.metrics["step_time_s"] ?? 0).filter((s) => s > 0);
  const perStepS = run.task?.steps_per_s ? 1 / run.task.steps_per_s : stepS.length === 0 ? null : stepS.reduce((sum, s) => sum + s, 0) / stepS.length;
  return perStepS === null ? null : Math.max(0, goal - run.step) * perStepS;
}
