import { expect, it } from "vitest";

import { EventParser } from "./sse";

const STREAM = 'retry: 1000\n\nid: b-1\nevent: worker_joined\ndata: {"a":1}\n\n: still here\n\nid: b-2\nevent: logs\ndata: [{"message":"one\\ntwo: \\u2028three"}]\n\n';

it("yields the same events for any chunking", () => {
  const expected = new EventParser().push(STREAM);
  expect(expected).toEqual([
    { id: "b-1", kind: "worker_joined", data: { a: 1 } },
    { id: "b-2", kind: "logs", data: [{ message: "one\ntwo: \u2028three" }] },
  ]);
  for (let size = 1; size < 40; size += 1) {
    const parser = new EventParser();
    const events = [];
    for (let at = 0; at < STREAM.length; at += size) events.push(...parser.push(STREAM.slice(at, at + size)));
    expect(events).toEqual(expected);
    expect(parser.lastId).toBe("b-2");
  }
});

it("continues from an earlier stream, and skips unknown kinds and invalid JSON", () => {
  const parser = new EventParser("b-7");
  expect(parser.push("event: resync\ndata: {nonsense\n\n")).toEqual([]);
  expect(parser.push('event: comet_seen\ndata: {"at_s":1}\n\n')).toEqual([]);
  expect(parser.lastId).toBe("b-7");
  expect(parser.push('event: resync\ndata: {"reason":\ndata: "r"}\n\n')).toEqual([{ id: "b-7", kind: "resync", data: { reason: "r" } }]);
});
