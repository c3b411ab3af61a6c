/** Draining machines, from a worker or from a run, and the outcome for their runs. */

import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { LogOut, Undo2 } from "lucide-react";
import { useMemo, useState, type ReactNode } from "react";

import { get, post, remove } from "../../api/client";
import type { Drain, MachineAgents } from "../../api/types";
import { Card } from "../../components/Card";
import { Button, Field, Input } from "../../components/controls";
import { Confirm } from "../../components/Dialog";
import { ErrorNote } from "../../components/states";
import { Ago } from "../../components/values";
import { plural } from "../../format";
import { useOnlyJob } from "../../session";
import type { Run } from "../../state/runs";
import { useServerNow, useStore } from "../../state/store";
import { deadlineText, drainText, machinesOf, type Machine } from "./machines";

const REFETCH_MS = 1_000;
const QUIET_MS = 5_000;
const WITHIN_S = 120;
const NONE: Drain[] = [];
const REFUSED = "cannot rejoin until the drain is cancelled";

/** Drains of all machines; not requested by a session bound to a job. */
function useDrains(asks = true): Drain[] {
  const enabled = useOnlyJob() === null && asks;
  return useQuery({ queryKey: ["drains"], queryFn: ({ signal }) => get<Drain[]>("/drains", {}, signal), enabled, refetchInterval: ({ state }) => (state.data?.some((one) => one.state === "draining") ? REFETCH_MS : QUIET_MS), retry: false }).data ?? NONE;
}

/** Confirmation of a drain: consequences, machines and deadline. */
function AskDrain(props: { title: string; open: boolean; onClose: () => void; hosts: readonly string[]; children: ReactNode }) {
  const [within, setWithin] = useState(String(WITHIN_S));
  const queries = useQueryClient();
  const start = useMutation({
    mutationFn: async () => {
      for (const host of props.hosts) await post("/drains", { host, within_s: Number(within), reason: "requested on the dashboard" });
    },
    onSuccess: props.onClose,
    onSettled: () => queries.invalidateQueries({ queryKey: ["drains"] }),
  });
  const valid = Number(within) >= 0 && within.trim() !== "";
  return (
    <Confirm open={props.open} onClose={props.onClose} onConfirm={() => start.mutate()} title={props.title} action="Drain" busy={start.isPending || !valid || props.hosts.length === 0} error={start.error !== null && <ErrorNote error={start.error} />}>
      {props.children}
      <Field label="Deadline (seconds)" error={valid ? undefined : "Enter a number of seconds."}>{(ids) => <Input {...ids} inputMode="numeric" value={within} onChange={(e) => setWithin(e.target.value)} className="w-32" />}</Field>
    </Confirm>
  );
}

export function DrainMachine({ host }: { host: string }) {
  const [asking, setAsking] = useState(false);
  const known = useDrains().find((one) => one.host === host);
  const only = useOnlyJob();
  if (known !== undefined) return <Outcome drain={known} />;
  return (
    <div>
      <Button needs="operator" unless={boundTo(only)} onClick={() => setAsking(true)}><LogOut aria-hidden className="size-4" />Drain machine</Button>
      <AskDrain open={asking} onClose={() => setAsking(false)} title={`Drain ${host}?`} hosts={[host]}>
        <p>Each of its runs saves, then continues without it or with a standby machine. Its agents {REFUSED}.</p>
      </AskDrain>
    </div>
  );
}

function boundTo(job: string | null): string | undefined {
  return job === null ? undefined : `Not available: you are signed in for job ${job} only, and other runs may use its machines.`;
}

/** Drain some machines of a run. */
export function DrainRun({ run }: { run: Run }) {
  const [asking, setAsking] = useState(false);
  const only = useOnlyJob();
  const alive = run.alive > 0;
  const drains = useDrains(alive);
  const agents = useQuery({ queryKey: ["agents"], queryFn: ({ signal }) => get<MachineAgents[]>("/agents", {}, signal), enabled: alive && only === null, refetchInterval: QUIET_MS, retry: false });
  const workers = useStore((state) => state.workers);
  const machines = useMemo(() => machinesOf(run.id, [...workers.values()], agents.data, drains), [run.id, workers, agents.data, drains]);
  return (
    <>
      <Button needs="operator" unless={boundTo(only) ?? refusalOf(run, machines, agents.data)} onClick={() => setAsking(true)}><LogOut aria-hidden className="size-4" />Drain</Button>
      {asking && <AskRun run={run} machines={machines} onClose={() => setAsking(false)} />}
    </>
  );
}

function refusalOf(run: Run, machines: readonly Machine[], agents: readonly MachineAgents[] | undefined): string | undefined {
  if (run.alive === 0) return "No workers left: nothing to drain.";
  if (agents === undefined) return "Checking which machines can be drained …";
  if (machines.some((one) => one.refusal === undefined)) return undefined;
  return machines.every((one) => one.isDrained) ? "All of its machines are drained." : "No agent of its machines is connected to this coordinator, and a drain needs one: start agents with strata torchrun --rdzv-endpoint.";
}

function AskRun(props: { run: Run; machines: readonly Machine[]; onClose: () => void }) {
  const able = props.machines.filter((one) => one.refusal === undefined);
  const [picked, setPicked] = useState<ReadonlySet<string>>(() => new Set(able.length === 1 ? able.map((one) => one.host) : []));
  const chosen = able.filter((one) => picked.has(one.host));
  const toggle = (host: string) => setPicked((before) => new Set(before.has(host) ? [...before].filter((one) => one !== host) : [...before, host]));
  return (
    <AskDrain open onClose={props.onClose} title={`Drain machines of ${props.run.name}?`} hosts={chosen.map((one) => one.host)}>
      <fieldset className="flex max-h-64 flex-col gap-1.5 overflow-y-auto">
        <legend className="mb-1 text-sm font-medium">Machines</legend>
        {props.machines.map((one) => (
          <label key={one.host} className={`flex items-baseline gap-2 ${one.refusal === undefined ? "" : "text-faint"}`}>
            <input type="checkbox" className="translate-y-0.5" disabled={one.refusal !== undefined} checked={picked.has(one.host)} onChange={() => toggle(one.host)} />
            <span className="foreign min-w-0 break-words"><span className="font-medium">{one.host}</span>: {one.refusal ?? plural(one.workers, "worker")}</span>
          </label>
        ))}
      </fieldset>
      <p aria-live="polite">{chosen.length === 0 ? "Select at least one machine." : `${drainText(props.run.name, chosen, props.machines)} Their agents ${REFUSED}.`}</p>
    </AskDrain>
  );
}

/** Drained machines of this run, until they are undrained. */
export function RunDrains({ run }: { run: Run }) {
  const drains = useDrains();
  const hosts = new Set(run.workers.map((worker) => worker.ip));
  const mine = drains.filter((one) => (run.alive > 0 && hosts.has(one.host)) || one.handovers.some((each) => each.run === run.id));
  if (mine.length === 0) return null;
  return (
    <Card title="Drained machines">
      <ul className="grid gap-4 sm:grid-cols-2" aria-label="Drained machines">
        {mine.map((one) => <li key={one.host} className="flex min-w-0 flex-col gap-1"><h3 className="foreign font-medium break-words">{one.host}</h3><Outcome drain={one} /></li>)}
      </ul>
    </Card>
  );
}

function Outcome({ drain }: { drain: Drain }) {
  const now = useServerNow();
  const queries = useQueryClient();
  const cancel = useMutation({ mutationFn: () => remove(`/drains/${encodeURIComponent(drain.host)}`), onSuccess: () => queries.invalidateQueries({ queryKey: ["drains"] }) });
  return (
    <div className="flex flex-col gap-2">
      <div className="flex flex-col gap-1">
        <p className={drain.state === "drained" ? "text-muted" : "text-warn"}>{drain.state === "drained" ? <>Drained <Ago at={drain.ended} />: {drain.outcome}</> : `Draining: ${deadlineText(drain.deadline, now)}`}</p>
        <p className="foreign text-sm text-muted">{drain.reason} ({drain.by})</p>
        <ul className="flex flex-col gap-1 text-sm">
          {drain.handovers.map((one) => <li key={one.run} className="foreign break-words"><span className="font-medium">{one.run}</span>: {one.reason}{one.lost_steps === null ? "" : ` (${plural(one.lost_steps, "step")} lost)`}</li>)}
        </ul>
      </div>
      {cancel.error !== null && <ErrorNote error={cancel.error} />}
      <div><Button needs="operator" disabled={cancel.isPending} onClick={() => cancel.mutate()}><Undo2 aria-hidden className="size-4" />Undrain</Button></div>
    </div>
  );
}
