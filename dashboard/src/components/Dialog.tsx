/** Modal dialogs and side drawers. Focus stays inside; Escape closes. */

import { X } from "lucide-react";
import { Dialog as Radix } from "radix-ui";
import type { ComponentProps, ReactNode } from "react";

import { Button, IconButton } from "./controls";

interface Props {
  open: boolean;
  onClose: () => void;
  title: string;
  /** One sentence under the title. */
  description?: ReactNode;
  children: ReactNode;
  /** Buttons at the end. */
  footer?: ReactNode;
}

/** Focuses the first field, or the dialog itself; never the close button. */
function focusFirstField(event: Event): void {
  event.preventDefault();
  const frame = event.currentTarget as HTMLElement;
  (frame.querySelector<HTMLElement>("input, select, textarea") ?? frame).focus();
}

/** Backdrop. Radix's own overlay injects a style sheet, which the content security policy forbids. */
export function Backdrop(props: ComponentProps<"div">) {
  return <div aria-hidden {...props} className="pointer-events-auto fixed inset-0 z-40 bg-[oklch(0.15_0.01_240/0.45)]" />;
}

function Frame(props: Props & { className: string }) {
  return (
    <Radix.Root open={props.open} onOpenChange={(open) => { if (!open) props.onClose(); }}>
      <Radix.Portal>
        <Backdrop />
        <Radix.Content onOpenAutoFocus={focusFirstField} className={`fixed z-50 flex flex-col border bg-surface shadow-2xl focus:outline-none ${props.className}`} {...(props.description ? {} : { "aria-describedby": undefined })}>
          <header className="flex items-start gap-3 border-b px-5 py-3.5">
            <div className="min-w-0 flex-1">
              <Radix.Title className="foreign line-clamp-4 text-lg font-semibold break-words" title={props.title}>{props.title}</Radix.Title>
              {props.description && <Radix.Description asChild><div className="text-muted">{props.description}</div></Radix.Description>}
            </div>
            <Radix.Close asChild><IconButton label="Close"><X aria-hidden className="size-4" /></IconButton></Radix.Close>
          </header>
          <div className="min-h-0 flex-1 overflow-y-auto px-5 py-4">{props.children}</div>
          {props.footer && <footer className="flex items-center justify-end gap-2 border-t px-5 py-3">{props.footer}</footer>}
        </Radix.Content>
      </Radix.Portal>
    </Radix.Root>
  );
}

export function Dialog(props: Props & { wide?: boolean | "most" }) {
  return <Frame {...props} className={`top-1/2 left-1/2 max-h-[88vh] w-[94vw] -translate-x-1/2 -translate-y-1/2 rounded-xl ${props.wide === "most" ? "max-w-7xl" : props.wide ? "max-w-3xl" : "max-w-lg"}`} />;
}

export function Drawer(props: Props) {
  return <Frame {...props} className="inset-y-0 right-0 w-full max-w-xl animate-slide border-y-0 border-r-0" />;
}

/** Confirmation before an irreversible action. */
export function Confirm(props: { open: boolean; onClose: () => void; onConfirm: () => void; title: string; children: ReactNode; action: string; busy?: boolean; error?: ReactNode }) {
  return (
    <Dialog
      open={props.open}
      onClose={props.onClose}
      title={props.title}
      footer={
        <>
          <Button onClick={props.onClose}>Cancel</Button>
          <Button look="danger" disabled={props.busy} onClick={props.onConfirm}>{props.action}</Button>
        </>
      }
    >
      <div className="flex flex-col gap-3">{props.children}{props.error}</div>
    </Dialog>
  );
}
