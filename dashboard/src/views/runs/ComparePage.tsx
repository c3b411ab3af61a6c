/** Comparison of runs: overlaid curves, final values, configuration differences. Everything is in the URL. */

import { useQueries } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { GitCompareArrows, X } from "lucide-react";
import { useEffect, useMemo, type ReactNode } from "react";

import type { LoggedRun, RunInfo, RunMetrics } from "../../api/types";
import { Card } from "../../components/Card";
import { Button, IconButton, Select } from "../../components/controls";
import { CopyButton } from "../../components/Copy";
import { Page } from "../../components/Page";
import { Empty, ErrorNote, Loading } from "../../components/states";
import { fileName, saveBlob } from "../../download";
import { count, plural } from "../../format";
import { useFilters } from "../../search";
import { useStore } from "../../state/store";
import { comparable, differences, finalValues, idsOf, LOOKS, RUNS_COMPARED, textOf } from "./compare";
import { csvOf } from "./curves";
import { configOf } from "./Details";
import { isHistogram, label } from "./histograms";
import { PANELS_SHOWN, usualOrder } from "./layout";
import { infoQuery, metricsQuery, useLoggedRuns } from "./metrics";
import { EAGER, Panel, preloadPlot, Swatch, valueText, type PanelRun } from "./Panel";
import { GRID, Toolbar } from "./Panels";
import { matching, useSettings } from "./settings";

export function ComparePage() {
  const [filters, set] = useFilters();
  const ids = useMemo(() => idsOf(filters["runs"]), [filters["runs"]]);
  const known = useLoggedRuns();
  useEffect(preloadPlot, []);
  const change = (next: readonly string[]) => set({ runs: textOf(next) });
  return (
    <Page title="Compare runs" actions={<><Link to="/runs" className="inline-flex h-8 items-center rounded-md border px-3 font-medium hover:bg-hover">All runs</Link><span className="inline-flex items-center text-sm text-muted">Link <CopyButton text={location.href} label="link to this comparison" /></span></>}>
      {ids.length === 0 ? (
        <Empty icon={GitCompareArrows} title="No runs selected" action={<Adder ids={ids} known={known} onAdd={(id) => change([...ids, id])} />}>Select runs here or in the run list.</Empty>
      ) : (
        <Comparison ids={ids} known={known} onChange={change} />
      )}
    </Page>
  );
}

function Adder(props: { ids: readonly string[]; known: readonly LoggedRun[] | undefined; onAdd: (id: string) => void }) {
  const left = (props.known ?? []).filter((one) => !props.ids.includes(one.run) && !one.jobs.some((job) => props.ids.includes(job)));
  return (
    <Select aria-label="Add a run" value="" disabled={left.length === 0 || props.ids.length >= RUNS_COMPARED} onChange={(event) => { if (event.target.value) props.onAdd(event.target.value); }}>
      <option value="">{props.ids.length >= RUNS_COMPARED ? `At most ${RUNS_COMPARED} runs` : left.length === 0 ? "No other runs" : "Add a run"}</option>
      {left.slice(0, 200).map((one) => <option key={one.run} value={one.run}>{one.jobs.at(-1) === one.run ? one.run : `${one.jobs.at(-1) ?? ""} (${one.run})`}</option>)}
    </Select>
  );
}

function Comparison(props: { ids: readonly string[]; known: readonly LoggedRun[] | undefined; onChange: (ids: readonly string[]) => void }) {
  const { ids, known } = props;
  const [filters, set] = useFilters();
  const [settings, change] = useSettings();
  const tasks = useStore((state) => state.tasks);
  const summaries = useQueries({ queries: ids.map((id) => metricsQuery(id, false)), combine: dataOf<RunMetrics> });
  const infos = useQueries({ queries: ids.map((id) => infoQuery(id)), combine: dataOf<RunInfo> });

  const labelKey = ids.map((id) => tasks.find((t) => t.id === id)?.name ?? known?.find((one) => one.run === id)?.jobs.at(-1) ?? id);
  const labels = useMemo(() => distinct(labelKey, ids), [labelKey.join("\n"), ids]);
  const origins = summaries.data.map((one) => one?.starts[0]?.started_at);
  const runs = useMemo(() => ids.map((id, i): PanelRun => ({ id, label: labels[i] ?? id, origin: origins[i] ?? null, live: false, marks: [], ...(LOOKS[i] ?? { color: "run-1" }) })), [ids, labels, origins.join()]);
  const names = useMemo(() => comparable(summaries.data), [summaries.data]);
  const ordered = useMemo(() => orderedNames(names, summaries.data), [names, summaries.data]);
  const chosen = idsInOrder(filters["m"]);
  const panels = matching(chosen.length > 0 ? chosen : ordered, settings.query).slice(0, PANELS_SHOWN);
  const lastStep = Math.max(0, ...summaries.data.flatMap((one) => one?.metrics.map((m) => m.last_step) ?? []));
  const configs = ids.map((id, i) => configOf(infos.data[i], tasks.find((t) => t.id === id) ?? null));
  return (
    <>
      <ul aria-label="Runs compared" className="flex flex-wrap items-center gap-2">
        {runs.map((run, i) => (
          <li key={run.id} className="inline-flex h-8 max-w-full items-center gap-2 rounded-md border bg-surface pl-3">
            <Swatch color={run.color} dash={run.dash} />
            <Link to="/runs/$job" params={{ job: run.id }} className="foreign min-w-0 truncate font-medium hover:underline" title={run.id}>{run.label}</Link>
            {summaries.data[i] === null && <span className="text-sm text-warn">no metrics logged</span>}
            <IconButton label={`Remove ${run.label}`} className="size-7" onClick={() => props.onChange(ids.filter((id) => id !== run.id))}><X aria-hidden className="size-3.5" /></IconButton>
          </li>
        ))}
        <li className="max-w-full"><Adder ids={ids} known={known} onAdd={(id) => props.onChange([...ids, id])} /></li>
      </ul>
      {summaries.error !== null && <ErrorNote error={summaries.error} />}
      <Toolbar settings={settings} change={change} lastStep={lastStep}>
        <Select aria-label="Add a metric" className="w-40" value="" onChange={(event) => { if (event.target.value) set({ m: textOfNames([...new Set([...chosen, event.target.value])]) }); }}>
          <option value="">{chosen.length > 0 ? `${plural(chosen.length, "metric")} selected` : "All metrics"}</option>
          {ordered.map((name) => <option key={name} value={name}>{label(name)}</option>)}
        </Select>
        {chosen.length > 0 && <Button onClick={() => set({ m: undefined })}>Show all</Button>}
      </Toolbar>
      {summaries.isPending && names.length === 0 ? (
        <Loading rows={8} />
      ) : panels.length === 0 ? (
        <Empty title={names.length === 0 ? "No metrics logged" : "No matching metrics"} />
      ) : (
        <div className={GRID}>
          {panels.map((name, i) => <Panel key={name} name={name} runs={runs} settings={settings} change={change} eager={i < EAGER} />)}
        </div>
      )}
      <FinalValues runs={runs} summaries={summaries.data} names={matching(ordered, settings.query)} />
      <Configurations runs={runs} configs={configs} all={filters["config"] === "all"} onAll={(all) => set({ config: all ? "all" : undefined }, { replace: true })} />
    </>
  );
}

const idsInOrder = (text: string | undefined) => [...new Set((text ?? "").split(",").filter(Boolean).map(decodeURIComponent))];
const textOfNames = (names: readonly string[]) => (names.length === 0 ? undefined : names.map(encodeURIComponent).join(","));

/** Metrics common to all runs first, each group in the usual order. */
function orderedNames(names: readonly string[], runs: readonly (RunMetrics | null | undefined)[]): string[] {
  const common = new Set(names.filter((name) => runs.every((run) => !run || run.metrics.some((m) => m.name === name))));
  return [...usualOrder(names.filter((n) => common.has(n))), ...usualOrder(names.filter((n) => !common.has(n)))];
}

function dataOf<T>(results: { data?: T | null | undefined; isPending: boolean; error: unknown }[]): { data: (T | null | undefined)[]; isPending: boolean; error: unknown } {
  return { data: results.map((one) => one.data), isPending: results.some((one) => one.isPending), error: results.find((one) => one.error)?.error ?? null };
}

/** Adds IDs to equal names. */
function distinct(labels: readonly string[], ids: readonly string[]): string[] {
  return labels.map((label, i) => (labels.filter((other) => other === label).length > 1 ? `${label} (${ids[i] ?? ""})` : label));
}

// --- tables -----------------------------------------------------------------------------------------------------

const CELL = "border-t border-line/60 px-4 py-1.5";

function Heads(props: { first: string; runs: readonly PanelRun[] }) {
  return (
    <thead>
      <tr>
        <th scope="col" className="sticky left-0 bg-surface px-4 py-2 text-left text-sm font-medium text-muted">{props.first}</th>
        {props.runs.map((run) => <th key={run.id} scope="col" className="px-4 py-2 text-right text-sm font-medium text-muted"><span className="inline-flex max-w-44 items-center gap-1.5"><Swatch color={run.color} dash={run.dash} /><span className="foreign truncate" title={run.label}>{run.label}</span></span></th>)}
      </tr>
    </thead>
  );
}

function Scrolling(props: { label: string; children: ReactNode }) {
  return <div className="max-h-96 overflow-auto border-t" tabIndex={0} role="region" aria-label={props.label}><table className="w-full">{props.children}</table></div>;
}

function FinalValues(props: { runs: readonly PanelRun[]; summaries: readonly (RunMetrics | null | undefined)[]; names: readonly string[] }) {
  const rows = finalValues(props.summaries, props.names);
  if (rows.length === 0) return null;
  const save = () => {
    const table = rows.flatMap((row) => row.values.map((value, i) => [label(row.name), props.runs[i]?.label ?? "", value?.step, value?.last, value?.min, value?.max]));
    saveBlob(`${fileName("final-values", ...props.runs.map((r) => r.label))}.csv`, new Blob([csvOf([["metric", "run", "step", "last", "min", "max"], ...table])], { type: "text/csv" }));
  };
  return (
    <Card title="Final values" hint="last, min to max; committed history" actions={<Button onClick={save}>Export CSV</Button>} flush>
      <Scrolling label="Final values">
        <Heads first="Metric" runs={props.runs} />
        <tbody>
          {rows.map((row) => (
            <tr key={row.name}>
              <th scope="row" className={`${CELL} foreign sticky left-0 bg-surface text-left font-normal`}>{label(row.name)}{isHistogram(row.name) && <span className="text-faint"> (median)</span>}</th>
              {row.values.map((value, i) => (
                <td key={props.runs[i]?.id ?? i} className={`${CELL} text-right whitespace-nowrap`} title={value ? `at step ${count(value.step)}` : undefined}>
                  {value === null ? <span className="text-faint">–</span> : <><span className="font-medium">{value.last === null ? "NaN/Inf" : valueText(row.name, value.last)}</span> <span className="text-sm text-faint">{valueText(row.name, value.min)} to {valueText(row.name, value.max)}</span></>}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </Scrolling>
    </Card>
  );
}

function Configurations(props: { runs: readonly PanelRun[]; configs: readonly (readonly (readonly [string, string])[])[]; all: boolean; onAll: (all: boolean) => void }) {
  const rows = differences(props.configs);
  const differing = rows.filter((row) => row.differs);
  const shown = props.all ? rows : differing;
  const unknown = props.runs.filter((_, i) => props.configs[i]?.length === 0).map((run) => run.label);
  return (
    <Card
      title="Configuration"
      hint={rows.length === 0 ? undefined : `${count(differing.length)} of ${plural(rows.length, "setting")} differ`}
      actions={rows.length > 0 && <label className="inline-flex items-center gap-1.5"><input type="checkbox" className="size-4 accent-accent" checked={!props.all} onChange={(event) => props.onAll(!event.target.checked)} />Differences only</label>}
      flush
    >
      {unknown.length > 0 && <p className="px-4 pb-2 text-muted">Unknown for {unknown.join(", ")}: pass it to <code className="font-mono text-sm">strata.elastic(…, config=&#123;…&#125;)</code>.</p>}
      {rows.length > 0 && shown.length === 0 && <p className="px-4 pb-4 text-muted">No differences</p>}
      {shown.length > 0 && (
        <Scrolling label="Configuration">
          <Heads first="Setting" runs={props.runs} />
          <tbody>
            {shown.map((row) => (
              <tr key={row.key}>
                <th scope="row" className={`${CELL} foreign sticky left-0 bg-surface text-left font-normal`}>{row.key}{row.differs && <span className="sr-only"> (differs)</span>}</th>
                {row.values.map((value, i) => <td key={props.runs[i]?.id ?? i} className={`${CELL} foreign max-w-64 truncate text-right ${row.differs ? "font-medium" : "text-muted"}`} title={value ?? undefined}>{value ?? <span className="text-faint">–</span>}</td>)}
              </tr>
            ))}
          </tbody>
        </Scrolling>
      )}
    </Card>
  );
}
