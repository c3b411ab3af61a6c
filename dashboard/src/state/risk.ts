/**
 * What would be lost, by what fails: a process, its machine, the whole site. Pure.
 *
 * A snapshot in memory outlives a process and dies with its machine; so does a disk, unless another machine keeps its files;
 * only a bucket outlives the site. What is not known to survive is counted as lost.
 */

import type { Checkpoint } from "../api/types";
import { plural } from "../format";
import type { Run } from "./runs";

export type Rung = "memory" | "disk" | "bucket";
export type Domain = "process" | "machine" | "site";

export interface DomainRisk {
  domain: Domain;
  /** "Process dies", "Machine dies", "Site lost" */
  label: string;
  /** Null: everything. */
  steps: number | null;
  /** "7 steps", or "everything" and why. */
  text: string;
  /** The step that training would continue at; null: from the start. */
  from: number | null;
}

const DISKS: ReadonlySet<string> = new Set(["nvme", "local", "disk", "file"]);

/** MEMORY, NVME, LOCAL, S3, GCS … → the rung it is. */
export function rungOf(tier: string): Rung {
  const name = tier.toLowerCase();
  if (name === "memory") return "memory";
  return DISKS.has(name) ? "disk" : "bucket";
}

/** Whether a checkpoint is there after this was lost. */
export function survives(checkpoint: Pick<Checkpoint, "status" | "tiers" | "metadata">, lost: Domain): boolean {
  if (checkpoint.status !== "completed") return false;
  const rungs = checkpoint.tiers.map(rungOf);
  if (rungs.includes("bucket")) return true;
  if (lost === "site") return false;
  return lost === "process" || (rungs.includes("disk") && checkpoint.metadata["disk"] === "network");
}

/** "process", "machine" or "site": the most that a checkpoint outlives; null: nothing. */
export function outlives(checkpoint: Pick<Checkpoint, "status" | "tiers" | "metadata">): Domain | null {
  return (["site", "machine", "process"] as const).find((lost) => survives(checkpoint, lost)) ?? null;
}

/** The newest snapshot that every rank which makes any has, where ranks report them. */
export function snapshotStep(run: Pick<Run, "workers">): number | null {
  const steps = run.workers
    .filter((w) => w.status !== "failed")
    .map((w) => w.metrics["snapshot_step"])
    .filter((step): step is number => typeof step === "number");
  return steps.length === 0 ? null : Math.min(...steps);
}

const LABELS: Record<Domain, string> = { process: "Process dies", machine: "Machine dies", site: "Site lost" };
const NOTHING: Record<Domain, string> = { process: "everything, nothing was saved", machine: "everything, no copy off the machine", site: "everything, no bucket copy" };

/** One line for each; none where nothing trains. */
export function domainsOf(run: Pick<Run, "workers" | "checkpoints" | "step" | "risk">): DomainRisk[] {
  if (run.risk.since === null) return [];
  return (["process", "machine", "site"] as const).map((domain) => {
    const saved = newest(run.checkpoints.filter((c) => survives(c, domain)))?.step ?? null;
    const snapshot = domain === "process" ? snapshotStep(run) : null;
    const from = saved === null ? snapshot : Math.max(saved, snapshot ?? 0);
    const steps = from === null ? null : Math.max(0, run.step - from);
    return { domain, label: LABELS[domain], steps, from, text: steps === null ? NOTHING[domain] : plural(steps, "step") };
  });
}

/** By time, not by step: after a fallback the newest save may have a smaller step than one of a lost timeline. */
export function newest(checkpoints: readonly Checkpoint[]): Checkpoint | null {
  let found: Checkpoint | null = null;
  for (const c of checkpoints) if (found === null || c.created_at > found.created_at) found = c;
  return found;
}
