/** Launch, configuration, tags and notes of a run. */

import { useMutation, useQueryClient } from "@tanstack/react-query";
import { X } from "lucide-react";
import { useState, type ReactNode } from "react";

import { post } from "../../api/client";
import type { MetricSummary, RunInfo, RunMetrics, Task } from "../../api/types";
import { Card, Facts } from "../../components/Card";
import { Button, Input } from "../../components/controls";
import { CopyButton } from "../../components/Copy";
import { ErrorNote } from "../../components/states";
import { Time } from "../../components/values";
import { useRefusal } from "../../session";
import { count, plural } from "../../format";
import { isHistogram, label } from "./histograms";
import { valueText } from "./Panel";

/** Nested values as dotted names and text. */
export function flatten(value: unknown, path = ""): (readonly [string, string])[] {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) return Object.entries(value).flatMap(([key, v]) => flatten(v, path ? `${path}.${key}` : key));
  return path === "" ? [] : [[path, typeof value === "string" ? value : JSON.stringify(value)]];
}

/** Configuration reported by the run, else that of its task. */
export function configOf(info: RunInfo | null | undefined, task: Task | null): (readonly [string, string])[] {
  const own = flatten(info?.details?.config ?? {});
  return own.length > 0 ? own : flatten(task?.config ?? {});
}

export function Details(props: { id: string; info: RunInfo | null | undefined; task: Task | null; labels: Readonly<Record<string, string>>; metrics: RunMetrics | null | undefined }) {
  const { info, task, metrics } = props;
  const details = info?.details ?? null;
  const config = configOf(info, task);
  const options = flatten(details?.options ?? {});
  const labels = Object.entries(props.labels);
  const started: (readonly [string, ReactNode])[] = [
    ["Run", <WithCopy key="run" text={info?.run ?? props.id} what="run ID" />],
    ...(task ? [["Task", <WithCopy key="task" text={task.id} what="task ID" />] as const, ["Recipe", task.type] as const] : []),
    ...(details?.commit ? [["Commit", <WithCopy key="commit" text={details.commit} shown={details.commit.slice(0, 12)} what="commit" />] as const] : []),
    ...(details?.branch ? [["Branch", details.branch] as const] : []),
    ...(details?.host ? [["First host", details.host] as const] : []),
    ...(details?.folder ? [["Working directory", details.folder] as const] : []),
    ...(details?.world_size ? [["Workers", count(details.world_size)] as const] : []),
    ...Object.entries(details?.versions ?? {}).map(([name, version]) => [name, version] as const),
  ];
  return (
    <div className="grid items-start gap-4 xl:grid-cols-2">
      <div className="flex min-w-0 flex-col gap-4">
        {info && <Notes key={info.run} id={props.id} info={info} />}
        <Card title="Launch" hint={details ? "latest start" : undefined}>
          {details?.command && <Command text={details.command} />}
          <Facts items={started} />
          {!details && <p className="mt-3 text-muted">No launch command reported. Runs report it with their first logged metrics.</p>}
          {details && details.commit && <p className="mt-3 text-sm text-faint">Checked-out commit; uncommitted changes are not recorded.</p>}
        </Card>
        {metrics && metrics.starts.length > 0 && <Card title="Starts" hint={plural(metrics.starts.length, "start")} flush><Starts metrics={metrics} /></Card>}
      </div>
      <div className="flex min-w-0 flex-col gap-4">
        <Card title="Configuration" actions={config.length > 0 && <CopyButton text={config.map(([k, v]) => `${k}=${v}`).join("\n")} label="configuration" />}>
          {config.length > 0 ? <Facts items={config} /> : labels.length > 0 ? <Facts items={labels} /> : <p className="text-muted">Unknown. Pass it to <code className="font-mono text-sm">strata.elastic(…, config=&#123;…&#125;)</code>.</p>}
        </Card>
        {options.length > 0 && <Card title="Job options" hint="in effect"><Facts items={options} /></Card>}
        {metrics && metrics.metrics.length > 0 && <Card title="Last values" hint="committed history" flush><Values metrics={metrics.metrics} /></Card>}
      </div>
    </div>
  );
}

function WithCopy(props: { text: string; what: string; shown?: string }) {
  return (
    <span className="inline-flex max-w-full items-center gap-1">
      <span className="foreign min-w-0 truncate font-mono text-sm" title={props.text}>{props.shown ?? props.text}</span>
      <CopyButton text={props.text} label={props.what} className="-my-1.5" />
    </span>
  );
}

function Command(props: { text: string }) {
  return (
    <div className="mb-3 flex items-start gap-2 rounded-md border bg-raised py-1.5 pr-1.5 pl-3">
      <pre tabIndex={0} aria-label="Command" className="foreign max-h-40 min-w-0 flex-1 overflow-auto py-1 font-mono text-sm break-words whitespace-pre-wrap">{props.text}</pre>
      <CopyButton text={props.text} label="command" />
    </div>
  );
}

const HEAD = "px-4 py-2 text-sm font-medium text-muted";

function Starts({ metrics }: { metrics: RunMetrics }) {
  return (
    <div className="max-h-72 overflow-auto border-t" tabIndex={0} role="region" aria-label="Starts">
      <table className="w-full">
        <thead><tr><th scope="col" className={`${HEAD} text-left`}>Generation</th><th scope="col" className={`${HEAD} text-left`}>Started</th><th scope="col" className={`${HEAD} text-right`}>Resumed at</th><th scope="col" className={`${HEAD} text-right`}>Abandoned after</th></tr></thead>
        <tbody>
          {metrics.starts.toReversed().map((start) => (
            <tr key={`${start.generation} ${start.started_at}`} className="border-t border-line/60">
              <td className="px-4 py-1.5">{count(start.generation)}</td>
              <td className="px-4 py-1.5"><Time at={start.started_at} /></td>
              <td className="px-4 py-1.5 text-right">{count(start.resumed_step)}</td>
              <td className="px-4 py-1.5 text-right text-muted">{start.committed_until === null ? "–" : count(start.committed_until)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Values({ metrics }: { metrics: readonly MetricSummary[] }) {
  return (
    <div className="max-h-96 overflow-auto border-t" tabIndex={0} role="region" aria-label="Last values">
      <table className="w-full">
        <thead><tr><th scope="col" className={`${HEAD} text-left`}>Metric</th>{["Last", "Min", "Max", "Step"].map((word) => <th key={word} scope="col" className={`${HEAD} text-right`}>{word}</th>)}</tr></thead>
        <tbody>
          {metrics.map((m) => (
            <tr key={m.name} className="border-t border-line/60">
              <th scope="row" className="foreign px-4 py-1.5 text-left font-normal [overflow-wrap:anywhere]">{label(m.name)}{isHistogram(m.name) && <span className="text-faint"> (median)</span>}{m.nonfinite > 0 && <span className="ml-2 text-sm text-warn">{count(m.nonfinite)} NaN/Inf</span>}</th>
              <td className="px-4 py-1.5 text-right font-medium">{m.last === null ? "NaN/Inf" : valueText(m.name, m.last)}</td>
              <td className="px-4 py-1.5 text-right text-muted">{valueText(m.name, m.min)}</td>
              <td className="px-4 py-1.5 text-right text-muted">{valueText(m.name, m.max)}</td>
              <td className="px-4 py-1.5 text-right text-muted">{count(m.last_step)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

// --- tags and notes ---------------------------------------------------------------------------------------------

export function Tags(props: { tags: readonly string[]; onRemove?: (tag: string) => void }) {
  if (props.tags.length === 0) return null;
  return (
    <ul aria-label="Tags" className="flex flex-wrap gap-1.5">
      {props.tags.map((tag) => (
        <li key={tag} className="inline-flex max-w-full items-center gap-1 rounded-full border bg-raised px-2 py-0.5 text-sm">
          <span className="foreign min-w-0 truncate" title={tag}>{tag}</span>
          {props.onRemove && <button type="button" aria-label={`Remove tag ${tag}`} className="-mr-0.5 rounded-full p-0.5 text-faint hover:bg-hover hover:text-ink" onClick={() => props.onRemove?.(tag)}><X aria-hidden className="size-3" /></button>}
        </li>
      ))}
    </ul>
  );
}

function Notes(props: { id: string; info: RunInfo }) {
  const { info, id } = props;
  const queries = useQueryClient();
  const refusal = useRefusal("operator");
  const [notes, setNotes] = useState<string | null>(null);
  const [tag, setTag] = useState("");
  const work = useMutation({
    mutationFn: (body: { tags?: string[]; notes?: string }) => post<RunInfo>(`/runs/${encodeURIComponent(info.run)}/notes`, body),
    onSuccess: async (after) => {
      const queryKey = ["run", id, "info"];
      await queries.cancelQueries({ queryKey }); // What was asked for before would bring back what is gone.
      queries.setQueryData(queryKey, after);
      void queries.invalidateQueries({ queryKey: ["runs"] });
    },
  });
  const add = () => {
    const created = tag.trim();
    if (created && !info.tags.includes(created)) work.mutate({ tags: [...info.tags, created] });
    setTag("");
  };
  return (
    <Card title="Notes">
      <div className="flex flex-col gap-3">
        <Tags tags={info.tags} {...(refusal === undefined ? { onRemove: (removed) => work.mutate({ tags: info.tags.filter((t) => t !== removed) }) } : {})} />
        <form className="flex gap-2" onSubmit={(event) => { event.preventDefault(); add(); }}>
          <Input aria-label="New tag" placeholder="Add a tag" maxLength={64} className="w-44" value={tag} disabled={refusal !== undefined} title={refusal} onChange={(event) => setTag(event.target.value)} />
          <Button needs="operator" type="submit" disabled={tag.trim() === "" || work.isPending}>Add tag</Button>
        </form>
        <textarea
          aria-label="Notes"
          rows={3}
          maxLength={16_384}
          placeholder={refusal ?? "Purpose and results of this run"}
          readOnly={refusal !== undefined}
          className="foreign min-h-20 w-full rounded-md border border-edge/60 bg-surface px-2.5 py-1.5 hover:border-edge focus:border-accent"
          value={notes ?? info.notes}
          onChange={(event) => setNotes(event.target.value)}
        />
        {notes !== null && notes !== info.notes && (
          <div className="flex gap-2">
            <Button look="primary" needs="operator" disabled={work.isPending} onClick={() => work.mutate({ notes }, { onSuccess: () => setNotes(null) })}>Save notes</Button>
            <Button onClick={() => setNotes(null)}>Discard</Button>
          </div>
        )}
        {work.isError && <ErrorNote error={work.error} />}
      </div>
    </Card>
  );
}
