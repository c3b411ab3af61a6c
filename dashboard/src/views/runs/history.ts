/** A run's history from the coordinator: curves from before this page was opened, and goodput. */

import { useQuery } from "@tanstack/react-query";
import { useEffect } from "react";

import { get } from "../../api/client";
import type { Goodput, History } from "../../api/types";
import { runHistory } from "../../state/series";
import { dispatch } from "../../state/store";

/** Fetches the history of a run once and merges it with the points seen on this page. */
export function useRunHistory(job: string | undefined): void {
  const { data } = useQuery({
    queryKey: ["history", job],
    queryFn: ({ signal }) => get<History>("/metrics/history", { job_id: job }, signal),
    enabled: job !== undefined,
    staleTime: Number.POSITIVE_INFINITY,
  });
  useEffect(() => {
    if (job !== undefined && data) dispatch({ type: "runHistory", jobId: job, series: runHistory(data) });
  }, [job, data]);
}

export function useGoodput(job: string): Goodput | null {
  const { data } = useQuery({
    queryKey: ["goodput", job],
    queryFn: ({ signal }) => get<Goodput>(`/jobs/${encodeURIComponent(job)}/goodput`, undefined, signal),
    refetchInterval: 5_000,
  });
  return data ?? null;
}
