/** The API of the simulated coordinator: what views request beside the state. Changes affect only the simulation. */

import { ApiError, type Call, type Transport } from "../api/client";
import type { Dataset, LogEntry, Task } from "../api/types";
import { annotate, isLogged, loggedRuns, runCurves, runInfo, runMetrics } from "./metrics";
import { DATASET, JOB, type Simulation } from "./simulation";
import { safetyOf } from "./safety";
import { samplesOf } from "./samples";
import { newTask } from "./tasks";

type Answer = (simulation: Simulation, call: Call, ...parts: string[]) => unknown;

const LEVELS = ["debug", "info", "warn", "error"];
const TASK_S = 90;

const ROUTES: readonly (readonly [method: string, pattern: RegExp, answer: Answer])[] = [
  ["GET", /^\/dashboard$/, (simulation) => simulation.snapshot()],
  ["GET", /^\/status$/, (simulation) => simulation.snapshot().coordinator],
  ["GET", /^\/workers$/, (simulation) => simulation.snapshot().workers],
  ["GET", /^\/datasets$/, (simulation) => [...simulation.datasets.values()]],
  ["GET", /^\/checkpoints$/, (simulation) => simulation.checkpoints],
  ["GET", /^\/barriers$/, (simulation) => simulation.barriers],
  ["GET", /^\/recoveries$/, (simulation) => simulation.recoveries],
  ["GET", /^\/incidents$/, (simulation) => simulation.incidents],
  ["GET", /^\/tasks$/, (simulation) => simulation.tasks],
  ["GET", /^\/drains$/, () => []],
  ["GET", /^\/agents$/, (simulation) => [...new Set(simulation.snapshot().workers.map((worker) => worker.ip))].map((host) => ({ host, agents: 1 }))],
  ["GET", /^\/logs$/, logs],
  ["GET", /^\/tasks\/([^/]+)\/logs$/, (simulation, call, id) => logs(simulation, { ...call, query: { ...call.query, task_id: id } })],
  ["GET", /^\/recipes$/, () => RECIPES],
  ["GET", /^\/jobs\/([^/]+)\/safety$/, (simulation, call, job) => safetyOf(simulation, job ?? "", call.query?.["step"] === undefined ? null : Number(call.query["step"]))],
  ["GET", /^\/datasets\/([^/]+)\/shards$/, shards],
  ["GET", /^\/datasets\/([^/]+)\/preview$/, preview],
  ["GET", /^\/datasets\/([^/]+)\/audit$/, audit],
  ["GET", /^\/runs$/, (simulation) => loggedRuns(simulation)],
  ["GET", /^\/runs\/([^/]+)$/, (simulation, _, run) => runInfo(simulation, logged(run))],
  ["POST", /^\/runs\/([^/]+)\/notes$/, (simulation, call, run) => annotate(simulation, logged(run), call.body as { tags?: string[]; notes?: string })],
  ["GET", /^\/runs\/([^/]+)\/metrics$/, (simulation, _, run) => runMetrics(simulation, logged(run))],
  ["GET", /^\/runs\/([^/]+)\/metrics\/series$/, curves],
  ["POST", /^\/datasets$/, registerDataset],
  ["POST", /^\/tasks$/, startTask],
  ["POST", /^\/tasks\/([^/]+)\/stop$/, stopTask],
  ["POST", /^\/tasks\/([^/]+)\/restart$/, restartTask],
  ["POST", /^\/checkpoints\/([^/]+)\/verify$/, verify],
];

export function transportFor(simulation: () => Simulation): Transport {
  return async (path, call) => {
    await Promise.resolve();
    for (const [method, pattern, answer] of ROUTES) {
      const found = method === (call.method ?? "GET") ? pattern.exec(path) : null;
      // A copy, like a response over the network.
      if (found) return structuredClone(answer(simulation(), call, ...found.slice(1).map(decodeURIComponent)));
    }
    throw unknown(`Not available in demo mode: ${path}.`);
  };
}

function unknown(message: string): ApiError {
  return new ApiError(message, { status: 404, code: "not_found", hint: "Exit demo mode to use a coordinator." });
}

function logs(simulation: Simulation, call: Call): LogEntry[] {
  const { level, task_id, worker_id, q, after, limit } = call.query ?? {};
  const least = LEVELS.indexOf(String(level ?? "debug"));
  const query = String(q ?? "").toLowerCase();
  return simulation.logs
    .filter(
      (entry) =>
        LEVELS.indexOf(entry.level) >= least &&
        (!task_id || entry.task_id === task_id) &&
        (!worker_id || entry.worker_id === worker_id) &&
        (!after || entry.id > String(after)) &&
        entry.message.toLowerCase().includes(query),
    )
    .slice(-Number(limit ?? 100))
    .reverse();
}

function logged(run: string | undefined): string {
  if (run === undefined || !isLogged(run)) throw unknown(`Unknown run '${run}'.`);
  return run;
}

function curves(simulation: Simulation, call: Call, run?: string): unknown {
  const { name, from, to, points } = call.query ?? {};
  const names = Array.isArray(name) ? (name as readonly string[]) : [String(name)];
  return runCurves(simulation, logged(run), { names, from: Number(from ?? 0), to: Number(to ?? Number.MAX_SAFE_INTEGER), points: Number(points ?? 1_000) });
}

function datasetOf(simulation: Simulation, id: string | undefined): Dataset {
  const dataset = simulation.datasets.get(id ?? "");
  if (!dataset) throw unknown(`Unknown dataset '${id}'.`);
  return dataset;
}

function shards(simulation: Simulation, _call: Call, id?: string): unknown {
  const dataset = datasetOf(simulation, id);
  if (id !== DATASET) throw unknown(`Dataset '${id}' has no shard plan: no worker reads it.`);
  const { plan } = simulation;
  const perShard = plan.done * plan.shardSize;
  return {
    dataset_id: id,
    job_id: JOB,
    epoch: 0,
    version: plan.version,
    reason: plan.reason,
    samples_done: Math.round(plan.done * plan.samples),
    total_samples: plan.samples,
    shard_count: dataset.shard_count,
    by_shard: true,
    shards: plan.owners.map((owner, shard) => {
      const done = Math.min(plan.shardSize, Math.round(perShard * (0.9 + ((shard * 37) % 21) / 100)));
      return {
        id: shard, start: shard * plan.shardSize, stop: (shard + 1) * plan.shardSize, done,
        reported: Math.min(plan.shardSize, done + 128), worker_id: owner, moved: plan.moved.has(shard),
      };
    }),
  };
}

function preview(simulation: Simulation, call: Call, id?: string): unknown {
  const dataset = datasetOf(simulation, id);
  const worker = call.query?.["worker_id"] ? String(call.query["worker_id"]) : null;
  const first = worker ? Math.floor(simulation.step) * 128 + Number(/\d+$/.exec(worker)?.[0] ?? 0) * 16 : 0;
  const indices = Array.from({ length: Number(call.query?.["limit"] ?? 5) }, (_, place) => (first + place * 7919) % dataset.total_samples);
  return { dataset_id: dataset.id, worker_id: worker, epoch: 0, shard_id: null, indices, samples: samplesOf(dataset.id, indices) };
}

function audit(simulation: Simulation, _call: Call, id?: string): unknown {
  const { plan } = simulation;
  if (id !== DATASET) return [];
  const samples = Math.round(plan.done * plan.samples);
  return [
    {
      job_id: JOB, dataset_id: id, epoch: 0, exact: true, total: plan.samples, samples, lost: 0, repeated: 0,
      remaining: plan.samples - samples, commits: simulation.checkpoints.length, reason: "each sample exactly once so far",
    },
  ];
}

function registerDataset(simulation: Simulation, call: Call): Dataset {
  const body = call.body as { dataset_id: string; path: string; format: string; total_samples?: number; shard_size?: number; shuffle?: boolean; seed?: number };
  if (simulation.datasets.has(body.dataset_id)) {
    throw new ApiError(`Dataset '${body.dataset_id}' is already registered.`, { status: 409, code: "conflict", hint: "Choose another ID." });
  }
  const total = body.total_samples ?? 10_000;
  const size = body.shard_size ?? 10_000;
  const dataset: Dataset = {
    id: body.dataset_id, name: body.dataset_id, path: body.path, format: body.format, total_samples: total, shard_size: size,
    shard_count: Math.ceil(total / size), shuffle: body.shuffle ?? false, seed: body.seed ?? 0, registered_at: simulation.now, metadata: {}, readers: [],
  };
  simulation.addDataset(dataset);
  return dataset;
}

function startTask(simulation: Simulation, call: Call): { task_id: string } {
  const body = call.body as { name: string; type: string; dataset_id?: string | null; worker_count?: number; config?: Record<string, unknown> };
  const id = `task-demo${simulation.tasks.length.toString().padStart(4, "0")}`;
  simulation.addTask(
    newTask({
      id, name: body.name, type: body.type, worker_count: body.worker_count ?? 1, dataset_id: body.dataset_id ?? null,
      config: body.config ?? {}, created_at: simulation.now,
    }),
  );
  run(simulation, id);
  return { task_id: id };
}

/** A started task: it only goes through its states. */
function run(simulation: Simulation, id: string): void {
  const live = () => simulation.tasks.find((task) => task.id === id && task.status === "running");
  simulation.after(1.5, () => simulation.changeTask(id, { status: "running", started_at: simulation.now, reason: "torchrun is up" }));
  for (let part = 1; part <= TASK_S; part += 1) {
    simulation.after(1.5 + part, () => {
      const task = live();
      if (!task) return;
      task.progress = (part / TASK_S) * 100;
      if (part === TASK_S) simulation.changeTask(id, { status: "completed", completed_at: simulation.now, reason: "exited successfully" });
    });
  }
}

function taskOf(simulation: Simulation, id: string | undefined): Task {
  const task = simulation.tasks.find((each) => each.id === id);
  if (!task) throw unknown(`Unknown task '${id}'.`);
  return task;
}

function stopTask(simulation: Simulation, _call: Call, id?: string): unknown {
  const task = taskOf(simulation, id);
  simulation.changeTask(task.id, { status: "stopped", completed_at: simulation.now, reason: "stop requested; final checkpoint saved" });
  return { task_id: task.id, status: task.status, reason: task.reason };
}

function restartTask(simulation: Simulation, _call: Call, id?: string): unknown {
  const task = taskOf(simulation, id);
  simulation.changeTask(task.id, { status: "pending", completed_at: null, progress: 0, reason: "restart requested" });
  run(simulation, task.id);
  return { task_id: task.id, status: task.status, reason: task.reason };
}

function verify(simulation: Simulation, _call: Call, id?: string): unknown {
  const checkpoint = simulation.checkpoints.find((each) => each.id === id);
  if (!checkpoint) throw unknown(`Unknown checkpoint '${id}'.`);
  return { checkpoint_id: id, status: "whole", size_bytes: checkpoint.size, damages: [], reason: "checksums match" };
}

const RECIPES = [
  {
    name: "training",
    description: "Train a GPT on a text dataset, elastically.",
    needs_dataset: false,
    max_workers: null,
    gpus_per_worker: 1,
    built_in: true,
    schema: {
      type: "object",
      required: [],
      properties: {
        learning_rate: { type: "number", description: "Learning rate at full batch, after warm-up.", exclusiveMinimum: 0, default: 0.0003 },
        batch_size: { type: "integer", description: "Sequences per worker and step.", minimum: 1, default: 8 },
        steps: { type: "integer", description: "Optimizer steps.", minimum: 1 },
        precision: { type: "string", description: "Precision of the forward pass.", enum: ["fp32", "bf16"], default: "fp32" },
        model: {
          type: "object",
          properties: {
            n_layer: { type: "integer", description: "Transformer blocks.", minimum: 1, default: 2 },
            n_embd: { type: "integer", description: "Width.", minimum: 1, default: 128 },
          },
        },
      },
    },
  },
];
