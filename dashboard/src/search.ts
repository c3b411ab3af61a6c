/** Filters are stored in the URL: `?level=warn&q=loss`. Every value is text; empty ones are omitted. */

import { useNavigate, useSearch } from "@tanstack/react-router";
import { useCallback } from "react";

export type Search = Record<string, string | undefined>;

export function parseSearch(text: string): Search {
  return Object.fromEntries(new URLSearchParams(text));
}

export function stringifySearch(search: Record<string, unknown>): string {
  const pairs = Object.entries(search).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return pairs.length === 0 ? "" : `?${new URLSearchParams(pairs.map(([key, value]) => [key, String(value)])).toString()}`;
}

/** The filters of this page and a setter, which may take a function of the latest ones. Typing replaces the history entry, selecting adds one. */
export function useFilters(): [Search, (change: Search | ((before: Search) => Search), how?: { replace?: boolean }) => void] {
  const search = useSearch({ strict: false }) as Search;
  const navigate = useNavigate();
  const change = useCallback(
    (next: Search | ((before: Search) => Search), how?: { replace?: boolean }) => {
      void navigate({ to: ".", search: (before: Search) => ({ ...before, ...(typeof next === "function" ? next(before) : next) }), replace: how?.replace ?? false } as never);
    },
    [navigate],
  );
  return [search, change];
}
