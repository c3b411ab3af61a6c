/** Signals of a background tab: the title names the run and its state, the icon shows problems, and notifications are optional. */

import { useEffect, useRef, useSyncExternalStore } from "react";

import type { Incident, Task } from "../api/types";
import { useDismissed } from "../dismissed";
import { assess, type Level } from "../state/health";
import { isGrave, kindOf, undismissed } from "../state/incidents";
import { runsOf, type Run } from "../state/runs";
import { useServerNow, useStore, useStory } from "../state/store";
import { VIEWS } from "./views";

export interface Sign {
  title: string;
  icon: "/favicon.svg" | "/favicon-warn.svg" | "/favicon-bad.svg";
}

/** Title and icon of a page. Pure. */
export function signOf(path: string, runs: readonly Run[], level: Level, incidents: readonly Incident[]): Sign {
  const grave = incidents.filter(isGrave).length;
  const icon = level === "bad" || grave > 0 ? "/favicon-bad.svg" : level === "warn" || incidents.length > 0 ? "/favicon-warn.svg" : "/favicon.svg";
  const mark = incidents.length > 0 ? `(${incidents.length}) ` : level === "bad" ? "(!) " : "";
  return { title: `${mark}${nameOf(path, runs)}`, icon };
}

function nameOf(path: string, runs: readonly Run[]): string {
  const id = /^\/runs\/(.+)$/.exec(path)?.[1];
  const live = runs.filter((run) => run.alive > 0);
  const run = id !== undefined ? runs.find((each) => each.id === decodeURIComponent(id)) : path === "/" && live.length === 1 ? live[0] : undefined;
  if (run) return `${run.name}: ${run.status} · Strata`;
  const view = VIEWS.find((each) => each.to !== "/" && path.startsWith(each.to));
  if (view) return `${view.label} · Strata`;
  return path === "/" ? "Strata" : path === "/compare" ? "Compare runs · Strata" : "Page not found · Strata";
}

export function useAttention(path: string): void {
  const state = useStory();
  const now = useServerNow();
  const dismissed = useDismissed();
  const pending = undismissed(state.incidents, dismissed, now);
  const { title, icon } = signOf(path, runsOf(state), assess(state, now).level, pending);
  useEffect(() => {
    document.title = title;
  }, [title]);
  useEffect(() => {
    document.querySelector<HTMLLinkElement>('link[rel="icon"]')?.setAttribute("href", icon);
  }, [icon]);
  useNotifications();
}

// --- notifications ------------------------------------------------------------------------------------------------

export interface News {
  tag: string;
  title: string;
  body: string;
}

/** Notifications: new failures, and tasks that failed or were stopped. Pure. */
export function newsOf(before: { incidents: readonly Incident[]; tasks: readonly Task[] }, after: { incidents: readonly Incident[]; tasks: readonly Task[] }): News[] {
  const known = new Set(before.incidents.map((each) => each.id));
  const was = new Map(before.tasks.map((task) => [task.id, task.status]));
  const failures = after.incidents.filter((each) => !known.has(each.id) && each.subject === "run");
  const ended = after.tasks.filter((task) => (task.status === "failed" || task.status === "stopped") && ["running", "pending"].includes(was.get(task.id) ?? ""));
  return [
    ...failures.map((each) => ({ tag: `incident-${each.id}`, title: `${each.run}: ${kindOf(each)}`, body: each.text })),
    ...ended.map((task) => ({ tag: `task-${task.id}`, title: `${task.name} ${task.status}`, body: task.exit_cause?.message ?? task.reason })),
  ];
}

const KEY = "strata.notify";
const listeners = new Set<() => void>();

function wanted(): boolean {
  try {
    return localStorage.getItem(KEY) === "1" && Notification.permission === "granted";
  } catch {
    return false;
  }
}

/** Whether this browser notifies; "denied" without permission, "missing" without support. */
export function useNotifying(): "on" | "off" | "denied" | "missing" {
  return useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => (typeof Notification === "undefined" ? "missing" : Notification.permission === "denied" ? "denied" : wanted() ? "on" : "off"),
  );
}

/** Requests permission where needed. */
export async function setNotifying(on: boolean): Promise<void> {
  if (on && Notification.permission !== "granted") await Notification.requestPermission();
  try {
    localStorage.setItem(KEY, on && Notification.permission === "granted" ? "1" : "0");
  } catch {
    // Without local storage the setting is lost.
  }
  for (const listener of listeners) listener();
}

function useNotifications(): void {
  const incidents = useStore((s) => s.incidents);
  const tasks = useStore((s) => s.tasks);
  const ready = useStore((s) => s.coordinator !== null && s.connection.phase !== "connecting");
  const before = useRef<{ incidents: readonly Incident[]; tasks: readonly Task[] } | null>(null);
  useEffect(() => {
    const last = before.current;
    before.current = ready ? { incidents, tasks } : null;
    // What was there when the page was opened is not new.
    if (last === null || !ready || !wanted()) return;
    for (const { tag, title, body } of newsOf(last, { incidents, tasks })) new Notification(title, { body, tag, icon: "/favicon-bad.svg" });
  }, [incidents, tasks, ready]);
}
