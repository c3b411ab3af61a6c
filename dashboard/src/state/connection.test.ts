// @vitest-environment node
/** Against a real server that can be made to misbehave. */

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
  signedIn = true;
  job: string | null = null;
  /** Every requested path. */
  asked: string[] = [];
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

  send(number: number, kind: string, data: unknown): void {
    for (const stream of this.open) stream.write(`id: b-${number}\nevent: ${kind}\ndata: ${JSON.stringify(data)}\n\n`);
  }

  private answer(request: IncomingMessage, response: ServerResponse): void {
    this.asked.push(request.url ?? "");
    if (!this.signedIn) {
      response.writeHead(401, { "Content-Type": "application/json" }).end(JSON.stringify({ code: "forbidden", message: "A token is required.", hint: "Send it in a header." }));
    } else if (request.url === "/api/session") {
      response.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify({ name: "token ci (1)", role: "viewer", job_id: this.job, signed_in: true }));
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
  await connect();
});

async function connect(): Promise<void> {
  vi.stubGlobal("document", { hidden: false });
  vi.stubEnv("VITE_API_URL", `http://127.0.0.1:${coordinator.port}/api`);
  vi.resetModules();
  state = initialState();
  const { live } = await import("./connection");
  stop = live.start((action) => {
    state = reduce(state, action);
  });
}

afterEach(async () => {
  stop();
  await coordinator.stop();
  vi.unstubAllEnvs();
  vi.unstubAllGlobals();
});

const until = (claim: () => void) => vi.waitFor(claim, { timeout: 25_000, interval: 20 });
const isLive = () => until(() => expect([state.connection.phase, coordinator.readers]).toEqual(["live", 1]));

it("resumes a broken stream where it ended, without a notice", async () => {
  await isLive();
  expect([...state.workers.keys()]).toEqual(["w0"]);
  coordinator.send(41, "metrics", { ...metrics, total_workers: 7 });
  await until(() => expect(state.metrics?.total_workers).toBe(7));
  coordinator.cut();
  await until(() => expect(coordinator.lastIds).toEqual([undefined, "b-41"]));
  expect(state.connection.phase).toBe("live");
});

it("fetches a new snapshot on resync", async () => {
  await isLive();
  const before = coordinator.snapshots;
  coordinator.workers = [worker({ id: "new" })];
  coordinator.send(1, "resync", { reason: "the coordinator restarted" });
  await until(() => expect([...state.workers.keys()]).toEqual(["new"]));
  expect(coordinator.snapshots).toBeGreaterThan(before);
});

it("polls where streams are blocked", async () => {
  coordinator.streams = false;
  coordinator.cut();
  await until(() => expect(state.connection.phase).toBe("polling"));
  coordinator.workers = [worker({ id: "seen by polling" })];
  await until(() => expect([...state.workers.keys()]).toEqual(["seen by polling"]));
});

it("says why it is disconnected and when it retries, keeps the last values, and reconnects", async () => {
  await isLive();
  const stoppedMs = Date.now();
  await coordinator.stop();
  await until(() => expect(state.connection.phase).toBe("disconnected"));
  expect(state.connection.reason).toMatch(/Cannot reach the coordinator/);
  expect(state.connection.nextAttemptAtMs).toBeGreaterThan(stoppedMs);
  expect(state.workers.size).toBe(1);
  await coordinator.start();
  await isLive();
  expect(state.connection).toMatchObject({ reason: "", nextAttemptAtMs: null });
  expect(state.coordinator?.server_time).toBe(NOW);
});

it("shows and requests nothing while signed out, and continues after sign-in", async () => {
  await isLive();
  expect(state.session).toMatchObject({ name: "token ci (1)", role: "viewer" });
  coordinator.signedIn = false;
  coordinator.cut();
  await until(() => expect(state.connection).toMatchObject({ phase: "signed_out", reason: "Your session has ended: it expired, or its token was revoked." }));
  expect([state.session, state.coordinator, state.workers.size]).toEqual([null, null, 0]);
  const asked = coordinator.asked.length;
  // Longer than the first retry intervals.
  await new Promise((resolve) => setTimeout(resolve, 1_500));
  expect(coordinator.asked.length).toBe(asked);
  coordinator.signedIn = true;
  const { retryNow } = await import("./connection");
  retryNow();
  await isLive();
  expect(state.session?.role).toBe("viewer");
});

it("checks the session after any 401", async () => {
  await isLive();
  coordinator.signedIn = false;
  const { get } = await import("../api/client");
  await expect(get("/tasks")).rejects.toMatchObject({ status: 401 });
  await until(() => expect(state.connection.phase).toBe("signed_out"));
});

it("shows the coordinator's message when it was never signed in", async () => {
  stop();
  coordinator.signedIn = false;
  await connect();
  await until(() => expect(state.connection).toMatchObject({ phase: "signed_out", reason: "A token is required." }));
});

it("requests nothing cluster-wide when bound to a job, and notices a lost coordinator", async () => {
  await isLive();
  stop();
  coordinator.job = "task-1";
  coordinator.asked = [];
  await connect();
  await until(() => expect(coordinator.asked.length).toBeGreaterThanOrEqual(2));
  expect(new Set(coordinator.asked)).toEqual(new Set(["/api/session"]));
  expect(state.connection).toMatchObject({ phase: "polling", reason: "Bound to job task-1: polling every few seconds." });
  await coordinator.stop();
  await until(() => expect(state.connection.phase).toBe("disconnected"));
  await coordinator.start();
  await until(() => expect(state.connection.phase).toBe("polling"));
});
