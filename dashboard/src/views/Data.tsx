/** Datasets: location, readers, shard assignment, progress and samples. */

import { useQuery } from "@tanstack/react-query";
import { Database, Plus } from "lucide-react";
import { useEffect, useMemo, useState } from "react";

import { ApiError, get } from "../api/client";
import type { Audit, Dataset, Preview, ShardPlan, Worker } from "../api/types";
import { Card, Facts } from "../components/Card";
import { Button, Select } from "../components/controls";
import { Page } from "../components/Page";
import { Empty, ErrorNote, Loading } from "../components/states";
import { Table, type Column } from "../components/Table";
import { Ago, Name, Path, Time } from "../components/values";
import { count, plural } from "../format";
import { useFilters } from "../search";
import { useRefusal } from "../session";
import { shortName } from "../state/runs";
import { useStore } from "../state/store";
import { Register } from "./data/Register";
import { Samples } from "./data/Samples";
import { ShardMap } from "./data/ShardMap";

const REFETCH_MS = 5_000;

const COLUMNS: readonly Column<Dataset>[] = [
  { id: "id", header: "Dataset", value: (dataset) => dataset.id, cell: (dataset) => <Name>{dataset.name === dataset.id ? dataset.id : `${dataset.name} (${dataset.id})`}</Name>, width: "minmax(10rem, 2fr)" },
  { id: "format", header: "Format", value: (dataset) => dataset.format, width: "100px" },
  { id: "samples", header: "Samples", value: (dataset) => dataset.total_samples, cell: (dataset) => count(dataset.total_samples), align: "right", width: "130px" },
  { id: "shards", header: "Shards", value: (dataset) => dataset.shard_count, cell: (dataset) => count(dataset.shard_count), align: "right", width: "90px" },
  { id: "order", header: "Order", value: (dataset) => (dataset.shuffle ? `shuffled, seed ${dataset.seed}` : "sequential"), width: "180px" },
  { id: "readers", header: "Readers", value: (dataset) => dataset.readers.length, cell: (dataset) => (dataset.readers.length === 0 ? <span className="text-faint">none</span> : <Name>{dataset.readers.join(", ")}</Name>), width: "minmax(7rem, 1fr)" },
  { id: "registered", header: "Registered", value: (dataset) => dataset.registered_at, cell: (dataset) => <Ago at={dataset.registered_at} />, align: "right", width: "130px" },
  { id: "path", header: "Path", value: (dataset) => dataset.path, cell: (dataset) => <Path>{dataset.path}</Path>, width: "minmax(12rem, 3fr)" },
];

export function Data() {
  const [search, setFilters] = useFilters();
  const known = useStore((state) => state.datasets);
  const ready = useStore((state) => state.coordinator !== null);
  const datasets = useMemo(() => [...known.values()], [known]);
  const chosen = known.get(search["dataset"] ?? "") ?? datasets[0] ?? null;
  const refused = useRefusal("operator") !== undefined;
  const registering = search["register"] === "1" && !refused;

  return (
    <Page
      title="Data"
      subtitle={ready && plural(datasets.length, "dataset")}
      actions={<Button look="primary" needs="operator" onClick={() => setFilters({ register: "1" })}><Plus aria-hidden className="size-4" />Register dataset</Button>}
    >
      <section className="flex flex-col overflow-hidden rounded-lg border bg-surface" aria-label="Datasets">
        {!ready ? (
          <div className="p-4"><Loading /></div>
        ) : (
          <Table
            label="Datasets"
            rows={datasets}
            columns={COLUMNS}
            rowId={(dataset) => dataset.id}
            height={280}
            sort={search["sort"]}
            onSort={(sort) => setFilters({ sort })}
            selected={chosen?.id}
            onOpen={(dataset) => setFilters({ dataset: dataset.id, worker: undefined })}
            empty={
              <Empty icon={Database} title="No datasets yet" action={<Button needs="operator" onClick={() => setFilters({ register: "1" })}>Register dataset</Button>}>
                Training scripts register their datasets; you can also register one here.
              </Empty>
            }
          />
        )}
      </section>
      {chosen && <Chosen key={chosen.id} dataset={chosen} />}
      <Register open={registering} onClose={() => setFilters({ register: undefined })} onDone={(dataset) => setFilters({ register: undefined, dataset: dataset.id })} />
    </Page>
  );
}

function Chosen(props: { dataset: Dataset }) {
  const { dataset } = props;
  const path = `/datasets/${encodeURIComponent(dataset.id)}`;
  const [search] = useFilters();
  const reader = useStore((state) => state.workers.get(search["worker"] ?? "")?.job_id);
  const present = useStore((state) => state.workers);
  const audit = useQuery({
    queryKey: ["audit", dataset.id],
    queryFn: ({ signal }) => get<Audit[]>(`${path}/audit`, {}, signal),
    refetchInterval: 2 * REFETCH_MS,
    retry: false,
  });
  // Several runs may read it: the selected worker's, else the one that has trained on it.
  const job = (reader !== undefined && dataset.readers.includes(reader) ? reader : undefined) ?? audit.data?.at(-1)?.job_id;
  const plan = useQuery({
    queryKey: ["shards", dataset.id, job],
    queryFn: async ({ signal }) => {
      try {
        return await get<ShardPlan>(`${path}/shards`, { limit: 10_000, job_id: job }, signal);
      } catch (error) {
        // That run has ended; another may be reading.
        if (job === undefined || !isMissing(error)) throw error;
        return get<ShardPlan>(`${path}/shards`, { limit: 10_000 }, signal);
      }
    },
    // A dataset without readers has no plan.
    enabled: !audit.isPending && dataset.readers.length > 0,
    refetchInterval: REFETCH_MS,
    placeholderData: (before) => before,
    retry: false,
  });
  // Refetch as soon as the plan changes.
  const moved = useStore((state) => state.planRevision);
  const { refetch } = plan;
  useEffect(() => {
    if (moved > 0) void refetch();
  }, [moved, refetch]);
  const proofs = (audit.data ?? []).filter((each) => each.job_id === plan.data?.job_id);
  // The audit of an epoch that has just started is not fetched yet.
  const started = plan.data?.epoch;
  const isUnverified = started !== undefined && proofs.length > 0 && proofs.every((each) => each.epoch < started);
  const { refetch: verifyAgain } = audit;
  useEffect(() => {
    if (isUnverified) void verifyAgain();
  }, [isUnverified, started, verifyAgain]);

  return (
    <div className="grid items-start gap-4 xl:grid-cols-[minmax(0,5fr)_minmax(0,3fr)]">
      <div className="flex min-w-0 flex-col gap-4">
        <Card title={<span className="foreign">Shards of {dataset.name}</span>}>
          {dataset.readers.length === 0 ? (
            <Empty icon={Database} title="No readers yet">Runs that read this dataset appear here with their progress.</Empty>
          ) : plan.isPending ? (
            <Loading rows={8} />
          ) : plan.isError ? (
            isMissing(plan.error) ? (
              <Empty icon={Database} title="No shards assigned yet">Shards are assigned when a worker requests them.</Empty>
            ) : (
              <ErrorNote error={plan.error} onRetry={() => void plan.refetch()} />
            )
          ) : (
            <ShardMap plan={plan.data} proofs={proofs} />
          )}
        </Card>
        <Card title="Details">
          <Facts
            columns={2}
            items={[
              ["ID", dataset.id],
              ["Format", dataset.format],
              ["Samples", count(dataset.total_samples)],
              ["Samples per shard", count(dataset.shard_size)],
              ["Registered", <Time key="registered" at={dataset.registered_at} />],
              ["Path", <Path key="path">{dataset.path}</Path>],
              ...Object.entries(dataset.metadata).map(([name, value]) => [name, value] as const),
            ]}
          />
        </Card>
      </div>
      <PreviewCard dataset={dataset} readers={readersOf(plan.data, present, dataset)} job={plan.data?.job_id ?? ""} path={path} />
    </div>
  );
}

function isMissing(error: unknown): boolean {
  return error instanceof ApiError && error.status === 404;
}

/** Workers with shards in the plan; without per-worker shards, all workers of the runs that read it. */
function readersOf(plan: ShardPlan | undefined, workers: ReadonlyMap<string, Worker>, dataset: Dataset): string[] {
  const names = new Set<string>();
  if (plan?.by_shard) for (const shard of plan.shards) if (shard.worker_id !== null) names.add(shard.worker_id);
  if (!plan?.by_shard) for (const worker of workers.values()) if (dataset.readers.includes(worker.job_id)) names.add(worker.id);
  return [...names].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
}

function PreviewCard(props: { dataset: Dataset; readers: readonly string[]; job: string; path: string }) {
  const { dataset, readers, job, path } = props;
  const [search, setFilters] = useFilters();
  const present = useStore((state) => state.workers);
  const worker = search["worker"] ?? "";
  const [limit, setLimit] = useState(3);
  const preview = useQuery({
    queryKey: ["preview", dataset.id, worker, limit],
    queryFn: ({ signal }) => get<Preview>(`${path}/preview`, { worker_id: worker, limit }, signal),
    refetchInterval: worker ? REFETCH_MS : false,
    placeholderData: (before) => before,
    retry: false,
  });
  const choices = readers.filter((name) => present.has(name)).slice(0, 500);
  return (
    <Card
      title="Samples"
      hint={worker ? "currently read" : "first samples"}
      actions={
        <Select aria-label="Worker" className="max-w-60" value={worker} onChange={(event) => setFilters({ worker: event.target.value || undefined })}>
          <option value="">First samples</option>
          {worker && !choices.includes(worker) && <option value={worker}>{shortName(worker, job)}</option>}
          {choices.map((name) => <option key={name} value={name}>{shortName(name, job)}</option>)}
        </Select>
      }
    >
      {preview.isPending ? (
        <Loading rows={6} />
      ) : preview.isError ? (
        <ErrorNote error={preview.error} onRetry={() => void preview.refetch()} />
      ) : preview.data.samples.length === 0 ? (
        <Empty icon={Database} title="No samples">{worker ? "This worker has read all of its shards." : "The dataset has no samples to preview."}</Empty>
      ) : (
        <div className="flex flex-col gap-3">
          <Samples preview={preview.data} />
          {limit < 10 && preview.data.samples.length === limit && <Button look="ghost" onClick={() => setLimit(10)}>Show 10</Button>}
        </div>
      )}
    </Card>
  );
}
