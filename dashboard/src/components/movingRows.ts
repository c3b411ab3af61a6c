/** Rows of live data move. When another one comes under the pointer before the button is released, a browser clicks neither. */

import { useMemo, useRef, type MouseEvent, type PointerEvent } from "react";

/** A pointer that has moved further was selecting text. */
const STILL_PX = 4;

interface Handlers {
  onPointerDown: (event: PointerEvent) => void;
  onClick: (event: MouseEvent) => void;
}

/** Handlers for the parent of rows (`data-row`): the row that was pressed is clicked, wherever it has moved. */
export function useMovingRows(): Handlers {
  const pressed = useRef<{ target: Element; x: number; y: number } | null>(null);
  return useMemo(
    () => ({
      onPointerDown: ({ target, clientX: x, clientY: y }) => {
        pressed.current = target instanceof Element ? { target, x, y } : null;
      },
      onClick: (event) => {
        const press = pressed.current;
        pressed.current = null;
        if (press === null || Math.hypot(event.clientX - press.x, event.clientY - press.y) > STILL_PX) return;
        const row = press.target.closest("[data-row]");
        if (row?.isConnected && !row.contains(event.target as Node)) press.target.dispatchEvent(new globalThis.MouseEvent("click", { bubbles: true, cancelable: true }));
      },
    }),
    [],
  );
}
