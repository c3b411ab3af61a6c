/** Simulated tasks, past and new. */

import type { TaskSpec } from "../api/generated";
import type { Task } from "../api/types";

export function newTask(about: Pick<Task, "id" | "name" | "created_at"> & Partial<Task>): Task {
  return {
    type: "training", status: "pending", stopping: false, worker_ids: [], worker_count: 1, gpus_per_worker: 1, dataset_id: null,
    config: {}, started_at: null, completed_at: null, progress: 0, step: 0, total_steps: null, steps_per_s: null, eta_s: null,
    attempts: 0, max_retries: 3, exit_cause: null, reason: "waiting for a launcher", ...about,
  };
}

export function pastTasks(before: number, dataset: string): Task[] {
  const message = "RuntimeError: loss is not finite at step 214";
  return [
    newTask({
      id: "task-51d0c4aa", name: "pretrain-warmup", status: "completed", worker_count: 8, dataset_id: dataset, config: { steps: 2_000 },
      created_at: before - 5_400, started_at: before - 5_390, completed_at: before - 4_100, progress: 100, step: 2_000, total_steps: 2_000,
      attempts: 1, reason: "exited successfully",
    }),
    newTask({
      id: "task-0b77e91f", name: "pretrain-lr-1e-2", status: "failed", worker_count: 8, dataset_id: dataset,
      config: { learning_rate: 0.01, steps: 2_000 }, created_at: before - 9_000, started_at: before - 8_990, completed_at: before - 8_870,
      progress: 10.7, step: 214, total_steps: 2_000, attempts: 4, reason: `attempt 4 failed, no retries left: ${message}`,
      exit_cause: {
        kind: "exception", message, rank: 3, exit_code: 1, signal: "", may_retry: true,
        traceback: `Traceback (most recent call last):\n  File "train.py", line 88, in step\n    raise RuntimeError("loss is not finite")\n${message}`,
      },
    }),
  ];
}

export function taskSpec(task: Task): TaskSpec {
  return {
    task_id: task.id, name: task.name, type: task.type, dataset_id: task.dataset_id, worker_count: task.worker_count,
    config_json: JSON.stringify(task.config), gpus_per_worker: task.gpus_per_worker, max_retries: task.max_retries,
  };
}
