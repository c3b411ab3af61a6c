/** A task: progress, exit cause, configuration; start, stop and restart. */

import { useMutation } from "@tanstack/react-query";
import { Link, useNavigate } from "@tanstack/react-router";
import { RotateCcw, Square } from "lucide-react";
import { useState } from "react";

import { post } from "../api/client";
import type { Task } from "../api/types";
import { Facts, Meter } from "../components/Card";
import { CopyButton } from "../components/Copy";
import { Button } from "../components/controls";
import { Confirm, Drawer } from "../components/Dialog";
import { Empty, ErrorNote, Loading } from "../components/states";
import { Status } from "../components/Status";
import { Duration, Time, WorkerLink } from "../components/values";
import { count, number, percent, plural } from "../format";
import type { Search } from "../search";
import { useOnlyJob } from "../session";
import { useServerNow, useStore } from "../state/store";
import { hasEnded, ranFor, secondsLeft } from "./tasks/progress";
import { Start } from "./tasks/Start";

const WORKERS_SHOWN = 50;

export function TaskDialogs(props: { starts: boolean; task: string | undefined; onChange: (change: Search) => void }) {
  const navigate = useNavigate();
  const task = useStore((state) => state.tasks.find((each) => each.id === props.task));
  const ready = useStore((state) => state.coordinator !== null);
  const close = () => props.onChange({ task: undefined });
  return (
    <>
      <Start open={props.starts} onClose={() => props.onChange({ start: undefined })} onStarted={(id) => void navigate({ to: "/runs/$job", params: { job: id }, search: { task: id } })} />
      <Drawer open={props.task !== undefined && !props.starts} onClose={close} title={task?.name ?? props.task ?? "Task"} description={task ? <span className="foreign">{task.reason}</span> : undefined}>
        {task ? <TaskDetails key={task.id} task={task} /> : !ready ? <Loading rows={8} /> : <Empty title="Task not found">It was removed or never existed.</Empty>}
      </Drawer>
    </>
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
          ["ID", <span key="id" className="inline-flex items-center gap-1"><span className="truncate">{task.id}</span><CopyButton text={task.id} label="ID" className="size-6" /></span>],
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
