/** Incidents for display: labels, filters, and which need attention. Pure. */

import type { Incident } from "../api/types";
import type { Tone } from "../components/Status";
import { age, count, duration, plural } from "../format";

/** The card of a rank that is no longer slow disappears after this long. */
const SLOW_STAYS_S = 600;

export const CLASSES: Record<Incident["failure_class"], string> = {
  user_error: "Script error", oom: "Out of memory", gpu: "GPU fault", network: "Network", storage: "Storage", preemption: "Preempted", hang: "Hang",
  node_lost: "Machine lost", unknown: "Unknown cause",
};

const SUBJECTS: Record<Incident["subject"], string> = { run: "Failure", save: "Failed save", slow_rank: "Slow rank", quarantine: "Quarantined machine" };

const STATES: Record<string, { tone: Tone; label: string }> = {
  open: { tone: "bad", label: "open" },
  recovered: { tone: "good", label: "recovered" },
  stopped: { tone: "bad", label: "stopped" },
  continued: { tone: "warn", label: "continued" },
  failed_again: { tone: "bad", label: "failed again" },
};

export function stateOf(incident: Incident): { tone: Tone; label: string } {
  return STATES[incident.state] ?? { tone: "idle", label: incident.state.replace("_", " ") };
}

/** "GPU fault", "Failed save", "Slow rank" */
export function kindOf(incident: Incident): string {
  return incident.subject === "run" ? CLASSES[incident.failure_class] : SUBJECTS[incident.subject];
}

/** Identifies an incident even when a coordinator without its data restarts numbering. */
export function keyOf(incident: Incident): string {
  return `${incident.id}@${Math.round(incident.opened_at)}`;
}

/**
 * Undismissed incidents: failures before slow ranks, newest first. A failure stays until it is dismissed, however fast the
 * recovery was and however long ago; the state bounds them by number.
 */
export function undismissed(incidents: readonly Incident[], dismissed: ReadonlySet<string>, now: number): Incident[] {
  const pending = incidents.filter((incident) => {
    if (dismissed.has(keyOf(incident))) return false;
    return isGrave(incident) || incident.state === "open" || now - (incident.closed_at ?? incident.opened_at) < SLOW_STAYS_S;
  });
  return [...pending.filter(isGrave), ...pending.filter((incident) => !isGrave(incident))];
}

/** A failure rather than a slow rank. */
export function isGrave(incident: Incident): boolean {
  return incident.subject !== "slow_rank";
}

/** "rank 3 on host b, pid 812, GPU 1"; empty where unknown. */
export function whoOf(incident: Incident): string {
  const { rank, host, pid, gpu } = incident;
  return [rank === null ? "" : `rank ${rank}${host ? ` on ${host}` : ""}`, pid ? `pid ${pid}` : "", gpu].filter(Boolean).join(", ");
}

/** Unit of the cost: worker for a run without GPUs. */
export function deviceOf(incident: Incident): "GPU" | "worker" {
  return incident.gpu || incident.failures.some((failure) => failure.gpu) ? "GPU" : "worker";
}

/** "12 s to recover, 7 steps lost, 24 GPU-seconds"; empty while unknown. */
export function costOf(incident: Incident): string {
  const downS = Object.values(incident.phases_s).reduce((sum, s) => sum + s, 0);
  return [
    downS > 0 ? `${duration(downS)} to recover` : "",
    incident.lost_steps === null ? "" : `${plural(incident.lost_steps, "step")} lost`,
    incident.lost_gpu_s ? `${count(incident.lost_gpu_s)} ${deviceOf(incident)}-seconds` : "",
  ].filter(Boolean).join(", ");
}

/** Outcome, in short. */
export function outcomeOf(incident: Incident, now: number): string {
  if (incident.state === "open") return `open for ${age(now - incident.opened_at)}`;
  const resumed = incident.resumed_step === null ? "" : `, resumed at step ${count(incident.resumed_step)}`;
  return `${stateOf(incident).label}${resumed}`;
}

export interface IncidentFilter {
  q?: string | undefined;
  run?: string | undefined;
  class?: string | undefined;
  state?: string | undefined;
}

export function matching(incidents: readonly Incident[], filter: IncidentFilter): Incident[] {
  const query = filter.q?.toLowerCase() ?? "";
  return incidents.filter(
    (each) =>
      (!filter.run || each.run === filter.run) &&
      (!filter.class || each.failure_class === filter.class || each.subject === filter.class) &&
      (!filter.state || each.state === filter.state) &&
      (!query || `${each.id} ${each.run} ${each.text} ${each.reason} ${whoOf(each)} ${each.fingerprint} ${kindOf(each)}`.toLowerCase().includes(query)),
  );
}
