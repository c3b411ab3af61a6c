/** Verifies the checksums of a checkpoint; polls a long verification until it is done, for half an hour at most. */

import { useMutation } from "@tanstack/react-query";
import { ShieldCheck, ShieldX } from "lucide-react";

import { post } from "../../api/client";
import type { Verification } from "../../api/types";
import { Button } from "../../components/controls";
import { ErrorNote } from "../../components/states";
import { bytes, duration } from "../../format";

const REFETCH_MS = 1_000;
const TIMEOUT_MS = 30 * 60_000;

async function verify(id: string): Promise<Verification> {
  const until = Date.now() + TIMEOUT_MS;
  for (;;) {
    const found = await post<Verification>(`/checkpoints/${encodeURIComponent(id)}/verify`);
    if (found.status !== "verifying" || Date.now() > until) return found;
    await new Promise((resolve) => setTimeout(resolve, REFETCH_MS));
  }
}

export function Verify(props: { id: string; size: number }) {
  const work = useMutation({ mutationFn: () => verify(props.id) });
  return (
    <section aria-label="Verification" className="flex flex-col gap-3 border-t pt-4">
      <div className="flex items-center gap-3">
        <Button look="primary" needs="operator" disabled={work.isPending} onClick={() => work.mutate()}>
          <ShieldCheck aria-hidden className="size-4" />{work.isPending ? "Verifying …" : "Verify"}
        </Button>
        <p className="text-muted">Reads all {bytes(props.size)} and compares checksums with the manifest.</p>
      </div>
      <div aria-live="polite">
        {work.isError && <ErrorNote error={work.error} />}
        {work.data && <Outcome found={work.data} />}
      </div>
    </section>
  );
}

export function Outcome(props: { found: Verification }) {
  const { found } = props;
  if (found.status === "verifying") return <p className="rounded-md bg-warn-soft px-3 py-2">Not known yet: the coordinator is still reading after {duration(TIMEOUT_MS / 1000)}. Press Verify again for the outcome.</p>;
  if (found.status === "whole") {
    return (
      <p className="flex items-center gap-2 rounded-md bg-good-soft px-3 py-2 font-medium text-good">
        <ShieldCheck aria-hidden className="size-4 shrink-0" />Verified: {found.reason}
      </p>
    );
  }
  return (
    <div className="rounded-md bg-bad-soft px-3 py-2">
      <p className="flex items-center gap-2 font-medium text-bad"><ShieldX aria-hidden className="size-4 shrink-0" />{found.reason}</p>
      <ul className="mt-2 flex flex-col gap-2">
        {found.damages.map((damage) => (
          <li key={`${damage.path}:${damage.start_bytes}`} className="foreign break-words">
            {damage.reason}
            {damage.tensors.length > 0 && <span className="block font-mono text-sm text-muted">{damage.tensors.join(", ")}</span>}
          </li>
        ))}
      </ul>
    </div>
  );
}
