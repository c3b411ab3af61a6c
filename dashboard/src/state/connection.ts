/**
 * Keeps the state in step with a coordinator.
 *
 * The event stream brings events as soon as they are durable; a snapshot every few seconds brings soft state (heartbeats,
 * progress, waiting workers). A broken stream is resumed where it ended; on `resync` a new snapshot is fetched. Where
 * streams are blocked, snapshots alone are polled. Nothing is discarded while the coordinator is unreachable: the state
 * says so, and when the next attempt comes.
 *
 * It first fetches the session. Without one nothing else is requested until somebody signs in; a session bound to a job
 * requests nothing cluster-wide.
 */

import { API_URL, ApiError, get, httpTransport, onUnauthorized, refusal, unreachable } from "../api/client";
import { received, type FeedEvent } from "../api/events";
import type { StreamEvent } from "../api/generated";
import type { History, Incident, Recovery, Session, Snapshot } from "../api/types";
import type { Backend } from "./backend";
import { fleetHistory } from "./series";
import { EventParser } from "./sse";
import type { Action } from "./types";

const FIRST_RETRY_MS = 1_000;
const LAST_RETRY_MS = 10_000;
/** The coordinator sends metrics every second; this long without data and the connection is dead. */
const SILENCE_MS = 10_000;
const POLL_MS = 2_000;
const HIDDEN_POLL_MS = 10_000;
const STREAM_RETRY_MS = 15_000;
const SNAPSHOT_TIMEOUT_MS = 15_000;
const PAST_S = 900;
const INCIDENTS_WAIT_MS = 150;
const FLEET_SERIES = "coordinator_rps,active_workers,barrier_latency_p99,checkpoint_throughput,shard_assignment_time";

let wake: (() => void) | null = null;

/** Retry now instead of at the announced time; while signed out, check the session again. */
export function retryNow(): void {
  wake?.();
}

export const live: Backend = {
  transport: httpTransport,
  start(dispatch) {
    const follower = new Follower(dispatch);
    onUnauthorized(() => follower.askAgain());
    void follower.run();
    return () => follower.stop();
  },
};

class Follower {
  private readonly ended = new AbortController();
  private lastId = "";
  /** Events since the pending snapshot was requested; null without one. */
  private since: FeedEvent[] | null = null;
  private pollTimer: ReturnType<typeof setTimeout> | undefined;
  private workers = 0;
  private asksForIncidents = false;
  /** Aborts the current connection. */
  private stream = new AbortController();

  constructor(private readonly dispatch: (action: Action) => void) {}

  stop(): void {
    this.ended.abort();
    clearTimeout(this.pollTimer);
  }

  /** A call failed with 401: check the session again. */
  askAgain(): void {
    this.stream.abort();
  }

  async run(): Promise<void> {
    let failures = 0;
    while (!this.ended.signal.aborted) {
      let reason: unknown;
      try {
        await this.connect(() => {
          failures = 0;
        });
        reason = unreachable("the event stream ended");
      } catch (error) {
        reason = error;
      }
      if (this.ended.signal.aborted) return;
      clearTimeout(this.pollTimer);
      if (isUnknownCaller(reason)) {
        failures = 0;
        this.lastId = "";
        this.dispatch({ type: "signedOut", reason: reason.message });
        await this.sleep(null);
        continue;
      }
      if (failures > 0 && (await this.pollOnly())) continue;
      const waitMs = failures === 0 ? 250 : Math.min(LAST_RETRY_MS, FIRST_RETRY_MS * 2 ** (failures - 1));
      failures += 1;
      // A stream that merely broke is resumed at once, without a notice.
      if (failures > 1) this.announce(reason, waitMs);
      await this.sleep(waitMs);
    }
  }

  private async connect(onOpen: () => void): Promise<void> {
    this.stream = new AbortController();
    const session = await this.ask<Session>("/session");
    this.dispatch({ type: "session", session });
    if (session.job_id === null) await this.follow(onOpen);
    else await this.stay(session, onOpen);
  }

  /** For a session bound to a job: its views poll what they show; this loop only checks that the coordinator responds. */
  private async stay(session: Session, onOpen: () => void): Promise<void> {
    onOpen();
    for (let now = session; now.name === session.name; now = await this.ask<Session>("/session")) {
      this.dispatch({
        type: "connection",
        connection: { phase: "polling", reason: `Bound to job ${session.job_id}: polling every few seconds.`, hint: "", nextAttemptAtMs: null, updatedAtMs: Date.now() },
      });
      await this.sleep(POLL_MS);
      if (this.ended.signal.aborted) return;
    }
  }

  /** Follows the stream until it breaks. */
  private async follow(onOpen: () => void): Promise<void> {
    const { stream } = this;
    const signal = AbortSignal.any([this.ended.signal, stream.signal]);
    let silence = setTimeout(() => stream.abort(), SILENCE_MS);
    try {
      let response: Response;
      try {
        response = await fetch(`${API_URL}/events`, {
          headers: { Accept: "text/event-stream", ...(this.lastId ? { "Last-Event-ID": this.lastId } : {}) },
          signal,
          cache: "no-store",
        });
      } catch {
        throw unreachable(stream.signal.aborted ? `no response within ${SILENCE_MS / 1000} s` : "the connection was refused or lost");
      }
      if (!response.ok) throw await refusal(response);
      if (!response.body || !response.headers.get("content-type")?.startsWith("text/event-stream")) {
        throw new ApiError("The event stream could not be opened.", { status: response.status, code: "no_stream", hint: `A proxy in front of ${API_URL} may block event streams.` });
      }
      const resumed = this.lastId !== "";
      await Promise.all([this.snapshot(), resumed ? this.incidents() : this.past()]);
      onOpen();
      this.dispatch({ type: "connection", connection: { phase: "live", reason: "", hint: "", nextAttemptAtMs: null } });
      this.schedulePoll();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      const parser = new EventParser(this.lastId);
      for (;;) {
        let piece: ReadableStreamReadResult<string>;
        try {
          piece = await reader.read();
        } catch {
          throw unreachable(stream.signal.aborted ? `no data for ${SILENCE_MS / 1000} s` : "the event stream was interrupted");
        }
        if (piece.done) return;
        clearTimeout(silence);
        silence = setTimeout(() => stream.abort(), SILENCE_MS);
        const events = parser.push(piece.value);
        this.lastId = parser.lastId;
        if (events.length > 0) this.take(events);
      }
    } finally {
      clearTimeout(silence);
      stream.abort();
    }
  }

  private take(events: FeedEvent[]): void {
    this.since?.push(...events);
    this.dispatch({ type: "events", events, atMs: Date.now() });
    if (events.some((e) => e.kind === "incident_reported" || e.kind === "incident_closed")) void this.incidents();
    if (events.some((e) => e.kind === "resync")) {
      void this.snapshot().catch(() => undefined); // The stream itself ends when the coordinator is lost.
      void this.past();
    }
  }

  private async snapshot(): Promise<void> {
    const since: FeedEvent[] = (this.since = []);
    try {
      const snapshot = await this.ask<Snapshot>("/dashboard");
      this.workers = snapshot.workers.length;
      this.dispatch({ type: "snapshot", snapshot, since: [...since], atMs: Date.now() });
    } finally {
      if (this.since === since) this.since = null;
    }
  }

  private async ask<T>(path: string): Promise<T> {
    const signal = AbortSignal.any([this.ended.signal, AbortSignal.timeout(SNAPSHOT_TIMEOUT_MS)]);
    try {
      return await get<T>(path, undefined, signal);
    } catch (error) {
      if (error instanceof ApiError || this.ended.signal.aborted) throw error;
      throw unreachable(`no response within ${SNAPSHOT_TIMEOUT_MS / 1000} s`);
    }
  }

  /** History from before this page was opened; an older coordinator may not have it. */
  private async past(): Promise<void> {
    const signal = this.ended.signal;
    const [events, recoveries, incidents, history] = await Promise.allSettled([
      get<StreamEvent[]>("/events/recent", undefined, signal),
      get<Recovery[]>("/recoveries", undefined, signal),
      get<Incident[]>("/incidents", undefined, signal),
      get<History>("/metrics/history", { series: FLEET_SERIES, since: Math.floor(Date.now() / 1000 - PAST_S) }, signal),
    ]);
    if (events.status === "fulfilled") this.dispatch({ type: "past", events: events.value.map((e) => received(e.id, e.event, e.data)).filter((e) => e !== null) });
    if (recoveries.status === "fulfilled") this.dispatch({ type: "recoveries", recoveries: recoveries.value });
    if (incidents.status === "fulfilled") this.dispatch({ type: "incidents", incidents: incidents.value });
    if (history.status === "fulfilled") this.dispatch({ type: "history", series: fleetHistory(history.value) });
  }

  /** Refetches incidents after an event, once for many events. */
  private async incidents(): Promise<void> {
    if (this.asksForIncidents) return;
    this.asksForIncidents = true;
    await new Promise((resolve) => setTimeout(resolve, INCIDENTS_WAIT_MS));
    this.asksForIncidents = false;
    try {
      this.dispatch({ type: "incidents", incidents: await this.ask<Incident[]>(`/incidents`) });
    } catch {
      // The stream itself ends when the coordinator is lost, and the history is fetched again.
    }
  }

  private schedulePoll(): void {
    clearTimeout(this.pollTimer);
    // A large fleet is polled less often: its snapshot is larger.
    const waitMs = document.hidden ? HIDDEN_POLL_MS : POLL_MS + 2 * this.workers;
    this.pollTimer = setTimeout(() => {
      void this.snapshot()
        .catch(() => undefined)
        .finally(() => {
          if (!this.ended.signal.aborted) this.schedulePoll();
        });
    }, waitMs);
  }

  /** Without a stream: snapshots alone, until the stream is retried. False when they fail too. */
  private async pollOnly(): Promise<boolean> {
    const untilMs = Date.now() + STREAM_RETRY_MS;
    try {
      await this.snapshot();
      void this.incidents();
      this.dispatch({
        type: "connection",
        connection: { phase: "polling", reason: "The event stream is blocked; polling every 2 s instead.", hint: "A proxy in front of the coordinator may buffer streams.", nextAttemptAtMs: null },
      });
      while (Date.now() < untilMs && !this.ended.signal.aborted) {
        await this.sleep(POLL_MS);
        await this.snapshot();
      }
      return true;
    } catch {
      return false;
    }
  }

  private announce(error: unknown, waitMs: number): void {
    this.dispatch({
      type: "connection",
      connection: {
        phase: "disconnected",
        reason: error instanceof Error ? error.message : String(error),
        hint: error instanceof ApiError ? error.hint : "",
        nextAttemptAtMs: Date.now() + waitMs,
      },
    });
  }

  /** For a while, or until `retryNow`; `null`: until `retryNow` alone. */
  private async sleep(ms: number | null): Promise<void> {
    await new Promise<void>((resolve) => {
      const end = () => {
        clearTimeout(timer);
        this.ended.signal.removeEventListener("abort", end);
        resolve();
      };
      const timer = ms === null ? undefined : setTimeout(end, ms);
      this.ended.signal.addEventListener("abort", end);
      wake = end;
    });
    wake = null;
  }
}

function isUnknownCaller(error: unknown): error is ApiError {
  return error instanceof ApiError && error.status === 401;
}
