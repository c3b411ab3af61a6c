/** The event stream, typed by the coordinator: see `generated.ts`. Pure. */

import { EVENT_KINDS, type StreamEvent } from "./generated";

type Received<E> = E extends StreamEvent ? { id: string; kind: E["event"]; data: E["data"] } : never;

/** One event: its kind says what its data holds. The id is unique and in order until the coordinator restarts. */
export type FeedEvent = Received<StreamEvent>;
export type Kind = FeedEvent["kind"];
export type DataOf<K extends Kind> = Extract<FeedEvent, { kind: K }>["data"];

const KINDS: ReadonlySet<string> = new Set(EVENT_KINDS);

/** A received event; null for an unknown kind. Its data follows the coordinator's schema. */
export function received(id: string, kind: string, data: unknown): FeedEvent | null {
  return KINDS.has(kind) ? ({ id, kind, data } as FeedEvent) : null;
}
