/** Who reads which part of a dataset, how far they are, and what moved at the last change. */

import { Link } from "@tanstack/react-router";
import { useVirtualizer } from "@tanstack/react-virtual";
import { Map as MapIcon } from "lucide-react";
import { memo, useMemo, useRef } from "react";

import type { Audit, ShardPlan } from "../../api/types";
import { Meter } from "../../components/Card";
import { Empty } from "../../components/states";
import { RunLink } from "../../components/values";
import { count, cut, percent, plural } from "../../format";
import { shortName } from "../../state/runs";
import { movedIn, rowsOf, type Range, type Row } from "./ranges";

const ROW_PX = 30;
const NAME_LETTERS = 24;

export function ShardMap(props: { plan: ShardPlan; audit: Audit | undefined }) {
  const { plan } = props;
  const rows = useMemo(() => rowsOf(plan), [plan]);
  const moved = useMemo(() => movedIn(plan), [plan]);
  const receivers = rows.filter((row) => row.moved > 0).length;
  return (
    <div className="flex flex-col gap-4">
      <Progress plan={plan} audit={props.audit} />
      <p className="text-muted">
        Plan {count(plan.version)} of <RunLink id={plan.job_id} />, epoch {count(plan.epoch)}: <span className="foreign text-ink">{plan.reason}</span>.{" "}
        {moved > 0 ? `${plural(moved, "shard")} moved to ${plural(receivers, "worker")}.` : "Nothing moved."}
      </p>
      <Legend />
      <Rows rows={rows} job={plan.job_id} total={plan.total_samples} />
      {plan.shards.length < plan.shard_count && <p className="text-faint">The first {count(plan.shards.length)} of {count(plan.shard_count)} shards are shown.</p>}
    </div>
  );
}

function Progress(props: { plan: ShardPlan; audit: Audit | undefined }) {
  const { plan, audit } = props;
  const done = Math.max(plan.samples_done, audit?.samples ?? 0);
  const share = plan.total_samples > 0 ? (done / plan.total_samples) * 100 : null;
  return (
    <div className="flex flex-col gap-2">
      <div className="flex flex-wrap items-baseline justify-between gap-x-6">
        <p><span className="text-lg font-semibold">{percent(share, 1)}</span> <span className="text-muted">of epoch {count(plan.epoch)} is trained and in a checkpoint</span></p>
        <p className="text-muted">{count(done)} of {count(plan.total_samples)} samples</p>
      </div>
      <Meter label={`Progress of epoch ${plan.epoch}`} value={share} />
      {audit && (
        <p className={audit.exact || (audit.lost === 0 && audit.repeated === 0) ? "text-good" : "text-bad"}>
          {audit.lost === 0 && audit.repeated === 0
            ? `Proved by ${plural(audit.commits, "checkpoint")}: no sample lost, none repeated.`
            : `${count(audit.lost)} samples lost, ${count(audit.repeated)} repeated.`}
        </p>
      )}
    </div>
  );
}

function Legend() {
  return (
    <ul className="flex flex-wrap gap-x-5 gap-y-1 text-sm text-muted" aria-label="Legend">
      <li className="flex items-center gap-2"><span aria-hidden className="h-3 w-6 rounded-xs bg-edge opacity-45" />held</li>
      <li className="flex items-center gap-2"><span aria-hidden className="h-3 w-6 rounded-xs bg-accent" />trained</li>
      <li className="flex items-center gap-2"><span aria-hidden className="h-3 w-6 rounded-xs border-b-2 border-b-warn bg-edge/45" />moved at the last change</li>
    </ul>
  );
}

function Rows(props: { rows: readonly Row[]; job: string; total: number }) {
  const { rows, job, total } = props;
  const scroller = useRef<HTMLDivElement>(null);
  const virtual = useVirtualizer({ count: rows.length, getScrollElement: () => scroller.current, estimateSize: () => ROW_PX, overscan: 8 });
  if (rows.length === 0) return <Empty icon={MapIcon} title="Nobody holds a shard" />;
  return (
    <div ref={scroller} role="list" aria-label="Shards by worker" tabIndex={0} className="max-h-[26rem] overflow-auto rounded-md border">
      <div className="relative" style={{ height: virtual.getTotalSize() }}>
        {virtual.getVirtualItems().map((item) => {
          const row = rows[item.index];
          if (!row) return null;
          return (
            <div key={row.workerId ?? ""} role="listitem" className="absolute inset-x-0 grid grid-cols-[minmax(5rem,13rem)_5.5rem_1fr_3rem] items-center gap-3 border-b border-line/60 px-3" style={{ height: ROW_PX, transform: `translateY(${item.start}px)` }}>
              {row.workerId === null ? <span className="text-warn">nobody</span> : <Reader id={row.workerId} job={job} />}
              <span className="truncate text-sm text-muted" title={`${plural(row.shards, "shard")}, ${count(row.moved)} of them moved here`}>{plural(row.shards, "shard")}</span>
              <Bar row={row} total={total} />
              <span className="text-right text-sm">{percent(row.samples > 0 ? (row.done / row.samples) * 100 : null)}</span>
            </div>
          );
        })}
      </div>
    </div>
  );
}

function Reader(props: { id: string; job: string }) {
  return <Link to="/workers" search={{ worker: props.id }} title={props.id} className="foreign min-w-0 truncate text-accent hover:underline">{cut(shortName(props.id, props.job), NAME_LETTERS)}</Link>;
}

/** Samples from left to right. Widths are per mille of the dataset; a shard is never thinner than can be seen. */
const Bar = memo(function Bar(props: { row: Row; total: number }) {
  const { row, total } = props;
  const scale = 1000 / Math.max(1, total);
  return (
    <svg viewBox="0 0 1000 16" preserveAspectRatio="none" className="h-4 w-full" role="img" aria-label={describe(row)}>
      {row.ranges.map((range) => {
        const width = Math.max(1.2, (range.stop - range.start) * scale);
        const trained = ((range.stop - range.start > 0 ? range.done / (range.stop - range.start) : 0)) * width;
        return (
          <g key={range.firstShard}>
            <title>{tell(range)}</title>
            <rect x={range.start * scale} y={1} width={width} height={14} className="fill-edge opacity-45" />
            <rect x={range.start * scale} y={1} width={trained} height={14} className="fill-accent" />
            {range.moved && <rect x={range.start * scale} y={13} width={width} height={3} className="fill-warn" />}
          </g>
        );
      })}
    </svg>
  );
});

function tell(range: Range): string {
  const shards = range.firstShard === range.lastShard ? `shard ${count(range.firstShard)}` : `shards ${count(range.firstShard)} to ${count(range.lastShard)}`;
  return `${shards}: samples ${count(range.start)} to ${count(range.stop - 1)}, ${count(range.done)} trained${range.moved ? ", moved at the last change" : ""}`;
}

function describe(row: Row): string {
  const first = row.ranges.slice(0, 3).map((range) => `${count(range.start)} to ${count(range.stop - 1)}`).join(", ");
  return `samples ${first}${row.ranges.length > 3 ? `, and ${row.ranges.length - 3} more ranges` : ""}`;
}
