/** Before the first run: commands for this address, and a sample run. */

import { useMutation } from "@tanstack/react-query";
import { Link, useNavigate } from "@tanstack/react-router";
import { Play } from "lucide-react";

import { post } from "../../api/client";
import { Card } from "../../components/Card";
import { Copyable } from "../../components/Copy";
import { Button } from "../../components/controls";
import { ErrorNote } from "../../components/states";

/** Small enough for a laptop, long enough to watch. */
const SAMPLE = {
  name: "sample",
  type: "training",
  worker_count: 2,
  config: { steps: 2_000, batch_size: 4, seq_length: 64, device: "cpu", checkpoint_interval: 100, snapshot_interval: 10, model: { n_layer: 2, n_head: 4, n_embd: 64 } },
};

export function FirstRun({ address }: { address: string }) {
  const navigate = useNavigate();
  const work = useMutation({
    mutationFn: () => post<{ task_id: string }>("/tasks", SAMPLE),
    onSuccess: ({ task_id }) => void navigate({ to: "/runs/$job", params: { job: task_id } }),
  });
  return (
    <div className="grid items-start gap-4 lg:grid-cols-2">
      <Card title="Try it">
        <div className="flex flex-col gap-3">
          <p className="text-muted">Trains a small model on this machine with two workers, for a few minutes. Kill one of them and watch it recover.</p>
          <div className="flex flex-wrap gap-2">
            <Button look="primary" needs="operator" disabled={work.isPending} onClick={() => work.mutate()}><Play aria-hidden className="size-4" />{work.isPending ? "Starting …" : "Run sample"}</Button>
            <Link to="/runs" search={{ start: "1" }} className="inline-flex h-8 items-center rounded-md border px-3 font-medium hover:bg-hover">Choose recipe</Link>
          </div>
          {work.isError && <ErrorNote error={work.error} onRetry={() => work.mutate()} />}
        </div>
      </Card>
      <Card title="Run your own script">
        <div className="flex flex-col gap-4">
          <Copyable label="On one machine" text={`COORDINATOR_ADDR=${address} strata torchrun --nproc-per-node=2 train.py`} />
          <Copyable label="On each of several machines" text={`COORDINATOR_ADDR=${address} strata torchrun --nnodes=1:4 --nproc-per-node=8 --rdzv-endpoint=${address} train.py`} />
          <Copyable label="After a failure" text="strata why RUN" />
        </div>
      </Card>
    </div>
  );
}
