/** The nouns of the API, under the names the views use. Generated: see `npm run types`. Times are Unix seconds. */

import type { components } from "./schema";

type Schemas = components["schemas"];

export type Worker = Schemas["WorkerView"];
export type Resources = Schemas["Resources"];
export type Gpu = Schemas["Gpu"];
export type Dataset = Schemas["DatasetView"];
export type ShardPlan = Schemas["ShardPlanView"];
export type Shard = Schemas["ShardView"];
export type Audit = Schemas["AuditView"];
export type Preview = Schemas["PreviewView"];
export type Checkpoint = Schemas["CheckpointView"];
export type Barrier = Schemas["BarrierView"];
export type Task = Schemas["TaskView"];
export type Recipe = Schemas["RecipeBody"];
export type Verification = Schemas["VerificationView"];
export type ExitCause = Schemas["ExitCause"];
export type Recovery = Schemas["RecoveryView"];
export type Metrics = Schemas["MetricsView"];
export type LogEntry = Schemas["LogView"];
export type CoordinatorStatus = Schemas["StatusView"];
export type History = Schemas["HistoryView"];
export type Goodput = Schemas["GoodputView"];
export type RecentEvent = Schemas["RecentEventBody"];
/** The answer of `GET /api/dashboard`. */
export type Snapshot = Schemas["DashboardView"];

export type WorkerState = Worker["status"];
export type TaskStatus = Task["status"];
export type CheckpointStatus = Checkpoint["status"];
export type BarrierStatus = Barrier["status"];
export type LogLevel = "debug" | "info" | "warn" | "error";
