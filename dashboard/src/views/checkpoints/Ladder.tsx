/** The tiers that store a checkpoint, from near to far. Each is labelled: colour is not the only cue. */

import type { CheckpointStatus } from "../../api/types";
import { rungOf } from "../../state/risk";

const RUNGS = [
  ["memory", "Memory"],
  ["disk", "Disk"],
  ["bucket", "Bucket"],
] as const;

export function Ladder(props: { tiers: readonly string[]; status: CheckpointStatus }) {
  const stored = new Map(props.tiers.map((tier) => [rungOf(tier), tier]));
  if (props.tiers.length === 0) {
    return <span className="text-sm text-faint">{props.status === "in_progress" ? "writing" : "–"}</span>;
  }
  return (
    <span className="inline-flex items-center gap-1 max-sm:flex-wrap" aria-label={`Tiers: ${props.tiers.join(", ")}`} role="img">
      {RUNGS.map(([rung, label]) => (
        <span
          key={rung}
          title={stored.get(rung) ?? `not in ${label.toLowerCase()}`}
          className={`rounded-sm px-1.5 py-px text-xs font-medium ${stored.has(rung) ? "bg-accent-soft text-accent" : "border border-dashed text-faint"}`}
        >
          {stored.has(rung) ? shortName(stored.get(rung)!) : label}
        </span>
      ))}
    </span>
  );
}

function shortName(tier: string): string {
  const name = tier.toLowerCase();
  return name === "memory" ? "Memory" : name === "local" ? "Disk" : tier.slice(0, 12);
}
