/** The frame around every view: navigation, connection state and the demo banner. */

import { useQueryClient } from "@tanstack/react-query";
import { Link, Navigate, Outlet, useRouterState } from "@tanstack/react-router";
import { FlaskConical, LockKeyhole, Menu, Moon, OctagonAlert, Search, Sun, WifiOff, X } from "lucide-react";
import { lazy, Suspense, useEffect, useMemo, useRef, useState, type ReactNode } from "react";

import { Button, IconButton, Kbd } from "../components/controls";
import { Dialog } from "../components/Dialog";
import { Page } from "../components/Page";
import { Empty, Loading } from "../components/states";
import { age, count } from "../format";
import { DEMO_ONLY, setMode, setTheme, useMode, useTheme } from "../mode";
import { dismiss, useDismissed } from "../dismissed";
import { useFilters } from "../search";
import { useOnlyJob, useRefusal } from "../session";
import { retryNow } from "../state/connection";
import { isGrave, kindOf, undismissed } from "../state/incidents";
import { useNowMs, useServerNow, useStore } from "../state/store";
import { Account } from "./Account";
import { useAttention } from "./attention";
import { KEYS, useKeys } from "./keys";
import { atHand, SIGN_IN, VIEWS, viewsFor } from "./views";

const SignIn = lazy(() => import("../views/SignIn").then((module) => ({ default: module.SignIn })));
const Palette = lazy(() => import("./Palette").then((module) => ({ default: module.Palette })));
const Job = lazy(() => import("../views/tasks/Job").then((module) => ({ default: module.Job })));
const TaskDialogs = lazy(() => import("../views/Tasks").then((module) => ({ default: module.TaskDialogs })));

function isDark(): boolean {
  const chosen = document.documentElement.dataset["theme"];
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function Shell() {
  const signedOut = useStore((s) => s.connection.phase === "signed_out");
  const asked = useRouterState({ select: (s) => s.location.pathname === SIGN_IN });
  const answers = useQueryClient();
  useEffect(() => {
    // Cached responses must not be shown to the next user.
    if (signedOut) answers.clear();
  }, [signedOut, answers]);
  return signedOut || asked ? <Gate>{asked ? <Outlet /> : <Suspense fallback={null}><SignIn /></Suspense>}</Gate> : <Views />;
}

/** Frame of the sign-in page, without navigation. */
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

/** A session bound to a job gets an explanation instead of cluster-wide views. */
function Content(props: { path: string }) {
  const job = useOnlyJob();
  const mode = useMode();
  // What a view may request depends on the session.
  const unknown = useStore((s) => s.connection.phase === "connecting" && s.session === null);
  if (unknown && mode === "live") return <Page title="Connecting"><Loading rows={6} /></Page>;
  if (job !== null && props.path === "/runs") return <Suspense fallback={<Page title={job}><Loading rows={6} /></Page>}><Job key={job} id={job} /></Suspense>;
  if (job === null || viewsFor(job).some((view) => props.path === view.to)) return <Outlet />;
  if (props.path === "/" || props.path === `/runs/${encodeURIComponent(job)}`) return <Navigate to="/runs" replace />;
  return (
    <Page title={VIEWS.find((view) => view.to !== "/" && props.path.startsWith(view.to))?.label ?? "Page not found"}>
      <Empty icon={LockKeyhole} title={`You are signed in for job ${job} only`} action={<Link to="/runs" className="inline-flex h-8 items-center rounded-md border px-3 font-medium hover:bg-hover">Open the job</Link>}>
        This view covers the whole cluster. It needs a token that is not bound to a job.
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
  const [more, setMore] = useState(false);
  useAttention(path);
  useEffect(() => {
    main.current?.scrollTo(0, 0);
    setMore(false);
  }, [path]);

  return (
    <div className="flex h-full flex-col">
      <a href="#main" className="sr-only focus:not-sr-only focus:absolute focus:z-50 focus:bg-surface focus:p-2">Skip to content</a>
      <DemoBanner />
      <DisconnectedBanner />
      <div className="flex min-h-0 flex-1">
        <nav aria-label="Views" className="hidden w-14 shrink-0 flex-col gap-0.5 overflow-y-auto border-r bg-surface px-2 py-3 sm:flex lg:w-52 lg:px-3">
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
              {view.to === "/incidents" && <PendingCount />}
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
          {path !== "/" && path !== "/incidents" && <IncidentStrip />}
          <Content path={path} />
        </main>
      </div>
      <BottomBar job={job} onMore={() => setMore(true)} />
      <Dialog open={more} onClose={() => setMore(false)} title="Views">
        <div className="flex flex-col gap-1">
          {viewsFor(job).map((view) => <Link key={view.to} to={view.to} activeOptions={{ exact: view.to === "/", includeSearch: false }} onClick={() => setMore(false)} className="flex h-11 items-center gap-3 rounded-md px-2 font-medium hover:bg-hover aria-[current=page]:bg-accent-soft"><view.icon aria-hidden className="size-4" />{view.label}</Link>)}
          <div className="mt-2 flex items-center gap-2 border-t pt-3">
            <ConnectionLamp />
            <Button onClick={() => { setMore(false); does.palette(); }}><Search aria-hidden className="size-4" />Search</Button>
            <IconButton label={isDark() ? "Light theme" : "Dark theme"} onClick={does.theme} className="ml-auto">{isDark() ? <Sun aria-hidden className="size-4" /> : <Moon aria-hidden className="size-4" />}</IconButton>
          </div>
        </div>
      </Dialog>
      <Tasks job={job} />
      {palette && <Suspense fallback={null}><Palette open onClose={() => setPalette(false)} /></Suspense>}
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

/** Simulated data is marked on every view. */
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
  const [tone, label] =
    mode === "demo" ? (["bg-busy", "Demo"] as const)
    : phase === "live" ? (["bg-good", "Live"] as const)
    : phase === "polling" ? (["bg-warn", "Polling"] as const)
    : phase === "connecting" ? (["bg-idle", "Connecting"] as const)
    : (["bg-bad", "Disconnected"] as const);
  return (
    <Link to="/settings" className="flex h-8 items-center gap-2 rounded-md px-1.5 text-sm text-muted hover:bg-hover hover:text-ink" title={`Connection: ${label}`}>
      <span aria-hidden className={`size-2 rounded-full ${tone}`} />
      <span className="sr-only lg:not-sr-only" aria-live="polite">{label}</span>
    </Link>
  );
}

function usePending() {
  const incidents = useStore((s) => s.incidents);
  const dismissed = useDismissed();
  const now = useServerNow();
  return undismissed(incidents, dismissed, now);
}

function PendingCount() {
  const pending = usePending().length;
  if (pending === 0) return null;
  return <span className="ml-auto grid h-5 min-w-5 place-items-center rounded-full bg-bad-soft px-1.5 text-xs font-semibold text-bad"><span className="sr-only">, not dismissed: </span>{count(pending)}</span>;
}

/** The latest failure, on every view, until it is dismissed. */
function IncidentStrip() {
  const [newest, ...others] = usePending();
  if (!newest) return null;
  return (
    <aside aria-label="Latest incident" className={`flex items-center gap-x-3 border-b px-4 ${isGrave(newest) ? "bg-bad-soft" : "bg-warn-soft"} py-1.5 text-sm sm:px-5 lg:px-7`}>
      <OctagonAlert aria-hidden className={`size-4 shrink-0 ${isGrave(newest) ? "text-bad" : "text-warn"}`} />
      <span className="foreign line-clamp-2 min-w-0 flex-1 break-words sm:line-clamp-1"><strong className="font-semibold">{kindOf(newest)}:</strong> {newest.text}</span>
      <Link to="/incidents" search={{ incident: String(newest.id) }} className="shrink-0 font-medium underline underline-offset-2">Details</Link>
      {others.length > 0 && <Link to="/incidents" className="hidden shrink-0 font-medium underline underline-offset-2 sm:inline">{count(others.length)} more</Link>}
      <IconButton label={`Dismiss incident ${newest.id}`} className="size-6" onClick={() => dismiss([newest])}><X aria-hidden className="size-4" /></IconButton>
    </aside>
  );
}

/** Phone navigation. */
function BottomBar(props: { job: string | null; onMore: () => void }) {
  const look = "flex min-w-0 flex-1 flex-col items-center justify-center gap-0.5 text-xs font-medium text-muted aria-[current=page]:text-accent";
  return (
    <nav aria-label="Main views" className="flex h-14 shrink-0 items-stretch border-t bg-surface sm:hidden">
      {atHand(props.job).map((view) => (
        <Link key={view.to} to={view.to} activeOptions={{ exact: view.to === "/", includeSearch: false }} className={look}>
          <view.icon aria-hidden className="size-5" />
          {view.label}
        </Link>
      ))}
      <button type="button" className={look} onClick={props.onMore}><Menu aria-hidden className="size-5" />More</button>
    </nav>
  );
}

/** Dialogs to start a task and to show one, over any view. */
function Tasks(props: { job: string | null }) {
  const [search, setFilters] = useFilters();
  const path = useRouterState({ select: (s) => s.location.pathname });
  const refused = useRefusal("operator") !== undefined;
  const starts = search["start"] === "1" && !refused;
  const task = path.startsWith("/runs") ? search["task"] : undefined;
  if (props.job !== null || (!starts && task === undefined)) return null;
  return <Suspense fallback={null}><TaskDialogs starts={starts} task={task} onChange={setFilters} /></Suspense>;
}
