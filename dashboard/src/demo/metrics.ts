/** Logged metrics of the simulated run and of two earlier ones to compare with: computed from the step alone, so that any range is reproducible. */

import type { Curve, LoggedRun, MetricSummary, RunCurves, RunInfo, RunMetrics } from "../api/types";
import { JOB, type Simulation } from "./simulation";

interface Past {
  lr: number;
  batch: number;
  steps: number;
  secondsAgo: number;
}

const PAST: Readonly<Record<string, Past>> = {
  "gpt-small-lr1e-4": { lr: 1e-4, batch: 16, steps: 6_000, secondsAgo: 90_000 },
  "gpt-small-batch32": { lr: 3e-4, batch: 32, steps: 5_200, secondsAgo: 40_000 },
};
const LIVE: Past = { lr: 3e-4, batch: 16, steps: 12_000, secondsAgo: 0 };
const STEPS_PER_S = 2.4;

const tags = new Map<string, string[]>([["gpt-small-batch32", ["baseline"]]]);
const notes = new Map<string, string>();

/** Between -1 and 1, the same for the same step. */
function noise(step: number, salt: number): number {
  let mixed = Math.imul(step ^ (salt * 0x9e3779b1), 0x85ebca6b);
  mixed ^= mixed >>> 13;
  mixed = Math.imul(mixed, 0xc2b2ae35);
  return (((mixed ^ (mixed >>> 16)) >>> 0) / 2_147_483_648) - 1;
}

type Formula = (step: number, about: Past) => number | null;
const loss: Formula = (step, about) => 2.6 + 0.4 * (3e-4 / about.lr - 1) * 0.3 + 8.2 * Math.exp(-step / (260 * (3e-4 / about.lr) ** 0.5)) + (0.16 / (about.batch / 16)) * noise(step, 1);
const FORMULAS: Readonly<Record<string, Formula>> = {
  "loss": loss,
  "eval/loss": (step, about) => (step % 100 === 0 ? (loss(step, about) ?? 0) + 0.12 : null),
  "eval/perplexity": (step, about) => (step % 100 === 0 ? Math.exp((loss(step, about) ?? 0) + 0.12) : null),
  "grad_norm": (step) => 0.9 + 3 * Math.exp(-step / 200) + 0.25 * noise(step, 2) + (step % 911 === 0 ? 6 : 0),
  "lr": (step, about) => about.lr * Math.min(1, step / 200) * (0.55 + 0.45 * Math.cos((Math.PI * Math.min(step, about.steps)) / about.steps)),
  "tokens_per_second": (step, about) => 314_000 * (about.batch / 16) ** 0.3 * (1 + 0.03 * noise(step, 3)),
  "step_time_s": (step) => 0.417 * (1 + 0.05 * noise(step, 4)),
  "system/cpu_percent": (step) => (step % 10 === 0 ? 42 + 6 * noise(step, 5) : null),
  "system/gpu0/memory_bytes": (step) => (step % 10 === 0 ? 61e9 + 4e8 * noise(step, 6) : null),
  "system/gpu0/utilization_percent": (step) => (step % 10 === 0 ? 93 + 5 * noise(step, 7) : null),
};

function lastStep(simulation: Simulation, run: string): number {
  return run === JOB ? simulation.step : (PAST[run]?.steps ?? 0);
}

function timeOf(simulation: Simulation, run: string, step: number): number {
  const past = PAST[run];
  if (past) return simulation.startedAt - past.secondsAgo + step / STEPS_PER_S;
  const { times, step: steps } = simulation.runSeries;
  const at = steps.findIndex((s) => (s ?? 0) >= step);
  return (at < 0 ? simulation.now : times[at]) ?? simulation.now;
}

function curve(simulation: Simulation, run: string, name: string, from: number, to: number, points: number, salt = 0): Curve {
  const formula = FORMULAS[name];
  const created: Curve = { steps: [], times: [], values: [], low: [], high: [] };
  const logged: [number, number][] = [];
  for (let step = Math.max(1, from); formula && step <= to; step += 1) {
    const value = formula(step, PAST[run] ?? LIVE);
    if (value !== null) logged.push([step, value * (salt === 0 ? 1 : 1 + 0.04 * noise(step, salt))]);
  }
  const width = Math.max(1, Math.ceil(logged.length / points));
  for (let i = 0; i < logged.length; i += width) {
    const part = logged.slice(i, i + width);
    const values = part.map(([, value]) => value);
    const last = part.at(-1)?.[0] ?? 0;
    created.steps.push(last);
    created.times.push(timeOf(simulation, run, last));
    created.values.push(values.reduce((a, b) => a + b, 0) / values.length);
    if (width > 1) {
      created.low.push(Math.min(...values));
      created.high.push(Math.max(...values));
    }
  }
  return created;
}

export function isLogged(run: string): boolean {
  return run === JOB || run in PAST;
}

export function loggedRuns(simulation: Simulation): LoggedRun[] {
  return [JOB, ...Object.keys(PAST)].map((run) => ({
    run, jobs: [run], created_at: timeOf(simulation, run, 1), updated_at: timeOf(simulation, run, lastStep(simulation, run)), tags: tags.get(run) ?? [],
  }));
}

export function runInfo(simulation: Simulation, run: string): RunInfo {
  const { lr, batch, steps } = PAST[run] ?? LIVE;
  const found = loggedRuns(simulation).find((one) => one.run === run)!;
  return {
    ...found,
    notes: notes.get(run) ?? "",
    details: {
      command: `train.py --config gpt-small.yaml --lr ${lr} --batch-size ${batch}`,
      folder: "/home/demo/gpt", host: "node-a", commit: "4f1c2a97be0d3f6a5c8e9b7d1a2f3c4e5d6b7a89", branch: "main",
      versions: { python: "3.12.4", torch: "2.9.1", strata: "demo" }, world_size: 8,
      config: { lr, batch_size: batch, max_steps: steps, seed: 7, model: { n_layer: 12, n_head: 12, n_embd: 768 }, precision: "bf16" },
      options: { save_every: 60, snapshot_every: 10, keep_count: 3 },
    },
  };
}

export function annotate(simulation: Simulation, run: string, body: { tags?: string[]; notes?: string }): RunInfo {
  if (body.tags) tags.set(run, body.tags);
  if (body.notes !== undefined) notes.set(run, body.notes);
  return runInfo(simulation, run);
}

export function runMetrics(simulation: Simulation, run: string): RunMetrics {
  const last = lastStep(simulation, run);
  const metrics = Object.keys(FORMULAS).sort().map((name): MetricSummary => {
    const { steps, values } = curve(simulation, run, name, 1, last, Number.POSITIVE_INFINITY);
    const finite = values.filter((v) => v !== null);
    return { name, count: values.length, nonfinite: 0, last: finite.at(-1) ?? null, last_step: steps.at(-1) ?? 0, min: finite.length ? Math.min(...finite) : null, max: finite.length ? Math.max(...finite) : null };
  });
  const first = { generation: 1, job_id: run, started_at: timeOf(simulation, run, 1), resumed_step: 0, committed_until: null };
  const again = run !== JOB ? [] : simulation.recoveries.toReversed().map((r, i) => ({ generation: i + 2, job_id: run, started_at: r.at, resumed_step: r.resumed_step, committed_until: null }));
  return { run, jobs: [run], starts: [first, ...again], metrics: metrics.filter((m) => m.count > 0), dropped: 0, missing_batches: 0 };
}

export function runCurves(simulation: Simulation, run: string, ask: { names: readonly string[]; from: number; to: number; points: number }): RunCurves {
  const last = Math.min(ask.to, lastStep(simulation, run));
  const rollbacks = run !== JOB ? [] : simulation.recoveries.toReversed().filter((r) => r.lost_steps > 0);
  return {
    run,
    series: ask.names.map((name) => ({
      name,
      committed: curve(simulation, run, name, ask.from, last, ask.points),
      abandoned: rollbacks.map((r, i) => ({ ...curve(simulation, run, name, Math.max(ask.from, r.resumed_step + 1), Math.min(ask.to, r.resumed_step + r.lost_steps), ask.points, 100 + i), generation: i + 1 })).filter((c) => c.steps.length > 0),
    })),
  };
}
