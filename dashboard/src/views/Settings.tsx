/** Settings: connection, access, appearance and demo mode. */

import { useState, type ReactNode } from "react";

import { API_URL, getToken, setToken } from "../api/client";
import { Card, Facts } from "../components/Card";
import { Button, Field, Input, Kbd, Segmented } from "../components/controls";
import { Page } from "../components/Page";
import { Ago, Time } from "../components/values";
import { age, count } from "../format";
import { DEMO_ONLY, setMode, setTheme, startBackend, useMode, useTheme, type Mode, type Theme } from "../mode";
import { retryNow } from "../state/connection";
import { useServerNow, useStore } from "../state/store";
import { KEYS } from "../shell/keys";

const PHASES = {
  connecting: "connecting",
  live: "live (event stream)",
  polling: "polling (event stream blocked)",
  disconnected: "disconnected",
};

export function Settings() {
  return (
    <Page title="Settings">
      <div className="grid max-w-5xl items-start gap-4 lg:grid-cols-2">
        <ConnectionCard />
        <div className="flex flex-col gap-4">
          <AppearanceCard />
          <ModeCard />
          <TokenCard />
        </div>
        <KeyboardCard />
      </div>
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
    ["Generation", coordinator ? count(coordinator.generation) : "–"],
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

function TokenCard() {
  const [token, edit] = useState(getToken);
  const [remember, setRemember] = useState(() => localStorage.getItem("strata.token") !== null);
  const save = (value: string) => {
    edit(value);
    setToken(value, remember);
    startBackend();
  };
  return (
    <Card title="Access">
      <form
        className="flex flex-col gap-3"
        onSubmit={(event) => {
          event.preventDefault();
          save(token.trim());
        }}
      >
        <Field label="Token" hint="Required if the coordinator was started with one. A viewer token reads; changes need an operator token.">
          {(ids) => <Input {...ids} type="password" value={token} onChange={(e) => edit(e.target.value)} placeholder="none" />}
        </Field>
        <label className="flex items-center gap-2"><input type="checkbox" className="size-4 accent-accent" checked={remember} onChange={(e) => setRemember(e.target.checked)} />Remember in this browser</label>
        <div className="flex gap-2">
          <Button type="submit" look="primary">Save token</Button>
          {getToken() && <Button onClick={() => save("")}>Clear token</Button>}
        </div>
      </form>
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
    <Card title="Keyboard shortcuts" className="lg:col-span-2">
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
