/** Every view and every filter has a URL. */

import { createHashHistory, createRootRoute, createRoute, createRouter, lazyRouteComponent, Link, redirect, type ErrorComponentProps } from "@tanstack/react-router";
import { Compass } from "lucide-react";

import { Page } from "./components/Page";
import { Empty, ErrorNote, Loading } from "./components/states";
import { DEMO_ONLY } from "./mode";
import { parseSearch, stringifySearch, type Search } from "./search";
import { Shell } from "./shell/Shell";
import { Overview } from "./views/Overview";

const root = createRootRoute({ component: Shell, validateSearch: (search: Record<string, unknown>) => search as Search, notFoundComponent: NotFound });

const overview = createRoute({ getParentRoute: () => root, path: "/", component: Overview });
const runs = createRoute({ getParentRoute: () => root, path: "/runs", component: lazyRouteComponent(() => import("./views/Runs"), "Runs") });
const run = createRoute({ getParentRoute: () => root, path: "/runs/$job", component: lazyRouteComponent(() => import("./views/runs/RunPage"), "RunDetail") });
const compare = createRoute({ getParentRoute: () => root, path: "/compare", component: lazyRouteComponent(() => import("./views/runs/ComparePage"), "ComparePage") });
const workers = createRoute({ getParentRoute: () => root, path: "/workers", component: lazyRouteComponent(() => import("./views/Workers"), "Workers") });
const data = createRoute({ getParentRoute: () => root, path: "/data", component: lazyRouteComponent(() => import("./views/Data"), "Data") });
const checkpoints = createRoute({ getParentRoute: () => root, path: "/checkpoints", component: lazyRouteComponent(() => import("./views/Checkpoints"), "Checkpoints") });
const barriers = createRoute({ getParentRoute: () => root, path: "/barriers", component: lazyRouteComponent(() => import("./views/Barriers"), "Barriers") });
const incidents = createRoute({ getParentRoute: () => root, path: "/incidents", component: lazyRouteComponent(() => import("./views/Incidents"), "Incidents") });
const coordinator = createRoute({ getParentRoute: () => root, path: "/coordinator", component: lazyRouteComponent(() => import("./views/Coordinator"), "Coordinator") });
/** Tasks are runs: old links to a task lead to its run. */
const tasks = createRoute({
  getParentRoute: () => root,
  path: "/tasks",
  beforeLoad: ({ search }) => {
    const { task, ...rest } = search as Search;
    throw task === undefined ? redirect({ to: "/runs", search: rest, replace: true }) : redirect({ to: "/runs/$job", params: { job: task }, search: { ...rest, task }, replace: true });
  },
});
const logs = createRoute({ getParentRoute: () => root, path: "/logs", component: lazyRouteComponent(() => import("./views/Logs"), "Logs") });
const settings = createRoute({ getParentRoute: () => root, path: "/settings", component: lazyRouteComponent(() => import("./views/Settings"), "Settings") });
const signIn = createRoute({ getParentRoute: () => root, path: "/sign-in", component: lazyRouteComponent(() => import("./views/SignIn"), "SignIn") });

export const router = createRouter({
  routeTree: root.addChildren([overview, runs, run, compare, workers, data, checkpoints, barriers, incidents, coordinator, tasks, logs, settings, signIn]),
  parseSearch,
  stringifySearch,
  defaultErrorComponent: Failed,
  defaultPendingComponent: Pending,
  defaultPreload: "intent",
  // A static build has no server that maps every path to index.html.
  ...(DEMO_ONLY ? { history: createHashHistory() } : {}),
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}

/** Preloads the code of every view, one after the other. */
export async function loadViews(): Promise<void> {
  for (const route of Object.values(router.routesById)) await router.loadRouteChunk(route);
}

function Pending() {
  return <Page title="Loading"><Loading rows={6} /></Page>;
}

function Failed({ error, reset }: ErrorComponentProps) {
  return <Page title="Something went wrong"><ErrorNote error={error} onRetry={reset} /></Page>;
}

function NotFound() {
  return (
    <Page title="Page not found">
      <Empty icon={Compass} title="No page at this address" action={<Link to="/" className="inline-flex h-8 items-center rounded-md border px-3 font-medium hover:bg-hover">Open overview</Link>}>
        <span className="foreign font-mono text-sm break-all">{location.pathname}</span>
      </Empty>
    </Page>
  );
}
