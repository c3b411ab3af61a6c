/** A failure: what, which rank first, why, and the next step. It stays until it is dismissed. */

import { Link } from "@tanstack/react-router";
import { OctagonAlert, TriangleAlert, X } from "lucide-react";

import type { Incident } from "../api/types";
import { dismiss } from "../dismissed";
import { costOf, isGrave, kindOf, outcomeOf, stateOf, whoOf } from "../state/incidents";
import { useServerNow } from "../state/store";
import { CopyButton } from "./Copy";
import { IconButton } from "./controls";
import { TONE_SOFT } from "./Status";
import { Ago, RunLink } from "./values";

export function IncidentPill({ incident }: { incident: Incident }) {
  const { tone, label } = stateOf(incident);
  return <span className={`inline-flex shrink-0 items-center rounded-full px-2 py-0.5 text-sm font-medium whitespace-nowrap ${TONE_SOFT[tone]}`}>{label}</span>;
}

export function IncidentCard({ incident }: { incident: Incident }) {
  const now = useServerNow();
  const grave = isGrave(incident);
  const Icon = grave ? OctagonAlert : TriangleAlert;
  const facts = [whoOf(incident), outcomeOf(incident, now), costOf(incident)].filter(Boolean);
  return (
    <article aria-label={`Incident ${incident.id}`} className={`flex flex-wrap gap-x-3 gap-y-2 rounded-lg border bg-surface px-4 py-3 sm:flex-nowrap sm:gap-4 sm:px-5 ${grave ? "border-l-4 border-l-bad" : "border-l-4 border-l-warn"}`}>
      <Icon aria-hidden className={`mt-0.5 size-5 shrink-0 ${grave ? "text-bad" : "text-warn"}`} />
      <div className="flex min-w-0 flex-1 basis-60 flex-col gap-1">
        <p className="flex flex-wrap items-center gap-x-2 gap-y-1">
          <strong className="font-semibold">{kindOf(incident)}</strong>
          <IncidentPill incident={incident} />
          <span className="min-w-0 text-sm text-muted"><RunLink id={incident.run} />, <Ago at={incident.opened_at} /></span>
        </p>
        <p className="foreign font-medium break-words">{sentence(incident.text)}</p>
        {facts.length > 0 && <p className="foreign text-sm break-words text-muted">{facts.join(" · ")}</p>}
        {incident.next_step && <p className="break-words"><span className="text-muted">Next: </span><Advice text={incident.next_step} /></p>}
      </div>
      <div className="flex shrink-0 basis-full items-center justify-end gap-1 sm:basis-auto sm:items-start">
        <Link to="/incidents" search={{ incident: String(incident.id) }} className="inline-flex h-8 items-center rounded-md border px-3 font-medium hover:bg-hover">Details<span className="sr-only"> of incident {incident.id}</span></Link>
        <CopyButton text={`strata why ${incident.run}`} label="command strata why" />
        <IconButton label={`Dismiss incident ${incident.id}`} onClick={() => dismiss([incident])}><X aria-hidden className="size-4" /></IconButton>
      </div>
    </article>
  );
}

/** The next step, with commands as code. */
export function Advice({ text }: { text: string }) {
  return text.split("`").map((part, i) => (i % 2 === 1 ? <code key={i} className="font-mono text-[0.92em]">{part}</code> : part));
}

function sentence(text: string): string {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}`;
}
