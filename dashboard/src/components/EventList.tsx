/** What happened, newest first, in sentences. */

import { Link } from "@tanstack/react-router";
import { CircleAlert, CircleCheck, CircleX, Dot, type LucideIcon } from "lucide-react";

import { folded } from "../state/facts";
import type { EventLine } from "../state/types";
import { Empty } from "./states";
import { Time } from "./values";

const LOOKS: Record<EventLine["level"], { icon: LucideIcon; tone: string; word: string }> = {
  info: { icon: Dot, tone: "text-idle", word: "" },
  good: { icon: CircleCheck, tone: "text-good", word: "success: " },
  warn: { icon: CircleAlert, tone: "text-warn", word: "warning: " },
  bad: { icon: CircleX, tone: "text-bad", word: "error: " },
};

export function EventList(props: { items: readonly EventLine[]; height?: number; onHover?: (at: number | null) => void }) {
  if (props.items.length === 0) return <Empty title="No events yet">Joins, failures, checkpoints and recoveries appear here.</Empty>;
  return (
    <ol className="divide-y divide-line/60 overflow-y-auto border-t" style={{ maxHeight: props.height }} tabIndex={0} aria-label="Events">
      {folded(props.items).map((item) => {
        const { icon: Icon, tone, word } = LOOKS[item.level];
        const to = item.workerId && item.kind.startsWith("worker_") ? item.workerId : null;
        return (
          <li key={item.id} className="flex items-baseline gap-2.5 px-4 py-1.5 hover:bg-hover" onMouseEnter={() => props.onHover?.(item.at)} onMouseLeave={() => props.onHover?.(null)}>
            <Icon aria-hidden className={`size-3.5 shrink-0 translate-y-0.5 ${tone}`} />
            <span className="foreign line-clamp-2 min-w-0 flex-1 break-words" title={item.text}>
              {word && <span className="sr-only">{word}</span>}
              {to ? <Link to="/workers" search={{ worker: to }} className="hover:underline">{item.text}</Link> : item.text}
            </span>
            <span className="shrink-0 text-sm text-faint"><Time at={item.at} /></span>
          </li>
        );
      })}
    </ol>
  );
}
