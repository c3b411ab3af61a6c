/** Types of the HTTP API and of the event stream. Generated: `npm run types`. Times are Unix seconds. */

/** What a start logged after the step that a later one resumed at. */
export interface AbandonedView {
  steps: number[];
  times: number[];
  values: (number | null)[];
  low: (number | null)[];
  high: (number | null)[];
  generation: number;
}

export interface AmountView {
  hours: number;
  cost: number | null;
}

export interface AuditEntry {
  at: number;
  who: string;
  role: string;
  action: string;
  target: string;
  outcome: "allowed" | "refused" | "failed";
  reason: string;
  client: string;
  count: number;
}

/** Totals over the committed history of one epoch. */
export interface AuditView {
  job_id: string;
  dataset_id: string;
  epoch: number;
  exact: boolean;
  total: number;
  samples: number;
  lost: number;
  repeated: number;
  remaining: number;
  commits: number;
  reason: string;
}

export interface BarrierBroken {
  job_id: string;
  barrier_id: string;
  step: number;
  round: number;
  generation: number;
  arrived: number;
  missing: string[];
  expected: number;
  opened_at_s: number;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface BarrierBrokenEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "barrier_broken";
  data: BarrierBroken;
}

export interface BarrierReleased {
  job_id: string;
  barrier_id: string;
  step: number;
  round: number;
  generation: number;
  arrived: number;
  opened_at_s: number;
  waited_s: number;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface BarrierReleasedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "barrier_released";
  data: BarrierReleased;
}

export interface BarrierView {
  id: string;
  name: string;
  job_id: string;
  step: number;
  arrived: number;
  total: number;
  status: "waiting" | "complete" | "broken";
  created_at: number;
  ended_at: number | null;
  missing: string[];
  reason: string;
}

export interface ChangeView {
  number: number;
  weights: Record<string, number>;
  from_step: number;
  status: "waiting" | "adopted" | "refused";
  reason: string;
}

export interface ChangeWeightsBody {
  /** New shares of some sources; the others divide the rest as they do now */
  weights: Record<string, number>;
  /** The first step with the new shares */
  from_step: number;
}

/** One channel, without its secrets. */
export interface ChannelView {
  name: string;
  kind: string;
  address: string;
  rules: string[];
  runs: string[];
  sent: number;
  failed: number;
  dropped: number;
  waiting: number;
  last_sent_at: number | null;
  last_error: string;
}

export interface CheckpointCompleted {
  checkpoint_id: string;
  job_id: string;
  worker_id: string;
  step: number;
  epoch: number;
  path: string;
  size_bytes: number;
  tiers: string[];
  digest: string;
  duration_s: number;
  parent_id: string;
  metadata: Record<string, string>;
  reason: string;
  at_s: number;
  run_id: string;
  generation: number;
  told_in: number;
  succeeded_by: string;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface CheckpointCompletedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "checkpoint_completed";
  data: CheckpointCompleted;
}

export interface CheckpointFailed {
  checkpoint_id: string;
  job_id: string;
  worker_id: string;
  step: number;
  epoch: number;
  path: string;
  reason: string;
  at_s: number;
  run_id: string;
  generation: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface CheckpointFailedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "checkpoint_failed";
  data: CheckpointFailed;
}

export interface CheckpointRemoved {
  checkpoint_id: string;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface CheckpointRemovedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "checkpoint_removed";
  data: CheckpointRemoved;
}

export interface CheckpointStarted {
  checkpoint_id: string;
  job_id: string;
  worker_id: string;
  step: number;
  epoch: number;
  path: string;
  size_bytes: number;
  reason: string;
  at_s: number;
  run_id: string;
  generation: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface CheckpointStartedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "checkpoint_started";
  data: CheckpointStarted;
}

export interface CheckpointView {
  id: string;
  step: number;
  epoch: number;
  size: number;
  path: string;
  created_at: number;
  completed_at: number | null;
  worker_id: string;
  job_id: string;
  status: "in_progress" | "completed" | "failed";
  tiers: string[];
  digest: string;
  throughput_mb_s: number | null;
  reason: string;
  metadata: Record<string, string>;
  run_id: string;
  generation: number;
}

/** Where a checkpoint is stored, or one part of it. */
export interface Copy {
  checkpoint_id: string;
  step: number;
  saved_at: number;
  kind: "memory" | "peer" | "disk" | "network disk" | "bucket";
  host: string;
  rack: string;
  where: string;
  part: string;
  parts: string[];
  verified: boolean | null;
}

/** What a run has cost so far. `hours` are of GPUs, or of workers where there are none (`counted`). */
export interface CostView {
  run: string;
  jobs: string[];
  currency: string;
  price_per_gpu_hour: number | null;
  counted: "gpu" | "worker";
  gpus_per_worker: number;
  spent: AmountView;
  training: AmountView;
  lost: AmountView;
  lost_by_cause: LossView[];
  saved: SavedView;
}

export interface CreateTaskBody {
  name: string;
  /** Name of a recipe */
  type: string;
  dataset_id?: string | null;
  worker_count?: number;
  /** What the recipe's schema allows */
  config?: Record<string, unknown>;
  /** The recipe's when not given */
  gpus_per_worker?: number | null;
  /** Failed attempts allowed before the task fails */
  max_retries?: number;
}

export interface CreateTokenBody {
  name?: string;
  role: "viewer" | "worker" | "operator" | "admin";
  job_id?: string | null;
  /** Lifetime: 7d, 12h, 30m, or never */
  expires?: string;
}

export interface CreatedTokenView {
  id: string;
  name: string;
  role: "viewer" | "worker" | "operator" | "admin";
  job_id: string | null;
  created_at: number;
  expires_at: number | null;
  created_by: string;
  expired: boolean;
  /** Shown now and never again */
  token: string;
}

/** Columns of equal length, by step. Where each point is one value, `low` and `high` are empty. */
export interface CurveView {
  steps: number[];
  times: number[];
  values: (number | null)[];
  low: (number | null)[];
  high: (number | null)[];
}

export interface DamageView {
  path: string;
  reason: string;
  start_bytes: number;
  end_bytes: number;
  tensors: string[];
}

export interface DashboardView {
  coordinator: StatusView;
  workers: WorkerView[];
  datasets: DatasetView[];
  checkpoints: CheckpointView[];
  barriers: BarrierView[];
  metrics: MetricsView;
  tasks: TaskView[];
  logs: LogView[];
  jobs: JobView[];
}

export interface DatasetRegistered {
  spec: DatasetSpec;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface DatasetRegisteredEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "dataset_registered";
  data: DatasetRegistered;
}

export interface DatasetRemoved {
  dataset_id: string;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface DatasetRemovedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "dataset_removed";
  data: DatasetRemoved;
}

/** What a dataset is; two registrations are the same when their specs are equal. */
export interface DatasetSpec {
  dataset_id: string;
  path: string;
  format: string;
  total_samples: number;
  shard_size: number;
  shuffle: boolean;
  seed: number;
  metadata: Record<string, string>;
  files: FileSpan[];
  jobs: string[];
}

export interface DatasetView {
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
  readers: string[];
}

/** The outcome of a test notification. */
export interface DeliveryView {
  channel: string;
  kind: string;
  delivered: boolean;
  error: string;
}

export interface DrainBody {
  /** As its workers show it */
  host: string;
  /** Seconds until the machine may be shut down */
  within_s: number;
  reason?: string;
}

/** One machine that is draining or drained. Times are Unix seconds. */
export interface DrainView {
  host: string;
  state: "draining" | "drained";
  reason: string;
  by: string;
  since: number;
  deadline: number;
  ended: number | null;
  agents: number;
  outcome: string;
  handovers: HandoverView[];
}

/** The body of every error response. */
export interface ErrorBody {
  /** Stable, for programs */
  code: string;
  /** What happened */
  message: string;
  /** What to do next */
  hint: string;
  /** One entry for each wrong field */
  details: Record<string, string>[];
}

/** Why an attempt at a task failed: the first failure, not the ones that followed from it. */
export interface ExitCause {
  kind: "exit" | "signal" | "exception" | "oom" | "lost" | "launch";
  message: string;
  rank: number | null;
  exit_code: number | null;
  signal: string;
  traceback: string;
  may_retry: boolean;
}

/** Everything known about how one worker ended. */
export interface Failure {
  rank: number | null;
  host: string;
  pid: number;
  gpu: string;
  at_s: number;
  exit_code: number | null;
  error: WorkerError | null;
  oom_killed: boolean;
  device_faults: string[];
  last_lines: string[];
  replaced: string;
  lost: string;
  left: string;
}

/** One file of a dataset and how many samples it holds. */
export interface FileSpan {
  path: string;
  samples: number;
}

/** Worker-seconds of one job, by activity. */
export interface GoodputView {
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

export interface Gpu {
  index: number;
  utilization_percent: number;
  memory_used_bytes: number;
  memory_total_bytes: number;
}

export interface HandoverRecorded {
  host: string;
  job_id: string;
  node: string;
  saved_step: number | null;
  lost_steps: number | null;
  where: string;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface HandoverRecordedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "handover_recorded";
  data: HandoverRecorded;
}

/** The outcome for one run of a draining machine. */
export interface HandoverView {
  run: string;
  saved_step: number | null;
  lost_steps: number | null;
  where: string;
  reason: string;
}

export interface HealthBody {
  status: "ok";
}

/** Results of a machine's health checks. Times are Unix seconds. */
export interface HealthView {
  host: string;
  kind: string;
  measured: Record<string, number>;
  failed: Record<string, string>;
  seconds: number;
  reason: string;
  at: number;
}

export interface HistoryView {
  start: number;
  step: number;
  job_id: string | null;
  series: Record<string, SeriesView>;
}

export interface HostCleared {
  host: string;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface HostClearedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "host_cleared";
  data: HostCleared;
}

export interface HostDrainStarted {
  host: string;
  by: string;
  deadline_s: number;
  agents: number;
  jobs: string[];
  reason: string;
  at_s: number;
  left: string[];
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface HostDrainStartedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "host_drain_started";
  data: HostDrainStarted;
}

export interface HostDrained {
  host: string;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface HostDrainedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "host_drained";
  data: HostDrained;
}

export interface HostExamined {
  host: string;
  kind: string;
  measured: Record<string, number>;
  failed: Record<string, string>;
  seconds: number;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface HostExaminedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "host_examined";
  data: HostExamined;
}

export interface HostQuarantined {
  host: string;
  by: string;
  job_id: string | null;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface HostQuarantinedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "host_quarantined";
  data: HostQuarantined;
}

export interface HostUndrained {
  host: string;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface HostUndrainedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "host_undrained";
  data: HostUndrained;
}

export interface IncidentClosed {
  incident_id: number;
  job_id: string;
  outcome: "recovered" | "stopped" | "failed_again";
  reason: string;
  at_s: number;
  phases_s: Record<string, number>;
  resumed_step: number | null;
  lost_steps: number | null;
  lost_s: number | null;
  lost_gpu_s: number | null;
  saved_steps: number | null;
  saved_gpu_s: number | null;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface IncidentClosedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "incident_closed";
  data: IncidentClosed;
}

export interface IncidentReported {
  incident_id: number;
  job_id: string;
  launch: string;
  subject: "run" | "save" | "slow_rank" | "quarantine";
  failure_class: "user_error" | "oom" | "gpu" | "network" | "storage" | "preemption" | "hang" | "node_lost" | "unknown";
  fingerprint: string;
  failures: number;
  what: string;
  decision: string;
  reason: string;
  at_s: number;
  rank: number | null;
  host: string;
  pid: number;
  gpu: string;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface IncidentReportedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "incident_reported";
  data: IncidentReported;
}

/** One incident, field by field as `/api/incidents` shows it. Times are Unix seconds. */
export interface IncidentView {
  id: number;
  run: string;
  launch: string;
  subject: "run" | "save" | "slow_rank" | "quarantine";
  failure_class: "user_error" | "oom" | "gpu" | "network" | "storage" | "preemption" | "hang" | "node_lost" | "unknown";
  rule: string;
  fingerprint: string;
  text: string;
  rank: number | null;
  host: string;
  pid: number;
  gpu: string;
  decision: string;
  reason: string;
  next_step: string;
  state: string;
  opened_at: number;
  closed_at: number | null;
  closed_reason: string;
  phases_s: Record<string, number>;
  resumed_step: number | null;
  lost_steps: number | null;
  lost_s: number | null;
  lost_gpu_s: number | null;
  failures: Failure[];
}

/** The last report of a job, kept after its workers have left. */
export interface JobView {
  id: string;
  at: number;
  step: number;
  loss: number | null;
  tokens_per_second: number | null;
  samples_per_second: number | null;
  step_time_s: number | null;
  goodput: number | null;
}

export interface LinkBody {
  /** At most the caller's own, which is the default */
  role?: "viewer" | "worker" | "operator" | "admin" | null;
}

export interface LinkView {
  /** To be appended to the coordinator's address */
  path: string;
  /** In seconds */
  expires_in: number;
}

export interface LogView {
  id: string;
  timestamp: number;
  level: string;
  message: string;
  source: string;
  task_id: string | null;
  worker_id: string | null;
}

export interface LogsEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "logs";
  data: LogView[];
}

/** Log lines omitted from the stream because too many arrived at once; a search finds them. */
export interface LogsSkipped {
  count: number;
}

export interface LogsSkippedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "logs_skipped";
  data: LogsSkipped;
}

/** What would be lost if one failure domain failed now. */
export interface Loss {
  domain: "process" | "machine" | "rack" | "site";
  label: string;
  steps: number | null;
  from_step: number | null;
  text: string;
}

export interface LossView {
  cause: "user_error" | "oom" | "gpu" | "network" | "storage" | "preemption" | "hang" | "node_lost" | "unknown" | "checkpoint" | "recovery" | "waiting";
  meaning: string;
  incidents: number;
  hours: number;
  cost: number | null;
}

/** A machine that can be drained. */
export interface MachineAgents {
  /** As its workers show it */
  host: string;
  /** Those connected to this coordinator */
  agents: number;
}

export interface MetricCurvesView {
  name: string;
  committed: CurveView;
  abandoned: AbandonedView[];
}

/** One metric over the committed history. */
export interface MetricView {
  name: string;
  count: number;
  nonfinite: number;
  last: number | null;
  last_step: number;
  min: number | null;
  max: number | null;
}

export interface MetricsEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "metrics";
  data: MetricsView;
}

/** Each metric is measured; one that has no measurement yet is null. */
export interface MetricsView {
  /** In MB/s. */
  checkpoint_throughput: number | null;
  /** In requests/s. */
  coordinator_rps: number;
  /** In workers. */
  active_workers: number;
  /** In workers. */
  total_workers: number;
  /** In ms. */
  barrier_latency_p99: number | null;
  /** In ms. */
  shard_assignment_time: number | null;
}

export interface MixtureView {
  run: string;
  seed: number;
  global_batch_size: number;
  sources: SourceView[];
  weights: WeightsView[];
  changes: ChangeView[];
}

export interface NotesBody {
  tags?: string[] | null;
  notes?: string | null;
}

/** One notification, as `/api/notifications` and the event stream show it. Times are Unix seconds. */
export interface Notification {
  id: number;
  rule: "stopped" | "slow_recovery" | "repeated" | "failed_save" | "overdue_save" | "loss" | "throughput" | "slow_rank" | "disk" | "goodput" | "quarantine" | "test";
  run: string;
  subject: string;
  state: "raised" | "resolved";
  severity: "debug" | "info" | "success" | "warning" | "error";
  title: string;
  text: string;
  next_step: string;
  at: number;
  held_back: number;
}

export interface NotificationEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "notification";
  data: Notification;
}

export interface NotifyView {
  channels: ChannelView[];
  rules: RuleView[];
}

export interface PreviewView {
  dataset_id: string;
  worker_id: string | null;
  epoch: number;
  shard_id: number | null;
  indices: number[];
  samples: Record<string, unknown>[];
}

export interface QuarantineBody {
  /** As its workers show it */
  host: string;
  reason: string;
}

/** One quarantined machine. Times are Unix seconds. */
export interface QuarantineView {
  host: string;
  reason: string;
  by: string;
  run: string;
  since: number;
}

/** A recipe that tasks can run. */
export interface RecipeBody {
  name: string;
  description: string;
  /** JSON Schema of a task's config */
  schema: Record<string, unknown>;
  needs_dataset: boolean;
  max_workers: number | null;
  /** Default for tasks that do not set it; null: one per worker if there are enough */
  gpus_per_worker: number | null;
  built_in: boolean;
}

export interface RecoveryRecorded {
  job_id: string;
  worker_id: string;
  phases_s: Record<string, number>;
  resumed_step: number;
  lost_steps: number;
  tier: string;
  world_before: number;
  world_after: number;
  reason: string;
  at_s: number;
  survived: number;
  lost: string[];
  joined: string[];
  cause: string;
  who_survived: string;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface RecoveryRecordedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "recovery_recorded";
  data: RecoveryRecorded;
}

export interface RecoveryView {
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
  survived: number;
  lost: string[];
  joined: string[];
  cause: string;
  who_survived: string;
}

export interface RegisterDatasetBody {
  dataset_id: string;
  path: string;
  format: string;
  /** Counted from the files when not given */
  total_samples?: number | null;
  shard_size?: number;
  shuffle?: boolean;
  seed?: number;
  metadata?: Record<string, string>;
}

/** One sample of what a worker's process and machine use. Bytes of disk and network are totals since start. */
export interface Resources {
  cpu_percent: number;
  memory_used_bytes: number;
  gpus: Gpu[];
  disk_read_bytes: number;
  disk_write_bytes: number;
  network_rx_bytes: number;
  network_tx_bytes: number;
}

/** Events between the last one that was read and this one are lost to this reader: fetch the state again. */
export interface Resync {
  reason: string;
}

export interface ResyncEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "resync";
  data: Resync;
}

export interface RuleView {
  name: string;
  enabled: boolean;
  threshold: number | null;
  unit: string;
  meaning: string;
}

export interface RunCurvesView {
  run: string;
  series: MetricCurvesView[];
}

export interface RunDetails {
  command: string;
  folder: string;
  host: string;
  commit: string;
  branch: string;
  versions: Record<string, string>;
  world_size: number;
  config: Record<string, unknown>;
  options: Record<string, unknown>;
}

/** A run with its tags, its notes and how it was last started. */
export interface RunInfoView {
  run: string;
  jobs: string[];
  created_at: number;
  updated_at: number;
  tags: string[];
  notes: string;
  details: RunDetails | null;
}

export interface RunMetricsView {
  run: string;
  jobs: string[];
  starts: StartView[];
  metrics: MetricView[];
  dropped: number;
  missing_batches: number;
}

/** A run that has logged something. */
export interface RunView {
  run: string;
  jobs: string[];
  created_at: number;
  updated_at: number;
  tags: string[];
}

/** The known copies of a run's checkpoints. */
export interface Safety {
  run: string;
  reached: number;
  step: number | null;
  copies: Copy[];
  safe_in: ("process" | "machine" | "rack" | "site")[];
  losses: Loss[];
  problems: string[];
}

/** Compared with restarting from the newest durable checkpoint each time. */
export interface SavedView {
  recoveries: number;
  steps: number;
  hours: number;
  cost: number | null;
}

export interface SeriesView {
  unit: string;
  values: (number | null)[];
}

/** The caller and its permissions. */
export interface SessionView {
  name: string;
  role: "viewer" | "worker" | "operator" | "admin";
  /** The job this credential is bound to; null: all jobs */
  job_id: string | null;
  /** Whether the caller signed in with a cookie, which signing out would end */
  signed_in: boolean;
}

export interface ShardPlanView {
  dataset_id: string;
  job_id: string;
  epoch: number;
  version: number;
  reason: string;
  samples_done: number;
  total_samples: number;
  shard_count: number;
  by_shard: boolean;
  shards: ShardView[];
}

export interface ShardView {
  id: number;
  start: number;
  stop: number;
  done: number;
  reported: number;
  worker_id: string | null;
  moved: boolean;
}

export interface ShardsMoved {
  job_id: string;
  dataset_id: string;
  epoch: number;
  version: number;
  workers: number;
  moved: Record<string, number>;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface ShardsMovedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "shards_moved";
  data: ShardsMoved;
}

/** A token or the code of a link; exactly one of them. */
export interface SignInBody {
  token?: string | null;
  code?: string | null;
}

export interface SourceView {
  name: string;
  size: number;
}

export interface StartView {
  generation: number;
  job_id: string;
  started_at: number;
  resumed_step: number;
  committed_until: number | null;
}

export interface StatusView {
  connected: boolean;
  address: string;
  uptime: number;
  version: string;
  leader: boolean;
  generation: number;
  started_at: number;
  server_time: number;
  jobs: Record<string, number>;
  storage: StorageView | null;
  role: "leader" | "standby";
  led_by: string;
  position: number;
  behind: number;
  others: string[];
}

/** The disk of the coordinator's journal. */
export interface StorageView {
  is_full: boolean;
  free_bytes: number;
  needed_bytes: number;
}

/** One event; `event` names its kind, which says what `data` holds. */
export type StreamEvent = WorkerJoinedEvent | WorkerFailedEvent | WorkerLeftEvent | WorkerForgottenEvent | DatasetRegisteredEvent | DatasetRemovedEvent | ShardsMovedEvent | BarrierReleasedEvent | BarrierBrokenEvent | CheckpointStartedEvent | CheckpointCompletedEvent | CheckpointFailedEvent | CheckpointRemovedEvent | TaskCreatedEvent | TaskChangedEvent | TaskProgressedEvent | RecoveryRecordedEvent | IncidentReportedEvent | IncidentClosedEvent | HostQuarantinedEvent | HostClearedEvent | HostDrainStartedEvent | HandoverRecordedEvent | HostDrainedEvent | HostUndrainedEvent | HostExaminedEvent | WorkerSlowEvent | WorkerCaughtUpEvent | NotificationEvent | MetricsEvent | LogsEvent | LogsSkippedEvent | ResyncEvent;

export interface TaskAnswer {
  task_id: string;
  status: "pending" | "running" | "completed" | "failed" | "stopped";
  reason: string;
}

export interface TaskChanged {
  task_id: string;
  status: "pending" | "running" | "completed" | "failed" | "stopped";
  worker_ids: string[];
  reason: string;
  at_s: number;
  attempt: number;
  failures: number;
  stopping: boolean;
  cause: ExitCause | null;
  where: string;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface TaskChangedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "task_changed";
  data: TaskChanged;
}

export interface TaskCreated {
  spec: TaskSpec;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface TaskCreatedBody {
  task_id: string;
}

export interface TaskCreatedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "task_created";
  data: TaskCreated;
}

export interface TaskProgressed {
  task_id: string;
  attempt: number;
  worker_ids: string[];
  step: number;
  total_steps: number;
  steps_per_s: number;
  reason: string;
  at_s: number;
  progress: number;
  eta_s: number | null;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface TaskProgressedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "task_progressed";
  data: TaskProgressed;
}

export interface TaskSpec {
  task_id: string;
  name: string;
  type: string;
  dataset_id: string | null;
  worker_count: number;
  config_json: string;
  gpus_per_worker: number;
  max_retries: number;
}

export interface TaskView {
  id: string;
  name: string;
  type: string;
  status: "pending" | "running" | "completed" | "failed" | "stopped";
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

export interface TestNotificationBody {
  /** Its name; all channels when not given */
  channel?: string | null;
}

export interface TokenView {
  id: string;
  name: string;
  role: "viewer" | "worker" | "operator" | "admin";
  job_id: string | null;
  created_at: number;
  expires_at: number | null;
  created_by: string;
  expired: boolean;
}

export interface VerificationView {
  checkpoint_id: string;
  status: "verifying" | "whole" | "damaged";
  size_bytes: number;
  damages: DamageView[];
  reason: string;
}

export interface WeightsView {
  from_step: number;
  weights: Record<string, number>;
}

export interface WorkerCaughtUp {
  job_id: string;
  worker_id: string;
  slow: boolean;
  own_s: number;
  others_s: number;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface WorkerCaughtUpEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "worker_caught_up";
  data: WorkerCaughtUp;
}

/** The error that ended a worker, as it reported it. */
export interface WorkerError {
  type: string;
  message: string;
  where: string[];
  step: number | null;
  traceback: string;
  at_s: number;
}

export interface WorkerFailed {
  worker_id: string;
  job_id: string;
  incarnation: number;
  generation: number;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface WorkerFailedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "worker_failed";
  data: WorkerFailed;
}

export interface WorkerForgotten {
  worker_id: string;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface WorkerForgottenEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "worker_forgotten";
  data: WorkerForgotten;
}

export interface WorkerJoined {
  spec: WorkerSpec;
  registration_id: string;
  incarnation: number;
  generation: number;
  superseded: number;
  reason: string;
  at_s: number;
  former: string[];
  origin: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface WorkerJoinedEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "worker_joined";
  data: WorkerJoined;
}

export interface WorkerLeft {
  worker_id: string;
  job_id: string;
  incarnation: number;
  generation: number;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface WorkerLeftEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "worker_left";
  data: WorkerLeft;
}

export interface WorkerSlow {
  job_id: string;
  worker_id: string;
  slow: boolean;
  own_s: number;
  others_s: number;
  reason: string;
  at_s: number;
  severity: "debug" | "info" | "success" | "warning" | "error";
  text: string;
}

export interface WorkerSlowEvent {
  /** Position in the stream; it resumes after the one given as `Last-Event-ID` */
  id: string;
  /** When it was published, in Unix seconds. Not sent on the stream */
  at: number;
  event: "worker_slow";
  data: WorkerSlow;
}

/** What a worker says about itself when it registers. */
export interface WorkerSpec {
  worker_id: string;
  job_id: string;
  hostname: string;
  port: number;
  gpu_count: number;
  memory_bytes: number;
  metadata: Record<string, string>;
  run_id: string;
  run_generation: number;
}

export interface WorkerView {
  id: string;
  ip: string;
  port: number;
  status: "active" | "idle" | "training" | "checkpointing" | "recovering" | "failed" | "initializing" | "loading";
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
  run_id: string;
}

/** Every kind on the stream. */
export const EVENT_KINDS: readonly StreamEvent["event"][] = ["barrier_broken", "barrier_released", "checkpoint_completed", "checkpoint_failed", "checkpoint_removed", "checkpoint_started", "dataset_registered", "dataset_removed", "handover_recorded", "host_cleared", "host_drain_started", "host_drained", "host_examined", "host_quarantined", "host_undrained", "incident_closed", "incident_reported", "logs", "logs_skipped", "metrics", "notification", "recovery_recorded", "resync", "shards_moved", "task_changed", "task_created", "task_progressed", "worker_caught_up", "worker_failed", "worker_forgotten", "worker_joined", "worker_left", "worker_slow"];
