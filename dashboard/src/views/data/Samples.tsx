/** Samples of a dataset, field by field: text, and images as images. */

import type { ReactNode } from "react";

import type { Preview } from "../../api/types";
import { bytes, count, plural } from "../../format";

/** One field of a sample; the optional parts depend on its kind. */
interface SampleField {
  kind: "null" | "boolean" | "number" | "text" | "bytes" | "image" | "array" | "object" | "list" | "note";
  role?: "key" | "label" | "feature";
  value?: unknown;
  length?: number;
  bytes?: number;
  format?: string;
  width?: number;
  height?: number;
  dtype?: string;
  shape?: number[];
}

const NUMBERS_SHOWN = 32;

export function Samples(props: { preview: Preview }) {
  const { preview } = props;
  return (
    <ol className="flex flex-col gap-3">
      {preview.samples.map((sample, place) => (
        <li key={preview.indices[place] ?? place} className="rounded-md border">
          <p className="border-b bg-raised px-3 py-1 text-sm text-muted">sample {count(preview.indices[place])}</p>
          <dl className="divide-y divide-line/60">
            {Object.entries(sample as Record<string, SampleField>).map(([name, field]) => (
              <div key={name} className="grid gap-x-4 gap-y-1 px-3 py-2 sm:grid-cols-[6.5rem_1fr]">
                <dt className="min-w-0">
                  <span className="foreign block truncate font-medium" title={name}>{name}</span>
                  <span className="text-sm text-faint">{kindOf(field)}</span>
                </dt>
                <dd className="min-w-0"><Value field={field} /></dd>
              </div>
            ))}
          </dl>
        </li>
      ))}
    </ol>
  );
}

function kindOf(field: SampleField): string {
  const role = field.role === "label" ? "label, " : "";
  if (field.kind === "image") return `${role}image${field.shape ? ` ${field.shape.join(" × ")}` : field.width ? ` ${field.width} × ${field.height}` : ""}`;
  if (field.kind === "array") return `${role}${field.dtype ?? "array"} ${(field.shape ?? []).join(" × ")}`;
  if (field.kind === "list") return `${role}${plural(field.length ?? 0, "value")}`;
  if (field.kind === "text") return `${role}${plural(field.length ?? 0, "character")}`;
  if (field.kind === "bytes") return `${role}${bytes(field.bytes)}`;
  return `${role}${field.kind}`;
}

function Value(props: { field: SampleField }): ReactNode {
  const { field } = props;
  switch (field.kind) {
    case "text":
      return <p className={`foreign break-words whitespace-pre-wrap ${field.role === "label" ? "font-medium text-accent" : ""}`}>{String(field.value ?? "")}</p>;
    case "image":
      return <Picture field={field} />;
    case "list":
    case "array":
      return Array.isArray(field.value) ? <Numbers field={field} values={field.value as unknown[]} /> : <Cut field={field} />;
    case "object":
      return field.value && typeof field.value === "object" ? <Inner value={field.value as Record<string, SampleField>} /> : <Cut field={field} />;
    case "bytes":
      return <code className="font-mono text-sm break-all text-muted">{String(field.value ?? "")} …</code>;
    case "null":
      return <span className="text-faint">null</span>;
    default:
      return <span className={`foreign ${field.role === "label" ? "font-medium text-accent" : ""}`}>{String(field.value)}</span>;
  }
}

function Picture(props: { field: SampleField }) {
  const { field } = props;
  const source = typeof field.value === "string" && field.value.startsWith("data:image/") ? field.value : null;
  if (source === null) return <span className="text-muted">{field.format} image of {bytes(field.bytes)}, too large to show</span>;
  return <img src={source} alt={`${field.format ?? ""} image`} className="max-h-40 min-h-16 max-w-full rounded-sm border bg-raised object-contain [image-rendering:pixelated]" />;
}

/** Tokens and feature vectors in a row; other lists one item per line. */
function Numbers(props: { field: SampleField; values: unknown[] }) {
  const { field, values } = props;
  if (values.some((value) => value !== null && typeof value === "object")) {
    return <ul className="flex flex-col gap-1">{values.map((value, place) => <li key={place}><Value field={value as SampleField} /></li>)}</ul>;
  }
  const all = field.length ?? (field.shape ?? []).reduce((product, size) => product * size, 1);
  const shown = values.slice(0, NUMBERS_SHOWN);
  return (
    <p className="flex flex-wrap gap-1 font-mono text-sm">
      {shown.map((value, place) => <span key={place} className="rounded-xs bg-raised px-1.5 py-px">{shortNumber(value)}</span>)}
      {all > shown.length && <span className="px-1 text-faint">… {count(all)} total</span>}
    </p>
  );
}

function shortNumber(value: unknown): string {
  return typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(5))) : String(value);
}

function Inner(props: { value: Record<string, SampleField> }) {
  return (
    <dl className="flex flex-col gap-1 border-l-2 pl-3">
      {Object.entries(props.value).map(([name, field]) => (
        <div key={name} className="flex min-w-0 gap-3"><dt className="foreign shrink-0 text-muted">{name}</dt><dd className="min-w-0"><Value field={field} /></dd></div>
      ))}
    </dl>
  );
}

function Cut(props: { field: SampleField }) {
  return <span className="text-muted">{plural(props.field.length ?? 0, "entry", "entries")}, nested too deeply to show</span>;
}
