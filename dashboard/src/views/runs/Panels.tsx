/** Metric charts with shared settings: axis, scale, smoothing, zoom. The layout is stored in the browser. */

import { Plus, RotateCcw, Search as SearchIcon, SlidersHorizontal, ZoomOut } from "lucide-react";
import { memo, useEffect, useMemo, useRef, useState, type ReactNode } from "react";

import type { MetricSummary } from "../../api/types";
import { Button, IconButton, Input, Segmented } from "../../components/controls";
import { Dialog } from "../../components/Dialog";
import { Empty } from "../../components/states";
import { count, plural } from "../../format";
import type { Axis } from "./curves";
import { isHistogram, label } from "./histograms";
import { EMPTY, load, moved, panelsOf, save, togglePin, usualOrder, withoutPanel, withPanel, type Layout, type Scope } from "./layout";
import { EAGER, Panel, preloadPlot, type PanelRun } from "./Panel";
import { matching, type Change, type Settings } from "./settings";

const AXES: readonly (readonly [Axis, string])[] = [["step", "Step"], ["wall", "Time"], ["relative", "Relative"]];
const NAMES_SHOWN = 200;

export const GRID = "grid grid-cols-[repeat(auto-fill,minmax(min(100%,22rem),1fr))] gap-3";

export function Toolbar(props: { settings: Settings; change: Change; lastStep: number; children?: ReactNode; hasMarks?: boolean }) {
  const { settings, change } = props;
  const [open, setOpen] = useState(false);
  return (
    <div className="z-20 -mx-1 flex flex-wrap items-center gap-x-3.5 gap-y-2 border-b bg-bg px-1 py-2 md:sticky md:top-0" role="group" aria-label="Chart settings">
      <label className="relative min-w-0 flex-1 md:flex-none">
        <SearchIcon aria-hidden className="pointer-events-none absolute top-2 left-2.5 size-4 text-faint" />
        <Input type="search" data-search aria-label="Filter metrics" placeholder="Filter metrics" className="w-full pl-8 md:w-40" value={settings.query} onChange={(event) => change({ query: event.target.value })} />
      </label>
      <IconButton label="Chart settings" aria-expanded={open} className="border md:hidden" onClick={() => setOpen(!open)}><SlidersHorizontal aria-hidden className="size-4" /></IconButton>
      <div className={`${open ? "flex" : "hidden"} order-last w-full flex-wrap items-center gap-x-3.5 gap-y-2 md:order-none md:contents`}>
        <Segmented label="X axis" value={settings.axis} options={AXES} onChange={(axis) => change({ axis })} />
        <Smoothing value={settings.smooth} onChange={(smooth) => change({ smooth })} />
        <Check label="Log scale" checked={settings.log} onChange={(log) => change({ log })} />
        {props.hasMarks && <Check label="Markers" title="Failures and checkpoints" checked={settings.marks} onChange={(marks) => change({ marks })} />}
        <ZoomFields key={settings.zoom?.join("-") ?? ""} settings={settings} change={change} lastStep={props.lastStep} />
      </div>
      {settings.zoom && <IconButton label="Reset zoom" className="border" onClick={() => change({ zoom: null })}><ZoomOut aria-hidden className="size-4" /></IconButton>}
      <div className="flex items-center gap-2 md:ml-auto">{props.children}</div>
    </div>
  );
}

function Check(props: { label: string; checked: boolean; onChange: (checked: boolean) => void; title?: string }) {
  return (
    <label className="inline-flex h-8 cursor-pointer items-center gap-1.5 whitespace-nowrap" title={props.title}>
      <input type="checkbox" className="size-4 accent-accent" checked={props.checked} onChange={(event) => props.onChange(event.target.checked)} />
      {props.label}
    </label>
  );
}

/** The number follows the slider; charts and URL follow with a short delay. */
function Smoothing(props: { value: number; onChange: (value: number) => void }) {
  const [value, setValue] = useState(props.value);
  const timer = useRef<ReturnType<typeof setTimeout>>(undefined);
  useEffect(() => setValue(props.value), [props.value]);
  useEffect(() => () => clearTimeout(timer.current), []);
  return (
    <label className="inline-flex h-8 items-center gap-2 whitespace-nowrap">
      Smoothing
      <input
        type="range"
        min={0}
        max={0.99}
        step={0.01}
        value={value}
        className="w-20 accent-accent"
        onChange={(event) => {
          const next = Number(event.target.value);
          setValue(next);
          clearTimeout(timer.current);
          timer.current = setTimeout(() => props.onChange(next), 60);
        }}
      />
      <output className="w-8 text-sm text-muted">{value.toFixed(2)}</output>
    </label>
  );
}

/** Zoom by keyboard. */
function ZoomFields(props: { settings: Settings; change: Change; lastStep: number }) {
  const { zoom } = props.settings;
  const [from, setFrom] = useState(zoom === null ? "" : String(zoom[0]));
  const [to, setTo] = useState(zoom === null ? "" : String(zoom[1]));
  const apply = () => {
    const first = from.trim() === "" ? 0 : Number(from.replaceAll(",", ""));
    const last = to.trim() === "" ? Math.max(props.lastStep, first + 1) : Number(to.replaceAll(",", ""));
    if (Number.isInteger(first) && Number.isInteger(last) && first >= 0 && last > first && (from !== "" || to !== "")) props.change({ zoom: [first, last] });
  };
  return (
    <form className="inline-flex items-center gap-1.5" onSubmit={(event) => { event.preventDefault(); apply(); }} onBlur={(event) => { if (!event.currentTarget.contains(event.relatedTarget) && (from !== (zoom?.[0].toString() ?? "") || to !== (zoom?.[1].toString() ?? ""))) apply(); }}>
      <span className="text-muted">Steps</span>
      <Input aria-label="First step" inputMode="numeric" placeholder="0" className="w-20" value={from} onChange={(event) => setFrom(event.target.value)} />
      <span aria-hidden className="text-muted">–</span>
      <Input aria-label="Last step" inputMode="numeric" placeholder={count(props.lastStep)} className="w-20" value={to} onChange={(event) => setTo(event.target.value)} />
      <button type="submit" className="sr-only">Zoom</button>
    </form>
  );
}

// --- layout -----------------------------------------------------------------------------------------------------

export interface Kept {
  layout: Layout;
  scope: Scope;
  change: (next: Layout) => void;
  setScope: (scope: Scope) => void;
  reset: () => void;
}

/** The layout of a run, stored in this browser. */
export function useLayout(run: string): Kept {
  const [kept, setKept] = useState(() => load(run));
  return useMemo(
    () => ({
      ...kept,
      change: (layout) => { save(run, kept.scope, layout); setKept({ scope: kept.scope, layout }); },
      setScope: (scope) => {
        // Switching back to the shared layout removes the run's own.
        save(run, "run", scope === "run" ? kept.layout : null);
        setKept(load(run));
      },
      reset: () => { save(run, kept.scope, kept.scope === "run" ? EMPTY : null); setKept({ scope: kept.scope, layout: EMPTY }); },
    }),
    [run, kept],
  );
}

export const Panels = memo(function Panels(props: { run: PanelRun; metrics: readonly MetricSummary[]; kept: Kept; settings: Settings; change: Change }) {
  const { run, metrics, kept, settings, change } = props;
  const { layout } = kept;
  const [adding, setAdding] = useState(false);
  useEffect(preloadPlot, []);
  const names = useMemo(() => metrics.map((m) => m.name), [metrics]);
  const bad = useMemo(() => new Map(metrics.map((m) => [m.name, m.nonfinite])), [metrics]);
  const all = useMemo(() => panelsOf(names, layout), [names, layout]);
  const shown = useMemo(() => matching(all, settings.query), [all, settings.query]);
  const runs = useMemo(() => [run], [run]);
  const lastStep = Math.max(0, ...metrics.map((m) => m.last_step));
  const left = names.filter((name) => !all.includes(name));
  const pinned = shown.filter((name) => layout.pinned.includes(name));
  const others = shown.filter((name) => !layout.pinned.includes(name));
  const grid = (group: readonly string[], before: number) => (
    <div className={GRID}>
      {group.map((name, i) => (
        <Panel
          key={name}
          name={name}
          runs={runs}
          settings={settings}
          change={change}
          nonfinite={bad.get(name) ?? 0}
          eager={before + i < EAGER}
          actions={{
            isPinned: layout.pinned.includes(name),
            onPin: () => kept.change(togglePin(layout, name)),
            onRemove: () => kept.change(withoutPanel(layout, name)),
            before: group[i - 1] ?? null,
            after: group[i + 1] ?? null,
            onMove: (dragged, target) => kept.change(moved(layout, all, dragged, target)),
          }}
        />
      ))}
    </div>
  );
  return (
    <div className="flex flex-col gap-3">
      <Toolbar settings={settings} change={change} lastStep={lastStep} hasMarks>
        <Button onClick={() => setAdding(true)} title={`${count(all.length)} of ${plural(names.length, "metric")} shown`}><Plus aria-hidden className="size-4" />Panels</Button>
      </Toolbar>
      {pinned.length > 0 && <section aria-label="Pinned" className="flex flex-col gap-2"><h2 className="text-sm font-medium text-muted">Pinned</h2>{grid(pinned, 0)}</section>}
      {pinned.length > 0 && others.length > 0 && <h2 className="text-sm font-medium text-muted">All</h2>}
      {others.length > 0 && grid(others, pinned.length)}
      {shown.length === 0 && <Empty title={all.length === 0 ? "No panels" : "No matching panels"} action={all.length === 0 ? <Button onClick={() => setAdding(true)}>Add panels</Button> : <Button onClick={() => change({ query: "" })}>Clear filter</Button>} />}
      <Chooser open={adding} onClose={() => setAdding(false)} names={names} shown={all} left={left} kept={kept} />
    </div>
  );
});

/** All metrics of the run, to show or hide their panels. */
function Chooser(props: { open: boolean; onClose: () => void; names: readonly string[]; shown: readonly string[]; left: readonly string[]; kept: Kept }) {
  const { kept } = props;
  const [query, setQuery] = useState("");
  const found = matching(usualOrder(props.names), query);
  const visible = new Set(props.shown);
  return (
    <Dialog
      open={props.open}
      onClose={props.onClose}
      title="Panels"
      description={`${count(props.shown.length)} of ${plural(props.names.length, "metric")} shown. Saved in this browser.`}
      footer={
        <>
          <label className="mr-auto inline-flex items-center gap-1.5"><input type="checkbox" className="size-4 accent-accent" checked={kept.scope === "run"} onChange={(event) => kept.setScope(event.target.checked ? "run" : "all")} />For this run only</label>
          <Button onClick={kept.reset}><RotateCcw aria-hidden className="size-4" />Reset</Button>
          <Button look="primary" onClick={props.onClose}>Done</Button>
        </>
      }
    >
      <div className="flex flex-col gap-3">
        <Input type="search" aria-label="Search metrics" placeholder="Search metrics" value={query} onChange={(event) => setQuery(event.target.value)} />
        <ul className="max-h-[50vh] overflow-y-auto" aria-label="Metrics" tabIndex={0}>
          {found.slice(0, NAMES_SHOWN).map((name) => (
            <li key={name}>
              <label className="flex cursor-pointer items-center gap-2 rounded-md px-2 py-1.5 hover:bg-hover">
                <input type="checkbox" className="size-4 shrink-0 accent-accent" checked={visible.has(name)} onChange={(event) => kept.change(event.target.checked ? withPanel(kept.layout, name) : withoutPanel(kept.layout, name))} />
                <span className="foreign min-w-0 break-words">{label(name)}</span>{isHistogram(name) && <span className="text-sm text-faint">histogram</span>}
              </label>
            </li>
          ))}
          {found.length > NAMES_SHOWN && <li className="px-2 py-1.5 text-faint">and {count(found.length - NAMES_SHOWN)} more; refine the search</li>}
          {found.length === 0 && <li className="px-2 py-1.5 text-faint">No matching metrics</li>}
        </ul>
      </div>
    </Dialog>
  );
}
