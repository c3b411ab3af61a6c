/**
 * Who is signed in, what they may do, and signing in and out.
 *
 * A token or a link's code is sent once and not kept; the session is an HttpOnly cookie. The coordinator decides what is
 * allowed; the page disables what it would refuse.
 */

import { ApiError, httpTransport } from "./api/client";
import type { Role, Session } from "./api/types";
import { restart } from "./mode";
import { useStore } from "./state/store";

export const ROLES: readonly Role[] = ["viewer", "worker", "operator", "admin"];

/** Each role includes the previous ones. */
export const ABILITIES: Record<Role, string> = {
  viewer: "read-only access",
  worker: "read access; reports as a worker of a job",
  operator: "starts, stops and restarts tasks, drains machines, registers datasets, verifies checkpoints, edits tags and notes",
  admin: "full access, including tokens and the audit log",
};

export function may(session: Session | null, need: Role): boolean {
  // Unknown session: demo mode allows everything, and the coordinator checks every call anyway.
  return session === null || ROLES.indexOf(session.role) >= ROLES.indexOf(need);
}

/** Why an action is not allowed; undefined where it is. */
export function refusalOf(session: Session | null, need: Role): string | undefined {
  return session === null || may(session, need) ? undefined : `Requires the ${need} role; you are signed in as ${session.role}.`;
}

export function useRefusal(need: Role | undefined): string | undefined {
  return useStore((state) => (need === undefined ? undefined : refusalOf(state.session, need)));
}

/** The job this session is bound to; null: all jobs. */
export function useOnlyJob(): string | null {
  return useStore((state) => state.session?.job_id ?? null);
}

export async function signIn(credential: { token: string } | { code: string }): Promise<void> {
  const session = (await httpTransport("/session", { method: "POST", body: credential })) as Session;
  const known = await (httpTransport("/session", {}) as Promise<Session>).catch((error: unknown) => {
    if (error instanceof ApiError && error.status === 401) return null;
    throw error;
  });
  if (known?.name !== session.name) {
    throw new ApiError("Signed in, but this browser rejected the cookie.", { status: 401, code: "no_cookie", hint: "Allow cookies for this address and sign in again." });
  }
  restart();
}

export async function signOut(): Promise<void> {
  try {
    await httpTransport("/session", { method: "DELETE" });
  } catch (error) {
    // 401: already signed out.
    if (!(error instanceof ApiError && error.status === 401)) throw error;
  }
  restart();
}

/** The code of a sign-in link. Removed from the address bar and the history, returned once. */
export function takeCode(): string | null {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  if (code !== null) history.replaceState(history.state, "", location.pathname + location.search);
  return code;
}
