/** Empty, error and loading states. */

import { CircleAlert, type LucideIcon, Inbox, WifiOff } from "lucide-react";
import type { ReactNode } from "react";

import { ApiError } from "../api/client";
import { useStore } from "../state/store";
import { Button } from "./controls";

/** Empty state, with what would change it. */
export function Empty(props: { title: string; children?: ReactNode; icon?: LucideIcon; action?: ReactNode }) {
  const Icon = props.icon ?? Inbox;
  return (
    <div className="flex flex-col items-center gap-2 px-6 py-10 text-center">
      <Icon aria-hidden className="size-6 text-faint" strokeWidth={1.5} />
      <p className="font-medium">{props.title}</p>
      {props.children && <div className="max-w-prose text-muted">{props.children}</div>}
      {props.action}
    </div>
  );
}

/** Error message, hint and retry. */
export function ErrorNote(props: { error: unknown; onRetry?: () => void; className?: string }) {
  const { error } = props;
  const message = error instanceof Error ? error.message : String(error);
  const hint = error instanceof ApiError ? error.hint : "";
  return (
    <div role="alert" className={`flex items-start gap-3 rounded-md bg-bad-soft px-4 py-3 ${props.className ?? ""}`}>
      <CircleAlert aria-hidden className="mt-0.5 size-4 shrink-0 text-bad" />
      <div className="min-w-0 flex-1">
        <p className="foreign break-words font-medium">{message}</p>
        {hint && <p className="foreign break-words text-muted">{hint}</p>}
      </div>
      {props.onRetry && <Button onClick={props.onRetry}>Retry</Button>}
    </div>
  );
}

/** Skeleton; an empty state while the coordinator is unreachable. */
export function Loading(props: { rows?: number; height?: number; label?: string }) {
  const away = useStore((state) => state.connection.phase === "disconnected");
  if (away) return <Empty icon={WifiOff} title="No data yet">Waiting for the coordinator.</Empty>;
  return (
    <div role="status" aria-label={props.label ?? "Loading"} className="flex flex-col gap-2 py-1">
      {Array.from({ length: props.rows ?? 3 }, (_, i) => (
        <div key={i} className="skeleton" style={{ height: props.height ?? 18, width: `${92 - ((i * 17) % 40)}%` }} />
      ))}
    </div>
  );
}
