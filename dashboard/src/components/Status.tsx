/** One component for every status: icon, colour and text, so that colour is never the only cue. */

import {
  CircleAlert, CircleCheck, CircleDashed, CircleDot, CirclePause, CircleSlash, CircleX, Hourglass, LoaderCircle, RotateCcw, Save, type LucideIcon,
} from "lucide-react";

export type Tone = "good" | "busy" | "warn" | "bad" | "idle";

interface Look {
  tone: Tone;
  icon: LucideIcon;
  label: string;
}

const LOOKS: Record<string, Look> = {
  // workers
  active: { tone: "good", icon: CircleCheck, label: "active" },
  training: { tone: "good", icon: CircleDot, label: "training" },
  checkpointing: { tone: "busy", icon: Save, label: "checkpointing" },
  recovering: { tone: "warn", icon: RotateCcw, label: "recovering" },
  loading: { tone: "busy", icon: LoaderCircle, label: "loading" },
  initializing: { tone: "busy", icon: LoaderCircle, label: "initializing" },
  idle: { tone: "idle", icon: CirclePause, label: "idle" },
  failed: { tone: "bad", icon: CircleX, label: "failed" },
  // runs
  starting: { tone: "busy", icon: LoaderCircle, label: "starting" },
  ended: { tone: "idle", icon: CircleSlash, label: "ended" },
  // tasks
  pending: { tone: "idle", icon: Hourglass, label: "pending" },
  running: { tone: "good", icon: CircleDot, label: "running" },
  completed: { tone: "good", icon: CircleCheck, label: "completed" },
  stopped: { tone: "idle", icon: CircleSlash, label: "stopped" },
  stopping: { tone: "warn", icon: LoaderCircle, label: "stopping" },
  // checkpoints
  in_progress: { tone: "busy", icon: LoaderCircle, label: "in progress" },
  // barriers
  waiting: { tone: "busy", icon: Hourglass, label: "waiting" },
  complete: { tone: "good", icon: CircleCheck, label: "complete" },
  broken: { tone: "bad", icon: CircleX, label: "broken" },
  // access
  allowed: { tone: "good", icon: CircleCheck, label: "allowed" },
  refused: { tone: "bad", icon: CircleSlash, label: "refused" },
  expired: { tone: "idle", icon: CircleSlash, label: "expired" },
  // logs
  debug: { tone: "idle", icon: CircleDashed, label: "debug" },
  info: { tone: "busy", icon: CircleDot, label: "info" },
  warn: { tone: "warn", icon: CircleAlert, label: "warn" },
  error: { tone: "bad", icon: CircleX, label: "error" },
};

const UNKNOWN: Look = { tone: "idle", icon: CircleDashed, label: "unknown" };

export function lookOf(value: string): Look {
  return LOOKS[value] ?? { ...UNKNOWN, label: value };
}

export const TONE_TEXT: Record<Tone, string> = {
  good: "text-good", busy: "text-busy", warn: "text-warn", bad: "text-bad", idle: "text-idle",
};
export const TONE_SOFT: Record<Tone, string> = {
  good: "bg-good-soft text-good", busy: "bg-busy-soft text-busy", warn: "bg-warn-soft text-warn", bad: "bg-bad-soft text-bad", idle: "bg-idle-soft text-idle",
};
export const TONE_FILL: Record<Tone, string> = {
  good: "bg-good", busy: "bg-busy", warn: "bg-warn", bad: "bg-bad", idle: "bg-idle",
};

/** `pill` has a tinted background; otherwise icon and text only, for tables. */
export function Status(props: { value: string; pill?: boolean; title?: string }) {
  const { tone, icon: Icon, label } = lookOf(props.value);
  const look = props.pill ? `rounded-full px-2 py-0.5 ${TONE_SOFT[tone]}` : TONE_TEXT[tone];
  return (
    <span className={`inline-flex items-center gap-1.5 align-middle whitespace-nowrap text-sm font-medium ${look}`} title={props.title}>
      <Icon aria-hidden className="size-3.5 shrink-0" strokeWidth={2.25} />
      {label}
    </span>
  );
}
