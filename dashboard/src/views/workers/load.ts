/** Load of a worker as one number. Pure. */

import type { Worker } from "../../api/types";

export interface Load {
  percent: number | null;
  of: "GPU" | "CPU";
}

/** Mean over its GPUs; without any, CPU. */
export function loadOf(worker: Worker): Load {
  const gpus = worker.resources?.gpus ?? [];
  if (gpus.length > 0) return { percent: gpus.reduce((sum, g) => sum + g.utilization_percent, 0) / gpus.length, of: "GPU" };
  return { percent: worker.resources ? Math.min(100, worker.resources.cpu_percent) : null, of: "CPU" };
}

export interface WorkerFilter {
  q?: string | undefined;
  status?: string | undefined;
  job?: string | undefined;
}

export function matches(worker: Worker, filter: WorkerFilter): boolean {
  if (filter.status && worker.status !== filter.status) return false;
  if (filter.job && worker.job_id !== filter.job) return false;
  if (!filter.q) return true;
  const query = filter.q.toLowerCase();
  return [worker.id, worker.ip, worker.job_id, worker.current_task ?? "", ...Object.values(worker.metadata)].some((text) => text.toLowerCase().includes(query));
}

/** By run, then name: a stable order when a worker fails and loses its rank. */
export function byPlace(a: Worker, b: Worker): number {
  return a.job_id.localeCompare(b.job_id) || a.id.localeCompare(b.id, "en", { numeric: true });
}
