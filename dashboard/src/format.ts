/** Formatting of numbers, sizes and times. Pure; an unknown value is an en dash, never a zero. */

export const UNKNOWN = "–";

type Maybe = number | null | undefined;

function known(value: Maybe): value is number {
  return value !== null && value !== undefined && Number.isFinite(value);
}

/** 1234567 → "1,234,567" */
export function count(value: Maybe): string {
  return known(value) ? Math.round(value).toLocaleString("en-US") : UNKNOWN;
}

/** Three significant digits, with thousands separators: 0.01234 → "0.0123", 12.34 → "12.3", 4567.8 → "4,568" */
export function number(value: Maybe, digits = 3): string {
  if (!known(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (Number.isInteger(value) || size >= 10 ** (digits - 1)) return Math.round(value).toLocaleString("en-US");
  if (size < 1e-4) return value.toExponential(digits - 1);
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toFixed(Math.min(places, 6));
}

/** Short form for axes and dense tables: 1234 → "1.23k", 5_600_000 → "5.6M" */
export function compact(value: Maybe): string {
  if (!known(value)) return UNKNOWN;
  const size = Math.abs(value);
  for (const [limit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]] as const) {
    if (size >= limit) return trim(value / limit) + letter;
  }
  if (size !== 0 && size < 0.01) return value.toExponential(0);
  return trim(value);
}

function trim(value: number): string {
  const size = Math.abs(value);
  const text = size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** 1536 → "1.5 KiB" */
export function bytes(value: Maybe): string {
  if (!known(value)) return UNKNOWN;
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < BYTE_UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? String(Math.round(size)) : trim(size)} ${BYTE_UNITS[unit] ?? ""}`;
}

/** Seconds as the two largest units: 0.0034 → "3.4 ms", 75 → "1 m 15 s", 90061 → "1 d 1 h" */
export function duration(seconds: Maybe): string {
  if (!known(seconds)) return UNKNOWN;
  const s = Math.max(0, seconds);
  if (s === 0) return "0 s";
  if (s < 0.001) return `${trim(s * 1e6)} µs`;
  if (s < 1) return `${trim(s * 1e3)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  const whole = Math.round(s);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return pair(Math.floor(whole / 60), "m", whole % 60, "s");
  if (whole < 86_400) return pair(Math.floor(whole / 3600), "h", Math.floor((whole % 3600) / 60), "m");
  return pair(Math.floor(whole / 86_400), "d", Math.floor((whole % 86_400) / 3600), "h");
}

function pair(large: number, largeUnit: string, small: number, smallUnit: string): string {
  return small === 0 ? `${large} ${largeUnit}` : `${large} ${largeUnit} ${small} ${smallUnit}`;
}

/** Whole seconds only, to avoid flicker: 0.4 → "now", 12.3 → "12 s ago" */
export function ago(seconds: Maybe): string {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 1) return "now";
  return `${duration(Math.max(1, Math.floor(seconds))).replace(/\.0 s$/, " s")} ago`;
}

/** Age without the word "ago", in whole seconds. */
export function age(seconds: Maybe): string {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 1) return "0 s";
  return duration(Math.floor(seconds)).replace(/\.0 s$/, " s");
}

/** Milliseconds: 0.1234 → "0.12", 12.3 → "12.3", 1234 → "1,234" */
export function millis(value: Maybe): string {
  return number(value, 3);
}

export function percent(value: Maybe, places = 0): string {
  return known(value) ? `${value.toFixed(places)} %` : UNKNOWN;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const DATE = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const FULL = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "long", hour12: false });

/** Unix seconds → "14:03:59" */
export function clock(at: Maybe): string {
  return known(at) ? CLOCK.format(at * 1000) : UNKNOWN;
}

/** Unix seconds → "14:03:59.123" */
export function clockMs(at: Maybe): string {
  if (!known(at)) return UNKNOWN;
  const ms = Math.floor((at - Math.floor(at)) * 1000);
  return `${CLOCK.format(Math.floor(at) * 1000)}.${String(ms).padStart(3, "0")}`;
}

/** Unix seconds → "14:03:59" today, "3 Nov 14:03:59" otherwise */
export function timestamp(at: Maybe, nowMs: number = Date.now()): string {
  if (!known(at)) return UNKNOWN;
  const same = DATE.format(at * 1000) === DATE.format(nowMs);
  return same ? clock(at) : `${DATE.format(at * 1000)} ${clock(at)}`;
}

/** For tooltips: date, time and zone. */
export function fullTime(at: Maybe): string {
  return known(at) ? FULL.format(at * 1000) : UNKNOWN;
}

/** Truncates a long name in the middle: names may differ at either end. */
export function cut(name: string, most: number): string {
  const letters = [...name];
  if (letters.length <= most) return name;
  const end = Math.ceil((most - 1) / 2);
  return `${letters.slice(0, most - 1 - end).join("")}…${letters.slice(-end).join("")}`;
}

export function plural(n: number, word: string, many = `${word}s`): string {
  return `${count(n)} ${n === 1 ? word : many}`;
}
