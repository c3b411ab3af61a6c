/** Rows of live data move: another one may come under the pointer before the button is released, and a browser then clicks neither. */

import { useMemo, useRef, type MouseEvent, type PointerEvent } from "react";

/** Further than this it was a selection of text. */
const STILL_PX = 4;

interface Handlers {
  onPointerDown: (event: PointerEvent) => void;
  onClick: (event: MouseEvent) => void;
}

/** Handlers for what holds the rows (`data-row`): the row that was pressed is clicked, wherever it is by then. */
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
