/** Puts a text on the clipboard, and says whether it is there. */

import { Check, Copy as CopyIcon } from "lucide-react";
import { useEffect, useState } from "react";

import { IconButton } from "./controls";

const SAID_MS = 1_500;

export function Copy(props: { text: string; what: string; className?: string }) {
  const [said, setSaid] = useState("");
  useEffect(() => {
    if (!said) return;
    const timer = setTimeout(() => setSaid(""), SAID_MS);
    return () => clearTimeout(timer);
  }, [said]);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(props.text);
      setSaid("Copied");
    } catch {
      // Only pages that came over TLS, or from this machine, may use the clipboard.
      setSaid("Not allowed here: select the text and press Ctrl C");
    }
  };
  return (
    <span className={`relative inline-flex ${props.className ?? ""}`}>
      <IconButton label={`Copy ${props.what}`} className="size-7" onClick={() => void copy()}>{said === "Copied" ? <Check aria-hidden className="size-3.5 text-good" /> : <CopyIcon aria-hidden className="size-3.5" />}</IconButton>
      <span role="status" className={said && said !== "Copied" ? "absolute top-full right-0 z-30 rounded-md border bg-surface px-2 py-1 text-sm whitespace-nowrap shadow-lg" : "sr-only"}>{said}</span>
    </span>
  );
}
