/** Events, newest first. Successful checkpoints are folded into one line; failures are red and stay. */

import { Link } from "@tanstack/react-router";
import { CircleAlert, CircleCheck, CircleX, Dot, type LucideIcon } from "lucide-react";
import { useMemo, useState } from "react";

import { filtered, folded, type EventFilter } from "../state/facts";
import type { EventLine } from "../state/types";
import { Empty } from "./states";
import { Time } from "./values";

const LOOKS: Record<EventLine["level"], { icon: LucideIcon; tone: string; prefix: string }> = {
  info: { icon: Dot, tone: "text-idle", prefix: "" },
  good: { icon: CircleCheck, tone: "text-good", prefix: "success: " },
  warn: { icon: CircleAlert, tone: "text-warn", prefix: "warning: " },
  bad: { icon: CircleX, tone: "text-bad", prefix: "error: " },
};

const FILTERS: readonly (readonly [EventFilter, string])[] = [["all", "All"], ["problems", "Problems"], ["workers", "Workers"], ["saves", "Checkpoints"], ["tasks", "Tasks and data"]];

export function EventList(props: { items: readonly EventLine[]; height?: number; onHover?: (at: number | null) => void }) {
  const [filter, setFilter] = useState<EventFilter>("all");
  const shown = useMemo(() => folded(filtered(props.items, filter)), [props.items, filter]);
  if (props.items.length === 0) return <Empty title="No events yet">Joins, failures, checkpoints and recoveries appear here.</Empty>;
  return (
    <div className="flex flex-col">
      <div role="group" aria-label="Filter events" className="flex flex-wrap gap-1 px-3 pb-2">
        {FILTERS.map(([value, label]) => (
          <button key={value} type="button" aria-pressed={filter === value} onClick={() => setFilter(value)} className={`inline-flex h-7 items-center rounded-full px-2.5 text-sm font-medium ${filter === value ? "bg-accent-soft text-ink" : "text-muted hover:bg-hover"}`}>
            {label}
          </button>
        ))}
      </div>
      {shown.length === 0 ? (
        <p className="border-t px-4 py-6 text-center text-muted">No matching events</p>
      ) : (
        <ol className="divide-y divide-line/60 overflow-y-auto border-t" style={{ maxHeight: props.height }} tabIndex={0} aria-label="Events">
          {shown.map((item) => <Line key={item.id} item={item} onHover={props.onHover} />)}
        </ol>
      )}
    </div>
  );
}

function Line({ item, onHover }: { item: EventLine; onHover: ((at: number | null) => void) | undefined }) {
  const { icon: Icon, tone, prefix } = LOOKS[item.level];
  const isBad = item.level === "bad";
  return (
    <li className={`flex items-baseline gap-2.5 px-4 py-1.5 hover:bg-hover ${isBad ? "bg-bad-soft/50" : ""}`} onMouseEnter={() => onHover?.(item.at)} onMouseLeave={() => onHover?.(null)}>
      <Icon aria-hidden className={`size-3.5 shrink-0 translate-y-0.5 ${tone}`} />
      <span className={`foreign line-clamp-3 min-w-0 flex-1 break-words ${isBad ? "font-medium" : ""}`} title={item.text}>
        {prefix && <span className="sr-only">{prefix}</span>}
        <EventText item={item} />
      </span>
      <span className="shrink-0 text-sm text-faint"><Time at={item.at} /></span>
    </li>
  );
}

function EventText({ item }: { item: EventLine }) {
  if (item.workerId && item.kind.startsWith("worker_")) return <Link to="/workers" search={{ worker: item.workerId }} className="hover:underline">{item.text}</Link>;
  if (item.kind.startsWith("incident_")) return <Link to="/incidents" search={item.jobId ? { run: item.jobId } : {}} className="hover:underline">{item.text}</Link>;
  return item.text;
}
