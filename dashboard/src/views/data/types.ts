/** Answers of the data calls. */

export interface Shard {
  id: number;
  start: number;
  stop: number;
  done: number;
  reported: number;
  worker_id: string | null;
  moved: boolean;
}

export interface ShardPlan {
  dataset_id: string;
  job_id: string;
  epoch: number;
  version: number;
  reason: string;
  samples_done: number;
  total_samples: number;
  shard_count: number;
  shards: Shard[];
}

export interface Audit {
  job_id: string;
  dataset_id: string;
  epoch: number;
  exact: boolean;
  total: number;
  samples: number;
  lost: number;
  repeated: number;
  remaining: number;
  commits: number;
  reason: string;
}

/** One field of a sample, as far as it can be shown. */
export interface SampleField {
  kind: "null" | "boolean" | "number" | "text" | "bytes" | "image" | "array" | "object" | "list" | "note" | string;
  role?: "key" | "label" | "feature" | string;
  value?: unknown;
  length?: number;
  truncated?: boolean;
  bytes?: number;
  format?: string;
  width?: number;
  height?: number;
  dtype?: string;
  shape?: number[];
}

export interface Preview {
  dataset_id: string;
  worker_id: string | null;
  epoch: number;
  shard_id: number | null;
  indices: number[];
  samples: Record<string, SampleField>[];
}
