/** Everything the dashboard knows. It changes in one place only: `reducer.ts`. */

import type { FeedEvent } from "../api/events";
import type {
  Barrier, Checkpoint, CoordinatorStatus, Dataset, Incident, LastReport, LogEntry, Metrics, Recovery, Session, Snapshot, Task, Worker,
} from "../api/types";

/**
 * How the coordinator is connected.
 * - connecting: no response yet
 * - live: the event stream is open
 * - polling: the stream does not work, but asking does
 * - disconnected: neither; the last values stay, dimmed
 * - signed_out: the coordinator does not know who is asking; nothing is shown until somebody signs in
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

/** A fact from the stream, or from before this page was opened. */
export interface EventLine {
  /** The stream's id, unique and in order within one life of the coordinator. */
  id: string;
  kind: string;
  at: number;
  jobId: string | null;
  workerId: string | null;
  text: string;
  level: "info" | "good" | "warn" | "bad";
}

/** One sample a second of what changes all the time; arrays are parallel, oldest first. */
export interface Series {
  times: number[];
  rps: (number | null)[];
  activeWorkers: (number | null)[];
  throughput: (number | null)[];
  barrierP99: (number | null)[];
  checkpointMbS: (number | null)[];
  planMs: (number | null)[];
}

/** Points of one run, one a poll; arrays are parallel, oldest first. */
export interface RunSeries {
  times: number[];
  step: (number | null)[];
  loss: (number | null)[];
  tokensPerS: (number | null)[];
  samplesPerS: (number | null)[];
  stepsPerS: (number | null)[];
}

/** A change of a run's members. */
export interface Generation {
  jobId: string;
  /** As the coordinator counts, over all jobs; 0 where only the joining itself is known. */
  number: number;
  /** As people count: the first change of this job is 1. */
  ordinal: number;
  at: number;
  kind: "joined" | "failed" | "left";
  workerId: string;
  reason: string;
}

export interface State {
  connection: Connection;
  /** Who is asking, and what they may do; null while that is not known, and in demo mode. */
  session: Session | null;
  /** Server clock minus browser clock, seconds: ages are right even where clocks are not. */
  skewS: number;
  coordinator: CoordinatorStatus | null;
  workers: ReadonlyMap<string, Worker>;
  datasets: ReadonlyMap<string, Dataset>;
  /** Newest first. */
  checkpoints: readonly Checkpoint[];
  /** Those that wait first, then the ones that ended last. */
  barriers: readonly Barrier[];
  /** Newest first. */
  tasks: readonly Task[];
  /** Newest first. */
  recoveries: readonly Recovery[];
  /** Newest first, as far as they were asked for. */
  incidents: readonly Incident[];
  /** What each job has reported last, also when nobody is in it any more. */
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
  /** Grows whenever shards have changed hands: ask for the plan again. */
  planRevision: number;
  /** Lines of a flood that the stream left out; a search still finds them. */
  logsSkipped: number;
}

export type Action =
  /**
   * `since`: events that came after the snapshot was asked for. They may or may not be in it, so they are applied
   * to it once more; every event can be applied twice.
   */
  | { type: "snapshot"; snapshot: Snapshot; since?: FeedEvent[]; atMs: number }
  | { type: "recoveries"; recoveries: Recovery[] }
  | { type: "incidents"; incidents: Incident[] }
  /** Facts from before this page was opened, oldest first. */
  | { type: "past"; events: FeedEvent[] }
  | { type: "events"; events: FeedEvent[]; atMs: number }
  /** Points from before this page was opened. */
  | { type: "history"; series: Partial<Series> & { times: number[] } }
  | { type: "runHistory"; jobId: string; series: RunSeries }
  | { type: "connection"; connection: Partial<Connection> }
  | { type: "session"; session: Session }
  /** Nobody is signed in, or not any more: what was shown is forgotten. */
  | { type: "signedOut"; reason: string };
