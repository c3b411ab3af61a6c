/** What a coordinator would report about the copies of the simulated run. */

import type { Checkpoint, Safety } from "../api/types";
import { plural } from "../format";
import { rungOf } from "../state/risk";
import type { Simulation } from "./simulation";

type Domain = Safety["safe_in"][number];
type Copy = Safety["copies"][number];

const LABELS = { process: "Process dies", machine: "Machine dies", rack: "Rack lost", site: "Site lost" } as const;
const NOTHING = { process: "everything, nothing was saved", machine: "everything, no copy off the machine", rack: "everything, no copy off the rack", site: "everything, no bucket copy" } as const;
const DOMAINS = ["process", "machine", "site"] as const;

export function safetyOf(simulation: Simulation, job: string, step: number | null): Safety {
  const saved = simulation.checkpoints.filter((each) => each.job_id === job && each.status === "completed").sort((a, b) => b.created_at - a.created_at);
  const reached = Math.floor(simulation.step);
  const asked = step === null ? saved.slice(0, 1) : saved.filter((each) => each.step === step);
  return {
    run: job,
    reached,
    step: asked[0]?.step ?? step,
    copies: asked.flatMap(copiesOf),
    safe_in: DOMAINS.filter((domain) => asked.some((each) => survives(each, domain))),
    losses: DOMAINS.map((domain) => {
      const from = saved.find((each) => survives(each, domain))?.step ?? null;
      const steps = from === null ? null : Math.max(0, reached - from);
      return { domain, label: LABELS[domain], steps, from_step: from, text: steps === null ? NOTHING[domain] : plural(steps, "step") };
    }),
    problems: [],
  };
}

function survives(checkpoint: Checkpoint, lost: Domain): boolean {
  const rungs = checkpoint.tiers.map(rungOf);
  return rungs.includes("bucket") || (lost === "process" && rungs.length > 0);
}

function copiesOf(checkpoint: Checkpoint): Copy[] {
  return checkpoint.tiers.map((tier) => ({
    checkpoint_id: checkpoint.id, step: checkpoint.step, saved_at: checkpoint.created_at, kind: rungOf(tier), host: rungOf(tier) === "bucket" ? "" : "node-0",
    rack: "", where: checkpoint.path, part: "", parts: [], verified: null,
  }));
}
