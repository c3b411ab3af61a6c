/** What the coordinator remembers of a run: its curves from before this page was opened, and where its time went. */

import { useQuery } from "@tanstack/react-query";
import { useEffect } from "react";

import { get } from "../../api/client";
import type { Goodput, History } from "../../api/types";
import { runHistory } from "../../state/series";
import { dispatch } from "../../state/store";

/** Asks once for the curves of a run; they join those the page draws itself. */
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
