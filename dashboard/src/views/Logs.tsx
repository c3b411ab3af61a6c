/**
 * Live logs of the whole fleet. History is fetched first, the stream continues from there; filters are in the URL.
 * Scrolling up or Pause pauses the view; lines that arrive meanwhile are counted, not lost.
 */

import { useMutation, useQuery } from "@tanstack/react-query";
import { useVirtualizer } from "@tanstack/react-virtual";
import { Download, Pause, Play, ScrollText, WrapText } from "lucide-react";
import { useDeferredValue, useEffect, useMemo, useRef, useState, type ReactNode } from "react";

import { get } from "../api/client";
import type { LogEntry } from "../api/types";
import { Facts } from "../components/Card";
import { Button, Input, Select } from "../components/controls";
import { Drawer } from "../components/Dialog";
import { Page } from "../components/Page";
import { Empty, ErrorNote, Loading } from "../components/states";
import { CopyButton } from "../components/Copy";
import { useNarrow } from "../components/narrow";
import { useMovingRows } from "../components/movingRows";
import { lookOf, Status, TONE_TEXT } from "../components/Status";
import { Name, Time, WorkerLink } from "../components/values";
import { clockMs, count, cut, plural } from "../format";
import { useFilters } from "../search";
import { useOnlyJob } from "../session";
import { useStore } from "../state/store";
import { filterOf, merged, splitMatches, type LogFilter } from "./logs/filter";
import { exportLogs } from "./logs/export";

const ROW_PX = 24;
const FETCHED = 2_000;
const REFETCH_MS = 3_000;
/** Characters that fit into the column. */
const NAME_LETTERS = 25;

export function Logs() {
  const [search, setFilters] = useFilters();
  const job = useOnlyJob();
  // A session bound to a job requests only that job.
  const filter = useMemo(() => ({ ...filterOf(search), ...(job === null ? {} : { task: job }) }), [search, job]);
  const wrap = search["wrap"] === "1";
  const narrow = useNarrow();
  const live = useStore((state) => state.logs);
  const early = useQuery({
    queryKey: ["logs", filter],
    queryFn: ({ signal }) =>
      get<LogEntry[]>("/logs", { level: filter.level, task_id: filter.task, worker_id: filter.worker, q: filter.text, limit: FETCHED }, signal),
    staleTime: Infinity,
    gcTime: 0,
    // A session bound to a job has no stream.
    refetchInterval: job === null ? false : REFETCH_MS,
  });
  // Lines may arrive faster than they can be rendered: deferred.
  const current = useDeferredValue(live);
  const lines = useMemo(() => merged(early.data ?? [], current, filter), [early.data, current, filter]);
  const [paused, setPaused] = useState<readonly LogEntry[] | null>(null);
  useEffect(() => setPaused(null), [filter]);
  const shown = paused ?? lines;
  const isUnknown = shown.length === 0 && !early.isSuccess;
  const added = paused ? newer(lines, paused.at(-1)?.id) : 0;
  const [open, setOpen] = useState<LogEntry | null>(null);
  const filtered = isFiltered(filter, job);
  const exporting = useMutation({ mutationFn: () => exportLogs(filter) });

  return (
    <Page
      title="Logs"
      fill
      subtitle={!isUnknown && <span aria-live="off">{plural(shown.length, "line")}{paused ? ", paused" : ""}</span>}
      actions={
        <>
          <Button aria-pressed={wrap} className="max-sm:hidden" onClick={() => setFilters({ wrap: wrap ? undefined : "1" })}><WrapText aria-hidden className="size-4" />Wrap</Button>
          <Button disabled={exporting.isPending} onClick={() => exporting.mutate()}><Download aria-hidden className="size-4" />Export</Button>
          {paused ? (
            <Button look="primary" onClick={() => setPaused(null)}><Play aria-hidden className="size-4" />Resume{added > 0 ? ` (${count(added)} new)` : ""}</Button>
          ) : (
            <Button onClick={() => setPaused(lines)}><Pause aria-hidden className="size-4" />Pause</Button>
          )}
        </>
      }
    >
      <Filters filter={filter} job={job} onChange={setFilters} />
      {early.isError && <ErrorNote error={early.error} onRetry={() => void early.refetch()} />}
      {exporting.isError && <ErrorNote error={exporting.error} onRetry={() => exporting.mutate()} />}
      <section className="flex min-h-0 flex-1 flex-col overflow-hidden rounded-lg border bg-surface" aria-label="Lines">
        {isUnknown ? (
          early.isError ? null : <div className="p-4"><Loading rows={12} /></div>
        ) : shown.length === 0 ? (
          <Empty icon={ScrollText} title={filtered ? "No matching lines" : "No log lines yet"}>
            {filtered ? "Clear filters to see all lines. New matches appear as they arrive." : "Logs of workers, tasks and the coordinator appear here."}
          </Empty>
        ) : (
          <Lines key={wrap || narrow ? "wrapped" : "cut"} lines={shown} wrap={wrap} narrow={narrow} following={paused === null} query={filter.text ?? ""} onPause={() => setPaused((before) => before ?? lines)} onFollow={() => setPaused(null)} onOpen={setOpen} />
        )}
      </section>
      <LineDrawer line={open} onClose={() => setOpen(null)} />
    </Page>
  );
}

function newer(lines: readonly LogEntry[], id: string | undefined): number {
  let found = 0;
  for (let i = lines.length - 1; i >= 0 && (id === undefined || lines[i]!.id > id); i -= 1) found += 1;
  return found;
}

/** Whether the user has set a filter; the fixed job of a bound session does not count. */
function isFiltered(filter: LogFilter, job: string | null): boolean {
  return Object.entries(filter).some(([name, value]) => value !== undefined && !(name === "task" && job !== null));
}

function Filters(props: { filter: LogFilter; job: string | null; onChange: (change: Record<string, string | undefined>, how?: { replace?: boolean }) => void }) {
  const { filter, job, onChange } = props;
  const filtered = isFiltered(filter, job);
  const tasks = useStore((state) => state.tasks);
  const workers = useStore((state) => state.workers);
  const names = useMemo(() => [...workers.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true })), [workers]);
  return (
    <form role="search" aria-label="Filter logs" className="grid grid-cols-2 gap-2 sm:flex sm:flex-wrap sm:items-center [&>*:first-child]:col-span-2" onSubmit={(event) => event.preventDefault()}>
      <Input
        type="search"
        data-search
        aria-label="Search messages"
        placeholder="Search messages"
        className="min-w-40 flex-1 basis-full sm:basis-auto"
        value={filter.text ?? ""}
        onChange={(event) => onChange({ q: event.target.value || undefined }, { replace: true })}
      />
      <Select aria-label="Minimum level" value={filter.level ?? ""} onChange={(event) => onChange({ level: event.target.value || undefined })}>
        <option value="">All levels</option>
        <option value="info">Info and above</option>
        <option value="warn">Warning and above</option>
        <option value="error">Error</option>
      </Select>
      {job === null && (
        <Select aria-label="Run" className="sm:max-w-56" value={filter.task ?? ""} onChange={(event) => onChange({ task: event.target.value || undefined })}>
          <option value="">All runs</option>
          {filter.task && !tasks.some((task) => task.id === filter.task) && <option value={filter.task}>{filter.task}</option>}
          {tasks.map((task) => <option key={task.id} value={task.id}>{task.name} ({task.id})</option>)}
        </Select>
      )}
      <Input
        aria-label="Worker"
        placeholder="All workers"
        list="log-workers"
        className="col-span-2 sm:w-52"
        value={filter.worker ?? ""}
        onChange={(event) => onChange({ worker: event.target.value || undefined }, { replace: true })}
      />
      <datalist id="log-workers">{names.map((name) => <option key={name} value={name} />)}</datalist>
      {filtered && <Button look="ghost" onClick={() => onChange({ q: undefined, level: undefined, task: undefined, worker: undefined })}>Clear filters</Button>}
    </form>
  );
}

function Lines(props: { lines: readonly LogEntry[]; wrap: boolean; narrow: boolean; following: boolean; query: string; onPause: () => void; onFollow: () => void; onOpen: (line: LogEntry) => void }) {
  const { lines, narrow, following } = props;
  const wrap = props.wrap || narrow;
  const scroller = useRef<HTMLDivElement>(null);
  const moving = useMovingRows();
  const virtual = useVirtualizer({
    count: lines.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW_PX,
    getItemKey: (index) => lines[index]?.id ?? index,
    overscan: 20,
  });
  const last = lines.at(-1)?.id;
  useEffect(() => {
    if (following && lines.length > 0) virtual.scrollToIndex(lines.length - 1, { align: "end" });
  }, [following, last, lines.length, virtual]);

  return (
    <div
      ref={scroller}
      role="log"
      aria-label="Log lines"
      aria-live="off"
      tabIndex={0}
      data-rows
      className="min-h-0 flex-1 overflow-auto font-mono text-sm"
      onWheel={(event) => { if (event.deltaY < 0) props.onPause(); }}
      onTouchMove={props.onPause}
      onKeyDown={(event) => {
        if (["ArrowUp", "PageUp", "Home"].includes(event.key)) props.onPause();
        if (event.key === "End") props.onFollow();
      }}
    >
      <div {...moving} className="relative min-w-fit" style={{ height: virtual.getTotalSize() }}>
        {virtual.getVirtualItems().map((item) => {
          const line = lines[item.index];
          if (!line) return null;
          return (
            <div
              key={item.key}
              ref={wrap ? virtual.measureElement : undefined}
              data-index={item.index}
              data-row
              data-log-level={line.level}
              tabIndex={-1}
              className={`absolute inset-x-0 flex cursor-pointer gap-3 px-4 hover:bg-hover focus-visible:-outline-offset-2 ${wrap ? "py-0.5" : "items-center whitespace-nowrap"} ${line.level === "error" ? "bg-bad-soft/60" : ""}`}
              style={{ transform: `translateY(${item.start}px)`, ...(wrap ? {} : { height: ROW_PX }) }}
              onClick={() => props.onOpen(line)}
              onKeyDown={(event) => { if (event.key === "Enter") props.onOpen(line); }}
              // Keyboard navigation pauses the view.
              onFocus={(event) => { if (event.currentTarget.matches(":focus-visible")) props.onPause(); }}
            >
              {narrow ? <NarrowLine line={line} query={props.query} /> : <Line line={line} wrap={wrap} query={props.query} />}
            </div>
          );
        })}
      </div>
    </div>
  );
}

/** On a phone the message is below time, level and worker. */
function NarrowLine(props: { line: LogEntry; query: string }) {
  const { line, query } = props;
  return (
    <span className="flex min-w-0 flex-1 flex-col">
      <span className="flex items-baseline gap-2 text-xs">
        <time className="shrink-0 text-faint" dateTime={new Date(line.timestamp * 1000).toISOString()}>{clockMs(line.timestamp)}</time>
        <span className={`shrink-0 font-semibold uppercase ${TONE_TEXT[lookOf(line.level).tone]}`}>{line.level}</span>
        <span className="foreign min-w-0 truncate text-muted">{line.worker_id ?? line.source}</span>
      </span>
      <span className={`foreign break-words whitespace-pre-wrap ${line.level === "debug" ? "text-muted" : ""}`}>{highlighted(line.message, query)}</span>
    </span>
  );
}

function Line(props: { line: LogEntry; wrap: boolean; query: string }) {
  const { line, wrap, query } = props;
  const writer = line.worker_id ?? line.source;
  return (
    <>
      <time className="shrink-0 text-faint" dateTime={new Date(line.timestamp * 1000).toISOString()}>{clockMs(line.timestamp)}</time>
      <span className={`w-12 shrink-0 font-semibold uppercase ${TONE_TEXT[lookOf(line.level).tone]}`}>{line.level}</span>
      <span className="foreign w-52 shrink-0 truncate text-muted" title={writer}>{cut(writer, NAME_LETTERS)}</span>
      <span className={`foreign min-w-0 ${wrap ? "break-words whitespace-pre-wrap" : "whitespace-pre"} ${line.level === "debug" ? "text-muted" : ""}`}>
        {highlighted(wrap ? line.message : firstLine(line.message), query)}
      </span>
    </>
  );
}

/** Without wrapping, a traceback is one row with the number of further lines. */
function firstLine(message: string): string {
  const end = message.indexOf("\n");
  if (end < 0) return message;
  const more = message.slice(end).split("\n").filter((part) => part.trim()).length;
  return more > 0 ? `${message.slice(0, end)}  ⏎ ${plural(more, "more line")}` : message.slice(0, end);
}

function highlighted(message: string, query: string): ReactNode {
  if (!query) return message;
  return splitMatches(message, query).map(({ text, hit }, place) => (hit ? <mark key={place} className="rounded-xs bg-warn-soft text-ink">{text}</mark> : text));
}

function LineDrawer(props: { line: LogEntry | null; onClose: () => void }) {
  const { line } = props;
  return (
    <Drawer open={line !== null} onClose={props.onClose} title="Log line">
      {line && (
        <div className="flex flex-col gap-4">
          <Facts
            items={[
              ["Time", <Time key="t" at={line.timestamp} />],
              ["Level", <Status key="l" value={line.level} />],
              ["Source", <Name key="s">{line.source}</Name>],
              ["Worker", line.worker_id ? <WorkerLink key="w" id={line.worker_id} /> : "–"],
              ["Run", <Name key="k">{line.task_id}</Name>],
            ]}
          />
          <div className="flex justify-end"><CopyButton text={line.message} label="message" /></div>
          <pre className="foreign max-h-[60vh] overflow-auto rounded-md border bg-raised p-3 font-mono text-sm break-words whitespace-pre-wrap" tabIndex={0}>{line.message}</pre>
        </div>
      )}
    </Drawer>
  );
}

