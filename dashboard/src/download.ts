/** Records as a file that the browser saves: one JSON object a line. */

export function saveLines(name: string, records: readonly object[]): void {
  const text = records.map((record) => JSON.stringify(record)).join("\n");
  const address = URL.createObjectURL(new Blob([text, "\n"], { type: "application/x-ndjson" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = `${name}-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.jsonl`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
