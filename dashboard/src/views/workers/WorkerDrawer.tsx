/** Details of one worker: status, resources, history, metrics and latest log lines. */

import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import type { ReactNode } from "react";

import { get } from "../../api/client";
import type { History, Worker } from "../../api/types";
import { Chart } from "../../components/Chart";
import { Facts, Meter } from "../../components/Card";
import { Drawer } from "../../components/Dialog";
import { LastLines } from "../../components/LastLines";
import { Empty, Loading } from "../../components/states";
import { Status } from "../../components/Status";
import { Ago, RunLink, Time } from "../../components/values";
import { bytes, count, duration, number, percent } from "../../format";
import { rankOf } from "../../state/runs";
import { useServerNow, useStore } from "../../state/store";
import { DrainMachine } from "./Drain";
import { busyTime } from "./pace";

/** Counters that are only meaningful summed over a run, where goodput shows them. */
const BOOKKEEPING = /_total_s$|_began_s$|_started_s$|^total_steps$/;

export function WorkerDrawer(props: { id: string | undefined; onClose: () => void }) {
  const worker = useStore((s) => (props.id ? s.workers.get(props.id) : undefined));
  const ready = useStore((s) => s.coordinator !== null);
  return (
    <Drawer open={props.id !== undefined} onClose={props.onClose} title={props.id ?? ""} description={worker && <span className="flex flex-wrap items-center gap-x-3 gap-y-1"><Status value={worker.status} /><span>last heartbeat <Ago at={worker.last_heartbeat} /></span></span>}>
      {worker ? <Details worker={worker} /> : !ready ? <Loading rows={8} /> : <Empty title="Worker not found">It left, or it failed and was removed. Its logs may still be available: <Link to="/logs" search={{ worker: props.id ?? "" }} className="text-accent underline underline-offset-2">search logs</Link>.</Empty>}
    </Drawer>
  );
}

function Details({ worker }: { worker: Worker }) {
  const measured = Object.entries(worker.metrics).filter(([name, value]) => value !== null && !BOOKKEEPING.test(name)).sort(([a], [b]) => a.localeCompare(b));
  const metadata = Object.entries(worker.metadata);
  const { busyS, waitS } = busyTime(worker);
  const task = worker.current_task || worker.metadata["task_id"];
  return (
    <div className="flex flex-col gap-6">
      {worker.reason && <p className={`foreign rounded-md bg-raised px-3 py-2 break-words ${worker.status === "failed" ? "text-bad" : "text-muted"}`}>{worker.slow && "Slow: "}{worker.reason}</p>}
      <Section title="Status">
        <Facts
          columns={2}
          items={[
            ["Run", <RunLink key="r" id={worker.job_id} />],
            ["Rank", worker.rank === null ? "none" : count(rankOf(worker))],
            ["Step", count(worker.current_step)],
            ["Epoch", count(worker.current_epoch)],
            ["Task", task ? <Link key="t" to="/runs/$job" params={{ job: worker.job_id }} search={{ task }} className="text-accent hover:underline">{task}</Link> : "none"],
            ["Shards", worker.assigned_shards === 0 ? "none" : <Link key="s" to="/data" search={{ worker: worker.id }} className="text-accent hover:underline">{count(worker.assigned_shards)}</Link>],
            ["Busy time per step", duration(busyS)],
            ["Wait time per step", duration(waitS)],
            ["Last heartbeat", <Ago key="h" at={worker.last_heartbeat} />],
            ["Session", worker.connected ? "open" : "closed"],
            ["Joined", <Time key="j" at={worker.joined_at} />],
            ["Incarnation", count(worker.incarnation)],
            ["Address", worker.port ? `${worker.ip}:${worker.port}` : worker.ip || "–"],
            ["GPUs", count(worker.gpu_count)],
          ]}
        />
      </Section>
      <Section title="Resources"><ResourceList worker={worker} /></Section>
      <Section title="Last hour"><WorkerHistory worker={worker} /></Section>
      {measured.length > 0 && <Section title="Training metrics"><Facts items={measured.map(([name, value]) => [name, name.endsWith("_bytes") ? bytes(value) : number(value, 5)] as const)} /></Section>}
      {metadata.length > 0 && <Section title="Labels"><Facts columns={2} items={metadata} /></Section>}
      {worker.ip && <Section title={`Machine ${worker.ip}`}><DrainMachine host={worker.ip} /></Section>}
      <Section title="Latest log lines" action={<Link to="/logs" search={{ worker: worker.id }} className="text-sm font-medium text-accent hover:underline">Follow</Link>}><LastLines of={{ worker_id: worker.id }} /></Section>
    </div>
  );
}

function Section(props: { title: string; action?: ReactNode; children: ReactNode }) {
  return (
    <section className="flex flex-col gap-2.5">
      <h3 className="flex items-center justify-between text-sm font-medium text-muted">{props.title}{props.action}</h3>
      {props.children}
    </section>
  );
}

const HISTORY_S = 3_600;
const REFETCH_MS = 15_000;

/** Resource history: GPUs where it has any, and step and wait time. */
function WorkerHistory({ worker }: { worker: Worker }) {
  const now = useServerNow();
  const { data } = useQuery({
    queryKey: ["history", "worker", worker.id],
    queryFn: ({ signal }) => get<History>("/metrics/history", { worker_id: worker.id, job_id: worker.job_id }, signal),
    refetchInterval: REFETCH_MS,
    retry: false,
  });
  const of = (name: string) => data?.series[name]?.values ?? [];
  const times = of("cpu").map((_, i) => (data?.start ?? 0) + i * (data?.step ?? 1));
  const first = times.find((_, i) => of("cpu")[i] !== null) ?? now - 60;
  const range = [Math.max(now - HISTORY_S, Math.min(first, now - 60)), now] as const;
  const hasGpu = of("gpu_utilization").some((v) => v !== null);
  const share = { sync: "worker", range, times, height: 90 } as const;
  return (
    <div className="flex flex-col gap-3">
      {hasGpu ? (
        <>
          <Chart {...share} label="GPU utilization over the last hour" lines={[{ label: "GPU", color: "accent", values: of("gpu_utilization"), fill: true }]} unit="%" format={(v) => percent(v).replace(" %", "")} />
          <Chart {...share} label="GPU memory over the last hour" lines={[{ label: "GPU memory", color: "busy", values: of("gpu_memory"), fill: true }]} format={(v) => bytes(v)} />
        </>
      ) : (
        <Chart {...share} label="CPU utilization over the last hour" lines={[{ label: "CPU", color: "accent", values: of("cpu"), fill: true }]} unit="%" format={(v) => percent(v).replace(" %", "")} />
      )}
      <Chart {...share} label="Step time over the last hour" lines={[{ label: "step", color: "good", values: of("step_time").map(inMs) }, { label: "waiting", color: "idle", values: of("sync_wait").map(inMs) }]} unit="ms" format={(v) => number(v)} />
    </div>
  );
}

function inMs(seconds: number | null): number | null {
  return seconds === null ? null : seconds * 1000;
}

function ResourceList({ worker }: { worker: Worker }) {
  const r = worker.resources;
  if (!r) return <p className="text-muted">No resource metrics yet; they arrive with heartbeats.</p>;
  return (
    <div className="flex flex-col gap-3">
      <Gauge label="CPU" value={r.cpu_percent} max={Math.max(100, Math.ceil(r.cpu_percent / 100) * 100)} text={percent(r.cpu_percent)} />
      <Gauge label="Memory" value={r.memory_used_bytes} max={worker.memory_bytes} text={worker.memory_bytes ? `${bytes(r.memory_used_bytes)} of ${bytes(worker.memory_bytes)}` : bytes(r.memory_used_bytes)} />
      {r.gpus.map((gpu) => (
        <div key={gpu.index} className="flex flex-col gap-1.5">
          <Gauge label={`GPU ${gpu.index}`} value={gpu.utilization_percent} max={100} text={percent(gpu.utilization_percent)} />
          <Gauge label={`GPU ${gpu.index} memory`} value={gpu.memory_used_bytes} max={gpu.memory_total_bytes} text={`${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}`} />
        </div>
      ))}
      <Facts columns={2} items={[["Disk read", bytes(r.disk_read_bytes)], ["Disk written", bytes(r.disk_write_bytes)], ["Network in (host)", bytes(r.network_rx_bytes)], ["Network out (host)", bytes(r.network_tx_bytes)]]} />
    </div>
  );
}

function Gauge(props: { label: string; value: number; max: number; text: string }) {
  return (
    <div className="grid grid-cols-[7.5rem_minmax(0,1fr)_9.5rem] items-center gap-3">
      <span className="text-muted">{props.label}</span>
      {props.max > 0 ? <Meter label={props.label} value={props.value} max={props.max} /> : <span />}
      <span className="text-right">{props.text}</span>
    </div>
  );
}
