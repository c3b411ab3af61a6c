/** Fixtures for tests: complete values that a test can override. */

import type { Barrier, Checkpoint, Incident, LastReport, LogEntry, Metrics, Recovery, Snapshot, Task, Worker } from "../api/types";

export const NOW = 1_800_000_000;

export function worker(change: Partial<Worker> = {}): Worker {
  return {
    id: "w0", ip: "10.0.0.1", port: 0, status: "training", gpu_count: 0, last_heartbeat: NOW - 1, assigned_shards: 0, current_epoch: 0, current_step: 100,
    current_task: null, resources: null, metrics: { loss: 2, tokens_per_second: 1000, step_time_s: 0.5 }, job_id: "job", rank: 0, incarnation: 1, connected: true,
    joined_at: NOW - 600, memory_bytes: 0, slow: false, reason: "", metadata: {}, run_id: "", ...change,
  };
}

export function checkpoint(change: Partial<Checkpoint> = {}): Checkpoint {
  return {
    id: "c1", step: 90, epoch: 0, size: 1_000_000, path: "/c", created_at: NOW - 20, completed_at: NOW - 19, worker_id: "w0", job_id: "job", status: "completed",
    tiers: ["local"], digest: "", throughput_mb_s: 1, reason: "", metadata: {}, run_id: "", generation: 0, ...change,
  };
}

export function recovery(change: Partial<Recovery> = {}): Recovery {
  return {
    job_id: "job", worker_id: "w0", at: NOW - 60, total_s: 4, phases_s: { detect: 1, rendezvous: 1, spawn: 1, load: 0.5, first_step: 0.5 }, resumed_step: 80, lost_steps: 5,
    tier: "memory", world_before: 2, world_after: 2, reason: "", survived: 0, lost: [], joined: [], cause: "", who_survived: "", ...change,
  };
}

export function barrier(change: Partial<Barrier> = {}): Barrier {
  return { id: "job/step@1#0", name: "step", job_id: "job", step: 1, arrived: 1, total: 2, status: "waiting", created_at: NOW - 5, ended_at: null, missing: ["w1"], reason: "", ...change };
}

export function task(change: Partial<Task> = {}): Task {
  return {
    id: "t1", name: "t", type: "training", status: "running", stopping: false, worker_ids: [], worker_count: 2, gpus_per_worker: 0, dataset_id: null, config: {},
    created_at: NOW - 700, started_at: NOW - 690, completed_at: null, progress: 0, step: 0, total_steps: null, steps_per_s: null, eta_s: null, attempts: 1, max_retries: 0,
    exit_cause: null, reason: "", ...change,
  };
}

export function logEntry(n: number, change: Partial<LogEntry> = {}): LogEntry {
  return { id: `log_${n.toString(16).padStart(8, "0")}`, timestamp: NOW, level: "info", message: `line ${n}`, source: "worker", task_id: null, worker_id: "w0", ...change };
}

export function job(change: Partial<LastReport> = {}): LastReport {
  return { id: "job", at: NOW, step: 0, loss: null, tokens_per_second: null, samples_per_second: null, step_time_s: null, goodput: 0.9, ...change };
}

export function incident(change: Partial<Incident> = {}): Incident {
  return {
    id: 1, run: "job", launch: "", subject: "run", failure_class: "unknown", rule: "ended by SIGKILL", fingerprint: "f", text: "rank 1 (host a, pid 7) was killed by SIGKILL", rank: 1, host: "a",
    pid: 7, gpu: "", decision: "restart", reason: "1 of 3 restarts", next_step: "Look at the machine.", state: "recovered", opened_at: NOW - 60, closed_at: NOW - 58, closed_reason: "", phases_s: {},
    resumed_step: 80, lost_steps: 5, lost_s: 2, lost_gpu_s: 4, failures: [], ...change,
  };
}

export const metrics: Metrics = { checkpoint_throughput: null, coordinator_rps: 10, active_workers: 1, total_workers: 1, barrier_latency_p99: null, shard_assignment_time: null };

export function snapshot(change: Partial<Snapshot> = {}): Snapshot {
  return {
    coordinator: { connected: true, address: "127.0.0.1:50051", uptime: 1, version: "0", leader: true, role: "leader", led_by: "", position: 0, behind: 0, others: [], generation: 1, started_at: NOW - 700, server_time: NOW, jobs: { job: 1 }, storage: null },
    workers: [worker()], datasets: [], checkpoints: [], barriers: [], metrics, tasks: [], logs: [], jobs: [], ...change,
  };
}
