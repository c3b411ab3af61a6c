/** What stands around every view: navigation, how we are connected, and whether any of this is real. */

import { useQueryClient } from "@tanstack/react-query";
import { Link, Navigate, Outlet, useRouterState } from "@tanstack/react-router";
import { FlaskConical, LockKeyhole, Moon, Search, Sun, WifiOff } from "lucide-react";
import { useEffect, useMemo, useRef, useState, type ReactNode } from "react";

import { Button, IconButton, Kbd } from "../components/controls";
import { Dialog } from "../components/Dialog";
import { Page } from "../components/Page";
import { Empty, Loading } from "../components/states";
import { age } from "../format";
import { DEMO_ONLY, setMode, setTheme, useMode, useTheme } from "../mode";
import { useOnlyJob } from "../session";
import { retryNow } from "../state/connection";
import { useNowMs, useStore } from "../state/store";
import { SIGN_IN, SignIn } from "../views/SignIn";
import { Account } from "./Account";
import { KEYS, useKeys } from "./keys";
import { Palette } from "./Palette";
import { VIEWS, viewsFor } from "./views";

function isDark(): boolean {
  const chosen = document.documentElement.dataset["theme"];
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function Shell() {
  const signedOut = useStore((s) => s.connection.phase === "signed_out");
  const asked = useRouterState({ select: (s) => s.location.pathname === SIGN_IN });
  const answers = useQueryClient();
  useEffect(() => {
    // What one person was shown is not for the next.
    if (signedOut) answers.clear();
  }, [signedOut, answers]);
  return signedOut || asked ? <Gate>{asked ? <Outlet /> : <SignIn />}</Gate> : <Views />;
}

/** Around the view that signs in: nothing of the coordinator's is there to go to. */
function Gate(props: { children: ReactNode }) {
  useEffect(() => {
    document.title = "Sign in · Strata";
  }, []);
  return (
    <div className="flex h-full flex-col">
      <DemoBanner />
      <DisconnectedBanner />
      <main id="main" className="flex min-h-0 flex-1 flex-col overflow-y-auto px-4 py-8">
        {props.children}
      </main>
    </div>
  );
}

/** A browser that is bound to a job reads so in the place of what is about the whole cluster. */
function Content(props: { path: string }) {
  const job = useOnlyJob();
  const mode = useMode();
  // What a view may ask for depends on who is asking.
  const unknown = useStore((s) => s.connection.phase === "connecting" && s.session === null);
  if (unknown && mode === "live") return <Page title="Connecting"><Loading rows={6} /></Page>;
  if (job === null || viewsFor(job).some((view) => props.path === view.to)) return <Outlet />;
  if (props.path === "/") return <Navigate to="/tasks" replace />;
  return (
    <Page title={VIEWS.find((view) => view.to !== "/" && props.path.startsWith(view.to))?.label ?? "Not found"}>
      <Empty icon={LockKeyhole} title={`You are signed in for job ${job} only`} action={<Link to="/tasks" className="inline-flex h-8 items-center rounded-md border px-3 font-medium hover:bg-hover">Open the job</Link>}>
        This view shows the whole cluster, which needs a credential that is not bound to a job.
      </Empty>
    </Page>
  );
}

function Views() {
  const [palette, setPalette] = useState(false);
  const [help, setHelp] = useState(false);
  useTheme();
  const does = useMemo(
    () => ({ palette: () => setPalette(true), help: () => setHelp(true), theme: () => setTheme(isDark() ? "light" : "dark") }),
    [],
  );
  useKeys(does);
  const path = useRouterState({ select: (s) => s.location.pathname });
  const job = useOnlyJob();
  const main = useRef<HTMLElement>(null);
  useEffect(() => {
    const view = VIEWS.find((v) => (v.to === "/" ? path === "/" : path.startsWith(v.to)));
    document.title = view && view.to !== "/" ? `${view.label} · Strata` : "Strata";
    main.current?.scrollTo(0, 0);
  }, [path]);

  return (
    <div className="flex h-full flex-col">
      <a href="#main" className="sr-only focus:not-sr-only focus:absolute focus:z-50 focus:bg-surface focus:p-2">Skip to content</a>
      <DemoBanner />
      <DisconnectedBanner />
      <div className="flex min-h-0 flex-1">
        <nav aria-label="Views" className="flex w-14 shrink-0 flex-col gap-0.5 overflow-y-auto border-r bg-surface px-2 py-3 lg:w-52 lg:px-3">
          <Link to="/" aria-label="Strata" className="mb-3 flex h-9 items-center gap-2.5 rounded-md px-2 text-lg font-semibold tracking-tight">
            <Logo />
            <span className="hidden lg:inline">Strata</span>
          </Link>
          {viewsFor(job).map((view) => (
            <Link
              key={view.to}
              to={view.to}
              activeOptions={{ exact: view.to === "/", includeSearch: false }}
              className="flex h-9 items-center gap-2.5 rounded-md px-2 font-medium text-muted transition-colors hover:bg-hover hover:text-ink aria-[current=page]:bg-accent-soft aria-[current=page]:text-ink"
              title={view.label}
            >
              <view.icon aria-hidden className="size-4 shrink-0" strokeWidth={2} />
              <span className="hidden lg:inline">{view.label}</span>
            </Link>
          ))}
          <div className="mt-auto flex flex-col gap-1 pt-3">
            <Account />
            <button
              type="button"
              onClick={does.palette}
              className="flex h-9 items-center gap-2.5 rounded-md px-2 text-muted hover:bg-hover hover:text-ink"
              title="Command palette"
            >
              <Search aria-hidden className="size-4 shrink-0" />
              <span className="sr-only flex-1 text-left lg:not-sr-only">Search</span>
              <span className="hidden lg:inline"><Kbd>Ctrl K</Kbd></span>
            </button>
            <div className="flex flex-col items-center gap-1 px-0.5 lg:flex-row">
              <ConnectionLamp />
              <IconButton label={isDark() ? "Light theme" : "Dark theme"} onClick={does.theme} className="lg:ml-auto">
                {isDark() ? <Sun aria-hidden className="size-4" /> : <Moon aria-hidden className="size-4" />}
              </IconButton>
            </div>
          </div>
        </nav>
        <main id="main" ref={main} tabIndex={-1} className="min-w-0 flex-1 overflow-y-auto focus:outline-none">
          <Content path={path} />
        </main>
      </div>
      <Palette open={palette} onClose={() => setPalette(false)} />
      <Dialog open={help} onClose={() => setHelp(false)} title="Keyboard shortcuts">
        <dl className="flex flex-col gap-3">
          {KEYS.map(([keys, meaning]) => (
            <div key={meaning} className="flex items-baseline gap-4">
              <dt className="flex w-28 shrink-0 gap-1">{keys.map((key) => <Kbd key={key}>{key}</Kbd>)}</dt>
              <dd className="text-muted">{meaning}</dd>
            </div>
          ))}
        </dl>
      </Dialog>
    </div>
  );
}

function Logo() {
  return (
    <svg aria-hidden viewBox="0 0 24 24" className="size-6 shrink-0 text-accent" fill="none" stroke="currentColor" strokeWidth="2" strokeLinejoin="round" strokeLinecap="round">
      <path d="m3 17 9 4.5L21 17" opacity="0.45" />
      <path d="m3 12 9 4.5L21 12" opacity="0.75" />
      <path d="M12 2.5 3 7l9 4.5L21 7z" fill="currentColor" stroke="none" />
    </svg>
  );
}

/** Simulated numbers must say so, on every view. */
function DemoBanner() {
  const mode = useMode();
  if (mode !== "demo") return null;
  return (
    <aside aria-label="Demo mode" className="flex items-center justify-center gap-3 border-b bg-busy-soft px-4 py-1.5 text-sm">
      <FlaskConical aria-hidden className="size-4 text-busy" />
      <span><strong className="font-semibold">Simulated data.</strong> Demo mode: not connected to a coordinator.</span>
      {!DEMO_ONLY && <button type="button" className="font-medium underline underline-offset-2" onClick={() => setMode("live")}>Exit demo</button>}
    </aside>
  );
}

function DisconnectedBanner() {
  const connection = useStore((s) => s.connection);
  const now = useNowMs();
  if (connection.phase !== "disconnected") return null;
  const inS = connection.nextAttemptAtMs === null ? null : Math.max(0, Math.ceil((connection.nextAttemptAtMs - now) / 1000));
  return (
    <div role="alert" className="flex flex-wrap items-center justify-center gap-x-3 gap-y-1 border-b bg-bad-soft px-4 py-1.5 text-sm">
      <WifiOff aria-hidden className="size-4 text-bad" />
      <span>
        <strong className="font-semibold">Disconnected.</strong> {connection.reason} {connection.hint}
        {connection.updatedAtMs !== null && <> Data is {age((now - connection.updatedAtMs) / 1000)} old.</>}
      </span>
      <span aria-hidden className="text-muted">{inS === null || inS === 0 ? "Retrying …" : `Retrying in ${inS} s`}</span>
      <Button className="h-6 px-2" onClick={retryNow}>Retry now</Button>
    </div>
  );
}

function ConnectionLamp() {
  const mode = useMode();
  const phase = useStore((s) => s.connection.phase);
  const [tone, word] =
    mode === "demo" ? (["bg-busy", "Demo"] as const)
    : phase === "live" ? (["bg-good", "Live"] as const)
    : phase === "polling" ? (["bg-warn", "Polling"] as const)
    : phase === "connecting" ? (["bg-idle", "Connecting"] as const)
    : (["bg-bad", "Disconnected"] as const);
  return (
    <Link to="/settings" className="flex h-8 items-center gap-2 rounded-md px-1.5 text-sm text-muted hover:bg-hover hover:text-ink" title={`Connection: ${word}`}>
      <span aria-hidden className={`size-2 rounded-full ${tone}`} />
      <span className="sr-only lg:not-sr-only" aria-live="polite">{word}</span>
    </Link>
  );
}
