/** Parser for server-sent events, independent of chunk boundaries. Pure. */

import { received, type FeedEvent } from "../api/events";

export class EventParser {
  private rest = "";
  private id: string;

  /** `lastId`: where an earlier stream ended. */
  constructor(lastId = "") {
    this.id = lastId;
  }

  get lastId(): string {
    return this.id;
  }

  /** The events completed by this chunk. Unknown kinds and invalid JSON are skipped. */
  push(piece: string): FeedEvent[] {
    const events: FeedEvent[] = [];
    const blocks = (this.rest + piece).split("\n\n");
    this.rest = blocks.pop() ?? "";
    for (const block of blocks) {
      const event = this.read(block);
      if (event) events.push(event);
    }
    return events;
  }

  private read(block: string): FeedEvent | null {
    let kind = "message";
    const data: string[] = [];
    for (const line of block.split("\n")) {
      const colon = line.indexOf(":");
      if (colon <= 0) continue; // Comments are keep-alives.
      const field = line.slice(0, colon);
      const value = line.charAt(colon + 1) === " " ? line.slice(colon + 2) : line.slice(colon + 1);
      if (field === "id") this.id = value;
      else if (field === "event") kind = value;
      else if (field === "data") data.push(value);
    }
    if (data.length === 0) return null;
    try {
      return received(this.id, kind, JSON.parse(data.join("\n")));
    } catch {
      return null;
    }
  }
}
