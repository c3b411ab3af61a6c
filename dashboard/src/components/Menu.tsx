/** A menu button. Arrow keys move, Escape or moving the focus away closes. */

import { useEffect, useRef, useState, type KeyboardEvent, type ReactNode } from "react";

import { IconButton } from "./controls";

export interface MenuItem {
  label: string;
  onSelect: () => void;
  disabled?: boolean;
}

export function Menu(props: { label: string; icon: ReactNode; items: readonly MenuItem[]; className?: string }) {
  const [open, setOpen] = useState(false);
  const root = useRef<HTMLDivElement>(null);
  const items = () => [...(root.current?.querySelectorAll<HTMLElement>("[role=menuitem]:not([disabled])") ?? [])];
  useEffect(() => {
    if (!open) return;
    items()[0]?.focus();
    const leave = (event: PointerEvent) => { if (!root.current?.contains(event.target as Node)) setOpen(false); };
    document.addEventListener("pointerdown", leave);
    return () => document.removeEventListener("pointerdown", leave);
  }, [open]);
  const close = () => {
    setOpen(false);
    root.current?.querySelector<HTMLElement>("[aria-haspopup]")?.focus();
  };
  const keys = (event: KeyboardEvent) => {
    if (!open) return;
    if (event.key === "Escape") close();
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const all = items();
      const at = all.indexOf(document.activeElement as HTMLElement);
      all[(at + (event.key === "ArrowDown" ? 1 : -1) + all.length) % all.length]?.focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <div ref={root} className={`relative ${props.className ?? ""}`} onKeyDown={keys} onBlur={(event) => { if (!event.currentTarget.contains(event.relatedTarget)) setOpen(false); }}>
      <IconButton label={props.label} aria-haspopup="menu" aria-expanded={open} className="size-7" onClick={() => setOpen(!open)}>{props.icon}</IconButton>
      {open && (
        <div role="menu" aria-label={props.label} className="absolute top-full right-0 z-30 mt-1 flex min-w-44 flex-col rounded-md border bg-surface py-1 shadow-lg">
          {props.items.map((item) => (
            <button
              key={item.label}
              type="button"
              role="menuitem"
              disabled={item.disabled}
              tabIndex={-1}
              className="px-3 py-1.5 text-left whitespace-nowrap hover:bg-hover focus-visible:-outline-offset-2 disabled:opacity-50"
              onClick={() => { close(); item.onSelect(); }}
            >
              {item.label}
            </button>
          ))}
        </div>
      )}
    </div>
  );
}
