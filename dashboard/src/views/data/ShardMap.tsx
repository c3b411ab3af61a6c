/** Shard assignment by worker, progress, and what the latest plan reassigned. */

import { Link } from "@tanstack/react-router";
import { useVirtualizer } from "@tanstack/react-virtual";
import { Map as MapIcon } from "lucide-react";
import { memo, useMemo, useRef } from "react";

import type { Audit, ShardPlan } from "../../api/types";
import { Meter } from "../../components/Card";
import { Empty } from "../../components/states";
import { RunLink } from "../../components/values";
import { count, cut, number, percent, plural } from "../../format";
import { shortName } from "../../state/runs";
import { movedIn, positionOf, rowsOf, type Position, type Range, type Row } from "./ranges";

const ROW_PX = 30;
const NAME_LETTERS = 24;

export function ShardMap(props: { plan: ShardPlan; proofs: readonly Audit[] }) {
  const { plan } = props;
  const rows = useMemo(() => rowsOf(plan), [plan]);
  const moved = useMemo(() => movedIn(plan), [plan]);
  const receivers = rows.filter((row) => row.moved > 0).length;
  const position = positionOf(plan, props.proofs);
  return (
    <div className="flex flex-col gap-4">
      <Progress position={position} />
      {!plan.by_shard && (
        <p className="rounded-md bg-raised px-3 py-2 text-muted">All ranks of <RunLink id={plan.job_id} /> read this dataset in one shared order; shards are not assigned to workers.</p>
      )}
      {plan.by_shard && <p className="text-muted">
        Plan {count(plan.version)} of <RunLink id={plan.job_id} />, epoch {count(plan.epoch)}: <span className="foreign text-ink">{plan.reason}</span>.{" "}
        {moved > 0 ? `${plural(moved, "shard")} reassigned to ${plural(receivers, "worker")}.` : "No shards reassigned."}
      </p>}
      <Legend byShard={plan.by_shard} trained={position.isPlans} read={position.isPlans && plan.shards.some((shard) => shard.reported > shard.done)} />
      {plan.by_shard ? <Rows rows={rows} job={plan.job_id} total={plan.total_samples} trained={position.isPlans} /> : <Together rows={rows} total={plan.total_samples} trained={position.isPlans} />}
      {plan.shards.length < plan.shard_count && <p className="text-faint">Showing the first {count(plan.shards.length)} of {count(plan.shard_count)} shards.</p>}
    </div>
  );
}

function Progress(props: { position: Position }) {
  const { epoch, done, total, proof, past } = props.position;
  const share = total > 0 ? Math.min(100, (done / total) * 100) : null;
  // Sources of a mixture repeat: more samples may be drawn than they hold.
  const passes = total > 0 && done > total ? done / total : null;
  return (
    <div className="flex flex-col gap-2">
      <div className="flex flex-wrap items-baseline justify-between gap-x-6">
        {passes === null ? (
          <p><span className="text-lg font-semibold">{percent(share, 1)}</span> <span className="text-muted">of epoch {count(epoch)} trained and checkpointed</span></p>
        ) : (
          <p><span className="text-lg font-semibold">{number(passes, 3)} passes</span> <span className="text-muted">over its sources trained and checkpointed</span></p>
        )}
        <p className="text-muted">{passes === null ? `${count(done)} of ${count(total)} samples` : `${count(done)} drawn from ${count(total)} samples`}</p>
      </div>
      <Meter label={`Progress of epoch ${epoch}`} value={share} />
      {proof && (
        <p className={isExact(proof) ? "text-good" : "text-bad"}>
          {isExact(proof)
            ? `Verified by ${plural(proof.commits, "checkpoint")}: 0 samples lost, 0 repeated.`
            : `${count(proof.lost)} samples lost, ${count(proof.repeated)} repeated.`}
          {past.length > 0 && past.every(isExact) && ` Same for the previous ${past.length === 1 ? "epoch" : `${count(past.length)} epochs`}.`}
        </p>
      )}
      {past.filter((each) => !isExact(each)).map((each) => (
        <p key={each.epoch} className="text-bad">Epoch {count(each.epoch)}: {count(each.lost)} samples lost, {count(each.repeated)} repeated.</p>
      ))}
    </div>
  );
}

function isExact(proof: Audit): boolean {
  return proof.lost === 0 && proof.repeated === 0;
}

function Legend(props: { byShard: boolean; trained: boolean; read: boolean }) {
  return (
    <ul className="flex flex-wrap gap-x-5 gap-y-1 text-sm text-muted" aria-label="Legend">
      <li className="flex items-center gap-2"><span aria-hidden className="h-3 w-6 rounded-xs bg-edge opacity-45" />{props.byShard ? "assigned" : "not trained yet"}</li>
      {props.trained && <li className="flex items-center gap-2"><span aria-hidden className="h-3 w-6 rounded-xs bg-accent" />trained</li>}
      {props.read && <li className="flex items-center gap-2"><span aria-hidden className="h-3 w-6 rounded-xs bg-accent opacity-45" />read since the last checkpoint</li>}
      {props.byShard && <li className="flex items-center gap-2"><span aria-hidden className="h-3 w-6 rounded-xs border-b-2 border-b-warn bg-edge/45" />reassigned in the latest plan</li>}
    </ul>
  );
}

/** Without `trained` the progress of each shard is unknown, and only the assignment is shown. */
function Rows(props: { rows: readonly Row[]; job: string; total: number; trained: boolean }) {
  const { rows, job, total, trained } = props;
  const scroller = useRef<HTMLDivElement>(null);
  const virtual = useVirtualizer({ count: rows.length, getScrollElement: () => scroller.current, estimateSize: () => ROW_PX, overscan: 8 });
  const letters = Math.min(NAME_LETTERS, Math.max(0, ...rows.map((row) => shortName(row.workerId ?? "", job).length))) + 1;
  if (rows.length === 0) return <Empty icon={MapIcon} title="No shards assigned" />;
  return (
    <div ref={scroller} role="list" aria-label="Shards by worker" tabIndex={0} className="max-h-[26rem] overflow-auto rounded-md border">
      <div className="relative" style={{ height: virtual.getTotalSize() }}>
        {virtual.getVirtualItems().map((item) => {
          const row = rows[item.index];
          if (!row) return null;
          return (
            <div key={row.workerId ?? ""} role="listitem" className="absolute inset-x-0 grid items-center gap-3 border-b border-line/60 px-3" style={{ height: ROW_PX, gridTemplateColumns: `minmax(4rem, ${letters}ch) 5.5rem 1fr 3rem`, transform: `translateY(${item.start}px)` }}>
              {row.workerId === null ? <span className="text-warn">unassigned</span> : <Reader id={row.workerId} job={job} />}
              <span className="truncate text-sm text-muted" title={`${plural(row.shards, "shard")}, ${count(row.moved)} reassigned in the latest plan`}>{plural(row.shards, "shard")}</span>
              <Bar row={row} total={total} trained={trained} />
              <span className="text-right text-sm">{trained && percent(row.samples > 0 ? (row.done / row.samples) * 100 : null)}</span>
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

/** One bar for all workers: which parts of the dataset are trained. */
function Together(props: { rows: readonly Row[]; total: number; trained: boolean }) {
  const ranges = props.rows.flatMap((row) => row.ranges).map((range) => ({ ...range, moved: false })).sort((a, b) => a.start - b.start);
  const [first] = props.rows;
  return first ? <div aria-label="Trained samples" role="group" className="rounded-md border p-3"><Bar row={{ ...first, workerId: null, ranges }} total={props.total} trained={props.trained} /></div> : null;
}

/** Samples from left to right. Widths are per mille of the dataset, with a visible minimum. */
const Bar = memo(function Bar(props: { row: Row; total: number; trained: boolean }) {
  const { row, total } = props;
  const scale = 1000 / Math.max(1, total);
  return (
    <svg viewBox="0 0 1000 16" preserveAspectRatio="none" className="h-4 w-full" role="img" aria-label={describe(row)}>
      {row.ranges.map((range) => {
        const width = Math.max(1.2, (range.stop - range.start) * scale);
        const widthOf = (samples: number) => (props.trained && range.stop > range.start ? (samples / (range.stop - range.start)) * width : 0);
        return (
          <g key={range.firstShard}>
            <title>{rangeText(range, props.trained)}</title>
            <rect x={range.start * scale} y={1} width={width} height={14} className="fill-edge opacity-45" />
            <rect x={range.start * scale} y={1} width={widthOf(range.reported)} height={14} className="fill-accent opacity-45" />
            <rect x={range.start * scale} y={1} width={widthOf(range.done)} height={14} className="fill-accent" />
            {range.moved && <rect x={range.start * scale} y={13} width={width} height={3} className="fill-warn" />}
          </g>
        );
      })}
    </svg>
  );
});

function rangeText(range: Range, trained: boolean): string {
  const shards = range.firstShard === range.lastShard ? `shard ${count(range.firstShard)}` : `shards ${count(range.firstShard)} to ${count(range.lastShard)}`;
  const far = `, ${count(range.done)} trained${range.reported > range.done ? `, ${count(range.reported)} read` : ""}`;
  return `${shards}: samples ${count(range.start)} to ${count(range.stop - 1)}${trained ? far : ""}${range.moved ? ", reassigned in the latest plan" : ""}`;
}

function describe(row: Row): string {
  const first = row.ranges.slice(0, 3).map((range) => `${count(range.start)} to ${count(range.stop - 1)}`).join(", ");
  return `samples ${first}${row.ranges.length > 3 ? `, and ${row.ranges.length - 3} more ranges` : ""}`;
}
