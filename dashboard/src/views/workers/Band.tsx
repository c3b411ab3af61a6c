/** Large fleets: counts by step time, and only the exceptions by name. */

import { count, plural } from "../../format";
import { useServerNow } from "../../state/store";
import { Heatmap, type HeatmapColor } from "./Heatmap";
import { exceptions, PACES, type Pace } from "./pace";

const NAMED = 200;

export function PaceCounts({ paces }: { paces: readonly Pace[] }) {
  const groups = PACES.map(([name, label, color]) => ({ name, label, color, n: paces.filter((p) => p.class === name).length })).filter((g) => g.n > 0);
  return (
    <div className="flex flex-col gap-2">
      <div role="img" aria-label={groups.map((g) => `${count(g.n)} ${g.label}`).join(", ")} className="flex h-8 gap-px overflow-hidden rounded-md bg-hover">
        {groups.map((g) => <div key={g.name} className={`${g.color} min-w-1.5`} style={{ flexGrow: g.n, flexBasis: 0 }} />)}
      </div>
      <ul className="flex flex-wrap gap-x-5 gap-y-1 text-sm">
        {groups.map((g) => <li key={g.name} className="flex items-center gap-2 text-muted"><span aria-hidden className={`size-2.5 rounded-sm ${g.color}`} /><span className="font-medium text-ink">{count(g.n)}</span>{g.label}</li>)}
      </ul>
    </div>
  );
}

export function Band(props: { paces: readonly Pace[]; color: HeatmapColor; selected: string | undefined; onOpen: (id: string) => void }) {
  const now = useServerNow();
  const odd = exceptions(props.paces, now);
  return (
    <div className="flex flex-col gap-4">
      <PaceCounts paces={props.paces} />
      <section aria-label="Exceptions" className="flex flex-col gap-2">
        <h3 className="text-sm font-medium text-muted">{odd.length === 0 ? "No exceptions: no worker is lost, late, marked slow or over 30 % slower." : `${plural(odd.length, "exception")}: lost, late, marked slow, over 30 % slower, or in an unusual state`}</h3>
        {odd.length > 0 && <Heatmap paces={odd.slice(0, NAMED)} color={props.color} selected={props.selected} onOpen={props.onOpen} />}
        {odd.length > NAMED && <p className="text-sm text-faint">and {count(odd.length - NAMED)} more in the table</p>}
      </section>
    </div>
  );
}
