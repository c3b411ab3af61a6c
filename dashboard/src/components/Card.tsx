import type { ReactNode } from "react";

/** A titled surface. */
export function Card(props: { title?: ReactNode; hint?: ReactNode; actions?: ReactNode; className?: string; flush?: boolean; children: ReactNode }) {
  return (
    <section className={`flex min-w-0 flex-col rounded-lg border bg-surface ${props.className ?? ""}`}>
      {(props.title || props.actions) && (
        <header className="flex min-h-11 flex-wrap items-center gap-x-3 gap-y-1 px-4 pt-2.5 pb-1">
          {props.title && <h2 className="font-medium">{props.title}</h2>}
          {props.hint && <span className="text-sm text-faint">{props.hint}</span>}
          {props.actions && <div className="ml-auto flex items-center gap-2">{props.actions}</div>}
        </header>
      )}
      <div className={`min-h-0 min-w-0 flex-1 ${props.flush ? "" : "px-4 pt-1 pb-4"}`}>{props.children}</div>
    </section>
  );
}

/** One key number with its unit and a hint. */
export function Stat(props: { label: string; value: ReactNode; unit?: string; hint?: ReactNode; children?: ReactNode }) {
  return (
    <section className="flex min-w-0 flex-col gap-1 rounded-lg border bg-surface px-4 py-3">
      <h2 className="text-sm text-muted">{props.label}</h2>
      <p className="flex flex-wrap items-baseline gap-x-1.5">
        <span className="text-2xl font-semibold tracking-tight whitespace-nowrap">{props.value}</span>
        {props.unit && <span className="text-sm text-faint">{props.unit}</span>}
      </p>
      {props.hint && <p className="text-sm text-faint">{props.hint}</p>}
      {props.children}
    </section>
  );
}

/** Label-value pairs. */
export function Facts(props: { items: readonly (readonly [label: string, value: ReactNode])[]; columns?: 1 | 2 }) {
  return (
    <dl className={`grid gap-x-8 gap-y-2 ${props.columns === 2 ? "sm:grid-cols-2" : ""}`}>
      {props.items.map(([label, value]) => (
        <div key={label} className="flex min-w-0 items-baseline justify-between gap-4">
          <dt className="shrink-0 text-muted">{label}</dt>
          <dd className="foreign min-w-0 truncate text-right" title={typeof value === "string" ? value : undefined}>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** A progress or usage bar; its number is always shown beside it. */
export function Meter(props: { value: number | null; max?: number; tone?: "accent" | "good" | "warn" | "bad" | "busy"; label: string; className?: string }) {
  const max = props.max ?? 100;
  const share = props.value === null || max <= 0 ? 0 : Math.min(1, Math.max(0, props.value / max));
  const tones = { accent: "bg-accent", good: "bg-good", warn: "bg-warn", bad: "bg-bad", busy: "bg-busy" };
  return (
    <div
      role="meter"
      aria-label={props.label}
      aria-valuemin={0}
      aria-valuemax={max}
      aria-valuenow={Math.min(max, props.value ?? 0)}
      aria-valuetext={props.value === null ? "unknown" : undefined}
      className={`h-1.5 w-full overflow-hidden rounded-full bg-hover ${props.className ?? ""}`}
    >
      <div className={`h-full rounded-full transition-[width] duration-500 ${tones[props.tone ?? "accent"]}`} style={{ width: `${share * 100}%` }} />
    </div>
  );
}
