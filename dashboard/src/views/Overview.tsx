/** Health of training and its reason; then each live run with loss, progress, goodput, throughput and risk. */

import { Link } from "@tanstack/react-router";
import { CircleCheck, CircleHelp, CirclePause, OctagonAlert, Play, TriangleAlert, type LucideIcon } from "lucide-react";
import { lazy, Suspense, useMemo } from "react";

import { Card } from "../components/Card";
import { EventList } from "../components/EventList";
import { IncidentCard } from "../components/IncidentCard";
import { Page } from "../components/Page";
import { Loading } from "../components/states";
import { Status, TONE_SOFT, TONE_TEXT, type Tone } from "../components/Status";
import { Ago, Name } from "../components/values";
import { dismiss, useDismissed } from "../dismissed";
import { count, duration, number, plural } from "../format";
import { useRefusal } from "../session";
import { assess, workerCounts, type Finding, type Health, type Level } from "../state/health";
import { undismissed } from "../state/incidents";
import { runsOf, shortName, type Run } from "../state/runs";
import { useServerNow, useStore, useStory } from "../state/store";
import { RunHero } from "./overview/RunHero";
import { PaceCounts } from "./workers/Band";
import { byPlace } from "./workers/load";
import { pacesOf, slowest, type Pace } from "./workers/pace";

/** Rarely shown. */
const FirstRun = lazy(() => import("./overview/FirstRun").then((module) => ({ default: module.FirstRun })));

const LEVELS: Record<Level, { tone: Tone; icon: LucideIcon }> = {
  good: { tone: "good", icon: CircleCheck },
  warn: { tone: "warn", icon: TriangleAlert },
  bad: { tone: "bad", icon: OctagonAlert },
  idle: { tone: "idle", icon: CirclePause },
  unknown: { tone: "idle", icon: CircleHelp },
};

const CARDS = 3;
const HEROES = 4;
const SLOWEST = 5;

export function Overview() {
  const state = useStory();
  const now = useServerNow();
  const runs = useMemo(() => runsOf(state), [state]);
  const health = useMemo(() => assess(state, now), [state, now]);
  if (state.coordinator === null) return <Page title="Overview"><Waiting health={health} /></Page>;
  const live = runs.filter((r) => r.alive > 0 || r.status === "pending" || r.status === "starting");
  // Without live runs, the last one is shown.
  const heroes = live.length > 0 ? live.slice(0, HEROES) : runs.slice(0, 1);
  const isNew = runs.length === 0 && state.workers.size === 0 && state.eventLines.length === 0;
  const others = runs.filter((r) => !heroes.includes(r));
  return (
    <Page title="Overview">
      <IncidentCards />
      <HealthPanel health={health} />
      {isNew && <Suspense fallback={<Loading rows={4} />}><FirstRun address={state.coordinator.address} /></Suspense>}
      {heroes.map((run) => <RunHero key={run.id} run={run} now={now} alone={heroes.length === 1} />)}
      <div className={`grid items-start gap-4 xl:grid-cols-[minmax(0,1.2fr)_minmax(0,1fr)] ${isNew ? "hidden" : ""}`}>
        <div className="flex min-w-0 flex-col gap-4">
          {state.workers.size > 0 && <Fleet />}
          {others.length > 0 && <Card title="Other runs" actions={<More to="/runs" />} flush><RunList runs={others.slice(0, 6)} /></Card>}
        </div>
        <Card title="Recent events" actions={<More to="/incidents" label="Incidents" />} flush>
          <EventList items={state.eventLines.slice(0, 300)} height={340} />
        </Card>
      </div>
    </Page>
  );
}

function IncidentCards() {
  const incidents = useStore((s) => s.incidents);
  const dismissed = useDismissed();
  const now = useServerNow();
  const shown = undismissed(incidents, dismissed, now);
  if (shown.length === 0) return null;
  return (
    <section aria-label="Incidents" className="flex flex-col gap-2">
      {shown.slice(0, CARDS).map((incident) => <IncidentCard key={incident.id} incident={incident} />)}
      {shown.length > 1 && (
        <p className="flex flex-wrap items-center gap-x-4 text-sm text-muted">
          {shown.length > CARDS && <Link to="/incidents" className="font-medium text-accent hover:underline">and {count(shown.length - CARDS)} more</Link>}
          <button type="button" className="font-medium text-accent hover:underline" onClick={() => dismiss(shown)}>Dismiss all</button>
        </p>
      )}
    </section>
  );
}

function Waiting({ health }: { health: Health }) {
  const away = useStore((s) => s.connection.phase === "disconnected");
  return (
    <>
      <HealthPanel health={health} />
      {away ? null : <div className="grid grid-cols-2 gap-4 xl:grid-cols-4">{[0, 1, 2, 3].map((i) => <div key={i} className="skeleton h-24" />)}</div>}
      <Loading rows={5} />
    </>
  );
}

function HealthPanel({ health }: { health: Health }) {
  const { tone, icon: Icon } = LEVELS[health.level];
  const [, ...others] = health.findings;
  const refused = useRefusal("operator") !== undefined;
  return (
    <section aria-label="Health" className="flex flex-col justify-center gap-3 rounded-lg border bg-surface px-4 py-4 sm:px-5">
      <div className="flex flex-wrap items-start gap-3 sm:flex-nowrap sm:gap-4">
        <span className={`grid size-9 shrink-0 place-items-center rounded-full sm:size-11 ${TONE_SOFT[tone]}`}><Icon aria-hidden className="size-5 sm:size-6" /></span>
        <div className="min-w-0 flex-1 basis-52" aria-live="polite">
          <h2 className="foreign text-xl leading-tight font-semibold tracking-tight break-words sm:text-2xl">{health.headline}</h2>
          <p className="foreign mt-1 break-words text-muted sm:text-lg">{health.reason}</p>
        </div>
        {health.findings[0] && <FindingLink finding={health.findings[0]} />}
        {health.level === "idle" && !refused && <Link to="/runs" search={{ start: "1" }} className="inline-flex h-8 shrink-0 items-center gap-1.5 rounded-md bg-accent px-3 font-medium text-on-accent hover:opacity-90"><Play aria-hidden className="size-3.5" />Start task</Link>}
      </div>
      {others.length > 0 && (
        <ul className="flex flex-col gap-2 border-t pt-3 sm:gap-1">
          {others.slice(0, 4).map((finding) => {
            const look = LEVELS[finding.level];
            return (
              <li key={finding.title} className="flex flex-wrap items-center gap-x-2 gap-y-0.5">
                <look.icon aria-hidden className={`size-4 shrink-0 ${TONE_TEXT[look.tone]}`} />
                <span className="foreign min-w-0 font-medium break-words">{finding.title}</span>
                <span className="foreign min-w-0 flex-1 basis-52 break-words text-muted sm:truncate" title={finding.reason}>{finding.reason}</span>
                <FindingLink finding={finding} />
              </li>
            );
          })}
          {others.length > 4 && <li className="text-muted">and {count(others.length - 4)} more</li>}
        </ul>
      )}
    </section>
  );
}

function FindingLink({ finding }: { finding: Finding }) {
  const look = "shrink-0 rounded-md border px-3 py-1 font-medium hover:bg-hover";
  const label = <>Show<span className="sr-only"> {finding.title}</span></>;
  if (finding.link.job !== undefined) return <Link to="/runs/$job" params={{ job: finding.link.job }} className={look}>{label}</Link>;
  return <Link to={finding.link.to} search={finding.link.search ?? {}} className={look}>{label}</Link>;
}

/** Workers by step time, and the slowest by name with busy and wait time. */
function Fleet() {
  const workers = useStore((s) => s.workers);
  const paces = useMemo(() => pacesOf([...workers.values()].sort(byPlace)), [workers]);
  const counts = workerCounts(workers);
  const slow = slowest(paces, SLOWEST);
  return (
    <Card title="Workers" hint={`${count(counts.present)} of ${count(counts.total)} up: ${counts.text}`} actions={<More to="/workers" />}>
      <div className="flex flex-col gap-4">
        <PaceCounts paces={paces} />
        {slow.length > 1 && (
          <section aria-label="Slowest workers" className="flex flex-col gap-1.5">
            <h3 className="text-sm font-medium text-muted">Slowest {count(slow.length)}: busy and wait time per step</h3>
            <ul className="flex flex-col gap-1">{slow.map((pace) => <li key={pace.worker.id}><SlowRow pace={pace} longest={Math.max(...slow.map((p) => (p.busyS ?? 0) + (p.waitS ?? 0)))} /></li>)}</ul>
          </section>
        )}
      </div>
    </Card>
  );
}

function SlowRow({ pace, longest }: { pace: Pace; longest: number }) {
  const { worker, busyS, waitS, ratio } = pace;
  const width = (seconds: number | null) => `${longest > 0 ? (100 * (seconds ?? 0)) / longest : 0}%`;
  const tone = pace.class === "slowest" ? "bg-bad" : pace.class === "slow" ? "bg-warn" : "bg-good";
  return (
    <Link to="/workers" search={{ worker: worker.id }} data-row className="grid grid-cols-[minmax(0,1fr)_4.5rem] items-center gap-x-3 rounded-md px-1 py-1 hover:bg-hover sm:grid-cols-[minmax(5rem,9rem)_minmax(0,1fr)_12rem]">
      <Name full={worker.id}>{shortName(worker.id, worker.job_id)}</Name>
      <span aria-hidden className="col-span-2 row-start-2 flex h-2 overflow-hidden rounded-full bg-hover sm:col-span-1 sm:row-start-auto"><span className={tone} style={{ width: width(busyS) }} /><span className="bg-idle/40" style={{ width: width(waitS) }} /></span>
      <span className="text-right text-sm text-muted">
        <span className="font-medium text-ink">{ratio === null ? "" : `${ratio.toFixed(2)}×`}</span><span className="hidden sm:inline"> {duration(busyS)} busy{waitS === null ? "" : `, ${duration(waitS)} waiting`}</span>
      </span>
    </Link>
  );
}

function RunList({ runs }: { runs: readonly Run[] }) {
  return (
    <ul className="divide-y border-t">
      {runs.map((run) => (
        <li key={run.id}>
          <Link to="/runs/$job" params={{ job: run.id }} data-row className="grid grid-cols-[minmax(0,1fr)_auto] items-center gap-x-3 gap-y-1 px-4 py-2.5 hover:bg-hover focus-visible:-outline-offset-2 sm:grid-cols-[minmax(0,1fr)_7.5rem_5rem_4.5rem_6rem]">
            <span className="min-w-0"><Name>{run.name}</Name><span className="block truncate text-sm text-faint">{plural(run.alive, "worker")}, gen. {count(run.generation)}</span></span>
            <Status value={run.status} />
            <Cell label="step" value={count(run.step)} />
            <Cell label="loss" value={number(run.loss, 4)} />
            <Cell label="checkpoint" value={run.risk.safe ? <Ago at={run.risk.safe.created_at} /> : run.risk.isUnsaved ? "never" : "–"} />
          </Link>
        </li>
      ))}
    </ul>
  );
}

function Cell(props: { label: string; value: React.ReactNode }) {
  return <span className="hidden min-w-0 text-right sm:block"><span className="block truncate font-medium">{props.value}</span><span className="block text-sm text-faint">{props.label}</span></span>;
}

function More(props: { to: "/runs" | "/incidents" | "/workers"; label?: string }) {
  return <Link to={props.to} className="text-sm font-medium text-accent hover:underline">{props.label ?? "All"}</Link>;
}
