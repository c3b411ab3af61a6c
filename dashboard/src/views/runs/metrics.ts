/**
 * Logged metrics of a run, fetched on demand: a summary of all metrics, and the curves of those in view. Panels that come
 * into view together share one request.
 */

import { useQueries, useQuery, useQueryClient, type UseQueryResult } from "@tanstack/react-query";
import { useCallback, useRef } from "react";

import { ApiError, get } from "../../api/client";
import type { Incident, LoggedRun, MetricCurves, RunCurves, RunInfo, RunMetrics } from "../../api/types";
import { NO_CURVE, within, type Zoom } from "./curves";
import { folded, isHistogram, partsOf, spreadOf, type Spread } from "./histograms";
import { useStore } from "../../state/store";

const REFETCH_MS = 5_000;
const GATHER_MS = 0;
/** Names per request: the first panels do not wait for the last ones. */
const NAMES_AT_ONCE = 10;

const path = (run: string) => `/runs/${encodeURIComponent(run)}`;

/** A run without logged metrics is not an error. */
async function unlessUnknown<T>(asked: Promise<T>): Promise<T | null> {
  return asked.catch((error: unknown) => {
    if (error instanceof ApiError && error.status === 404) return null;
    throw error;
  });
}

const RUNS_LISTED = 500;

/** Runs with logged metrics, newest first. */
export function useLoggedRuns(): readonly LoggedRun[] | undefined {
  const isBound = useStore((state) => state.session?.job_id != null); // The list covers the whole cluster.
  return useQuery({ queryKey: ["runs"], queryFn: ({ signal }) => get<LoggedRun[]>("/runs", { limit: RUNS_LISTED }, signal), refetchInterval: REFETCH_MS, enabled: !isBound }).data;
}

/** Whether a run, or a job's latest, has logged metrics; undefined while unknown. Avoids requests that would return 404. */
export function useIsLogged(id: string): boolean | undefined {
  const runs = useLoggedRuns();
  return runs && (runs.length >= RUNS_LISTED || runs.some((one) => one.run === id || one.jobs.includes(id)));
}

export function metricsQuery(run: string, live: boolean) {
  return {
    queryKey: ["run", run, "metrics"] as const,
    queryFn: ({ signal }: { signal: AbortSignal }) => unlessUnknown(get<RunMetrics>(`${path(run)}/metrics`, undefined, signal).then((found) => ({ ...found, metrics: folded(found.metrics) }))),
    refetchInterval: live ? REFETCH_MS : (false as const),
  };
}

export function infoQuery(run: string) {
  return {
    queryKey: ["run", run, "info"] as const,
    queryFn: ({ signal }: { signal: AbortSignal }) => unlessUnknown(get<RunInfo>(path(run), undefined, signal)),
    refetchInterval: REFETCH_MS * 3,
  };
}

/** Null: nothing logged. Undefined: not known yet. */
export function useRunMetrics(run: string, isLogged: boolean | undefined, live: boolean): { data: RunMetrics | null | undefined; error: unknown } {
  const found = useQuery({ ...metricsQuery(run, live), enabled: isLogged === true });
  return isLogged === false ? NOT_LOGGED : found;
}

export function useRunInfo(run: string, isLogged: boolean | undefined): { data: RunInfo | null | undefined; error: unknown } {
  const found = useQuery({ ...infoQuery(run), enabled: isLogged === true });
  return isLogged === false ? NOT_LOGGED : found;
}

const NOT_LOGGED = { data: null, error: null };

/** Newest first. */
export function useIncidents(job: string | null): readonly Incident[] {
  const { data } = useQuery({ queryKey: ["incidents", job], queryFn: ({ signal }) => get<Incident[]>("/incidents", { run: job }, signal), refetchInterval: REFETCH_MS, enabled: job !== null });
  return data ?? NONE;
}

const NONE: readonly Incident[] = [];

// --- curves -----------------------------------------------------------------------------------------------------

interface Request {
  names: string[];
  answer: Promise<Map<string, MetricCurves>>;
}

const gathering = new Map<string, Request>();

/** One metric of a run. */
export async function curveOf(run: string, name: string, zoom: Zoom | null, points: number): Promise<Spread> {
  if (!isHistogram(name)) return numberOf(run, name, zoom, points);
  return spreadOf(name, await Promise.all(partsOf(name).map((part) => numberOf(run, part, zoom, points))));
}

/** Requests for the same range in the same tick are batched. */
async function numberOf(run: string, name: string, zoom: Zoom | null, points: number): Promise<MetricCurves> {
  const key = JSON.stringify([run, zoom, points]);
  let request = gathering.get(key);
  if (!request || request.names.length >= NAMES_AT_ONCE) {
    const names: string[] = [];
    const created: Request = {
      names,
      answer: new Promise((resolve) => setTimeout(resolve, GATHER_MS)).then(async () => {
        if (gathering.get(key) === created) gathering.delete(key);
        const found = await get<RunCurves>(`${path(run)}/metrics/series`, { name: names, points, from: zoom?.[0], to: zoom?.[1] });
        return new Map(found.series.map((each) => [each.name, each]));
      }),
    };
    request = created;
    gathering.set(key, created);
  }
  if (!request.names.includes(name)) request.names.push(name);
  const found = (await request.answer).get(name);
  return found ?? { name, committed: NO_CURVE, abandoned: [] };
}

function curveQuery(run: string, name: string, zoom: Zoom | null, points: number) {
  return { queryKey: ["curve", run, name, zoom, points] as const, queryFn: () => curveOf(run, name, zoom, points) };
}

/** One metric of several runs, in their order. The previous curve stays until the new range is loaded. */
export function useCurves(runs: readonly { id: string; live: boolean }[], name: string, ask: { zoom: Zoom | null; points: number; enabled: boolean }) {
  const seen = useRef(new Map<string, Spread>());
  const found = useQueries({
    queries: runs.map((run) => ({
      ...curveQuery(run.id, name, ask.zoom, ask.points),
      enabled: ask.enabled,
      refetchInterval: run.live ? REFETCH_MS : (false as const),
      staleTime: run.live ? 2_000 : 60_000,
      gcTime: 60_000,
      placeholderData: (previous: Spread | undefined) => finerOf(run.id, name, ask.zoom, ask.points) ?? previous ?? seen.current.get(run.id),
    })),
    combine,
  });
  // Not every change passes the previous data on, and a plot without points would unmount.
  found.curves.forEach((each, i) => { const run = runs[i]; if (each && run) seen.current.set(run.id, each); });
  return found;
}

function combine(results: UseQueryResult<Spread>[]) {
  return {
    curves: results.map((one) => one.data),
    isPending: results.some((one) => one.isPending),
    isOld: results.some((one) => one.isPlaceholderData && !(one.data && areFine.has(one.data))),
    error: results.find((one) => one.isError && one.data === undefined)?.error ?? null,
  };
}

// --- zoom prefetch ----------------------------------------------------------------------------------------------

/** Prefetched points per metric in view, so that a zoom needs no request. */
const AHEAD_POINTS = 2_500;
const AHEAD_KEPT = 40;
const AHEAD_FRESH_MS = 60_000;
/** Share of the points a plot has space for; with fewer it waits for the request. */
const ENOUGH = 0.6;

interface Ahead {
  zoom: Zoom | null;
  at: number;
  /** The latest response and its range. */
  found: { zoom: Zoom | null; curves: Spread } | null;
}

const ahead = new Map<string, Ahead>();
/** Curves cut from prefetched data. */
const areFine = new WeakSet<object>();

/** Prefetches what a zoom into this range will need. */
export function lookAhead(run: string, name: string, zoom: Zoom | null): void {
  const key = JSON.stringify([run, name]);
  const before = ahead.get(key);
  if (isHistogram(name) || (before && String(before.zoom) === String(zoom) && Date.now() - before.at < AHEAD_FRESH_MS)) return;
  const mine: Ahead = { zoom, at: Date.now(), found: before?.found ?? null };
  ahead.delete(key);
  ahead.set(key, mine);
  for (const oldest of [...ahead.keys()].slice(0, -AHEAD_KEPT)) ahead.delete(oldest);
  curveOf(run, name, zoom, AHEAD_POINTS).then((curves) => { mine.found = { zoom, curves }; }, () => ahead.delete(key));
}

/** The curve of a range, where enough points are prefetched. */
export function finerOf(run: string, name: string, zoom: Zoom | null, points: number): Spread | undefined {
  const there = zoom && ahead.get(JSON.stringify([run, name]))?.found;
  if (!there || (there.zoom && (there.zoom[0] > zoom[0] || there.zoom[1] < zoom[1]))) return undefined;
  const kept = there.curves;
  const committed = within(kept.committed, zoom);
  if (committed.steps.length < points * ENOUGH) return undefined;
  const found = { ...kept, committed, abandoned: kept.abandoned.map((branch) => ({ ...branch, ...within(branch, zoom) })) };
  areFine.add(found);
  return found;
}

/** As many points as the coordinator returns at once, for an export. */
export function useFullCurve(): (run: string, name: string, zoom: Zoom | null) => Promise<MetricCurves> {
  const queries = useQueryClient();
  return useCallback((run, name, zoom) => queries.fetchQuery({ ...curveQuery(run, name, zoom, 10_000), gcTime: 0 }), [queries]);
}
