import type { ReactNode } from "react";

import { useStale } from "../state/store";

/** A view: title, actions and content. Dims while the coordinator is unreachable. */
export function Page(props: {
  title: string;
  subtitle?: ReactNode;
  actions?: ReactNode;
  /** Fill the window and scroll inside (tables, logs) instead of scrolling the page. */
  fill?: boolean;
  children: ReactNode;
}) {
  const stale = useStale();
  return (
    <div className={`mx-auto flex w-full max-w-[1680px] flex-col gap-4 px-5 py-5 lg:px-7 ${props.fill ? "h-full min-h-0" : ""}`}>
      <header className="flex min-h-9 flex-wrap items-center gap-x-4 gap-y-2">
        <h1 className="text-xl font-semibold tracking-tight">{props.title}</h1>
        {props.subtitle && <div className="text-muted">{props.subtitle}</div>}
        {props.actions && <div className="ml-auto flex flex-wrap items-center gap-2">{props.actions}</div>}
      </header>
      <div className={`flex flex-col gap-4 ${props.fill ? "min-h-0 flex-1" : ""} ${stale ? "stale" : "transition-opacity"}`} data-stale={stale || undefined}>
        {props.children}
      </div>
    </div>
  );
}
