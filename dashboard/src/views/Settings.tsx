/** Settings: connection, access, appearance and demo mode. */

import { useMutation } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { LogOut } from "lucide-react";
import type { ReactNode } from "react";

import { API_URL } from "../api/client";
import { Card, Facts } from "../components/Card";
import { Button, Kbd, Segmented } from "../components/controls";
import { Page } from "../components/Page";
import { ErrorNote } from "../components/states";
import { Ago, Time } from "../components/values";
import { age } from "../format";
import { DEMO_ONLY, setMode, setTheme, useMode, useTheme, type Mode, type Theme } from "../mode";
import { ABILITIES, signOut } from "../session";
import { retryNow } from "../state/connection";
import { useServerNow, useStore } from "../state/store";
import { setNotifying, useNotifying } from "../shell/attention";
import { KEYS } from "../shell/keys";
import { AuditLog } from "./settings/AuditLog";
import { Tokens } from "./settings/Tokens";

const PHASES = {
  connecting: "connecting",
  live: "live (event stream)",
  polling: "polling",
  disconnected: "disconnected",
  signed_out: "signed out",
};

export function Settings() {
  const isAdmin = useStore((s) => s.session?.role === "admin" && s.session.job_id === null);
  return (
    <Page title="Settings">
      <div className="grid max-w-5xl items-start gap-4 lg:grid-cols-2">
        <ConnectionCard />
        <div className="flex flex-col gap-4">
          <AccessCard />
          <NotificationCard />
          <AppearanceCard />
          <ModeCard />
        </div>
      </div>
      {isAdmin && <Tokens />}
      {isAdmin && <AuditLog />}
      <KeyboardCard />
    </Page>
  );
}

function ConnectionCard() {
  const mode = useMode();
  const connection = useStore((s) => s.connection);
  const coordinator = useStore((s) => s.coordinator);
  const skew = useStore((s) => s.skewS);
  const now = useServerNow();
  const items: (readonly [string, ReactNode])[] = [
    ["API", mode === "demo" ? "none (simulated)" : <code key="a" className="font-mono text-sm">{API_URL}</code>],
    ["State", PHASES[connection.phase]],
    ["Last update", connection.updatedAtMs === null ? "never" : <Ago key="h" at={connection.updatedAtMs / 1000 + skew} />],
    ["Coordinator", coordinator?.address ?? "–"],
    ["Version", coordinator?.version ?? "–"],
    ["Uptime", coordinator ? age(now - coordinator.started_at) : "–"],
    ["Started", <Time key="s" at={coordinator?.started_at} />],
    ["Role", coordinator ? (coordinator.leader ? "leader" : "standby") : "–"],
    ["Clock skew", Math.abs(skew) < 0.05 ? "none" : `${skew > 0 ? "+" : "−"}${Math.abs(skew).toFixed(1)} s`],
  ];
  return (
    <Card title="Connection" actions={connection.phase === "disconnected" && <Button onClick={retryNow}>Retry now</Button>}>
      {connection.reason && <p className="foreign mb-3 rounded-md bg-warn-soft px-3 py-2 break-words">{connection.reason} {connection.hint}</p>}
      <Facts items={items} />
      <p className="mt-3 text-sm text-faint">Set <code className="font-mono">VITE_API_URL</code> at build time to use another address.</p>
    </Card>
  );
}

function AccessCard() {
  const session = useStore((s) => s.session);
  const work = useMutation({ mutationFn: signOut });
  if (session === null) return null;
  return (
    <Card title="Access" actions={session.signed_in && <Button disabled={work.isPending} onClick={() => work.mutate()}><LogOut aria-hidden className="size-4" />Sign out</Button>}>
      <div className="flex flex-col gap-3">
        <Facts items={[["Name", session.name], ["Role", session.role], ["Job", session.job_id ?? "all"]]} />
        <p className="text-muted">{session.role}: {ABILITIES[session.role]}.</p>
        {!session.signed_in && <p className="text-muted">This connection needs no sign-in. <Link to="/sign-in" className="text-accent underline underline-offset-2">Sign in with a token</Link> to use another role.</p>}
        {work.isError && <ErrorNote error={work.error} />}
      </div>
    </Card>
  );
}

function NotificationCard() {
  const state = useNotifying();
  const text = {
    on: "This browser notifies when a run fails or a task stops, while a Strata page is open.",
    off: "Get notified when a run fails or a task stops, while a Strata page is open.",
    denied: "Blocked by this browser. Allow notifications for this address in its site settings.",
    missing: "Not available: notifications need HTTPS or a coordinator on this machine.",
  }[state];
  return (
    <Card title="Desktop notifications">
      <div className="flex flex-col gap-3">
        {(state === "on" || state === "off") && <Segmented label="Desktop notifications" value={state} options={[["on", "On"], ["off", "Off"]]} onChange={(next) => void setNotifying(next === "on")} />}
        <p className="text-muted">{text}</p>
      </div>
    </Card>
  );
}

function AppearanceCard() {
  const theme = useTheme();
  const options: readonly (readonly [Theme, string])[] = [["system", "System"], ["dark", "Dark"], ["light", "Light"]];
  return (
    <Card title="Appearance">
      <Segmented label="Theme" value={theme} options={options} onChange={setTheme} />
    </Card>
  );
}

function ModeCard() {
  const mode = useMode();
  const options: readonly (readonly [Mode, string])[] = [["live", "Live"], ["demo", "Demo"]];
  return (
    <Card title="Mode">
      <div className="flex flex-col gap-3">
        {DEMO_ONLY ? <p>This is a demo build without a coordinator.</p> : <Segmented label="Mode" value={mode} options={options} onChange={setMode} />}
        <p className="text-muted">Demo mode shows a simulated run that fails and recovers. Every view is marked as simulated.</p>
      </div>
    </Card>
  );
}

function KeyboardCard() {
  return (
    <Card title="Keyboard shortcuts" className="max-w-5xl">
      <dl className="grid gap-x-8 gap-y-2 lg:grid-cols-2">
        {KEYS.map(([keys, meaning]) => (
          <div key={meaning} className="flex items-baseline gap-4">
            <dt className="flex w-28 shrink-0 gap-1">{keys.map((key) => <Kbd key={key}>{key}</Kbd>)}</dt>
            <dd className="text-muted">{meaning}</dd>
          </div>
        ))}
      </dl>
    </Card>
  );
}
