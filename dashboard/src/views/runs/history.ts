/** What a coordinator remembers of a run's curves and its goodput from before this page was opened. */

import type { Goodput } from "../../state/runs";

export interface RunHistory {
  goodput: Goodput | null;
}

export function useRunHistory(_job: string): RunHistory {
  return { goodput: null };
}
