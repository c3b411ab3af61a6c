/** Log lines of one run, newest last; the coordinator searches. */

import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { useEffect, useRef, useState } from "react";

import { get } from "../../api/client";
import type { LogEntry } from "../../api/types";
import { Input, Select } from "../../components/controls";
import { Empty, ErrorNote, Loading } from "../../components/states";
import { lookOf, TONE_TEXT } from "../../components/Status";
import { clockMs, plural } from "../../format";
import { shortName } from "../../state/runs";
import { taskOf } from "../logs/filter";

const SHOWN = 500;
const REFETCH_MS = 3_000;

export function RunLogs(props: { job: string }) {
  const [query, setQuery] = useState("");
  const [level, setLevel] = useState("");
  const lines = useQuery({
    queryKey: ["logs", "run", props.job, query, level],
    queryFn: ({ signal }) => get<LogEntry[]>("/logs", { task_id: props.job, q: query, level, limit: SHOWN }, signal),
    refetchInterval: REFETCH_MS,
    placeholderData: (before) => before,
  });
  const entries = (lines.data ?? []).toReversed();
  const scroller = useRef<HTMLOListElement>(null);
  const atEnd = useRef(true);
  const last = entries.at(-1)?.id;
  useEffect(() => {
    if (atEnd.current && scroller.current) scroller.current.scrollTop = scroller.current.scrollHeight;
  }, [last]);
  return (
    <section aria-label="Run logs" className="flex min-h-0 flex-col gap-3">
      <div className="flex flex-wrap items-center gap-2">
        <Input type="search" data-search aria-label="Search messages" placeholder="Search messages" className="w-56" value={query} onChange={(event) => setQuery(event.target.value)} />
        <Select aria-label="Level" value={level} onChange={(event) => setLevel(event.target.value)}>
          <option value="">All levels</option>
          {["info", "warn", "error"].map((word) => <option key={word} value={word}>{word} and above</option>)}
        </Select>
        <span className="text-sm text-faint">{entries.length === SHOWN ? `latest ${SHOWN} lines` : plural(entries.length, "line")}</span>
        <Link to="/logs" search={{ task: taskOf(props.job), q: query || undefined, level: level || undefined }} className="ml-auto inline-flex h-8 items-center rounded-md border px-3 font-medium hover:bg-hover">Open in Logs</Link>
      </div>
      {lines.isPending ? (
        <Loading rows={10} />
      ) : lines.isError && !lines.data ? (
        <ErrorNote error={lines.error} onRetry={() => void lines.refetch()} />
      ) : entries.length === 0 ? (
        <Empty title={query || level ? "No matching lines" : "No log lines yet"}>{query || level ? "Clear filters to see all lines." : taskOf(props.job) === undefined ? "Log lines of workers without a job ID are not assigned to a run. Open them in Logs." : "Processes of this run have not logged anything."}</Empty>
      ) : (
        <ol
          ref={scroller}
          tabIndex={0}
          aria-label="Log lines"
          className="max-h-[70vh] min-h-40 overflow-auto rounded-lg border bg-surface py-2 font-mono text-sm"
          onScroll={(event) => { const list = event.currentTarget; atEnd.current = list.scrollTop + list.clientHeight > list.scrollHeight - 24; }}
        >
          {entries.map((entry) => (
            <li key={entry.id} className={`flex flex-wrap gap-x-3 px-3 py-0.5 sm:flex-nowrap ${entry.level === "error" ? "bg-bad-soft/60" : ""}`}>
              <time className="shrink-0 text-faint" dateTime={new Date(entry.timestamp * 1000).toISOString()}>{clockMs(entry.timestamp)}</time>
              <span className={`w-11 shrink-0 font-semibold uppercase ${TONE_TEXT[lookOf(entry.level).tone]}`}>{entry.level}</span>
              <span className="foreign w-20 shrink-0 truncate text-muted" title={entry.worker_id ?? entry.source}>{entry.worker_id ? shortName(entry.worker_id, props.job) : entry.source}</span>
              <span className="foreign min-w-0 basis-full break-words whitespace-pre-wrap sm:basis-auto">{entry.message}</span>
            </li>
          ))}
        </ol>
      )}
    </section>
  );
}
