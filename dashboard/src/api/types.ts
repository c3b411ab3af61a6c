/** The nouns of the API, under the names the views use. Times are Unix seconds. */

export type WorkerState =
  | "active" | "idle" | "training" | "checkpointing" | "recovering" | "failed" | "initializing" | "loading";
export type TaskStatus = "pending" | "running" | "completed" | "failed" | "stopped";
export type CheckpointStatus = "in_progress" | "completed" | "failed";
export type BarrierStatus = "waiting" | "complete" | "broken";
export type LogLevel = "debug" | "info" | "warn" | "error";

export interface Gpu {
  index: number;
  utilization_percent: number;
  memory_used_bytes: number;
  memory_total_bytes: number;
}

export interface Resources {
  cpu_percent: number;
  memory_used_bytes: number;
  gpus: Gpu[];
  disk_read_bytes: number;
  disk_write_bytes: number;
  network_rx_bytes: number;
  network_tx_bytes: number;
}

export interface Worker {
  id: string;
  ip: string;
  port: number;
  status: WorkerState;
  gpu_count: number;
  last_heartbeat: number;
  assigned_shards: number;
  current_epoch: number;
  current_step: number;
  current_task: string | null;
  resources: Resources | null;
  metrics: Record<string, number | null>;
  job_id: string;
  rank: number | null;
  incarnation: number;
  connected: boolean;
  joined_at: number;
  memory_bytes: number;
  slow: boolean;
  reason: string;
  metadata: Record<string, string>;
}

export interface Dataset {
  id: string;
  name: string;
  path: string;
  total_samples: number;
  shard_size: number;
  shard_count: number;
  format: string;
  shuffle: boolean;
  seed: number;
  registered_at: number;
  metadata: Record<string, string>;
}

export interface Checkpoint {
  id: string;
  step: number;
  epoch: number;
  size: number;
  path: string;
  created_at: number;
  completed_at: number | null;
  worker_id: string;
  job_id: string;
  status: CheckpointStatus;
  tiers: string[];
  digest: string;
  throughput_mb_s: number | null;
  reason: string;
  metadata: Record<string, string>;
}

export interface Barrier {
  id: string;
  name: string;
  job_id: string;
  step: number;
  arrived: number;
  total: number;
  status: BarrierStatus;
  created_at: number;
  ended_at: number | null;
  missing: string[];
  reason: string;
}

export interface Task {
  id: string;
  name: string;
  type: string;
  status: TaskStatus;
  stopping: boolean;
  worker_ids: string[];
  worker_count: number;
  gpus_per_worker: number;
  dataset_id: string | null;
  config: Record<string, unknown>;
  created_at: number;
  started_at: number | null;
  completed_at: number | null;
  progress: number;
  step: number;
  total_steps: number | null;
  steps_per_s: number | null;
  eta_s: number | null;
  attempts: number;
  max_retries: number;
  exit_cause: ExitCause | null;
  reason: string;
}

/** Why an attempt at a task ended badly. */
export interface ExitCause {
  kind: string;
  message: string;
  rank: number | null;
  exit_code: number | null;
  signal: string;
  traceback: string;
  may_retry: boolean;
}

export interface Recovery {
  job_id: string;
  worker_id: string;
  at: number;
  total_s: number;
  phases_s: Record<string, number>;
  resumed_step: number;
  lost_steps: number;
  tier: string;
  world_before: number;
  world_after: number;
  reason: string;
}

export interface Metrics {
  checkpoint_throughput: number | null;
  coordinator_rps: number;
  active_workers: number;
  total_workers: number;
  barrier_latency_p99: number | null;
  shard_assignment_time: number | null;
}

export interface LogEntry {
  id: string;
  timestamp: number;
  level: string;
  message: string;
  source: string;
  task_id: string | null;
  worker_id: string | null;
}

export interface CoordinatorStatus {
  connected: boolean;
  address: string;
  uptime: number;
  version: string;
  leader: boolean;
  generation: number;
  started_at: number;
  server_time: number;
  jobs: Record<string, number>;
}

/** The answer of `GET /api/dashboard`. */
export interface Snapshot {
  coordinator: CoordinatorStatus;
  workers: Worker[];
  datasets: Dataset[];
  checkpoints: Checkpoint[];
  barriers: Barrier[];
  metrics: Metrics;
  tasks: Task[];
  logs: LogEntry[];
}

/** The answer of `GET /api/metrics/history`. */
export interface History {
  start: number;
  step: number;
  job_id: string | null;
  series: Record<string, { unit: string; values: (number | null)[] }>;
}

/** The answer of `GET /api/jobs/{job_id}/goodput`, in worker-seconds. */
export interface Goodput {
  job_id: string;
  task_id: string | null;
  training_s: number;
  checkpoint_s: number;
  recovery_s: number;
  waiting_s: number;
  total_s: number;
  goodput: number | null;
  processes: number;
  queued_s: number | null;
}
