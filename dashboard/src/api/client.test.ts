// @vitest-environment node
/** Against a real server that drops connections. */

import { createServer, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";

import { afterEach, expect, it, vi } from "vitest";

let server: Server;

afterEach(() => {
  vi.unstubAllEnvs();
  server.closeAllConnections();
  server.close();
});

/** Result or error of a call to a server that responds like this. */
async function outcomeOf(answer: (response: ServerResponse) => void): Promise<unknown> {
  server = createServer((_, response) => answer(response));
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  vi.stubEnv("VITE_API_URL", `http://127.0.0.1:${(server.address() as AddressInfo).port}/api`);
  vi.resetModules();
  const { get } = await import("./client");
  return await get("/workers").catch((error: unknown) => error);
}

it("treats a truncated response as a lost connection", async () => {
  const error = await outcomeOf((response) => {
    response.writeHead(200, { "Content-Type": "application/json", "Content-Length": 100 });
    response.write("[1, 2");
    setTimeout(() => response.destroy(), 20);
  });
  expect(error).toMatchObject({ code: "unreachable", status: 0, message: "Cannot reach the coordinator: the connection was lost." });
});

it("distinguishes a complete response that is not JSON", async () => {
  const error = await outcomeOf((response) => response.writeHead(200).end("<html>"));
  expect(error).toMatchObject({ code: "not_json", status: 200 });
});

it("passes on the message and hint of an error response", async () => {
  const error = await outcomeOf((response) => response.writeHead(422).end(JSON.stringify({ code: "invalid", message: "No.", hint: "Ask otherwise." })));
  expect(error).toMatchObject({ code: "invalid", status: 422, message: "No.", hint: "Ask otherwise." });
});

it("reads Retry-After", async () => {
  const error = await outcomeOf((response) => response.writeHead(429, { "Retry-After": "3" }).end(JSON.stringify({ code: "forbidden", message: "Too many.", hint: "Wait." })));
  expect(error).toMatchObject({ status: 429, message: "Too many.", retryAfterS: 3 });
});

it("returns null for 204 No Content", async () => {
  expect(await outcomeOf((response) => response.writeHead(204).end())).toBeNull();
});
