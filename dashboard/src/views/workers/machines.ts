/** The machines of a run, and what draining some of them does. Pure. */

import type { Drain, MachineAgents, Worker } from "../../api/types";
import { age, plural } from "../../format";

export interface Machine {
  host: string;
  /** Of this run, alive. */
  workers: number;
  /** Other runs that have workers there. */
  others: string[];
  isDrained: boolean;
  /** Why it cannot be drained; undefined where it can. */
  refusal: string | undefined;
}

export function machinesOf(run: string, workers: readonly Worker[], agents: readonly MachineAgents[] | undefined, drains: readonly Drain[]): Machine[] {
  const alive = workers.filter((worker) => worker.status !== "failed" && worker.ip !== "");
  const hosts = [...new Set(alive.filter((worker) => worker.job_id === run).map((worker) => worker.ip))];
  return hosts.sort((a, b) => a.localeCompare(b, "en", { numeric: true })).map((host) => {
    const there = alive.filter((worker) => worker.ip === host);
    const drain = drains.find((one) => one.host === host);
    const connected = agents?.some((one) => one.host === host) === true;
    return {
      host,
      workers: there.filter((worker) => worker.job_id === run).length,
      others: [...new Set(there.map((worker) => worker.job_id))].filter((job) => job !== run),
      isDrained: drain !== undefined,
      refusal: drain !== undefined ? `is ${drain.state}` : connected ? undefined : "no agent connected",
    };
  });
}

export function deadlineText(deadline: number, now: number): string {
  const leftS = deadline - now;
  return Math.abs(leftS) < 1 ? "deadline now" : leftS > 0 ? `deadline in ${age(leftS)}` : `deadline passed ${age(-leftS)} ago`;
}

/** Consequences for the run, and for others on the same machines. */
export function drainText(run: string, chosen: readonly Machine[], all: readonly Machine[]): string {
  const stay = all.filter((one) => !one.isDrained && !chosen.includes(one));
  const workers = chosen.reduce((sum, one) => sum + one.workers, 0);
  const leaving = `${plural(workers, "worker")} ${workers === 1 ? "leaves" : "leave"}`;
  const here = stay.length === 0
    ? `All machines of ${run} are drained: it saves and ends, unless a standby machine takes over.`
    : `${run} saves, ${leaving}, and it continues on ${stay.length === 1 ? stay[0]!.host : plural(stay.length, "machine")} or with a standby machine.`;
  const others = [...new Set(chosen.flatMap((one) => one.others))];
  return others.length === 0 ? here : `${here} Workers of ${others.join(", ")} on the same machines leave too.`;
}
