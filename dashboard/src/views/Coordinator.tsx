/** The coordinator's own health: load, latencies, memory, disk. Nothing here is about training. */

import { useQuery } from "@tanstack/react-query";

import { get } from "../api/client";
import type { History } from "../api/types";
import { Card, Facts, Stat } from "../components/Card";
import { Chart } from "../components/Chart";
import { CopyButton } from "../components/Copy";
import { Page } from "../components/Page";
import { Sparkline } from "../components/Sparkline";
import { Loading } from "../components/states";
import { Time } from "../components/values";
import { age, bytes, compact, count, millis, number } from "../format";
import { useServerNow, useStory } from "../state/store";

const WINDOW_S = 900;
const REFETCH_MS = 15_000;

export function Coordinator() {
  const { coordinator, metrics, series, workers } = useStory();
  const now = useServerNow();
  const inside = useQuery({
    queryKey: ["history", "coordinator"],
    queryFn: ({ signal }) => get<History>("/metrics/history", { series: "loop_lag,memory,log_lines,log_lines_dropped,events", since: Math.floor(Date.now() / 1000 - WINDOW_S) }, signal),
    refetchInterval: REFETCH_MS,
    retry: false,
  });
  if (coordinator === null) return <Page title="Coordinator"><Loading rows={8} /></Page>;
  const from = Math.max(0, series.times.findIndex((t) => t >= now - WINDOW_S));
  const cut = <T,>(values: readonly T[]) => values.slice(from);
  const times = cut(series.times);
  const window = [Math.max(now - WINDOW_S, Math.min(times[0] ?? now - 60, now - 60)), now] as const;
  const past = inside.data;
  const pastTimes = past ? (Object.values(past.series)[0]?.values ?? []).map((_, i) => past.start + i * past.step) : [];
  const of = (name: string) => past?.series[name]?.values ?? [];
  const storage = coordinator.storage;
  return (
    <Page title="Coordinator" subtitle={`version ${coordinator.version}, up ${age(now - coordinator.started_at)}`}>
      <div className="grid grid-cols-2 gap-4 xl:grid-cols-4">
        <Stat label="Requests" value={compact(metrics?.coordinator_rps ?? null)} unit="/s"><Sparkline label="Requests over time" values={cut(series.rps)} /></Stat>
        <Stat label="Barrier latency, p99" value={millis(metrics?.barrier_latency_p99)} unit="ms"><Sparkline label="Barrier latency over time" values={cut(series.barrierP99)} /></Stat>
        <Stat label="Shard assignment" value={millis(metrics?.shard_assignment_time)} unit="ms"><Sparkline label="Shard assignment time over time" values={cut(series.planMs)} /></Stat>
        <Stat label="Checkpoint throughput" value={number(metrics?.checkpoint_throughput)} unit="MB/s"><Sparkline label="Checkpoint throughput over time" values={cut(series.checkpointMbS)} /></Stat>
      </div>
      <div className="grid gap-4 xl:grid-cols-2">
        <Card title="Requests"><Chart label="Coordinator requests per second over time" sync="coordinator" range={window} times={times} lines={[{ label: "requests", color: "busy", values: cut(series.rps), fill: true }]} unit="/s" format={compact} height={150} /></Card>
        <Card title="Event loop lag"><Chart label="Event loop lag over time" sync="coordinator" range={window} times={pastTimes} lines={[{ label: "lag", color: "warn", values: of("loop_lag"), fill: true }]} unit="ms" format={(v) => number(v)} height={150} /></Card>
        <Card title="Memory"><Chart label="Coordinator memory over time" sync="coordinator" range={window} times={pastTimes} lines={[{ label: "resident", color: "accent", values: of("memory"), fill: true }]} format={(v) => bytes(v)} height={150} /></Card>
        <Card title="Log lines"><Chart label="Log lines per second over time" sync="coordinator" range={window} times={pastTimes} lines={[{ label: "received", color: "good", values: of("log_lines") }, { label: "dropped", color: "bad", values: of("log_lines_dropped") }]} unit="/s" format={compact} height={150} /></Card>
      </div>
      <Card title="Details">
        <Facts
          columns={2}
          items={[
            ["Address", <span key="a" className="inline-flex items-center gap-1"><code className="font-mono text-sm">{coordinator.address}</code><CopyButton text={coordinator.address} label="address" className="size-6" /></span>],
            ["Version", coordinator.version],
            ["Started", <Time key="s" at={coordinator.started_at} />],
            ["Role", coordinator.leader ? "leader" : "standby"],
            ["Workers", count(workers.size)],
            ["Jobs", count(Object.keys(coordinator.jobs).length)],
            ["Journal disk", storage === null ? "–" : storage.is_full ? `full: ${bytes(storage.free_bytes)} free, needs ${bytes(storage.needed_bytes)}` : `${bytes(storage.free_bytes)} free`],
          ]}
        />
      </Card>
    </Page>
  );
}
