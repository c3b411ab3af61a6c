/** Everything the dashboard knows. It changes in one place only: `reducer.ts`. */

import type { FeedEvent } from "../api/events";
import type {
  Barrier, Checkpoint, CoordinatorStatus, Dataset, Incident, LastReport, LogEntry, Metrics, Recovery, Session, Snapshot, Task, Worker,
} from "../api/types";

/**
 * How the coordinator is connected.
 * - connecting: no response yet
 * - live: the event stream is open
 * - polling: the stream does not work, but requests do
 * - disconnected: neither; the last values stay, dimmed
 * - signed_out: no session; nothing is shown until somebody signs in
 */
export interface Connection {
  phase: "connecting" | "live" | "polling" | "disconnected" | "signed_out";
  /** Why it is not live, for people; "" when it is. */
  reason: string;
  hint: string;
  /** Browser clock, ms. When the next attempt is made, while disconnected. */
  nextAttemptAtMs: number | null;
  /** Browser clock, ms. When anything last arrived; null before the first time. */
  updatedAtMs: number | null;
}

/** An event from the stream, or from before this page was opened. */
export interface EventLine {
  /** The stream's id, unique and in order until the coordinator restarts. */
  id: string;
  kind: string;
  at: number;
  jobId: string | null;
  workerId: string | null;
  text: string;
  level: "info" | "good" | "warn" | "bad";
}

/** One sample per second; arrays are parallel, oldest first. */
export interface Series {
  times: number[];
  rps: (number | null)[];
  activeWorkers: (number | null)[];
  throughput: (number | null)[];
  barrierP99: (number | null)[];
  checkpointMbS: (number | null)[];
  planMs: (number | null)[];
}

/** One point per poll of one run; arrays are parallel, oldest first. */
export interface RunSeries {
  times: number[];
  step: (number | null)[];
  loss: (number | null)[];
  tokensPerS: (number | null)[];
  samplesPerS: (number | null)[];
  stepsPerS: (number | null)[];
}

/** A membership change of a run. */
export interface Generation {
  jobId: string;
  /** As the coordinator counts, over all jobs; 0 for a guess from a join time. */
  number: number;
  /** Per job: its first change is 1. */
  ordinal: number;
  at: number;
  kind: "joined" | "failed" | "left";
  workerId: string;
  reason: string;
}

export interface State {
  connection: Connection;
  /** Who is signed in, and their role; null while unknown, and in demo mode. */
  session: Session | null;
  /** Server clock minus browser clock in seconds, to correct ages. */
  skewS: number;
  coordinator: CoordinatorStatus | null;
  workers: ReadonlyMap<string, Worker>;
  datasets: ReadonlyMap<string, Dataset>;
  /** Newest first. */
  checkpoints: readonly Checkpoint[];
  /** Waiting ones first, then the latest ended. */
  barriers: readonly Barrier[];
  /** Newest first. */
  tasks: readonly Task[];
  /** Newest first. */
  recoveries: readonly Recovery[];
  /** The newest hundred, newest first. */
  incidents: readonly Incident[];
  /** Last report of each job, kept after its workers have left. */
  jobs: ReadonlyMap<string, LastReport>;
  metrics: Metrics | null;
  /** Oldest first, bounded. */
  logs: readonly LogEntry[];
  /** Newest first, bounded. */
  eventLines: readonly EventLine[];
  /** Oldest first, bounded. */
  generations: readonly Generation[];
  series: Series;
  runSeries: ReadonlyMap<string, RunSeries>;
  /** Incremented when shards are reassigned: refetch the plan. */
  planRevision: number;
  /** Log lines that the stream skipped; a search still finds them. */
  logsSkipped: number;
}

export type Action =
  /**
   * `since`: events received after the snapshot was requested. They may or may not be in it, so they are applied
   * again; every event can be applied twice.
   */
  | { type: "snapshot"; snapshot: Snapshot; since?: FeedEvent[]; atMs: number }
  | { type: "recoveries"; recoveries: Recovery[] }
  | { type: "incidents"; incidents: Incident[] }
  /** Events from before this page was opened, oldest first. */
  | { type: "past"; events: FeedEvent[] }
  | { type: "events"; events: FeedEvent[]; atMs: number }
  /** Points from before this page was opened. */
  | { type: "history"; series: Partial<Series> & { times: number[] } }
  | { type: "runHistory"; jobId: string; series: RunSeries }
  | { type: "connection"; connection: Partial<Connection> }
  | { type: "session"; session: Session }
  /** Not signed in, or not any more: all data is dropped. */
  | { type: "signedOut"; reason: string };
