/** The views, in the order of the questions they answer. */

import { Activity, Boxes, Database, Gauge, Save, ScrollText, Server, Settings, Siren, UsersRound, type LucideIcon } from "lucide-react";

export interface ViewEntry {
  to: "/" | "/runs" | "/incidents" | "/workers" | "/data" | "/checkpoints" | "/barriers" | "/logs" | "/coordinator" | "/settings";
  label: string;
  icon: LucideIcon;
  /** Typed after "g". */
  key: string;
}

export const VIEWS: readonly ViewEntry[] = [
  { to: "/", label: "Overview", icon: Gauge, key: "o" },
  { to: "/runs", label: "Runs", icon: Activity, key: "r" },
  { to: "/incidents", label: "Incidents", icon: Siren, key: "i" },
  { to: "/workers", label: "Workers", icon: Boxes, key: "w" },
  { to: "/data", label: "Data", icon: Database, key: "d" },
  { to: "/checkpoints", label: "Checkpoints", icon: Save, key: "c" },
  { to: "/barriers", label: "Barriers", icon: UsersRound, key: "b" },
  { to: "/logs", label: "Logs", icon: ScrollText, key: "l" },
  { to: "/coordinator", label: "Coordinator", icon: Server, key: "h" },
  { to: "/settings", label: "Settings", icon: Settings, key: "s" },
];

const OF_A_JOB: readonly ViewEntry["to"][] = ["/runs", "/logs", "/settings"];

/** In the phone's bottom bar; the rest is behind "More". */
const AT_HAND: readonly ViewEntry["to"][] = ["/", "/runs", "/incidents", "/logs"];

/** The views available to a session, which may be bound to one job. */
export function viewsFor(job: string | null): readonly ViewEntry[] {
  return job === null ? VIEWS : VIEWS.filter((view) => OF_A_JOB.includes(view.to));
}

export function atHand(job: string | null): readonly ViewEntry[] {
  return viewsFor(job).filter((view) => AT_HAND.includes(view.to));
}

/** Path of the sign-in page. */
export const SIGN_IN = "/sign-in";
