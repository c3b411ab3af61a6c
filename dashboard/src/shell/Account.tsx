/** The signed-in user with role, and sign-out. */

import { useMutation } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { LogOut, UserRound } from "lucide-react";

import { IconButton } from "../components/controls";
import { signOut } from "../session";
import { useStore } from "../state/store";

export function Account() {
  const session = useStore((state) => state.session);
  const work = useMutation({ mutationFn: signOut });
  if (session === null) return null;
  const what = session.job_id === null ? session.role : `${session.role}, job ${session.job_id}`;
  return (
    <div className="flex flex-col items-center gap-1 border-t pt-2 lg:flex-row">
      <Link to="/settings" title={`${session.name}, ${what}`} className="flex min-h-9 max-w-full min-w-0 items-center gap-2.5 rounded-md px-2 hover:bg-hover lg:flex-1">
        <UserRound aria-hidden className="size-4 shrink-0 text-muted" />
        <span className="sr-only lg:not-sr-only lg:flex lg:min-w-0 lg:flex-col lg:leading-tight">
          <span className="foreign truncate"><span className="sr-only">Signed in: </span>{session.name}</span>
          <span className="foreign truncate text-sm text-muted">{what}</span>
        </span>
      </Link>
      {session.signed_in && (
        <IconButton label={work.isError ? `Sign out (failed: ${work.error.message})` : "Sign out"} disabled={work.isPending} onClick={() => work.mutate()}>
          <LogOut aria-hidden className={`size-4 ${work.isError ? "text-bad" : ""}`} />
        </IconButton>
      )}
    </div>
  );
}
