/** The tiers that a checkpoint was saved to, from near to far. Each is labelled: colour is not the only cue. */

import type { CheckpointStatus } from "../../api/types";
import { rungOf } from "../../state/risk";

const RUNGS = [
  ["memory", "Memory"],
  ["disk", "Disk"],
  ["bucket", "Bucket"],
] as const;

export function Ladder(props: { tiers: readonly string[]; status: CheckpointStatus }) {
  if (props.tiers.length === 0) {
    return <span className="text-sm text-faint">{props.status === "in_progress" ? "writing" : "–"}</span>;
  }
  return (
    <span className="inline-flex max-w-full items-center gap-1 align-middle max-sm:flex-wrap" aria-label={`Saved to: ${props.tiers.join(", ")}`} role="img">
      {RUNGS.map(([rung, label]) => {
        const stored = props.tiers.filter((tier) => rungOf(tier) === rung);
        return (
          <span
            key={rung}
            title={stored.length > 0 ? `saved to ${stored.join(", ")}` : `not saved to ${label.toLowerCase()}`}
            className={`min-w-0 truncate rounded-sm px-1.5 py-px text-xs font-medium ${stored.length > 0 ? "bg-accent-soft text-accent" : "border border-dashed text-faint"}`}
          >
            {stored.length > 0 ? stored.map(shortName).join(" + ") : label}
          </span>
        );
      })}
    </span>
  );
}

const NAMES: Readonly<Record<string, string>> = { memory: "Memory", peer: "Peer", local: "Disk" };

function shortName(tier: string): string {
  return NAMES[tier.toLowerCase()] ?? tier.slice(0, 12);
}
