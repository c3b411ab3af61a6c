/** The event stream, typed by the coordinator: see `generated.ts`. Pure. */

import { EVENT_KINDS, type StreamEvent } from "./generated";

type Received<E> = E extends StreamEvent ? { id: string; kind: E["event"]; data: E["data"] } : never;

/** One event: its kind says what its data holds. The id is unique and in order within one life of the coordinator. */
export type FeedEvent = Received<StreamEvent>;
export type Kind = FeedEvent["kind"];
export type DataOf<K extends Kind> = Extract<FeedEvent, { kind: K }>["data"];

const KINDS: ReadonlySet<string> = new Set(EVENT_KINDS);

/** An event as it was received; null for a kind this page does not know. Its data is what the coordinator's schema says. */
export function received(id: string, kind: string, data: unknown): FeedEvent | null {
  return KINDS.has(kind) ? ({ id, kind, data } as FeedEvent) : null;
}
