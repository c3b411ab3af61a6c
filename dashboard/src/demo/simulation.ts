/**
 * A simulated run that fails and recovers: eight workers, checkpoints that fill tier by tier, a crash, a slow worker, an
 * unreachable bucket, a machine that is preempted and comes back.
 *
 * Pure: time arrives as `advance(now)`, randomness from the seed. The output is the events a coordinator would send, and
 * the snapshot it would return.
 */

import type {
  Barrier, Checkpoint, Dataset, Incident, LogEntry, Metrics, Recovery, Snapshot, Task, Worker, WorkerState,
} from "../api/types";
import type { DataOf, FeedEvent, Kind } from "../api/events";
import type { DatasetSpec } from "../api/generated";
import { count, plural } from "../format";
import type { RunSeries, Series } from "../state/types";
import { Random } from "./random";
import { dealShards, movedShards, type Plan } from "./shards";
import { newTask, pastTasks, taskSpec } from "./tasks";

export const JOB = "gpt-small";
export const DATASET = "web-text";
export const PICTURES = "fruit-images";
export const TASK = "task-7f3a91c2";

const TICK_S = 0.25;
const WORKERS = 8;
/** Plausible for a run that has lost a few workers. */
const GOODPUT = 0.962;
const STEPS = 12_000;
const STEPS_PER_S = 2.4;
const SAVE_EVERY = 60;
const SNAPSHOT_EVERY = 10;
const SYNC_EVERY = 5;
const TOKENS_PER_STEP = 8 * 16 * 1_024;
const SAVE_BYTES = 1_486_000_000;
const LOGS_KEPT = 2_000;
const CYCLE_S = 200;
const POINTS_KEPT = 3_600;

type Act = "crash" | "slow" | "outage" | "leave" | "return";

/** What goes wrong, and when in each cycle. */
const SCRIPT: readonly (readonly [number, Act])[] = [
  [38, "crash"],
  [84, "slow"],
  [112, "outage"],
  [146, "leave"],
  [168, "return"],
];

interface Pending {
  at: number;
  run: () => void;
}

export class Simulation {
  readonly startedAt: number;
  readonly workers = new Map<string, Worker>();
  readonly datasets = new Map<string, Dataset>();
  checkpoints: Checkpoint[] = [];
  barriers: Barrier[] = [];
  tasks: Task[] = [];
  recoveries: Recovery[] = [];
  incidents: Incident[] = [];
  logs: LogEntry[] = [];
  /** One point a second. */
  readonly series: Series = { times: [], rps: [], activeWorkers: [], throughput: [], barrierP99: [], checkpointMbS: [], planMs: [] };
  readonly runSeries: RunSeries = { times: [], step: [], loss: [], tokensPerS: [], samplesPerS: [], stepsPerS: [] };
  plan: Plan;
  now: number;
  step = 0;
  private random: Random;
  private events: FeedEvent[] = [];
  private pending: Pending[] = [];
  private numbers = { event: 0, log: 0x1000, generation: 0, incarnation: 0, plan: 0, save: 0 };
  private playedUntil = 0;
  private phase: WorkerState = "initializing";
  private slowUntil = 0;
  private outageUntil = 0;
  private safeStep = 0;
  private loss = 10.8;
  private barrierWaits: number[] = [];

  constructor(options: { startedAt: number; seed?: number }) {
    this.startedAt = this.now = options.startedAt;
    this.random = new Random(options.seed ?? 7);
    this.registerDatasets();
    this.tasks = pastTasks(this.startedAt, DATASET);
    for (let rank = 0; rank < WORKERS; rank += 1) this.join(rank, "new worker");
    this.plan = dealShards(this.datasets.get(DATASET)!, this.names(), null, 1, "first plan");
    this.moved("first plan: 240 shards over 8 workers");
    this.startTask();
    this.after(1.5, () => this.becomeAll("loading"));
    this.after(3, () => this.becomeAll("training"));
  }

  /** All events until then. */
  advance(until: number): FeedEvent[] {
    while (this.now + TICK_S <= until) {
      this.now += TICK_S;
      this.tick();
    }
    const happened = this.events;
    this.events = [];
    return happened;
  }

  snapshot(): Snapshot {
    return {
      coordinator: {
        connected: true,
        address: "simulated",
        uptime: this.now - this.startedAt,
        version: "demo",
        leader: true, role: "leader", led_by: "", position: 0, behind: 0, others: [],
        generation: this.numbers.generation,
        started_at: this.startedAt,
        server_time: this.now,
        jobs: { [JOB]: this.numbers.generation },
        storage: null,
      },
      workers: [...this.workers.values()].map((worker) => ({ ...worker })),
      datasets: [...this.datasets.values()],
      checkpoints: this.checkpoints.slice(0, 100),
      barriers: this.barriers.slice(0, 100),
      metrics: this.metrics(),
      tasks: this.tasks.map((task) => ({ ...task })),
      logs: this.logs.slice(-100).reverse(),
      jobs: [{ id: JOB, at: this.now, step: Math.floor(this.step), loss: this.loss, tokens_per_second: this.runSeries.tokensPerS.at(-1) ?? null, samples_per_second: null, step_time_s: null, goodput: GOODPUT }],
    };
  }

  names(): string[] {
    return [...this.workers.values()].filter((worker) => worker.status !== "failed").map((worker) => worker.id);
  }

  addTask(task: Task): void {
    this.tasks = [task, ...this.tasks];
    this.publish("task_created", { spec: taskSpec(task), reason: task.reason, at_s: this.now, severity: "info", text: `task ${task.name} created (${task.id})` });
  }

  changeTask(id: string, change: Partial<Task> & { reason: string }): Task | undefined {
    const task = this.tasks.find((each) => each.id === id);
    if (!task) return undefined;
    Object.assign(task, change);
    const { status, worker_ids, reason, stopping, attempts: attempt, exit_cause: cause } = task;
    this.publish("task_changed", { task_id: id, status, worker_ids, reason, stopping, attempt, cause, failures: 0, where: "", at_s: this.now, severity: "info", text: `task ${id} ${status}: ${reason}` });
    return task;
  }

  addDataset(dataset: Dataset): void {
    this.datasets.set(dataset.id, dataset);
    const reason = `${dataset.total_samples.toLocaleString("en-US")} samples in ${dataset.shard_count} shards`;
    this.publish("dataset_registered", { spec: datasetSpec(dataset), reason, at_s: this.now, severity: "info", text: `dataset ${dataset.id} registered: ${reason}` });
  }

  after(seconds: number, run: () => void): void {
    this.pending.push({ at: this.now + seconds, run });
  }

  // --- one tick ------------------------------------------------------------------------------------------------------

  private tick(): void {
    const due = this.pending.filter((each) => each.at <= this.now);
    this.pending = this.pending.filter((each) => each.at > this.now);
    for (const each of due) each.run();
    this.playScript();
    if (this.phase === "training") this.train();
    for (const worker of this.workers.values()) this.beat(worker);
    if (Math.floor(this.now) !== Math.floor(this.now - TICK_S)) this.sample();
  }

  private sample(): void {
    const metrics = this.metrics();
    const throughput = this.phase === "training" ? Math.round(this.throughput()) : 0;
    this.publish("metrics", metrics);
    append(this.series.times, this.now);
    append(this.series.rps, metrics.coordinator_rps);
    append(this.series.activeWorkers, metrics.active_workers);
    append(this.series.throughput, throughput);
    append(this.series.barrierP99, metrics.barrier_latency_p99);
    append(this.series.checkpointMbS, metrics.checkpoint_throughput);
    append(this.series.planMs, metrics.shard_assignment_time);
    append(this.runSeries.times, this.now);
    append(this.runSeries.step, Math.floor(this.step));
    append(this.runSeries.loss, this.phase === "training" ? round(this.loss, 4) : null);
    append(this.runSeries.tokensPerS, this.phase === "training" ? throughput : null);
    append(this.runSeries.samplesPerS, null);
    append(this.runSeries.stepsPerS, null);
  }

  private playScript(): void {
    const since = this.now - this.startedAt;
    const cycle = Math.floor(since / CYCLE_S);
    for (const [offset, act] of SCRIPT) {
      const at = cycle * CYCLE_S + offset;
      if (at <= since && at > this.playedUntil) {
        this.playedUntil = at;
        this.play(act);
      }
    }
  }

  private play(act: Act): void {
    if (act === "crash") this.crash(5);
    else if (act === "slow") this.slowDown(2);
    else if (act === "outage") this.outageUntil = this.now + 28;
    else if (act === "leave") this.leave(7);
    else this.comeBack(7);
  }

  private train(): void {
    const slow = this.now < this.slowUntil ? 0.45 : 1;
    const share = this.names().length / WORKERS;
    const before = this.step;
    this.step += STEPS_PER_S * TICK_S * slow * (0.25 + 0.75 * share);
    const reached = Math.floor(this.step);
    for (let step = Math.floor(before) + 1; step <= reached; step += 1) this.completed(step);
  }

  private completed(step: number): void {
    this.loss = 2.31 + 8.2 * Math.exp(-step / 420) + this.random.around(0, 0.03);
    if (step % SNAPSHOT_EVERY === 0) this.safeStep = step;
    if (step % SAVE_EVERY === 0) this.save(step);
    if (step % SYNC_EVERY === 0) this.sync(step);
    if (step % 10 === 0) {
      this.log("info", `step ${step}: loss ${this.loss.toFixed(4)}, lr 3.00e-04, ${Math.round(this.throughput()).toLocaleString("en")} tokens/s`, `${JOB}-rank0`);
    }
    if (step >= STEPS) this.restart();
    const task = this.tasks.find((each) => each.id === TASK);
    if (task) Object.assign(task, { step, progress: (step / STEPS) * 100, steps_per_s: STEPS_PER_S, eta_s: (STEPS - step) / STEPS_PER_S });
    this.plan.done = Math.min(1, ((step * 128) % this.plan.samples) / this.plan.samples);
  }

  /** The run is complete: start over, so that the demo never ends. */
  private restart(): void {
    this.step = 0;
    this.safeStep = 0;
  }

  private beat(worker: Worker): void {
    if (worker.status === "failed") return;
    const training = worker.status === "training" || worker.status === "checkpointing";
    const lagging = this.now < this.slowUntil && worker.rank === 2;
    worker.last_heartbeat = this.now - this.random.between(0, 0.6);
    worker.slow = lagging;
    worker.current_step = Math.floor(this.step) - (lagging ? 1 : 0);
    worker.assigned_shards = this.plan.counts.get(worker.id) ?? 0;
    worker.metrics = training
      ? {
          loss: round(this.loss, 4),
          lr: 3e-4,
          tokens_per_second: Math.round(this.throughput()),
          data_position: (Math.floor(this.step) * 128) % this.plan.samples,
        }
      : {};
    const use = training ? (lagging ? 31 : 93) : 4;
    worker.resources = {
      cpu_percent: round(this.random.around(training ? 142 : 12, 14), 1),
      memory_used_bytes: Math.round(this.random.around(38e9, 4e8)),
      gpus: [
        {
          index: 0,
          utilization_percent: round(Math.max(0, Math.min(100, this.random.around(use, 5))), 1),
          memory_used_bytes: training ? 61_200_000_000 : 1_300_000_000,
          memory_total_bytes: 85_899_345_920,
        },
      ],
      disk_read_bytes: Math.round((this.now - this.startedAt) * 4.1e7),
      disk_write_bytes: Math.round((this.now - this.startedAt) * 2.6e7),
      network_rx_bytes: Math.round((this.now - this.startedAt) * 9.4e8),
      network_tx_bytes: Math.round((this.now - this.startedAt) * 9.3e8),
    };
  }

  private throughput(): number {
    const slow = this.now < this.slowUntil ? 0.45 : 1;
    return this.random.around(STEPS_PER_S * TOKENS_PER_STEP * slow, 9_000);
  }

  private metrics(): Metrics {
    const saves = this.checkpoints.filter((each) => each.throughput_mb_s !== null).slice(0, 5);
    const waits = [...this.barrierWaits].sort((one, other) => one - other);
    return {
      checkpoint_throughput: saves.length ? saves.reduce((sum, each) => sum + each.throughput_mb_s!, 0) / saves.length : null,
      coordinator_rps: round(this.names().length * 1.9 + this.random.between(0, 3), 1),
      active_workers: [...this.workers.values()].filter((worker) => ["active", "training", "checkpointing"].includes(worker.status)).length,
      total_workers: this.workers.size,
      barrier_latency_p99: waits.length ? round(waits[Math.floor(waits.length * 0.99)]! * 1000, 1) : null,
      shard_assignment_time: 0.4,
    };
  }

  // --- workers ------------------------------------------------------------------------------------------------------

  private join(rank: number, reason: string): void {
    const id = `${JOB}-rank${rank}`;
    const superseded = this.workers.get(id)?.incarnation ?? 0;
    this.numbers.generation += 1;
    this.numbers.incarnation += 1;
    const host = `gpu-${String(1 + Math.floor(rank / 2)).padStart(2, "0")}`;
    const metadata = { pid: String(4_100 + this.numbers.incarnation * 7), world_size: String(WORKERS) };
    this.workers.set(id, {
      id, ip: host, port: 29_500, status: "initializing", gpu_count: 1, last_heartbeat: this.now, assigned_shards: 0,
      current_epoch: 0, current_step: Math.floor(this.step), current_task: TASK, resources: null, metrics: {},
      job_id: JOB, rank, incarnation: this.numbers.incarnation, connected: true, joined_at: this.now,
      memory_bytes: 137_438_953_472, slow: false, reason, metadata, run_id: "",
    });
    this.publish("worker_joined", {
      spec: { worker_id: id, job_id: JOB, hostname: host, port: 29_500, gpu_count: 1, memory_bytes: 137_438_953_472, metadata, run_id: "", run_generation: 0 },
      registration_id: this.random.hex(12), incarnation: this.numbers.incarnation, generation: this.numbers.generation,
      superseded, reason, at_s: this.now, former: [], origin: 0, severity: "success",
      text: `${id} joined${superseded ? " again" : ""} on ${host}`,
    });
  }

  private lose(rank: number, kind: "worker_failed" | "worker_left", reason: string): Worker {
    const worker = this.workers.get(`${JOB}-rank${rank}`)!;
    this.numbers.generation += 1;
    Object.assign(worker, { status: "failed", reason, connected: false, resources: null, metrics: {} });
    this.publish(kind, {
      worker_id: worker.id, job_id: JOB, incarnation: worker.incarnation, generation: this.numbers.generation, reason, at_s: this.now,
      ...(kind === "worker_failed" ? { severity: "error", text: `${worker.id} failed: ${reason}` } : { severity: "info", text: `${worker.id} left: ${reason}` }),
    });
    return worker;
  }

  private becomeAll(status: WorkerState): void {
    this.phase = status;
    for (const worker of this.workers.values()) if (worker.status !== "failed") worker.status = status;
  }

  private crash(rank: number): void {
    const worker = this.lose(rank, "worker_failed", "connection lost 0.5 s ago, not reconnected");
    const lastStep = Math.floor(this.step);
    this.log("error", `Rank ${rank}: CUDA error: uncorrectable ECC error encountered`, worker.id);
    this.log("error", `worker '${worker.id}' failed: ${worker.reason}`, null, "coordinator");
    this.openIncident(rank, worker);
    this.breakBarrier(worker.id);
    this.becomeAll("recovering");
    this.replan(`${worker.id} failed`);
    this.after(0.75, () => this.join(rank, "restarted after a failure"));
    this.after(1, () => this.log("warn", "rendezvous complete: world size 8", `${JOB}-rank0`));
    this.after(3.25, () => {
      this.becomeAll("loading");
      this.replan(`${worker.id} rejoined`);
    });
    this.after(3.75, () => this.recover(worker.id, lastStep, 8, 8, "MEMORY", { detect: 0.41, rendezvous: 0.62, spawn: 2.18, load: 0.19, first_step: 0.42 }));
  }

  private openIncident(rank: number, worker: Worker): void {
    const pid = Number(worker.metadata["pid"]);
    const what = `rank ${rank} (host ${worker.ip}, pid ${pid}) failed: CUDA error: uncorrectable ECC error encountered`;
    const error = { type: "AcceleratorError", message: "CUDA error: uncorrectable ECC error encountered", where: ["train.py:118 in train_step", "model.py:64 in forward"], step: Math.floor(this.step), traceback: "", at_s: this.now };
    const failure = { rank, host: worker.ip, pid, gpu: `GPU ${rank % 2}`, at_s: this.now, exit_code: 1, error, oom_killed: false, device_faults: ["NVRM: Xid (PCI:0000:3b:00): 48, Double Bit ECC Error"], last_lines: [], replaced: "", lost: "", left: "" };
    this.incidents = [
      {
        id: this.incidents.length + 1, run: JOB, launch: "", subject: "run" as const, failure_class: "gpu" as const, rule: "the kernel reports a GPU fault", fingerprint: "gpu:xid48", text: what, rank, host: worker.ip, pid,
        gpu: failure.gpu, decision: "restart", reason: "1 of 3 restarts within an hour", next_step: "Drain the machine and run its diagnostics: double-bit errors recur.", state: "open", opened_at: this.now,
        closed_at: null, closed_reason: "", phases_s: {}, resumed_step: null, lost_steps: null, lost_s: null, lost_gpu_s: null, failures: [failure],
      },
      ...this.incidents,
    ].slice(0, 50);
    const { id, fingerprint, decision, reason, failure_class, subject } = this.incidents[0]!;
    this.publish("incident_reported", { incident_id: id, job_id: JOB, launch: "", subject, failure_class, fingerprint, failures: 1, what, decision, reason, at_s: this.now, rank, host: worker.ip, pid, gpu: failure.gpu, severity: "error", text: `${JOB}: ${what} (${failure_class}); restarting: ${reason}` });
  }

  private closeIncident(recovery: Recovery): void {
    const lostS = recovery.total_s + 0.5 * recovery.lost_steps;
    this.incidents = this.incidents.map((each) =>
      each.state === "open"
        ? { ...each, state: "recovered", closed_at: recovery.at, closed_reason: recovery.reason, phases_s: recovery.phases_s, resumed_step: recovery.resumed_step, lost_steps: recovery.lost_steps, lost_s: lostS, lost_gpu_s: lostS * WORKERS }
        : each,
    );
  }

  private recover(worker: string, lastStep: number, before: number, after: number, tier: string, phases: Record<string, number>, who: Partial<Recovery> = {}): void {
    this.step = this.safeStep;
    const lost = lastStep - this.safeStep;
    const total = Object.values(phases).reduce((sum, seconds) => sum + seconds, 0);
    const reason = `recovered in ${total.toFixed(2)} s at step ${this.safeStep} from ${tier}, ${lost} steps lost, ${before} -> ${after} workers`;
    const recovery: Recovery = {
      job_id: JOB, worker_id: `${JOB}-rank0`, at: this.now, total_s: total, phases_s: phases, resumed_step: this.safeStep,
      lost_steps: lost, tier, world_before: before, world_after: after, reason,
      survived: 0, lost: [], joined: [], cause: "", who_survived: "", ...who,
    };
    this.recoveries = [recovery, ...this.recoveries].slice(0, 200);
    this.closeIncident(recovery);
    const { at, total_s: _total, ...rest } = recovery;
    const text = `${JOB} recovered in ${total.toFixed(1)} s; resumed at step ${count(this.safeStep)} from ${tier}, ${plural(lost, "step")} lost`;
    this.publish("recovery_recorded", { ...rest, at_s: at, severity: "success", text: [text, recovery.who_survived, recovery.cause].filter(Boolean).join("; ") });
    this.log("info", reason, `${JOB}-rank0`);
    this.log("info", `data: ${worker} resumes its shards at the position of the checkpoint`, worker);
    this.becomeAll("training");
  }

  private slowDown(rank: number): void {
    this.slowUntil = this.now + 14;
    const name = `${JOB}-rank${rank}`;
    this.log("warn", `GPU 0 throttles: 87 °C, clocks at 45 %`, name);
    const barrier = this.open(`sync`, Math.floor(this.step));
    barrier.arrived = this.names().length - 1;
    barrier.missing = [name];
    this.after(6, () => this.release(barrier));
  }

  private leave(rank: number): void {
    const name = `${JOB}-rank${rank}`;
    const lastStep = Math.floor(this.step);
    this.log("warn", "preemption notice: 30 s left; saving and leaving", name);
    this.lose(rank, "worker_left", "preempted; saved and left");
    this.safeStep = lastStep;
    this.becomeAll("recovering");
    this.replan(`${name} left`);
    this.after(2, () => this.recover(`${JOB}-rank0`, lastStep, 8, 7, "MEMORY", { detect: 0.05, abort: 0.31, regroup: 0.06, load: 0.11, first_step: 0.3 }, { survived: 7, lost: [name], cause: `rank ${rank} left: preempted`, who_survived: `7 survived in process, rank${rank} lost` }));
    this.after(4, () => {
      this.workers.delete(name);
      this.publish("worker_forgotten", { worker_id: name, reason: "left the job", at_s: this.now, severity: "info", text: `${name} removed: left the job` });
    });
  }

  private comeBack(rank: number): void {
    const lastStep = Math.floor(this.step);
    this.safeStep = lastStep;
    this.join(rank, "host added to the job");
    this.becomeAll("recovering");
    this.replan(`${JOB}-rank${rank} joined`);
    this.after(2.25, () => this.recover(`${JOB}-rank${rank}`, lastStep, 7, 8, "MEMORY", { detect: 0.05, abort: 0.28, regroup: 0.07, load: 0.14, first_step: 0.31 }, { survived: 7, joined: [`${JOB}-rank${rank}`], cause: "a replacement joins", who_survived: `7 survived in process, rank${rank} joined` }));
  }

  // --- checkpoints --------------------------------------------------------------------------------------------------

  private save(step: number): void {
    this.numbers.save += 1;
    const id = `${String(step).padStart(8, "0")}-${this.random.hex(6)}-4d2-01`;
    const parent = this.checkpoints.find((each) => each.status === "completed")?.id ?? "";
    const checkpoint: Checkpoint = {
      id, step, epoch: 0, size: SAVE_BYTES, path: `/nvme/${JOB}/checkpoint_step_${String(step).padStart(8, "0")}.pt`,
      created_at: this.now, completed_at: null, worker_id: `${JOB}-rank0`, job_id: JOB, status: "in_progress", tiers: [],
      digest: "", throughput_mb_s: null, reason: "saving", metadata: {}, run_id: "", generation: this.numbers.generation,
    };
    this.checkpoints = [checkpoint, ...this.checkpoints].slice(0, 300);
    this.publish("checkpoint_started", {
      checkpoint_id: id, job_id: JOB, worker_id: checkpoint.worker_id, step, epoch: 0, path: checkpoint.path,
      size_bytes: SAVE_BYTES, reason: checkpoint.reason, at_s: this.now, run_id: "", generation: checkpoint.generation,
      severity: "debug", text: `checkpoint at step ${count(step)} started by ${checkpoint.worker_id}`,
    });
    const seconds = this.random.between(1.3, 1.9);
    const digest = `xxh3-128:${this.random.hex(32)}`;
    this.after(seconds, () => this.complete(id, { tiers: ["MEMORY", "NVME"], seconds, digest, parent }));
    this.after(seconds + 3.5, () => {
      if (this.now < this.outageUntil) this.missTier(id);
      else this.complete(id, { tiers: ["MEMORY", "NVME", "S3"], seconds, digest, parent });
    });
  }

  private complete(id: string, save: { tiers: string[]; seconds: number; digest: string; parent: string }): void {
    const old = this.checkpoints.find((each) => each.id === id);
    if (!old) return;
    const done: Checkpoint = {
      ...old, status: "completed", tiers: save.tiers, digest: save.digest, completed_at: this.now,
      throughput_mb_s: SAVE_BYTES / 1e6 / save.seconds, reason: `saved to ${save.tiers.join(", ")}`,
    };
    this.checkpoints = this.checkpoints.map((each) => (each.id === id ? done : each));
    this.publish("checkpoint_completed", {
      checkpoint_id: id, job_id: JOB, worker_id: done.worker_id, step: done.step, epoch: 0, path: done.path, size_bytes: done.size,
      tiers: done.tiers, digest: done.digest, duration_s: save.seconds, parent_id: save.parent, metadata: {},
      reason: done.reason, at_s: this.now, run_id: "", generation: done.generation, told_in: 0, succeeded_by: "",
      severity: "success", text: `checkpoint at step ${count(done.step)} completed: ${done.reason}`,
    });
  }

  private missTier(id: string): void {
    const step = this.checkpoints.find((each) => each.id === id)?.step ?? 0;
    this.log("warn", `step ${step} not uploaded to S3: 503 Slow Down after 3 attempts; kept on NVME, retried with the next checkpoint`, `${JOB}-rank0`);
  }

  // --- barriers and shards --------------------------------------------------------------------------------------------

  private open(name: string, step: number): Barrier {
    const barrier: Barrier = {
      id: `${JOB}/${name}@${step}#1`, name, job_id: JOB, step, arrived: 0, total: this.names().length, status: "waiting",
      created_at: this.now, ended_at: null, missing: [], reason: "waiting",
    };
    this.barriers = [barrier, ...this.barriers].slice(0, 100);
    return barrier;
  }

  private sync(step: number): void {
    const barrier = this.open("sync", step);
    this.release(barrier, this.random.between(0.004, 0.03));
  }

  private release(barrier: Barrier, seconds?: number): void {
    if (barrier.status !== "waiting") return;
    const waited = seconds ?? this.now - barrier.created_at;
    Object.assign(barrier, {
      status: "complete", arrived: barrier.total, missing: [], ended_at: barrier.created_at + waited, reason: `all ${barrier.total} arrived`,
    });
    this.barrierWaits = [...this.barrierWaits, waited].slice(-1_000);
    this.publish("barrier_released", {
      job_id: JOB, barrier_id: barrier.name, step: barrier.step, round: 1, generation: this.numbers.generation,
      arrived: barrier.total, opened_at_s: barrier.created_at, waited_s: waited, reason: barrier.reason, at_s: this.now,
      severity: "debug", text: `barrier ${barrier.name} released at step ${count(barrier.step)}: ${barrier.reason}`,
    });
  }

  private breakBarrier(missing: string): void {
    const barrier = this.open("sync", Math.floor(this.step) + 1);
    const reason = `${barrier.total} of ${barrier.total + 1} arrived, '${missing}' was lost (connection lost 0.5 s ago)`;
    Object.assign(barrier, { status: "broken", arrived: barrier.total, total: barrier.total + 1, missing: [missing], ended_at: this.now, reason });
    this.publish("barrier_broken", {
      job_id: JOB, barrier_id: barrier.name, step: barrier.step, round: 1, generation: this.numbers.generation, arrived: barrier.arrived,
      missing: [missing], expected: barrier.total, opened_at_s: barrier.created_at, reason, at_s: this.now,
      severity: "warning", text: `barrier ${barrier.name} broken at step ${count(barrier.step)}: ${reason}`,
    });
  }

  private replan(reason: string): void {
    this.numbers.plan += 1;
    this.plan = dealShards(this.datasets.get(DATASET)!, this.names(), this.plan, this.plan.version + 1, reason);
    this.moved(reason);
  }

  private moved(reason: string): void {
    this.publish("shards_moved", {
      job_id: JOB, dataset_id: DATASET, epoch: 0, version: this.plan.version, workers: this.names().length,
      moved: movedShards(this.plan), reason, at_s: this.now,
      severity: "info", text: `shard plan ${this.plan.version} of ${DATASET}, epoch 0: ${reason}`,
    });
  }

  // --- the rest ---------------------------------------------------------------------------------------------------------

  private registerDatasets(): void {
    const common = { shuffle: true, seed: 42, registered_at: this.startedAt, metadata: {} };
    this.addDataset({
      ...common, id: DATASET, name: "Web text", path: "s3://datasets/web-text", format: "tokens", total_samples: 2_400_000,
      shard_size: 10_000, shard_count: 240, readers: [JOB],
    });
    this.addDataset({
      ...common, id: PICTURES, name: "Fruit images", path: "/data/fruit", format: "webdataset", total_samples: 61_488,
      shard_size: 1_000, shard_count: 62, readers: [],
    });
  }

  private startTask(): void {
    const config = { learning_rate: 3e-4, batch_size: 16, seq_length: 1024, steps: STEPS };
    this.addTask(newTask({ id: TASK, name: "pretrain-gpt-small", worker_count: WORKERS, dataset_id: DATASET, config, created_at: this.startedAt, total_steps: STEPS }));
    this.changeTask(TASK, { status: "running", started_at: this.now, worker_ids: this.names(), attempts: 1, reason: "torchrun is up" });
  }

  private log(level: string, message: string, worker: string | null, source = "worker"): void {
    this.numbers.log += 1;
    const entry: LogEntry = {
      id: `log_${this.numbers.log.toString(16).padStart(8, "0")}`, timestamp: this.now, level, message, source,
      task_id: worker ? TASK : null, worker_id: worker,
    };
    this.logs.push(entry);
    if (this.logs.length > LOGS_KEPT) this.logs.splice(0, this.logs.length - LOGS_KEPT);
    this.publish("logs", [entry]);
  }

  private publish<K extends Kind>(kind: K, data: DataOf<K>): void {
    this.numbers.event += 1;
    this.events.push({ id: `demo-${this.numbers.event}`, kind, data } as FeedEvent);
  }
}

function datasetSpec(dataset: Dataset): DatasetSpec {
  const { id, name: _name, shard_count: _count, registered_at: _at, readers: _readers, ...rest } = dataset;
  return { dataset_id: id, ...rest, files: [], jobs: [] };
}

function append<T>(list: T[], value: T): void {
  list.push(value);
  if (list.length > POINTS_KEPT) list.shift();
}

function round(value: number, digits: number): number {
  return Number(value.toFixed(digits));
}
