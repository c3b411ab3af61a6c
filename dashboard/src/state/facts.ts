/** The shapes of the facts on the event stream, and how each is told to a person. Pure. */

import type { ExitCause } from "../api/types";
import { duration, plural } from "../format";
import type { FeedEvent, Happening } from "./types";

interface WorkerFact { worker_id: string; job_id: string; incarnation: number; generation: number; reason: string; at_s: number }

export interface Facts {
  worker_joined: {
    spec: { worker_id: string; job_id: string; hostname: string; port: number; gpu_count: number; memory_bytes: number; metadata: Record<string, string> };
    incarnation: number; generation: number; superseded: number; reason: string; at_s: number;
  };
  worker_failed: WorkerFact;
  worker_left: WorkerFact;
  worker_slow: { job_id: string; worker_id: string; slow: boolean; own_s: number; others_s: number; reason: string };
  worker_caught_up: { job_id: string; worker_id: string; slow: boolean; own_s: number; others_s: number; reason: string };
  worker_forgotten: { worker_id: string; reason: string; at_s: number };
  dataset_registered: {
    spec: { dataset_id: string; path: string; format: string; total_samples: number; shard_size: number; shuffle: boolean; seed: number; metadata: Record<string, string> };
    reason: string; at_s: number;
  };
  shards_moved: { job_id: string; dataset_id: string; epoch: number; version: number; workers: number; moved: Record<string, number>; reason: string; at_s: number };
  barrier_released: { job_id: string; barrier_id: string; step: number; round: number; arrived: number; opened_at_s: number; waited_s: number; reason: string; at_s: number };
  barrier_broken: { job_id: string; barrier_id: string; step: number; round: number; arrived: number; missing: string[]; expected: number; opened_at_s: number; reason: string; at_s: number };
  checkpoint_started: { checkpoint_id: string; job_id: string; worker_id: string; step: number; epoch: number; path: string; size_bytes: number; reason: string; at_s: number };
  checkpoint_completed: {
    checkpoint_id: string; job_id: string; worker_id: string; step: number; epoch: number; path: string; size_bytes: number;
    tiers: string[]; digest: string; duration_s: number; metadata: Record<string, string>; reason: string; at_s: number;
  };
  checkpoint_failed: { checkpoint_id: string; job_id: string; worker_id: string; step: number; epoch: number; path: string; reason: string; at_s: number };
  checkpoint_removed: { checkpoint_id: string; reason: string; at_s: number };
  task_created: {
    spec: { task_id: string; name: string; type: string; dataset_id: string | null; worker_count: number; gpus_per_worker?: number; max_retries?: number; config_json: string };
    reason: string; at_s: number;
  };
  task_changed: { task_id: string; status: string; worker_ids: string[]; reason: string; at_s: number; attempt?: number; stopping?: boolean; cause?: ExitCause | null };
  task_progressed: { task_id: string; attempt: number; worker_ids: string[]; step: number; total_steps: number; steps_per_s: number; at_s: number };
  recovery_recorded: {
    job_id: string; worker_id: string; phases_s: Record<string, number>; resumed_step: number; lost_steps: number; tier: string;
    world_before: number; world_after: number; reason: string; at_s: number;
  };
}

export type FactKind = keyof Facts;

/** What an event says in one sentence; null for those that are no news (metrics, logs, releases, removals). `nowS` dates what does not date itself. */
export function tell(event: FeedEvent, nowS: number): Happening | null {
  const told = sentence(event);
  if (told === null) return null;
  const data = event.data as Record<string, unknown>;
  const spec = (data["spec"] ?? {}) as Record<string, unknown>;
  return {
    id: event.id,
    kind: event.kind,
    at: typeof data["at_s"] === "number" ? data["at_s"] : nowS,
    jobId: text(data["job_id"] ?? spec["job_id"]),
    workerId: text(data["worker_id"] ?? spec["worker_id"]),
    text: told[1],
    level: told[0],
    data,
  };
}

function text(value: unknown): string | null {
  return typeof value === "string" && value !== "" ? value : null;
}

function because(reason: string): string {
  return reason ? `: ${reason}` : "";
}

function sentence({ kind, data }: FeedEvent): [Happening["level"], string] | null {
  switch (kind as FactKind) {
    case "worker_joined": {
      const d = data as Facts["worker_joined"];
      return ["good", `${d.spec.worker_id} joined${d.superseded ? " again" : ""} (generation ${d.generation})`];
    }
    case "worker_failed": {
      const d = data as Facts["worker_failed"];
      return ["bad", `${d.worker_id} failed${because(d.reason)}`];
    }
    case "worker_left": {
      const d = data as Facts["worker_left"];
      return ["info", `${d.worker_id} left${because(d.reason)}`];
    }
    case "worker_slow": {
      const d = data as Facts["worker_slow"];
      return ["warn", `${d.worker_id} is ${d.reason || "slow"}`];
    }
    case "worker_caught_up": {
      const d = data as Facts["worker_caught_up"];
      return ["good", `${d.worker_id} is ${d.reason || "as fast as the others again"}`];
    }
    case "worker_forgotten": {
      const d = data as Facts["worker_forgotten"];
      return ["info", `${d.worker_id} is off the list${because(d.reason)}`];
    }
    case "dataset_registered": {
      const d = data as Facts["dataset_registered"];
      return ["info", `dataset ${d.spec.dataset_id} registered: ${plural(d.spec.total_samples, "sample")}`];
    }
    case "shards_moved": {
      const d = data as Facts["shards_moved"];
      const moved = Object.values(d.moved).reduce((sum, n) => sum + n, 0);
      return moved === 0 ? null : ["info", `${plural(moved, "shard")} of ${d.dataset_id} moved${because(d.reason)}`];
    }
    case "barrier_broken": {
      const d = data as Facts["barrier_broken"];
      return ["warn", `barrier ${d.barrier_id} broke at step ${d.step}${because(d.reason)}`];
    }
    case "checkpoint_completed": {
      const d = data as Facts["checkpoint_completed"];
      return ["good", `step ${d.step.toLocaleString("en-US")} is safe in ${d.tiers.join(", ") || "storage"}`];
    }
    case "checkpoint_failed": {
      const d = data as Facts["checkpoint_failed"];
      return ["bad", `saving step ${d.step.toLocaleString("en-US")} failed${because(d.reason)}`];
    }
    case "task_created": {
      const d = data as Facts["task_created"];
      return ["info", `task ${d.spec.name} created`];
    }
    case "task_changed": {
      const d = data as Facts["task_changed"];
      return [d.status === "failed" ? "bad" : "info", `task ${d.task_id} is ${d.status}${because(d.reason)}`];
    }
    case "recovery_recorded": {
      const d = data as Facts["recovery_recorded"];
      const total = Object.values(d.phases_s).reduce((sum, s) => sum + s, 0);
      return ["good", `${d.job_id} recovered in ${duration(total)} from ${d.tier || "storage"}, ${plural(d.lost_steps, "step")} lost`];
    }
    default:
      return null;
  }
}

const FOLDED: Record<string, string> = { worker_joined: "joined", worker_failed: "failed", worker_left: "left" };
const TOGETHER_S = 10;

/** Newest first, with the same change of many workers told once. */
export function folded(items: readonly Happening[]): Happening[] {
  const result: Happening[] = [];
  for (let i = 0; i < items.length; ) {
    const first = items[i];
    if (!first) break;
    let end = i + 1;
    const belongs = (h: Happening | undefined, before: Happening) => h !== undefined && h.kind === first.kind && h.jobId === first.jobId && before.at - h.at <= TOGETHER_S;
    if (first.kind in FOLDED) while (belongs(items[end], items[end - 1] ?? first)) end += 1;
    const n = end - i;
    if (n >= 3) {
      const generation = typeof first.data["generation"] === "number" ? ` (generation ${first.data["generation"]})` : "";
      result.push({ ...first, workerId: null, text: `${plural(n, "worker")} of ${first.jobId ?? "a run"} ${FOLDED[first.kind] ?? ""}${generation}` });
    } else result.push(...items.slice(i, end));
    i = end;
  }
  return result;
}
