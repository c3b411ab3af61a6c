/** Failures, slow ranks and failed saves: first failing rank, evidence, decision and cost. */

import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { ShieldCheck } from "lucide-react";
import { useMemo } from "react";

import { get } from "../api/client";
import type { Failure, Incident } from "../api/types";
import { Facts } from "../components/Card";
import { Copyable } from "../components/Copy";
import { Button, Input, RunFilter, Select } from "../components/controls";
import { Drawer } from "../components/Dialog";
import { Advice, IncidentPill } from "../components/IncidentCard";
import { Page } from "../components/Page";
import { Empty, ErrorNote, Loading } from "../components/states";
import { Table, type Column } from "../components/Table";
import { Ago, Name, RunLink, Time } from "../components/values";
import { dismiss, useDismissed } from "../dismissed";
import { count, duration, plural } from "../format";
import { useFilters } from "../search";
import { CLASSES, costOf, deviceOf, kindOf, matching, outcomeOf, undismissed, whoOf } from "../state/incidents";
import { PHASES } from "../state/runs";
import { useServerNow, useStore } from "../state/store";
import { searchOf } from "./logs/filter";

const MOST = 1_000;

const COLUMNS: readonly Column<Incident>[] = [
  { id: "opened", header: "Opened", value: (each) => each.opened_at, cell: (each) => <Ago at={each.opened_at} />, width: "110px" },
  { id: "state", header: "State", value: (each) => each.state, cell: (each) => <IncidentPill incident={each} />, width: "124px" },
  { id: "class", header: "Class", value: kindOf, cell: (each) => <Name>{kindOf(each)}</Name>, width: "150px" },
  { id: "text", header: "Summary", wide: true, cell: (each) => <Name>{each.text}</Name>, width: "minmax(14rem, 4fr)" },
  { id: "run", header: "Run", value: (each) => each.run, cell: (each) => <RunLink id={each.run} />, width: "minmax(9rem, 1fr)" },
  { id: "rank", header: "Rank", value: (each) => each.rank, cell: (each) => (each.rank === null ? "–" : count(each.rank)), align: "right", width: "96px" },
  { id: "lost", header: "Steps lost", value: (each) => each.lost_steps, cell: (each) => count(each.lost_steps), align: "right", width: "100px" },
  { id: "gpu", header: "Cost", value: (each) => each.lost_gpu_s, cell: (each) => (each.lost_gpu_s === null ? "–" : `${count(each.lost_gpu_s)} ${deviceOf(each)}-s`), align: "right", width: "112px" },
];

export function Incidents() {
  const [search, setFilters] = useFilters();
  const recent = useStore((s) => s.incidents);
  const ready = useStore((s) => s.coordinator !== null);
  const older = useQuery({ queryKey: ["incidents", recent], queryFn: ({ signal }) => get<Incident[]>("/incidents", { limit: MOST }, signal), enabled: ready, placeholderData: (before) => before });
  const all = useMemo(() => together(recent, older.data ?? []), [recent, older.data]);
  const isUnknown = all.length === 0 && !older.isSuccess;
  const { q, run, class: kind, state } = search;
  const shown = useMemo(() => matching(all, { q, run, class: kind, state }), [all, q, run, kind, state]);
  const runs = useMemo(() => [...new Set(all.map((each) => each.run))].sort(), [all]);
  const open = all.find((each) => String(each.id) === search["incident"]) ?? null;
  const dismissed = useDismissed();
  const now = useServerNow();
  const pending = undismissed(recent, dismissed, now);
  return (
    <Page
      title="Incidents"
      fill
      subtitle={!isUnknown && plural(shown.length, "incident")}
      actions={
        <>
          <Input type="search" data-search aria-label="Search incidents" placeholder="Rank, host, signal, text" value={q ?? ""} onChange={(event) => setFilters({ q: event.target.value || undefined }, { replace: true })} className="w-52" />
          <Select aria-label="Class" value={kind ?? ""} onChange={(event) => setFilters({ class: event.target.value || undefined })}>
            <option value="">All classes</option>
            {Object.entries(CLASSES).map(([value, label]) => <option key={value} value={value}>{label}</option>)}
            <option value="save">Failed saves</option>
            <option value="slow_rank">Slow ranks</option>
            <option value="quarantine">Quarantined machines</option>
          </Select>
          <Select aria-label="State" value={state ?? ""} onChange={(event) => setFilters({ state: event.target.value || undefined })}>
            <option value="">All states</option>
            {["open", "recovered", "stopped", "failed_again", "continued"].map((word) => <option key={word} value={word}>{word.replace("_", " ")}</option>)}
          </Select>
          <RunFilter runs={runs} value={run} onChange={(next) => setFilters({ run: next })} />
          {pending.length > 0 && <Button onClick={() => dismiss(pending)}>Dismiss {count(pending.length)}</Button>}
        </>
      }
    >
      {older.isError && <ErrorNote error={older.error} onRetry={() => void older.refetch()} />}
      <section className="flex min-h-0 flex-1 flex-col overflow-hidden rounded-lg border bg-surface" aria-label="Incidents">
        {isUnknown ? (
          older.isError ? null : <div className="p-4"><Loading rows={8} /></div>
        ) : (
          <Table
            label="Incidents"
            rows={shown}
            columns={COLUMNS}
            rowId={(each) => String(each.id)}
            sort={search["sort"]}
            onSort={(sort) => setFilters({ sort })}
            selected={search["incident"]}
            onOpen={(each) => setFilters({ incident: String(each.id) })}
            empty={
              all.length === 0 ? (
                <Empty icon={ShieldCheck} title="No incidents">Failures, slow ranks and failed saves appear here with evidence and cost.</Empty>
              ) : (
                <Empty icon={ShieldCheck} title="No matching incidents">{plural(all.length, "incident")} hidden. Clear filters to see them.</Empty>
              )
            }
          />
        )}
      </section>
      <Drawer
        open={search["incident"] !== undefined}
        onClose={() => setFilters({ incident: undefined })}
        title={open ? `${kindOf(open)}, incident ${open.id}` : `Incident ${search["incident"] ?? ""}`}
        description={open && <span className="flex flex-wrap items-center gap-x-3 gap-y-1"><IncidentPill incident={open} /><span><Time at={open.opened_at} /></span></span>}
      >
        {open ? <Detail incident={open} now={now} /> : older.isPending ? <Loading rows={8} /> : older.isError ? <ErrorNote error={older.error} /> : <Empty title="Incident not found">The coordinator keeps the latest {count(MOST)}.</Empty>}
      </Drawer>
    </Page>
  );
}

/** Entries from the stream replace fetched ones. */
function together(recent: readonly Incident[], older: readonly Incident[]): Incident[] {
  const known = new Set(recent.map((each) => each.id));
  return [...recent, ...older.filter((each) => !known.has(each.id))].sort((a, b) => b.id - a.id);
}

function Detail({ incident, now }: { incident: Incident; now: number }) {
  const place = (name: string) => (PHASES as readonly string[]).indexOf(name);
  const phases = Object.entries(incident.phases_s).sort(([a], [b]) => place(a) - place(b));
  const who = whoOf(incident);
  return (
    <div className="flex flex-col gap-6">
      <section className="flex flex-col gap-2">
        <p className="foreign text-lg font-medium break-words">{incident.text}</p>
        {incident.next_step && <p className="rounded-md bg-accent-soft px-3 py-2"><strong className="font-semibold">Next: </strong><Advice text={incident.next_step} /></p>}
        <Copyable label="Command" title={false} text={`strata why ${incident.run}`} />
      </section>
      <Section title="Decision">
        <Facts
          items={[
            ["Run", <RunLink key="r" id={incident.run} />],
            ["Decision", incident.decision || "–"],
            ["Outcome", outcomeOf(incident, now)],
            ["Closed", <Time key="c" at={incident.closed_at} />],
            ...(who ? [["First to fail", who] as const] : []),
            ["Classified by", incident.rule],
          ]}
        />
        {incident.reason && <p className="foreign break-words text-muted">{incident.reason}</p>}
        {incident.closed_reason && incident.closed_reason !== incident.reason && <p className="foreign break-words text-muted">{incident.closed_reason}</p>}
      </Section>
      <Section title="Cost">
        {costOf(incident) ? (
          <Facts items={[["Steps lost", count(incident.lost_steps)], ["Time lost", duration(incident.lost_s)], [`${deviceOf(incident) === "GPU" ? "GPU" : "Worker"}-seconds lost`, count(incident.lost_gpu_s)], ["Resumed at step", count(incident.resumed_step)]]} />
        ) : (
          <p className="text-muted">{incident.state === "open" ? "Available when the incident closes." : "Not measured."}</p>
        )}
      </Section>
      {phases.length > 0 && <Section title="Recovery phases"><Phases phases={phases} /></Section>}
      <Section title={`Evidence from ${plural(incident.failures.length, "worker")}`}>
        {incident.failures.length === 0 ? <p className="text-muted">No worker has reported a cause.</p> : <ol className="flex flex-col gap-3">{incident.failures.map((failure, i) => <li key={i}><Evidence failure={failure} run={incident.run} /></li>)}</ol>}
      </Section>
      <p className="flex flex-wrap gap-x-4">
        <Link to="/logs" search={searchOf(incident)} className="text-accent underline underline-offset-2">Search logs</Link>
        <Link to="/incidents" search={{ q: incident.fingerprint }} className="text-accent underline underline-offset-2">Same fingerprint</Link>
      </p>
    </div>
  );
}

function Section(props: { title: string; children: React.ReactNode }) {
  return <section aria-label={props.title} className="flex flex-col gap-2"><h3 className="text-sm font-medium text-muted">{props.title}</h3>{props.children}</section>;
}

function Phases({ phases }: { phases: readonly (readonly [string, number])[] }) {
  const longest = Math.max(...phases.map(([, s]) => s), 1e-9);
  return (
    <dl className="flex flex-col gap-1.5">
      {phases.map(([name, seconds]) => (
        <div key={name} className="grid grid-cols-[7rem_minmax(0,1fr)_5rem] items-center gap-3">
          <dt className="text-muted">{name.replaceAll("_", " ")}</dt>
          <span aria-hidden className="h-1.5 rounded-full bg-hover"><span className="block h-full rounded-full bg-accent" style={{ width: `${(100 * seconds) / longest}%` }} /></span>
          <dd className="text-right">{duration(seconds)}</dd>
        </div>
      ))}
    </dl>
  );
}

function Evidence({ failure, run }: { failure: Failure; run: string }) {
  const ended = failure.lost || failure.left || (failure.exit_code === null ? "" : failure.exit_code < 0 ? `signal ${-failure.exit_code}` : `exit code ${failure.exit_code}`);
  const text = [failure.error ? `${failure.error.type}: ${failure.error.message}` : "", ...(failure.error?.where ?? []).map((place) => `  at ${place}`), ...failure.device_faults, ...failure.last_lines].filter(Boolean).join("\n");
  return (
    <article className="flex flex-col gap-2 rounded-md border bg-raised px-3 py-2">
      <p className="flex flex-wrap items-baseline gap-x-3">
        <strong className="foreign font-medium">{failure.rank === null ? run : `rank ${failure.rank}`}</strong>
        <span className="foreign text-sm text-muted">{[failure.host, failure.pid ? `pid ${failure.pid}` : "", failure.gpu].filter(Boolean).join(", ")}</span>
        <span className="ml-auto text-sm text-faint"><Time at={failure.at_s} /></span>
      </p>
      {ended && <p className="foreign break-words">{ended}{failure.oom_killed && ", killed by the kernel: out of memory"}</p>}
      {text && <pre tabIndex={0} className="foreign max-h-72 overflow-auto rounded-md border bg-surface p-2 font-mono text-xs whitespace-pre-wrap">{text}</pre>}
      {failure.error?.traceback && (
        <details>
          <summary className="cursor-pointer text-sm font-medium">Traceback</summary>
          <pre tabIndex={0} className="foreign mt-2 max-h-96 overflow-auto rounded-md border bg-surface p-2 font-mono text-xs whitespace-pre-wrap">{failure.error.traceback}</pre>
        </details>
      )}
    </article>
  );
}
