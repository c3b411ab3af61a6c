/** Where the time of a run went: work that counts, work done twice, recovering. */

import { duration, percent } from "../../format";
import type { Goodput } from "../../state/runs";

export function GoodputBar({ goodput }: { goodput: Goodput }) {
  const parts = [
    { label: "training that counts", seconds: goodput.goodS, color: "bg-good" },
    { label: "repeated after a recovery", seconds: goodput.repeatedS, color: "bg-warn" },
    { label: "recovering", seconds: goodput.recoveringS, color: "bg-bad" },
  ];
  const share = (seconds: number) => (goodput.totalS > 0 ? (100 * seconds) / goodput.totalS : 0);
  return (
    <div className="flex flex-col gap-3">
      <p className="flex items-baseline gap-2"><span className="text-2xl font-semibold tracking-tight">{percent(share(goodput.goodS), 1)}</span><span className="text-muted">of {duration(goodput.totalS)} was training that counts</span></p>
      <div role="img" aria-label={parts.map((p) => `${p.label} ${percent(share(p.seconds), 1)}`).join(", ")} className="flex h-4 gap-px overflow-hidden rounded">
        {parts.map((p) => p.seconds > 0 && <div key={p.label} className={`${p.color} min-w-0.5`} style={{ width: `${share(p.seconds)}%` }} />)}
      </div>
      <ul className="flex flex-wrap gap-x-6 gap-y-1">
        {parts.map((p) => (
          <li key={p.label} className="flex items-center gap-2 text-muted"><span aria-hidden className={`size-2.5 rounded-sm ${p.color}`} />{p.label}<span className="font-medium text-ink">{duration(p.seconds)}</span></li>
        ))}
      </ul>
    </div>
  );
}
