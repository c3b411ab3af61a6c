/** The job a session is bound to: task, goodput and latest log lines. */

import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { ListChecks } from "lucide-react";

import { ApiError, get } from "../../api/client";
import type { Task } from "../../api/types";
import { Card } from "../../components/Card";
import { LastLines } from "../../components/LastLines";
import { Page } from "../../components/Page";
import { Empty, ErrorNote, Loading } from "../../components/states";
import { GoodputBar } from "../runs/GoodputBar";
import { useGoodput } from "../runs/history";
import { TaskDetails } from "../Tasks";

const REFETCH_MS = 3_000;

export function Job(props: { id: string }) {
  const { id } = props;
  const task = useQuery({
    queryKey: ["task", id],
    queryFn: ({ signal }) => get<Task>(`/tasks/${encodeURIComponent(id)}`, {}, signal),
    refetchInterval: REFETCH_MS,
  });
  const goodput = useGoodput(id);
  return (
    <Page title={task.data?.name ?? id} subtitle={task.data && <span className="foreign">{task.data.reason}</span>}>
      <p className="rounded-md bg-busy-soft px-4 py-3">
        You are signed in for job <strong className="foreign font-semibold break-words">{id}</strong> only: its task and <Link to="/logs" className="font-medium underline underline-offset-2">its logs</Link> are all you can see.
      </p>
      <div className="grid items-start gap-4 xl:grid-cols-2">
        <Card title="Task">
          {task.isPending ? (
            <Loading rows={6} />
          ) : task.data ? (
            <TaskDetails task={task.data} />
          ) : task.error instanceof ApiError && task.error.status === 404 ? (
            <Empty icon={ListChecks} title="Task not found">The job was not started as a task, or it was removed.</Empty>
          ) : (
            <ErrorNote error={task.error} onRetry={() => void task.refetch()} />
          )}
        </Card>
        <div className="flex min-w-0 flex-col gap-4">
          <Card title="Goodput" hint="worker time by activity">{goodput ? <GoodputBar goodput={goodput} /> : <p className="text-muted">No goodput reported yet.</p>}</Card>
          <Card title="Latest log lines"><LastLines of={{ task_id: id }} /></Card>
        </div>
      </div>
    </Page>
  );
}
