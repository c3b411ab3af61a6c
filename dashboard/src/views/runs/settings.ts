/** Chart settings. They are in the URL, so that a link shows the same. */

import { useCallback, useMemo } from "react";

import { useFilters, type Search } from "../../search";
import { parseZoom, type Axis, type Zoom } from "./curves";

export interface Settings {
  axis: Axis;
  log: boolean;
  /** 0 to 0.99 */
  smooth: number;
  marks: boolean;
  zoom: Zoom | null;
  /** Filter on metric names. */
  query: string;
}

export function settingsOf(search: Search): Settings {
  const smooth = Number(search["smooth"]);
  return {
    axis: search["x"] === "wall" || search["x"] === "relative" ? search["x"] : "step",
    log: search["log"] === "1",
    smooth: smooth > 0 && smooth < 1 ? smooth : 0,
    marks: search["marks"] !== "0",
    zoom: parseZoom(search["zoom"]),
    query: search["q"] ?? "",
  };
}

export type Change = (change: Partial<Settings>) => void;

export function useSettings(): [Settings, Change] {
  const [search, set] = useFilters();
  const { x, log, smooth, marks, zoom, q } = search;
  const settings = useMemo(() => settingsOf({ x, log, smooth, marks, zoom, q }), [x, log, smooth, marks, zoom, q]);
  const change = useCallback<Change>(
    (next) => {
      const written: Search = {};
      if (next.axis !== undefined) written["x"] = next.axis === "step" ? undefined : next.axis;
      if (next.log !== undefined) written["log"] = next.log ? "1" : undefined;
      if (next.smooth !== undefined) written["smooth"] = next.smooth > 0 ? String(next.smooth) : undefined;
      if (next.marks !== undefined) written["marks"] = next.marks ? undefined : "0";
      if (next.zoom !== undefined) written["zoom"] = next.zoom === null ? undefined : `${next.zoom[0]}-${next.zoom[1]}`;
      if (next.query !== undefined) written["q"] = next.query || undefined;
      // A zoom adds a history entry to go back from; a slider does not.
      set(written, { replace: next.zoom === undefined });
    },
    [set],
  );
  return [settings, change];
}

/** Names that contain all parts of the query, in any order. */
export function matching(names: readonly string[], query: string): string[] {
  const parts = query.toLowerCase().split(/\s+/).filter(Boolean);
  return names.filter((name) => parts.every((part) => name.toLowerCase().includes(part)));
}
