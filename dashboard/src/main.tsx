import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { RouterProvider } from "@tanstack/react-router";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";

import { ApiError } from "./api/client";
import { applyTheme, forgetTokens, startBackend } from "./mode";
import { loadViews, router } from "./router";
import "./styles/app.css";

/** Delay before preloading, so that it does not slow down the first view. */
const AFTER_MS = 1_000;

const queries = new QueryClient({
  defaultOptions: {
    queries: {
      staleTime: 2_000,
      refetchOnWindowFocus: false,
      // Only lost connections are retried; an error response would repeat.
      retry: (failures, error) => failures < 2 && !(error instanceof ApiError && error.status > 0),
    },
  },
});

forgetTokens();
applyTheme();
startBackend();
addEventListener("load", () => setTimeout(() => void loadTheRest().catch(() => undefined), AFTER_MS));

const root = document.getElementById("root");
if (root) {
  createRoot(root).render(
    <StrictMode>
      <QueryClientProvider client={queries}>
        <RouterProvider router={router} />
      </QueryClientProvider>
    </StrictMode>,
  );
}

/** Preloads all other code: it cannot be fetched while the coordinator is unreachable. */
async function loadTheRest(): Promise<void> {
  await loadViews();
  await Promise.all([import("./views/Tasks"), import("./views/tasks/Job"), import("./components/Chart"), import("./shell/Palette")]);
  await import("./demo");
}
