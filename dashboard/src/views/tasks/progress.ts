/** Progress and ETA of a task, as reported by the coordinator, else extrapolated. Pure. */

import type { Task } from "../../api/types";

/** ETA in seconds; null where unknown. */
export function secondsLeft(task: Task, now: number): number | null {
  if (task.status !== "running" || task.stopping) return null;
  if (typeof task.eta_s === "number") return task.eta_s;
  if (task.started_at === null || task.progress <= 1) return null;
  return ((now - task.started_at) / task.progress) * (100 - task.progress);
}

/** Duration in seconds. */
export function ranFor(task: Task, now: number): number | null {
  return task.started_at === null ? null : (task.completed_at ?? now) - task.started_at;
}

export function hasEnded(task: Task): boolean {
  return task.status === "completed" || task.status === "failed" || task.status === "stopped";
}
