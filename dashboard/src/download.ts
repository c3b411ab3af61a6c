/** File downloads. */

/** Records as JSON lines. */
export function saveLines(name: string, records: readonly object[]): void {
  const text = records.map((record) => JSON.stringify(record)).join("\n");
  saveBlob(`${name}-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.jsonl`, new Blob([text, "\n"], { type: "application/x-ndjson" }));
}

export function saveBlob(name: string, blob: Blob): void {
  const address = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** A file name that is valid on every file system. */
export function fileName(...parts: string[]): string {
  return parts.map((part) => part.replaceAll(/[^\w.-]+/g, "_")).join("-").slice(0, 120);
}
