/** Log lines as a file: one JSON object a line, oldest first, as many as the coordinator still has of those wanted. */

import { get } from "../../api/client";
import type { LogEntry } from "../../api/types";
import type { LogFilter } from "./filter";

const MOST = 10_000;

export async function exportLogs(filter: LogFilter): Promise<void> {
  const lines = await get<LogEntry[]>("/logs", { level: filter.level, task_id: filter.task, worker_id: filter.worker, q: filter.text, limit: MOST });
  const text = lines.reverse().map((line) => JSON.stringify(line)).join("\n");
  const address = URL.createObjectURL(new Blob([text, "\n"], { type: "application/x-ndjson" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = `strata-logs-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.jsonl`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
