/** Text to copy: a command, a path, an ID. */

import { Check, Copy as CopyIcon } from "lucide-react";
import { useEffect, useState } from "react";

import { IconButton } from "./controls";

export function CopyButton(props: { text: string; label: string; className?: string }) {
  const [done, setDone] = useState<"" | "copied" | "failed">("");
  useEffect(() => {
    if (!done) return;
    const timer = setTimeout(() => setDone(""), 2_000);
    return () => clearTimeout(timer);
  }, [done]);
  const copy = () => {
    copyText(props.text).then(() => setDone("copied"), () => setDone("failed"));
  };
  return (
    <>
      <IconButton label={`Copy ${props.label}`} onClick={copy} className={props.className ?? ""}>
        {done === "copied" ? <Check aria-hidden className="size-4 text-good" /> : <CopyIcon aria-hidden className="size-4" />}
      </IconButton>
      <span role="status" className="sr-only">{done === "copied" ? "Copied" : done === "failed" ? "Copy failed" : ""}</span>
    </>
  );
}

/** Without a secure origin there is no clipboard API, but a selection can still be copied. */
async function copyText(text: string): Promise<void> {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("not copied");
}

/** A block of text with a copy button. */
export function Copyable(props: { label: string; text: string; title?: boolean }) {
  return (
    <div className="flex flex-col gap-1">
      {props.title !== false && <h3 className="text-sm text-muted">{props.label}</h3>}
      <div className="flex items-start gap-1 rounded-md border bg-raised py-1 pr-1 pl-3">
        <code className="foreign min-w-0 flex-1 py-1 font-mono text-sm wrap-anywhere whitespace-pre-wrap select-all">{props.text || "–"}</code>
        {props.text && <CopyButton text={props.text} label={props.label.toLowerCase()} className="size-7" />}
      </div>
    </div>
  );
}
