/** The views, in the order of the questions they answer. */

import { Activity, Boxes, Database, Gauge, ListChecks, Save, ScrollText, Settings, UsersRound, type LucideIcon } from "lucide-react";

export interface ViewEntry {
  to: "/" | "/runs" | "/workers" | "/data" | "/checkpoints" | "/barriers" | "/tasks" | "/logs" | "/settings";
  label: string;
  icon: LucideIcon;
  /** Typed after "g". */
  key: string;
}

export const VIEWS: readonly ViewEntry[] = [
  { to: "/", label: "Overview", icon: Gauge, key: "o" },
  { to: "/runs", label: "Runs", icon: Activity, key: "r" },
  { to: "/workers", label: "Workers", icon: Boxes, key: "w" },
  { to: "/data", label: "Data", icon: Database, key: "d" },
  { to: "/checkpoints", label: "Checkpoints", icon: Save, key: "c" },
  { to: "/barriers", label: "Barriers", icon: UsersRound, key: "b" },
  { to: "/tasks", label: "Tasks", icon: ListChecks, key: "t" },
  { to: "/logs", label: "Logs", icon: ScrollText, key: "l" },
  { to: "/settings", label: "Settings", icon: Settings, key: "s" },
];

const OF_A_JOB: readonly ViewEntry["to"][] = ["/tasks", "/logs", "/settings"];

/** Those that a browser which may see one job only can show anything in. */
export function viewsFor(job: string | null): readonly ViewEntry[] {
  return job === null ? VIEWS : VIEWS.filter((view) => OF_A_JOB.includes(view.to));
}
