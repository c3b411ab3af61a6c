/** The machine of a worker: letting it go before it is taken away, and what became of its runs. */

import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { LogOut, Undo2 } from "lucide-react";
import { useState } from "react";

import { get, post, remove } from "../../api/client";
import type { Drain } from "../../api/types";
import { Button, Field, Input } from "../../components/controls";
import { Confirm } from "../../components/Dialog";
import { ErrorNote } from "../../components/states";
import { Ago } from "../../components/values";
import { age, plural } from "../../format";
import { useServerNow } from "../../state/store";

const AGAIN_MS = 1_000;
const WITHIN_S = 120;

export function DrainMachine({ host }: { host: string }) {
  const [asking, setAsking] = useState(false);
  const [within, setWithin] = useState(String(WITHIN_S));
  const queries = useQueryClient();
  const again = () => queries.invalidateQueries({ queryKey: ["drains"] });
  const found = useQuery({ queryKey: ["drains"], queryFn: ({ signal }) => get<Drain[]>("/drains", {}, signal), refetchInterval: AGAIN_MS, retry: false });
  const known = found.data?.find((one) => one.host === host);
  const start = useMutation({ mutationFn: () => post("/drains", { host, within_s: Number(within), reason: "asked for on the dashboard" }), onSuccess: () => { setAsking(false); return again(); } });
  const cancel = useMutation({ mutationFn: () => remove(`/drains/${encodeURIComponent(host)}`), onSuccess: again });
  if (known !== undefined) {
    return (
      <div className="flex flex-col gap-2">
        <Outcome drain={known} />
        {cancel.error !== null && <ErrorNote error={cancel.error} />}
        <div><Button needs="operator" disabled={cancel.isPending} onClick={() => cancel.mutate()}><Undo2 aria-hidden className="size-4" />Let it be used again</Button></div>
      </div>
    );
  }
  const valid = Number(within) >= 0 && within.trim() !== "";
  return (
    <div>
      <Button needs="operator" onClick={() => setAsking(true)}><LogOut aria-hidden className="size-4" />Drain machine</Button>
      <Confirm open={asking} onClose={() => setAsking(false)} onConfirm={() => valid && start.mutate()} title={`Drain ${host}?`} action="Drain" busy={start.isPending} error={start.error !== null && <ErrorNote error={start.error} />}>
        <div className="flex flex-col gap-3">
          <p>Its runs save, and continue without it or with a machine that stands by. None of its agents is let in again until that is cancelled.</p>
          <Field label="Seconds until the machine may be gone" error={valid ? undefined : "Give a number of seconds."}>{(ids) => <Input {...ids} inputMode="numeric" value={within} onChange={(e) => setWithin(e.target.value)} className="w-32" />}</Field>
        </div>
      </Confirm>
    </div>
  );
}

function Outcome({ drain }: { drain: Drain }) {
  const now = useServerNow();
  return (
    <div className="flex flex-col gap-1">
      <p className={drain.state === "drained" ? "text-muted" : "text-warn"}>{drain.state === "drained" ? <>Drained <Ago at={drain.ended} />: {drain.outcome}</> : `Draining: it may go in ${age(Math.max(0, drain.deadline - now))}`}</p>
      <p className="foreign text-sm text-muted">{drain.reason} ({drain.by})</p>
      <ul className="flex flex-col gap-1 text-sm">
        {drain.handovers.map((one) => <li key={one.run} className="foreign break-words"><span className="font-medium">{one.run}</span>: {one.reason}{one.lost_steps === null ? "" : ` (${plural(one.lost_steps, "step")} lost)`}</li>)}
      </ul>
    </div>
  );
}
