/** Latest log lines of a worker or a run, newest first. */

import { useQuery } from "@tanstack/react-query";

import { get } from "../api/client";
import type { LogEntry } from "../api/types";
import { clockMs } from "../format";
import { ErrorNote, Loading } from "./states";
import { lookOf, TONE_TEXT } from "./Status";

const SHOWN = 40;
const REFETCH_MS = 3_000;

export function LastLines(props: { of: { worker_id: string } | { task_id: string } }) {
  const lines = useQuery({
    queryKey: ["logs", "last", props.of],
    queryFn: ({ signal }) => get<LogEntry[]>("/logs", { ...props.of, limit: SHOWN }, signal),
    refetchInterval: REFETCH_MS,
  });
  if (lines.isPending) return <Loading rows={4} />;
  if (lines.isError && !lines.data) return <ErrorNote error={lines.error} onRetry={() => void lines.refetch()} />;
  const entries = lines.data ?? [];
  if (entries.length === 0) return <p className="text-muted">No log lines.</p>;
  return (
    <ol className="max-h-80 overflow-auto rounded-md bg-raised p-2 font-mono text-xs leading-relaxed" tabIndex={0} aria-label="Latest log lines, newest first">
      {entries.map((entry) => (
        <li key={entry.id} className="flex gap-2">
          <span className="shrink-0 text-faint">{clockMs(entry.timestamp)}</span>
          <span className={`w-9 shrink-0 ${TONE_TEXT[lookOf(entry.level).tone]}`}>{entry.level}</span>
          <span className="foreign min-w-0 break-words whitespace-pre-wrap">{entry.message}</span>
        </li>
      ))}
    </ol>
  );
}
