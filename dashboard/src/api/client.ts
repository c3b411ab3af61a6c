/**
 * Calls to the coordinator. Every error becomes an `ApiError` that says what happened and what to do next.
 *
 * Scripts never keep a credential after signing in: the browser sends the session cookie itself.
 */

export const API_URL: string = (import.meta.env["VITE_API_URL"] as string | undefined)?.replace(/\/+$/, "") || "/api";

export class ApiError extends Error {
  override readonly name = "ApiError";
  /** 0 without a response. */
  readonly status: number;
  readonly code: string;
  readonly hint: string;
  readonly details: { field?: string; message?: string }[];
  /** Seconds to wait before the next attempt (Retry-After); 0 without one. */
  readonly retryAfterS: number;

  constructor(message: string, about: { status: number; code: string; hint?: string; details?: { field?: string; message?: string }[]; retryAfterS?: number }) {
    super(message);
    this.status = about.status;
    this.code = about.code;
    this.hint = about.hint ?? "";
    this.details = about.details ?? [];
    this.retryAfterS = about.retryAfterS ?? 0;
  }
}

export interface Call {
  method?: "GET" | "POST" | "DELETE";
  /** A list becomes one parameter per value. */
  query?: Record<string, string | number | boolean | readonly string[] | null | undefined>;
  body?: unknown;
  signal?: AbortSignal | undefined;
}

/** Returns decoded JSON, or throws an `ApiError`. Demo mode has its own. */
export type Transport = (path: string, call: Call) => Promise<unknown>;

let unauthorized: () => void = () => undefined;

/** Called when a request fails with 401: not signed in, or not any more. */
export function onUnauthorized(listener: () => void): void {
  unauthorized = listener;
}

export function withQuery(path: string, query: Call["query"]): string {
  const pairs = Object.entries(query ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  if (pairs.length === 0) return path;
  const flat = pairs.flatMap(([key, value]) => (Array.isArray(value) ? (value as readonly string[]) : [String(value)]).map((each) => [key, each]));
  return `${path}?${new URLSearchParams(flat).toString()}`;
}

const TIMEOUT_MS = 30_000;

export const httpTransport: Transport = async (path, call) => {
  const timeout = AbortSignal.timeout(TIMEOUT_MS);
  const signal = call.signal ? AbortSignal.any([call.signal, timeout]) : timeout;
  const lost = (how: string) => unreachable(timeout.aborted ? `no response within ${TIMEOUT_MS / 1000} s` : how);
  let response: Response;
  try {
    response = await fetch(API_URL + withQuery(path, call.query), {
      method: call.method ?? "GET",
      headers: {
        Accept: "application/json",
        ...(call.body === undefined ? {} : { "Content-Type": "application/json" }),
      },
      body: call.body === undefined ? null : JSON.stringify(call.body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (call.signal?.aborted) throw error;
    throw lost("the connection was refused or lost");
  }
  if (!response.ok) {
    // A failed sign-in does not end the current session.
    if (response.status === 401 && path !== "/session") unauthorized();
    throw await refusal(response);
  }
  if (response.status === 204) return null;
  try {
    return await response.json();
  } catch (error) {
    if (call.signal?.aborted) throw error;
    if (!(error instanceof SyntaxError)) throw lost("the connection was lost");
    throw new ApiError("The response is not JSON.", {
      status: response.status,
      code: "not_json",
      hint: `The server at ${API_URL} is not a coordinator.`,
    });
  }
};

export function unreachable(why: string): ApiError {
  return new ApiError(`Cannot reach the coordinator: ${why}.`, {
    status: 0,
    code: "unreachable",
    hint: "Check that it is running (strata serve) and reachable from this browser.",
  });
}

export async function refusal(response: Response): Promise<ApiError> {
  let body: { code?: string; message?: string; hint?: string; details?: { field?: string; message?: string }[] } = {};
  try {
    body = (await response.json()) as typeof body;
  } catch {
    // Not JSON, probably a proxy's error page: only the status is known.
  }
  return new ApiError(body.message ?? `The request failed: ${response.status} ${response.statusText}.`, {
    status: response.status,
    code: body.code ?? "http_error",
    hint: body.hint ?? "Retry, or check the coordinator's log.",
    details: body.details ?? [],
    retryAfterS: Number(response.headers.get("retry-after")) || 0,
  });
}

let transport: Transport = httpTransport;

export function setTransport(next: Transport): void {
  transport = next;
}

export async function get<T>(path: string, query?: Call["query"], signal?: AbortSignal): Promise<T> {
  return (await transport(path, { query, signal })) as T;
}

export async function post<T>(path: string, body: unknown = {}): Promise<T> {
  return (await transport(path, { method: "POST", body })) as T;
}

export async function remove(path: string): Promise<void> {
  await transport(path, { method: "DELETE" });
}
