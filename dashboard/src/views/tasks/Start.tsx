/** Start a task: recipe, dataset, workers and the recipe's settings. */

import { useMutation, useQuery } from "@tanstack/react-query";
import { WifiOff } from "lucide-react";
import { useMemo, useState } from "react";

import { get, post } from "../../api/client";
import { errorOf, errorsInside } from "../../api/errors";
import type { Recipe } from "../../api/types";
import { Button, Field, Input, Select } from "../../components/controls";
import { Dialog } from "../../components/Dialog";
import { Empty, ErrorNote, Loading } from "../../components/states";
import { useStale, useStore } from "../../state/store";
import { configOf, fieldsOf, initially, type Typed } from "./schema";
import { SchemaForm } from "./SchemaForm";

export function Start(props: { open: boolean; onClose: () => void; onStarted: (taskId: string) => void }) {
  const recipes = useQuery({ queryKey: ["recipes"], queryFn: ({ signal }) => get<Recipe[]>("/recipes", {}, signal), enabled: props.open, staleTime: 30_000 });
  const away = useStale();
  return (
    <Dialog open={props.open} onClose={props.onClose} wide title="Start task" description="Runs a recipe with torchrun.">
      {away && !recipes.data ? (
        <Empty icon={WifiOff} title="Not connected">The coordinator does not respond. Retrying automatically.</Empty>
      ) : recipes.isPending ? (
        <Loading rows={6} />
      ) : recipes.isError ? (
        <ErrorNote error={recipes.error} onRetry={() => void recipes.refetch()} />
      ) : recipes.data.length === 0 ? (
        <Empty title="No recipes">Recipes are configured on the coordinator.</Empty>
      ) : (
        <StartForm recipes={recipes.data} onClose={props.onClose} onStarted={props.onStarted} />
      )}
    </Dialog>
  );
}

function StartForm(props: { recipes: readonly Recipe[]; onClose: () => void; onStarted: (taskId: string) => void }) {
  const datasets = useStore((state) => state.datasets);
  const [name, setName] = useState("");
  const [recipeName, setRecipeName] = useState(props.recipes[0]?.name ?? "");
  const [dataset, setDataset] = useState("");
  const [workers, setWorkers] = useState("2");
  const recipe = props.recipes.find((each) => each.name === recipeName);
  const fields = useMemo(() => fieldsOf(recipe?.schema ?? {}), [recipe]);
  const [typed, setTyped] = useState<{ recipe: string; texts: Typed }>({ recipe: "", texts: {} });
  const texts = typed.recipe === recipeName ? typed.texts : initially(fields);
  const [errors, setErrors] = useState<Record<string, string>>({});

  const work = useMutation({
    mutationFn: (config: Record<string, unknown>) =>
      post<{ task_id: string }>("/tasks", { name, type: recipeName, ...(dataset ? { dataset_id: dataset } : {}), worker_count: Number(workers), config }),
    onSuccess: (created) => props.onStarted(created.task_id),
    onError: (error) => setErrors(errorsInside(error, "config")),
  });
  const submit = () => {
    const read = configOf(fields, texts);
    setErrors(read.errors);
    if (Object.keys(read.errors).length === 0) work.mutate(read.config);
  };

  return (
    <form className="flex flex-col gap-5" onSubmit={(event) => { event.preventDefault(); submit(); }}>
      <div className="grid gap-4 sm:grid-cols-2">
        <Field label="Name *" error={errorOf(work.error, "name")}>
          {(ids) => <Input {...ids} autoFocus required maxLength={256} value={name} onChange={(event) => setName(event.target.value)} />}
        </Field>
        <Field label="Recipe" hint={recipe?.description} error={errorOf(work.error, "type")}>
          {(ids) => (
            <Select {...ids} value={recipeName} onChange={(event) => { setRecipeName(event.target.value); setErrors({}); }}>
              {props.recipes.map((each) => <option key={each.name} value={each.name}>{each.name}</option>)}
            </Select>
          )}
        </Field>
        <Field label={recipe?.needs_dataset ? "Dataset *" : "Dataset"} error={errorOf(work.error, "dataset_id")}>
          {(ids) => (
            <Select {...ids} required={recipe?.needs_dataset ?? false} value={dataset} onChange={(event) => setDataset(event.target.value)}>
              <option value="">Recipe default</option>
              {[...datasets.keys()].map((id) => <option key={id} value={id}>{id}</option>)}
            </Select>
          )}
        </Field>
        <Field label="Workers *" error={errorOf(work.error, "worker_count")}>
          {(ids) => <Input {...ids} type="number" required min={1} max={recipe?.max_workers ?? 100_000} step={1} value={workers} onChange={(event) => setWorkers(event.target.value)} />}
        </Field>
      </div>
      {fields.length > 0 && (
        <fieldset className="flex flex-col gap-3 border-t pt-4">
          <legend className="sr-only">Recipe settings</legend>
          <h3 className="font-medium">Settings</h3>
          <SchemaForm fields={fields} typed={texts} errors={errors} onChange={(key, text) => setTyped({ recipe: recipeName, texts: { ...texts, [key]: text } })} />
        </fieldset>
      )}
      {work.isError && <ErrorNote error={work.error} />}
      <footer className="sticky -bottom-4 -mx-5 -mb-4 flex justify-end gap-2 border-t bg-surface px-5 py-3">
        <Button onClick={props.onClose}>Cancel</Button>
        <Button look="primary" type="submit" disabled={work.isPending}>{work.isPending ? "Starting …" : "Start"}</Button>
      </footer>
    </form>
  );
}
