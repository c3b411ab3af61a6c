/** Register a dataset. Its samples are counted unless the number is given. */

import { useMutation } from "@tanstack/react-query";
import { useState } from "react";

import { post } from "../../api/client";
import { errorOf } from "../../api/errors";
import type { Dataset } from "../../api/types";
import { Button, Field, Input, Select } from "../../components/controls";
import { Dialog } from "../../components/Dialog";
import { ErrorNote } from "../../components/states";

const FORMATS = ["parquet", "csv", "tsv", "jsonl", "arrow", "webdataset", "tfrecord", "npy", "text", "tokens"];

interface Form {
  id: string;
  path: string;
  format: string;
  samples: string;
  shardSize: string;
  shuffle: boolean;
  seed: string;
}

const EMPTY: Form = { id: "", path: "", format: "parquet", samples: "", shardSize: "10000", shuffle: true, seed: "0" };

export function Register(props: { open: boolean; onClose: () => void; onDone: (dataset: Dataset) => void }) {
  const [form, setForm] = useState(EMPTY);
  const set = (change: Partial<Form>) => setForm((before) => ({ ...before, ...change }));
  const work = useMutation({
    mutationFn: () =>
      post<Dataset>("/datasets", {
        dataset_id: form.id,
        path: form.path,
        format: form.format,
        ...(form.samples ? { total_samples: Number(form.samples) } : {}),
        shard_size: Number(form.shardSize),
        shuffle: form.shuffle,
        seed: Number(form.seed),
      }),
    onSuccess: (dataset) => {
      setForm(EMPTY);
      props.onDone(dataset);
    },
  });
  const close = () => {
    work.reset();
    props.onClose();
  };
  const wrong = (name: string) => errorOf(work.error, name);

  return (
    <Dialog
      open={props.open}
      onClose={close}
      title="Register dataset"
      description="Its shards are assigned to the workers that read it."
      footer={
        <>
          <Button onClick={close}>Cancel</Button>
          <Button look="primary" type="submit" form="register-dataset" disabled={work.isPending}>{work.isPending ? "Counting samples …" : "Register"}</Button>
        </>
      }
    >
      <form id="register-dataset" className="flex flex-col gap-4" onSubmit={(event) => { event.preventDefault(); work.mutate(); }}>
        <Field label="ID" hint="The name used in training scripts" error={wrong("dataset_id")}>
          {(ids) => <Input {...ids} autoFocus required maxLength={256} value={form.id} onChange={(event) => set({ id: event.target.value })} />}
        </Field>
        <Field label="Path" hint="File, folder, glob or bucket, as seen by workers" error={wrong("path")}>
          {(ids) => <Input {...ids} required className="font-mono" placeholder="/data/train or s3://bucket/train" value={form.path} onChange={(event) => set({ path: event.target.value })} />}
        </Field>
        <div className="grid gap-4 sm:grid-cols-2">
          <Field label="Format" error={wrong("format")}>
            {(ids) => (
              <Select {...ids} value={form.format} onChange={(event) => set({ format: event.target.value })}>
                {FORMATS.map((format) => <option key={format} value={format}>{format}</option>)}
              </Select>
            )}
          </Field>
          <Field label="Samples" hint="Leave empty to count them" error={wrong("total_samples")}>
            {(ids) => <Input {...ids} type="number" min={1} step={1} value={form.samples} onChange={(event) => set({ samples: event.target.value })} />}
          </Field>
          <Field label="Samples per shard" error={wrong("shard_size")}>
            {(ids) => <Input {...ids} type="number" required min={1} step={1} value={form.shardSize} onChange={(event) => set({ shardSize: event.target.value })} />}
          </Field>
          <Field label="Shuffle seed" error={wrong("seed")}>
            {(ids) => <Input {...ids} type="number" required min={0} step={1} value={form.seed} onChange={(event) => set({ seed: event.target.value })} />}
          </Field>
        </div>
        <label className="flex items-center gap-2">
          <input type="checkbox" className="size-4 accent-(--color-accent)" checked={form.shuffle} onChange={(event) => set({ shuffle: event.target.checked })} />
          Shuffle every epoch
        </label>
        {work.isError && <ErrorNote error={work.error} />}
      </form>
    </Dialog>
  );
}
