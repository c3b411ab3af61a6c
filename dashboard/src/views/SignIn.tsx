/**
 * Sign in with a token or a one-time link. Replaces every view while signed out, so that the requested page opens after
 * sign-in.
 */

import { useMutation } from "@tanstack/react-query";
import { Link, useNavigate, useRouterState } from "@tanstack/react-router";
import { useEffect, useState } from "react";

import { ApiError } from "../api/client";
import { Button, Field, Input } from "../components/controls";
import { ErrorNote } from "../components/states";
import { setMode, useMode } from "../mode";
import { signIn, takeCode } from "../session";
import { SIGN_IN } from "../shell/views";
import { retryNow } from "../state/connection";
import { useNowMs, useStore } from "../state/store";

export function SignIn() {
  const [token, setToken] = useState("");
  const { reason, phase } = useStore((state) => state.connection);
  const session = useStore((state) => state.session);
  const mode = useMode();
  const { pathname, hash } = useRouterState({ select: (state) => state.location });
  const navigate = useNavigate();
  const work = useMutation({
    mutationFn: signIn,
    gcTime: 0,
    onSuccess: () => {
      if (pathname === SIGN_IN) void navigate({ to: "/", replace: true });
    },
    onError: () => setToken(""),
  });
  const { mutate } = work;
  useEffect(() => {
    const code = takeCode();
    if (code !== null) mutate({ code });
  }, [hash, mutate]);
  useOtherTabs();
  const waitS = useWait(work.error, work.submittedAt);
  const byLink = work.variables !== undefined && "code" in work.variables;

  return (
    <div className="m-auto flex w-full max-w-md flex-col gap-5 rounded-xl border bg-surface p-6 sm:p-8">
      <header className="flex flex-col gap-1">
        <h1 className="text-xl font-semibold tracking-tight">Sign in to Strata</h1>
        {phase === "signed_out" && !work.isError && <p className="foreign break-words text-muted">{reason}</p>}
        {session && mode === "live" && (
          <p className="text-muted">
            Signed in as <span className="foreign break-words text-ink">{session.name}</span> ({session.role}). <Link to="/" className="text-accent underline underline-offset-2">Open the dashboard</Link>
          </p>
        )}
      </header>
      {work.isPending && byLink ? (
        <p role="status">Signing in …</p>
      ) : (
        <form
          className="flex flex-col gap-4"
          onSubmit={(event) => {
            event.preventDefault();
            work.mutate({ token: token.trim() });
          }}
        >
          {work.isError && <ErrorNote error={work.error} />}
          <Field label="Token" hint="Starts a 12-hour session (HttpOnly cookie)">
            {(ids) => <Input {...ids} type="password" required autoFocus autoCapitalize="off" className="h-10 font-mono" value={token} onChange={(event) => setToken(event.target.value)} />}
          </Field>
          <Button type="submit" look="primary" className="h-10" disabled={work.isPending || waitS > 0}>
            {work.isPending ? "Signing in …" : waitS > 0 ? `Wait ${waitS} s` : "Sign in"}
          </Button>
        </form>
      )}
      <p className="border-t pt-4 text-muted">
        Get a token with <Command>strata token create --role viewer</Command>, or ask an admin for a one-time sign-in link: <Command>strata dashboard-link</Command>.
      </p>
      {mode === "live" && <Button look="ghost" className="-ml-3 self-start" onClick={() => setMode("demo")}>Open demo with simulated data</Button>}
    </div>
  );
}

function Command(props: { children: string }) {
  return <code className="rounded bg-raised px-1 py-0.5 font-mono text-sm text-ink">{props.children}</code>;
}

/** A sign-in in another tab applies here as soon as this tab is visible. */
function useOtherTabs(): void {
  useEffect(() => {
    const look = () => {
      if (!document.hidden) retryNow();
    };
    document.addEventListener("visibilitychange", look);
    return () => document.removeEventListener("visibilitychange", look);
  }, []);
}

/** Seconds until the coordinator accepts another attempt. */
function useWait(error: unknown, sinceMs: number): number {
  const now = useNowMs();
  if (!(error instanceof ApiError) || error.retryAfterS === 0) return 0;
  return Math.max(0, Math.ceil(error.retryAfterS - (now - sinceMs) / 1000));
}
