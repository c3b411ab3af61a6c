/** Exports the matching log lines that the coordinator still has as JSON lines, oldest first. */

import { get } from "../../api/client";
import type { LogEntry } from "../../api/types";
import { saveLines } from "../../download";
import type { LogFilter } from "./filter";

const MOST = 10_000;

export async function exportLogs(filter: LogFilter): Promise<void> {
  const lines = await get<LogEntry[]>("/logs", { level: filter.level, task_id: filter.task, worker_id: filter.worker, q: filter.text, limit: MOST });
  saveLines("strata-logs", lines.reverse());
}
