/** Buttons and fields: one look, one size, always with an accessible name. */

import type { ButtonHTMLAttributes, ComponentProps, KeyboardEvent, ReactNode, SelectHTMLAttributes } from "react";
import { useId } from "react";

import type { Role } from "../api/types";
import { useRefusal } from "../session";

type ButtonLook = "plain" | "primary" | "danger" | "ghost";

const LOOKS: Record<ButtonLook, string> = {
  plain: "border bg-surface hover:bg-hover",
  primary: "bg-accent text-on-accent hover:opacity-90",
  danger: "border border-bad/50 text-bad hover:bg-bad-soft",
  ghost: "text-muted hover:bg-hover hover:text-ink",
};

interface ButtonProps extends ButtonHTMLAttributes<HTMLButtonElement> {
  look?: ButtonLook;
  /** Required role. Without it the button is disabled and says why; it stays focusable for keyboard users. */
  needs?: Role;
  /** Why the action is not available; disables the button in the same way. */
  unless?: string | undefined;
}

export function Button({ look = "plain", className = "", needs, unless, ...rest }: ButtonProps) {
  const refusal = useRefusal(needs) ?? unless;
  const refused = refusal === undefined ? {} : { "aria-disabled": true, title: refusal, type: "button" as const, onClick: undefined };
  return (
    <button
      type="button"
      className={`inline-flex h-8 shrink-0 items-center justify-center gap-1.5 whitespace-nowrap rounded-md px-3 font-medium transition-colors disabled:opacity-50 aria-disabled:cursor-not-allowed aria-disabled:opacity-50 ${LOOKS[look]} ${className}`}
      {...rest}
      {...refused}
    />
  );
}

/** An icon-only button with an accessible name. */
export function IconButton({ label, className = "", ...rest }: ButtonHTMLAttributes<HTMLButtonElement> & { label: string }) {
  return (
    <button
      type="button"
      aria-label={label}
      title={label}
      className={`inline-flex size-8 shrink-0 items-center justify-center rounded-md text-muted transition-colors hover:bg-hover hover:text-ink disabled:opacity-50 ${className}`}
      {...rest}
    />
  );
}

const FIELD = "h-8 min-w-0 rounded-md border border-edge/60 bg-surface px-2.5 hover:border-edge focus:border-accent";

export function Input({ className = "", ...rest }: ComponentProps<"input">) {
  return <input className={`${FIELD} ${className}`} autoComplete="off" spellCheck={false} {...rest} />;
}

export function Select({ className = "", ...rest }: SelectHTMLAttributes<HTMLSelectElement>) {
  return <select className={`${FIELD} max-w-full pr-7 ${className}`} {...rest} />;
}

/** Filter by run. Shown where there is a choice, and always while one is chosen, known or not: no filter is invisible. */
export function RunFilter(props: { runs: readonly string[]; value: string | undefined; onChange: (run: string | undefined) => void }) {
  const { runs, value } = props;
  if (runs.length < 2 && !value) return null;
  return (
    <Select aria-label="Run" className="max-w-48" value={value ?? ""} onChange={(event) => props.onChange(event.target.value || undefined)}>
      <option value="">All runs</option>
      {(value && !runs.includes(value) ? [value, ...runs] : runs).map((id) => <option key={id} value={id}>{id}</option>)}
    </Select>
  );
}

/** A labelled field with a hint or an error. */
export function Field(props: { label: string; hint?: ReactNode; error?: string | undefined; children: (ids: { id: string; "aria-describedby"?: string; "aria-invalid"?: true }) => ReactNode }) {
  const id = useId();
  const note = props.error ?? props.hint;
  return (
    <div className="flex flex-col gap-1">
      <label htmlFor={id} className="text-sm font-medium">{props.label}</label>
      {props.children({ id, ...(note ? { "aria-describedby": `${id}-note` } : {}), ...(props.error ? { "aria-invalid": true as const } : {}) })}
      {note && <p id={`${id}-note`} className={`text-sm ${props.error ? "text-bad" : "text-faint"}`}>{note}</p>}
    </div>
  );
}

/** Segmented control (radio group). One tab stop; arrow keys select. */
export function Segmented<T extends string>(props: { label: string; value: T; options: readonly (readonly [value: T, label: ReactNode])[]; onChange: (value: T) => void }) {
  const step = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const { options } = props;
    const next = (options.findIndex(([value]) => value === props.value) + by + options.length) % options.length;
    props.onChange(options[next]![0]);
    (event.currentTarget.children[next] as HTMLElement).focus();
  };
  return (
    <div role="radiogroup" aria-label={props.label} onKeyDown={step} className="inline-flex h-8 items-center gap-0.5 self-start rounded-md border bg-raised p-0.5">
      {props.options.map(([value, label]) => (
        <button
          key={value}
          type="button"
          role="radio"
          aria-checked={value === props.value}
          tabIndex={value === props.value ? 0 : -1}
          onClick={() => props.onChange(value)}
          className={`inline-flex h-full items-center gap-1.5 rounded-[5px] px-2.5 text-sm font-medium transition-colors ${value === props.value ? "bg-surface text-ink shadow-[0_0_0_1px_var(--color-line)]" : "text-muted hover:text-ink"}`}
        >
          {label}
        </button>
      ))}
    </div>
  );
}

export function Kbd(props: { children: ReactNode }) {
  return <kbd className="rounded border bg-raised px-1.5 py-px font-sans text-xs text-muted">{props.children}</kbd>;
}
