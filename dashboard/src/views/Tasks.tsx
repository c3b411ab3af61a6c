/** Tasks: progress, ETA and exit cause; start, stop and restart. */

import { useMutation } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { ListChecks, Play, RotateCcw, Square } from "lucide-react";
import { useState } from "react";

import { post } from "../api/client";
import type { Task } from "../api/types";
import { Facts, Meter } from "../components/Card";
import { Button, Input, Select } from "../components/controls";
import { Confirm, Drawer } from "../components/Dialog";
import { Page } from "../components/Page";
import { Empty, ErrorNote, Loading } from "../components/states";
import { Status } from "../components/Status";
import { Table, type Column } from "../components/Table";
import { Ago, Duration, Name, Time, WorkerLink } from "../components/values";
import { count, number, percent, plural } from "../format";
import { useFilters } from "../search";
import { useOnlyJob, useRefusal } from "../session";
import { useServerNow, useStore } from "../state/store";
import { Job } from "./tasks/Job";
import { hasEnded, ranFor, secondsLeft } from "./tasks/progress";
import { Start } from "./tasks/Start";

const WORKERS_SHOWN = 50;

const COLUMNS: readonly Column<Task>[] = [
  { id: "status", header: "Status", value: (task) => task.status, cell: (task) => <Status value={task.stopping ? "stopping" : task.status} />, width: "120px" },
  { id: "name", header: "Task", value: (task) => task.name, cell: (task) => <Name>{task.name}</Name>, width: "minmax(10rem, 2fr)" },
  { id: "type", header: "Recipe", value: (task) => task.type, width: "130px" },
  { id: "progress", header: "Progress", value: (task) => task.progress, cell: (task) => <Progress task={task} />, width: "minmax(9rem, 1fr)" },
  { id: "eta", header: "ETA", cell: (task) => <Left task={task} />, align: "right", width: "100px" },
  { id: "workers", header: "Workers", value: (task) => task.worker_count, cell: (task) => count(task.worker_count), align: "right", width: "90px" },
  { id: "dataset", header: "Dataset", value: (task) => task.dataset_id, cell: (task) => <Name>{task.dataset_id}</Name> },
  { id: "created", header: "Created", value: (task) => task.created_at, cell: (task) => <Ago at={task.created_at} />, align: "right", width: "120px" },
  { id: "reason", header: "Reason", cell: (task) => <Name>{task.exit_cause?.message ?? task.reason}</Name>, width: "minmax(12rem, 2fr)" },
];

/** All of them; or, for a browser that is bound to a job, the one of that job. */
export function Tasks() {
  const job = useOnlyJob();
  return job === null ? <AllTasks /> : <Job key={job} id={job} />;
}

function AllTasks() {
  const refused = useRefusal("operator") !== undefined;
  const [search, setFilters] = useFilters();
  const tasks = useStore((state) => state.tasks);
  const ready = useStore((state) => state.coordinator !== null);
  const status = search["status"] ?? "";
  const words = (search["q"] ?? "").toLowerCase();
  const shown = tasks.filter((task) => (!status || task.status === status) && (!words || `${task.name} ${task.id} ${task.type} ${task.dataset_id ?? ""}`.toLowerCase().includes(words)));
  const open = tasks.find((task) => task.id === search["task"]) ?? null;
  const running = tasks.filter((task) => task.status === "running").length;

  return (
    <Page
      title="Tasks"
      fill
      subtitle={ready && `${count(running)} running, ${plural(tasks.length, "task")} total`}
      actions={
        <>
          <Input type="search" data-search aria-label="Search tasks" placeholder="Name, recipe, dataset" value={search["q"] ?? ""} onChange={(event) => setFilters({ q: event.target.value || undefined }, { replace: true })} />
          <Select aria-label="Status" value={status} onChange={(event) => setFilters({ status: event.target.value || undefined })}>
            <option value="">All statuses</option>
            {["pending", "running", "completed", "failed", "stopped"].map((word) => <option key={word} value={word}>{word}</option>)}
          </Select>
          <Button look="primary" needs="operator" onClick={() => setFilters({ start: "1" })}><Play aria-hidden className="size-4" />Start task</Button>
        </>
      }
    >
      <section className="flex min-h-0 flex-1 flex-col overflow-hidden rounded-lg border bg-surface" aria-label="Tasks">
        {!ready ? (
          <div className="p-4"><Loading rows={6} /></div>
        ) : (
          <Table
            label="Tasks"
            rows={shown}
            columns={COLUMNS}
            rowId={(task) => task.id}
            sort={search["sort"]}
            onSort={(sort) => setFilters({ sort })}
            selected={open?.id}
            onOpen={(task) => setFilters({ task: task.id })}
            empty={
              tasks.length === 0 ? (
                <Empty icon={ListChecks} title="No tasks yet" action={<Button needs="operator" onClick={() => setFilters({ start: "1" })}>Start task</Button>}>A task runs a recipe. Training started with torchrun is listed under Runs.</Empty>
              ) : (
                <Empty icon={ListChecks} title="No matching tasks">{plural(tasks.length, "task")} hidden. Clear filters to see them.</Empty>
              )
            }
          />
        )}
      </section>
      <Start open={search["start"] === "1" && !refused} onClose={() => setFilters({ start: undefined })} onStarted={(id) => setFilters({ start: undefined, task: id })} />
      <TaskDrawer task={open} onClose={() => setFilters({ task: undefined })} />
    </Page>
  );
}

function Progress(props: { task: Task }) {
  const { task } = props;
  const tone = task.status === "failed" ? "bad" : task.status === "completed" ? "good" : "accent";
  return (
    <span className="flex items-center gap-2">
      <Meter label={`Progress of ${task.name}`} value={task.progress} tone={tone} />
      <span className="w-11 shrink-0 text-right">{percent(task.progress)}</span>
    </span>
  );
}

function Left(props: { task: Task }) {
  const now = useServerNow();
  return <Duration seconds={secondsLeft(props.task, now)} />;
}

function TaskDrawer(props: { task: Task | null; onClose: () => void }) {
  const { task } = props;
  return (
    <Drawer open={task !== null} onClose={props.onClose} title={task?.name ?? "Task"} description={task ? <span className="foreign">{task.reason}</span> : undefined}>
      {task && <TaskDetails key={task.id} task={task} />}
    </Drawer>
  );
}

export function TaskDetails(props: { task: Task }) {
  const { task } = props;
  const now = useServerNow();
  const only = useOnlyJob();
  const settings = Object.entries(task.config);
  return (
    <div className="flex flex-col gap-5">
      <div className="flex flex-wrap items-center gap-3">
        <Status value={task.stopping ? "stopping" : task.status} pill />
        <div className="ml-auto flex gap-2">
          <Link to="/logs" search={{ task: task.id } as never} className="inline-flex h-8 items-center rounded-md border px-3 font-medium hover:bg-hover">Logs</Link>
          {hasEnded(task) ? <Restart task={task} /> : <Stop task={task} />}
        </div>
      </div>
      <div className="flex flex-col gap-1.5">
        <div className="flex justify-between">
          <span className="font-medium">{percent(task.progress, 1)}{task.total_steps ? `, step ${count(task.step)} of ${count(task.total_steps)}` : ""}</span>
          <span className="text-muted">{secondsLeft(task, now) === null ? "" : <><Duration seconds={secondsLeft(task, now)} /> left</>}</span>
        </div>
        <Meter label="Progress" value={task.progress} tone={task.status === "failed" ? "bad" : "accent"} />
      </div>
      {task.exit_cause && <Cause cause={task.exit_cause} />}
      <Facts
        items={[
          ["ID", task.id],
          ["Recipe", task.type],
          ["Dataset", task.dataset_id && only === null ? <Link key="dataset" to="/data" search={{ dataset: task.dataset_id } as never} className="text-accent hover:underline">{task.dataset_id}</Link> : (task.dataset_id ?? "–")],
          ["Workers", count(task.worker_count)],
          ["Attempts", `${count(task.attempts)} (max ${plural(task.max_retries, "retry", "retries")})`],
          ["Steps/s", task.steps_per_s ? number(task.steps_per_s) : "–"],
          ["Created", <Time key="created" at={task.created_at} />],
          ["Started", <Time key="started" at={task.started_at} />],
          ["Ended", <Time key="ended" at={task.completed_at} />],
          ["Duration", <Duration key="duration" seconds={ranFor(task, now)} />],
        ]}
      />
      {settings.length > 0 && (
        <section aria-label="Configuration" className="flex flex-col gap-1">
          <h3 className="text-sm text-muted">Configuration</h3>
          <pre tabIndex={0} className="foreign max-h-64 overflow-auto rounded-md border bg-raised p-3 font-mono text-sm">{JSON.stringify(task.config, null, 2)}</pre>
        </section>
      )}
      {task.worker_ids.length > 0 && (
        <section aria-label="Workers" className="flex flex-col gap-1">
          <h3 className="text-sm text-muted">Workers</h3>
          <ul className="flex flex-wrap gap-x-4 gap-y-1">
            {task.worker_ids.slice(0, WORKERS_SHOWN).map((id) => <li key={id} className="max-w-full"><WorkerLink id={id} /></li>)}
            {task.worker_ids.length > WORKERS_SHOWN && <li className="text-faint">and {count(task.worker_ids.length - WORKERS_SHOWN)} more</li>}
          </ul>
        </section>
      )}
    </div>
  );
}

function Cause(props: { cause: NonNullable<Task["exit_cause"]> }) {
  const { cause } = props;
  return (
    <section aria-label="Exit cause" className="flex flex-col gap-2 rounded-md bg-bad-soft px-4 py-3">
      <p className="foreign font-medium break-words">{cause.message}</p>
      <p className="text-muted">
        {[cause.rank == null ? "" : `rank ${cause.rank}`, cause.signal || (cause.exit_code == null ? "" : `exit code ${cause.exit_code}`), cause.may_retry === false ? "not retried" : ""].filter(Boolean).join(", ")}
      </p>
      {cause.traceback && <pre tabIndex={0} className="foreign max-h-64 overflow-auto rounded-md bg-surface p-3 font-mono text-sm whitespace-pre-wrap">{cause.traceback}</pre>}
    </section>
  );
}

export function Stop(props: { task: Task }) {
  const [asking, setAsking] = useState(false);
  const work = useMutation({ mutationFn: () => post(`/tasks/${encodeURIComponent(props.task.id)}/stop`), onSuccess: () => setAsking(false) });
  return (
    <>
      <Button look="danger" needs="operator" disabled={props.task.stopping} onClick={() => setAsking(true)}><Square aria-hidden className="size-3.5" />{props.task.stopping ? "Stopping …" : "Stop"}</Button>
      <Confirm open={asking} onClose={() => setAsking(false)} onConfirm={() => work.mutate()} busy={work.isPending} action="Stop task" title={`Stop ${props.task.name}?`} error={work.isError ? <ErrorNote error={work.error} /> : undefined}>
        <p>Its processes save a final checkpoint and exit. You can restart the task from that checkpoint.</p>
      </Confirm>
    </>
  );
}

export function Restart(props: { task: Task }) {
  const work = useMutation({ mutationFn: () => post(`/tasks/${encodeURIComponent(props.task.id)}/restart`) });
  return (
    <>
      <Button needs="operator" disabled={work.isPending} onClick={() => work.mutate()}><RotateCcw aria-hidden className="size-4" />Restart</Button>
      {work.isError && <ErrorNote error={work.error} />}
    </>
  );
}
