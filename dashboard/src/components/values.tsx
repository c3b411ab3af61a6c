/** Times and sizes as elements: short to read, exact on hover. */

import { Link } from "@tanstack/react-router";

import { ago, age, bytes, duration, fullTime, timestamp, UNKNOWN } from "../format";
import { useOnlyJob } from "../session";
import { useServerNow } from "../state/store";

/** A timestamp in local time. */
export function Time(props: { at: number | null | undefined }) {
  if (props.at === null || props.at === undefined) return <span className="text-faint">{UNKNOWN}</span>;
  return <time dateTime={new Date(props.at * 1000).toISOString()} title={fullTime(props.at)} className="whitespace-nowrap">{timestamp(props.at)}</time>;
}

/** Time since a timestamp; updates every second. */
export function Ago(props: { at: number | null | undefined; bare?: boolean }) {
  const now = useServerNow();
  if (props.at === null || props.at === undefined) return <span className="text-faint">{UNKNOWN}</span>;
  const seconds = now - props.at;
  return (
    <time dateTime={new Date(props.at * 1000).toISOString()} title={fullTime(props.at)} className="whitespace-nowrap">
      {props.bare ? age(seconds) : ago(seconds)}
    </time>
  );
}

export function Bytes(props: { value: number | null | undefined }) {
  return <span className="whitespace-nowrap" title={props.value == null ? undefined : `${props.value.toLocaleString("en-US")} bytes`}>{bytes(props.value)}</span>;
}

export function Duration(props: { seconds: number | null | undefined }) {
  return <span className="whitespace-nowrap" title={props.seconds == null ? undefined : `${props.seconds} s`}>{duration(props.seconds)}</span>;
}

/** A user-supplied name: plain text, truncated when long, in full on hover. */
export function Name(props: { children: string | null | undefined; full?: string; mono?: boolean }) {
  if (!props.children) return <span className="text-faint">{UNKNOWN}</span>;
  return <span className={`foreign block truncate ${props.mono ? "font-mono text-sm" : ""}`} title={props.full ?? props.children}>{props.children}</span>;
}

/** A path, truncated at its start: the end identifies it. */
export function Path(props: { children: string }) {
  return <span className="truncate-start block font-mono text-sm" title={props.children}><bdi dir="ltr">{props.children}</bdi></span>;
}

const LINK = "foreign inline-block max-w-full truncate align-bottom leading-6 text-accent underline decoration-accent/40 underline-offset-2 hover:decoration-accent";

export function WorkerLink(props: { id: string }) {
  // The Workers view needs access to the whole cluster.
  if (useOnlyJob() !== null) return <Name>{props.id}</Name>;
  return <Link to="/workers" search={{ worker: props.id }} className={LINK} title={props.id}>{props.id}</Link>;
}

export function RunLink(props: { id: string }) {
  return <Link to="/runs/$job" params={{ job: props.id }} className={LINK} title={props.id}>{props.id}</Link>;
}
