/** For tests: a view at an address, with the given state and responses of the coordinator. */

import { notifyManager, QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { createMemoryHistory, createRootRoute, createRouter, RouterProvider } from "@tanstack/react-router";
import { act, type ReactNode } from "react";
import { createRoot } from "react-dom/client";
import { onTestFinished, vi } from "vitest";

import { ApiError, setTransport } from "../api/client";
import type { Snapshot } from "../api/types";
import { parseSearch, stringifySearch } from "../search";
import { NOW } from "../state/samples";
import { dispatch, getState, reset } from "../state/store";

// React draws a response in the same turn: a test waits for no timer.
notifyManager.setScheduler(queueMicrotask);

/** A path without a response is refused. */
export type Responses = Record<string, unknown>;

export async function show(View: () => ReactNode, address: string, known: { snapshot?: Snapshot; responses?: Responses } = {}): Promise<HTMLElement> {
  setTransport((path) => (known.responses && path in known.responses ? Promise.resolve(known.responses[path]) : Promise.reject(new ApiError(`refused: ${path}`, { status: 503, code: "refused" }))));
  reset();
  if (known.snapshot) {
    dispatch({ type: "snapshot", snapshot: known.snapshot, since: [], atMs: NOW * 1000 });
    await vi.waitUntil(() => getState().coordinator !== null);
  }
  const router = createRouter({ routeTree: createRootRoute({ component: View }), history: createMemoryHistory({ initialEntries: [address] }), parseSearch, stringifySearch });
  const queries = new QueryClient({ defaultOptions: { queries: { retry: false } } });
  const host = document.body.appendChild(document.createElement("div"));
  const root = createRoot(host);
  onTestFinished(async () => {
    await settled(async () => root.unmount());
    queries.clear();
    host.remove();
  });
  await settled(async () => {
    await router.load();
    root.render(<QueryClientProvider client={queries}><RouterProvider router={router as never} /></QueryClientProvider>);
  });
  await settled(async () => void (await vi.waitUntil(() => queries.isFetching() === 0)));
  return host;
}

/** Runs until React has drawn the result. Between such calls the page draws by itself: its clock ticks. */
async function settled(work: () => Promise<void>): Promise<void> {
  Object.assign(globalThis, { IS_REACT_ACT_ENVIRONMENT: true });
  await act(work);
  Object.assign(globalThis, { IS_REACT_ACT_ENVIRONMENT: false });
}

/** Rows of a table, drawn or not. */
export function rowsIn(host: HTMLElement, label: string): number {
  return Number(host.querySelector(`[role=table][aria-label="${label}"]`)?.getAttribute("aria-rowcount") ?? Number.NaN) - 1;
}
