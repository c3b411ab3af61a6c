/** Worker time of a run by activity, as measured by its workers. */

import type { Goodput } from "../../api/types";
import { duration, percent } from "../../format";

export function GoodputBar({ goodput }: { goodput: Goodput }) {
  const parts = [
    { label: "training", seconds: goodput.training_s, color: "bg-good" },
    { label: "checkpointing", seconds: goodput.checkpoint_s, color: "bg-busy" },
    { label: "recovering", seconds: goodput.recovery_s, color: "bg-bad" },
    { label: "waiting", seconds: goodput.waiting_s, color: "bg-idle" },
  ];
  const share = (seconds: number) => (goodput.total_s > 0 ? (100 * seconds) / goodput.total_s : 0);
  return (
    <div className="flex flex-col gap-3">
      <p className="flex items-baseline gap-2">
        <span className="text-2xl font-semibold tracking-tight">{goodput.goodput === null ? "–" : percent(100 * goodput.goodput, 1)}</span>
        <span className="text-muted">of {duration(goodput.total_s)} worker time spent training</span>
      </p>
      <div role="img" aria-label={parts.map((p) => `${p.label} ${percent(share(p.seconds), 1)}`).join(", ")} className="flex h-4 gap-px overflow-hidden rounded bg-hover">
        {parts.map((p) => p.seconds > 0 && <div key={p.label} className={`${p.color} min-w-0.5`} style={{ width: `${share(p.seconds)}%` }} />)}
      </div>
      <ul className="flex flex-wrap gap-x-6 gap-y-1">
        {parts.map((p) => (
          <li key={p.label} className="flex items-center gap-2 text-muted"><span aria-hidden className={`size-2.5 rounded-sm ${p.color}`} />{p.label}<span className="font-medium text-ink">{duration(p.seconds)}</span>{percent(share(p.seconds), 1)}</li>
        ))}
      </ul>
      {goodput.queued_s !== null && <p className="text-sm text-faint">Queued for {duration(goodput.queued_s)}.</p>}
    </div>
  );
}
