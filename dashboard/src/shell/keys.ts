/** Global keyboard shortcuts, inactive inside fields. */

import { useNavigate } from "@tanstack/react-router";
import { useEffect } from "react";

import { VIEWS } from "./views";

export const KEYS: readonly (readonly [keys: readonly string[], meaning: string])[] = [
  [["⌘ K", "Ctrl K"], "Command palette"],
  [["/"], "Search this view"],
  [["j", "k"], "Next and previous row"],
  [["Enter"], "Open row"],
  [["Esc"], "Close, or leave a field"],
  [["g", "letter"], `Go to a view: ${VIEWS.map((v) => `${v.key} ${v.label}`).join(", ")}`],
  [["t"], "Toggle theme"],
  [["?"], "Keyboard shortcuts"],
];

function inField(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName));
}

export function useKeys(does: { palette: () => void; help: () => void; theme: () => void }): void {
  const navigate = useNavigate();
  useEffect(() => {
    let goingMs = 0;
    const onKey = (event: KeyboardEvent) => {
      if ((event.metaKey || event.ctrlKey) && event.key.toLowerCase() === "k") {
        event.preventDefault();
        does.palette();
        return;
      }
      if (event.key === "Escape" && inField(event.target)) {
        (event.target as HTMLElement).blur();
        return;
      }
      if (event.metaKey || event.ctrlKey || event.altKey || inField(event.target)) return;
      if (document.querySelector('[role="dialog"]')) return;
      if (Date.now() - goingMs < 1_200) {
        goingMs = 0;
        const view = VIEWS.find((v) => v.key === event.key);
        if (view) {
          event.preventDefault();
          void navigate({ to: view.to });
          return;
        }
      }
      switch (event.key) {
        case "g":
          goingMs = Date.now();
          return;
        case "/": {
          const field = document.querySelector<HTMLInputElement>("[data-search]");
          if (field) field.focus();
          else does.palette();
          break;
        }
        case "?":
          does.help();
          break;
        case "t":
          does.theme();
          break;
        case "j":
        case "k":
          step(event.key === "j" ? 1 : -1);
          break;
        default:
          return;
      }
      event.preventDefault();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [does, navigate]);
}

/** Rows are marked with `data-row`; a virtual list renders more when the focus comes near its edge, and a frame or two after it scrolled. */
function step(by: 1 | -1, frames = 10): void {
  const rows = [...document.querySelectorAll<HTMLElement>("main [data-row]")];
  if (rows.length === 0) return;
  rows.sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top);
  const at = rows.indexOf(document.activeElement as HTMLElement);
  const next = at < 0 ? (by > 0 ? rows.find(isSeen) : rows.findLast(isSeen)) : rows[Math.min(rows.length - 1, Math.max(0, at + by))];
  if (next) {
    next.focus();
    next.scrollIntoView({ block: "nearest" });
  } else if (frames > 0) {
    requestAnimationFrame(() => step(by, frames - 1));
  }
}

/** A virtual list renders some rows outside its viewport. */
function isSeen(row: HTMLElement): boolean {
  const frame = (row.closest("[data-rows]") ?? document.documentElement).getBoundingClientRect();
  const { top, bottom } = row.getBoundingClientRect();
  return top >= frame.top - 1 && bottom <= frame.bottom + 1;
}
