/** What would be lost if something failed now, and where the copies of a step are, as computed by the coordinator. Loaded on demand. */

import { useQuery } from "@tanstack/react-query";

import { get } from "../../api/client";
import type { Safety } from "../../api/types";
import { Stat } from "../../components/Card";
import { ErrorNote, Loading } from "../../components/states";
import { Name } from "../../components/values";
import { count, plural, UNKNOWN } from "../../format";
import type { Run } from "../../state/runs";

const REFETCH_MS = 2_000;

const SURVIVES = { process: "its process", machine: "a machine", rack: "a rack", site: "the site" } as const;
const COPIES = { memory: "Memory", peer: "Peer's memory", disk: "Disk", "network disk": "Network disk", bucket: "Object storage" } as const;

export function useSafety(job: string, step?: number) {
  return useQuery({
    queryKey: ["safety", job, step ?? null],
    queryFn: ({ signal }) => get<Safety>(`/jobs/${encodeURIComponent(job)}/safety`, step === undefined ? {} : { step }, signal),
    refetchInterval: REFETCH_MS,
  });
}

/** What the death of a process would lose, as a key number; the other failure domains as its hint. */
export function RiskStat({ run }: { run: Run }) {
  const found = useSafety(run.id);
  const [first, ...others] = found.data?.losses ?? [];
  if (run.risk.since === null) return <Stat label="Work at risk" value="none" hint="not training" />;
  if (first === undefined) return <Stat label="Work at risk" value={UNKNOWN} hint={found.isError ? "not available" : "…"} />;
  return (
    <Stat
      label="Work at risk"
      value={first.steps === null ? "everything" : plural(first.steps, "step")}
      hint={<span title={others.map((each) => `${each.label}: ${each.text}`).join("\n")}>if a process dies; {others.map((each) => `${each.label.toLowerCase()}: ${each.steps === null ? "all" : count(each.steps)}`).join(", ")}</span>}
    />
  );
}

/** One line per failure domain. */
export function RiskList(props: { job: string; name: string }) {
  const found = useSafety(props.job);
  if (found.data === undefined) return <p className="text-sm text-muted">{found.isError ? "Not available" : "…"}</p>;
  return (
    <ul aria-label={`Work at risk of ${props.name}`} className="mt-1 flex flex-col gap-0.5">
      {found.data.losses.map((each) => (
        <li key={each.domain} className="flex flex-wrap items-baseline justify-between gap-x-3">
          <span className="text-muted">{each.label}</span>
          <span className={`ml-auto text-right ${each.steps === null ? "text-warn" : "font-medium"}`} title={each.from_step === null ? "Restarts from step 0" : `Resumes at step ${count(each.from_step)}`}>{each.text}</span>
        </li>
      ))}
    </ul>
  );
}

/** The copies of one step, whether they are verified, and what they survive. */
export function Where(props: { job: string; step: number }) {
  const found = useSafety(props.job, props.step);
  if (found.isError && found.data === undefined) return <ErrorNote error={found.error} onRetry={() => void found.refetch()} />;
  if (found.data === undefined) return <Loading rows={2} />;
  const { copies, safe_in, losses } = found.data;
  return (
    <section aria-label="Copies" className="flex flex-col gap-2 border-t pt-4">
      <h3 className="font-medium">Copies</h3>
      {copies.length === 0 ? (
        <p className="text-muted">No known copies of step {count(props.step)}.</p>
      ) : (
        <ul className="flex flex-col gap-1">
          {copies.map((each) => (
            <li key={`${each.kind} ${each.host} ${each.where} ${each.part}`} className="flex flex-wrap items-baseline gap-x-2">
              <span className="font-medium">{COPIES[each.kind]}</span>
              {each.host && <Name full={each.host}>{each.host}</Name>}
              <span className={`ml-auto text-sm ${each.verified === false ? "text-bad" : "text-muted"}`}>{each.verified === null ? "not verified" : each.verified ? "verified" : "corrupted"}</span>
            </li>
          ))}
        </ul>
      )}
      <p className="text-muted">Survives the loss of: {safe_in.length === 0 ? "nothing" : safe_in.map((each) => SURVIVES[each]).join(", ")}.</p>
      <p className="text-sm text-muted">Lost if it happened now: {losses.map((each) => `${each.label.toLowerCase()}: ${each.text}`).join("; ")}.</p>
    </section>
  );
}
