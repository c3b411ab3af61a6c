/** Command palette: views, runs, workers, incidents, datasets and actions. */

import { useNavigate } from "@tanstack/react-router";
import { Activity, Boxes, Database, FlaskConical, Play, Siren, SunMoon, type LucideIcon } from "lucide-react";
import { Dialog as Radix } from "radix-ui";
import { useEffect, useId, useMemo, useRef, useState } from "react";

import { Backdrop } from "../components/Dialog";
import { DEMO_ONLY, setMode, setTheme, useMode } from "../mode";
import { may } from "../session";
import { runsOf } from "../state/runs";
import { getState } from "../state/store";
import { viewsFor } from "./views";

interface Item {
  id: string;
  label: string;
  kind: string;
  icon: LucideIcon;
  run: () => void;
}

const SHOWN = 50;

export function Palette(props: { open: boolean; onClose: () => void }) {
  return (
    <Radix.Root open={props.open} onOpenChange={(open) => { if (!open) props.onClose(); }}>
      <Radix.Portal>
        <Backdrop />
        <Radix.Content aria-describedby={undefined} className="fixed top-[12vh] left-1/2 z-50 flex max-h-[70vh] w-[94vw] max-w-xl -translate-x-1/2 flex-col overflow-hidden rounded-xl border bg-surface shadow-2xl focus:outline-none">
          <Radix.Title className="sr-only">Command palette</Radix.Title>
          <Body onClose={props.onClose} />
        </Radix.Content>
      </Radix.Portal>
    </Radix.Root>
  );
}

function Body({ onClose }: { onClose: () => void }) {
  const navigate = useNavigate();
  const mode = useMode();
  const listId = useId();
  const list = useRef<HTMLUListElement>(null);
  const [query, setQuery] = useState("");
  const [at, setAt] = useState(0);

  const items = useMemo<Item[]>(() => {
    const state = getState();
    const go = (to: string, search: Record<string, string> = {}) => () => void navigate({ to, search } as never);
    const job = state.session?.job_id ?? null;
    const operates = job === null && may(state.session, "operator");
    return [
      ...viewsFor(job).map((v): Item => ({ id: v.to, label: v.label, kind: "view", icon: v.icon, run: go(v.to) })),
      ...(operates
        ? [
            { id: "start", label: "Start task", kind: "action", icon: Play, run: go("/runs", { start: "1" }) },
            { id: "register", label: "Register dataset", kind: "action", icon: Database, run: go("/data", { register: "1" }) },
          ]
        : []),
      { id: "dark", label: "Dark theme", kind: "action", icon: SunMoon, run: () => setTheme("dark") },
      { id: "light", label: "Light theme", kind: "action", icon: SunMoon, run: () => setTheme("light") },
      ...(DEMO_ONLY ? [] : [{ id: "mode", label: mode === "demo" ? "Exit demo mode" : "Demo mode", kind: "action", icon: FlaskConical, run: () => setMode(mode === "demo" ? "live" : "demo") }]),
      ...runsOf(state).map(({ id: job, name }): Item => ({ id: `run ${job}`, label: name === job ? job : `${name} (${job})`, kind: "run", icon: Activity, run: () => void navigate({ to: "/runs/$job", params: { job } }) })),
      ...[...state.workers.keys()].map((w): Item => ({ id: `worker ${w}`, label: w, kind: "worker", icon: Boxes, run: go("/workers", { worker: w }) })),
      ...state.incidents.map((i): Item => ({ id: `incident ${i.id}`, label: `${i.id}: ${i.text}`, kind: "incident", icon: Siren, run: go("/incidents", { incident: String(i.id) }) })),
      ...[...state.datasets.values()].map((d): Item => ({ id: `dataset ${d.id}`, label: d.id, kind: "dataset", icon: Database, run: go("/data", { dataset: d.id }) })),
    ];
  }, [navigate, mode]);

  const found = useMemo(() => {
    const parts = query.toLowerCase().split(/\s+/).filter(Boolean);
    return items.filter((i) => parts.every((p) => `${i.kind} ${i.label}`.toLowerCase().includes(p))).slice(0, SHOWN);
  }, [items, query]);

  const choose = (item: Item | undefined) => {
    if (!item) return;
    onClose();
    item.run();
  };
  useEffect(() => {
    list.current?.children[at]?.scrollIntoView({ block: "nearest" });
  }, [at]);

  return (
    <>
      <input
        role="combobox"
        aria-expanded
        aria-controls={listId}
        aria-activedescendant={found[at] ? `${listId}-${at}` : undefined}
        aria-label="Search views, runs, workers, incidents and datasets"
        placeholder="Search views, runs, workers, incidents, datasets …"
        autoFocus
        value={query}
        onChange={(event) => {
          setQuery(event.target.value);
          setAt(0);
        }}
        onKeyDown={(event) => {
          if (event.key === "ArrowDown") setAt(Math.min(found.length - 1, at + 1));
          else if (event.key === "ArrowUp") setAt(Math.max(0, at - 1));
          else if (event.key === "Enter") choose(found[at]);
          else return;
          event.preventDefault();
        }}
        className="h-12 border-b bg-transparent px-4 text-lg outline-none focus-visible:outline-none"
      />
      <ul ref={list} id={listId} role="listbox" aria-label="Results" className="min-h-0 flex-1 overflow-y-auto p-2">
        {found.map((item, i) => (
          <li
            key={item.id}
            id={`${listId}-${i}`}
            role="option"
            aria-selected={i === at}
            onMouseMove={() => setAt(i)}
            onClick={() => choose(item)}
            className={`flex h-9 cursor-pointer items-center gap-3 rounded-md px-2.5 ${i === at ? "bg-accent-soft" : ""}`}
          >
            <item.icon aria-hidden className="size-4 shrink-0 text-muted" />
            <span className="foreign min-w-0 flex-1 truncate">{item.label}</span>
            <span className="text-sm text-muted">{item.kind}</span>
          </li>
        ))}
        {found.length === 0 && <li role="option" aria-selected={false} aria-disabled className="px-3 py-6 text-center text-muted">No results</li>}
      </ul>
    </>
  );
}
