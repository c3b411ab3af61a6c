/** Tiers of checkpoints, and the newest one. Pure. The coordinator computes what would be lost (`views/checkpoints/Safety`). */

import type { Checkpoint } from "../api/types";

export type Rung = "memory" | "disk" | "bucket";

const DISKS: ReadonlySet<string> = new Set(["nvme", "local", "disk", "file"]);

/** MEMORY, NVME, LOCAL, S3, GCS … → its rung. */
export function rungOf(tier: string): Rung {
  const name = tier.toLowerCase();
  if (name === "memory" || name === "peer") return "memory";
  return DISKS.has(name) ? "disk" : "bucket";
}

/** By time, not by step: after a fallback the newest save may have a smaller step than one of a lost timeline. */
export function newest(checkpoints: readonly Checkpoint[]): Checkpoint | null {
  let found: Checkpoint | null = null;
  for (const c of checkpoints) if (found === null || c.created_at > found.created_at) found = c;
  return found;
}
