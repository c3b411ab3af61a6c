// @vitest-environment node
/** Against a real server that can be told to misbehave. */

import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { AddressInfo, Socket } from "node:net";

import { afterEach, beforeEach, expect, it, vi } from "vitest";

import { initialState, reduce } from "./reducer";
import { metrics, NOW, snapshot, worker } from "./samples";
import type { State } from "./types";

class Coordinator {
  snapshots = 0;
  lastIds: (string | undefined)[] = [];
  streams = true;
  token = "";
  workers = [worker()];
  port = 0;
  private server: Server | null = null;
  private open = new Set<ServerResponse>();
  private sockets = new Set<Socket>();

  async start(): Promise<void> {
    this.server = createServer((request, response) => this.answer(request, response));
    this.server.on("connection", (socket) => {
      this.sockets.add(socket);
      socket.on("close", () => this.sockets.delete(socket));
    });
    await new Promise<void>((resolve) => this.server?.listen(this.port, "127.0.0.1", resolve));
    this.port = (this.server.address() as AddressInfo).port;
  }

  async stop(): Promise<void> {
    for (const socket of this.sockets) socket.destroy();
    await new Promise((resolve) => this.server?.close(resolve));
    this.open.clear();
  }

  get readers(): number {
    return this.open.size;
  }

  cut(): void {
    for (const stream of this.open) stream.destroy();
    this.open.clear();
  }

  tell(number: number, kind: string, data: unknown): void {
    for (const stream of this.open) stream.write(`id: b-${number}\nevent: ${kind}\ndata: ${JSON.stringify(data)}\n\n`);
  }

  private answer(request: IncomingMessage, response: ServerResponse): void {
    if (this.token && request.headers.authorization !== `Bearer ${this.token}`) {
      response.writeHead(401, { "Content-Type": "application/json" }).end(JSON.stringify({ code: "unauthorized", message: "A token is required.", hint: "Send it in a header." }));
    } else if (request.url === "/api/events" && this.streams) {
      this.lastIds.push(request.headers["last-event-id"] as string | undefined);
      response.writeHead(200, { "Content-Type": "text/event-stream" });
      response.write("retry: 1000\n\n");
      this.open.add(response);
    } else if (request.url === "/api/dashboard") {
      this.snapshots += 1;
      response.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify(snapshot({ workers: this.workers })));
    } else {
      response.writeHead(404, { "Content-Type": "application/json" }).end(JSON.stringify({ code: "not_found", message: "Nothing here.", hint: "" }));
    }
  }
}

let coordinator: Coordinator;
let state: State;
let stop: () => void;

beforeEach(async () => {
  coordinator = new Coordinator();
  await coordinator.start();
  vi.stubGlobal("document", { hidden: false });
  vi.stubEnv("VITE_API_URL", `http://127.0.0.1:${coordinator.port}/api`);
  vi.resetModules();
  state = initialState();
  const { live } = await import("./connection");
  stop = live.start((action) => {
    state = reduce(state, action);
  });
});

afterEach(async () => {
  stop();
  await coordinator.stop();
  vi.unstubAllEnvs();
  vi.unstubAllGlobals();
});

const until = (claim: () => void) => vi.waitFor(claim, { timeout: 25_000, interval: 20 });
const isLive = () => until(() => expect([state.connection.phase, coordinator.readers]).toEqual(["live", 1]));

it("takes a broken stream up where it ended, without a word to anybody", async () => {
  await isLive();
  expect([...state.workers.keys()]).toEqual(["w0"]);
  coordinator.tell(41, "metrics", { ...metrics, total_workers: 7 });
  await until(() => expect(state.metrics?.total_workers).toBe(7));
  coordinator.cut();
  await until(() => expect(coordinator.lastIds).toEqual([undefined, "b-41"]));
  expect(state.connection.phase).toBe("live");
});

it("asks for everything anew when told to", async () => {
  await isLive();
  const before = coordinator.snapshots;
  coordinator.workers = [worker({ id: "new" })];
  coordinator.tell(1, "resync", { reason: "the coordinator restarted" });
  await until(() => expect([...state.workers.keys()]).toEqual(["new"]));
  expect(coordinator.snapshots).toBeGreaterThan(before);
});

it("asks again and again where streams do not get through", async () => {
  coordinator.streams = false;
  coordinator.cut();
  await until(() => expect(state.connection.phase).toBe("polling"));
  coordinator.workers = [worker({ id: "seen by asking" })];
  await until(() => expect([...state.workers.keys()]).toEqual(["seen by asking"]));
});

it("says why it is disconnected and when it tries again, keeps the last values, and comes back", async () => {
  await isLive();
  const beganMs = Date.now();
  await coordinator.stop();
  await until(() => expect(state.connection.phase).toBe("disconnected"));
  expect(state.connection.reason).toMatch(/Cannot reach the coordinator/);
  expect(state.connection.nextAttemptAtMs).toBeGreaterThan(beganMs);
  expect(state.workers.size).toBe(1);
  await coordinator.start();
  await isLive();
  expect(state.connection).toMatchObject({ reason: "", nextAttemptAtMs: null });
  expect(state.coordinator?.server_time).toBe(NOW);
});

it("asks for a token, says when one is not accepted, and continues with one that is", async () => {
  await isLive();
  let token = "";
  vi.stubGlobal("sessionStorage", { getItem: () => token || null });
  vi.stubGlobal("localStorage", { getItem: () => null });
  coordinator.token = "secret";
  coordinator.cut();
  await until(() => expect(state.connection).toMatchObject({ phase: "disconnected", needsToken: true, reason: "The coordinator requires a token." }));
  token = "wrong";
  await until(() => expect(state.connection.reason).toBe("The coordinator rejected this token."));
  token = "secret";
  await isLive();
  expect(state.connection.needsToken).toBe(false);
});
