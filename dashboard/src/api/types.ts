/** The nouns of the API, under the names the views use. Times are Unix seconds. */

import type { BarrierView, CheckpointView, SessionView, TaskView, WorkerView } from "./generated";

export type {
  AuditEntry,
  AuditView as Audit,
  BarrierView as Barrier,
  CheckpointView as Checkpoint,
  CreatedTokenView as CreatedToken,
  CurveView as Curve,
  DashboardView as Snapshot,
  DatasetView as Dataset,
  DrainView as Drain,
  MachineAgents,
  ExitCause,
  GoodputView as Goodput,
  Gpu,
  Failure,
  HistoryView as History,
  IncidentView as Incident,
  JobView as LastReport,
  LogView as LogEntry,
  MetricCurvesView as MetricCurves,
  MetricView as MetricSummary,
  MetricsView as Metrics,
  PreviewView as Preview,
  RecipeBody as Recipe,
  RecoveryView as Recovery,
  Resources,
  RunCurvesView as RunCurves,
  RunInfoView as RunInfo,
  RunMetricsView as RunMetrics,
  RunView as LoggedRun,
  Safety,
  SessionView as Session,
  ShardPlanView as ShardPlan,
  ShardView as Shard,
  StatusView as CoordinatorStatus,
  TaskView as Task,
  TokenView as Token,
  VerificationView as Verification,
  WorkerView as Worker,
} from "./generated";

export type Role = SessionView["role"];
export type WorkerState = WorkerView["status"];
export type TaskStatus = TaskView["status"];
export type CheckpointStatus = CheckpointView["status"];
export type BarrierStatus = BarrierView["status"];
export type LogLevel = "debug" | "info" | "warn" | "error";
