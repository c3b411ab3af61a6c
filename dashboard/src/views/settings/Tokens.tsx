/** Tokens issued by the coordinator: list, create, revoke. For admins. */

import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { Check, Copy, KeyRound, Plus } from "lucide-react";
import { useMemo, useRef, useState } from "react";

import { get, post, remove } from "../../api/client";
import { errorOf } from "../../api/errors";
import type { CreatedToken, Role, Token } from "../../api/types";
import { Card } from "../../components/Card";
import { Button, Field, Input, Select } from "../../components/controls";
import { Confirm, Dialog } from "../../components/Dialog";
import { Empty, ErrorNote, Loading } from "../../components/states";
import { Status } from "../../components/Status";
import { Table, type Column } from "../../components/Table";
import { Name, Time } from "../../components/values";
import { ABILITIES, ROLES } from "../../session";

const KEY = ["tokens"];
const EXPIRIES = [["1d", "1 day"], ["7d", "7 days"], ["30d", "30 days"], ["90d", "90 days"], ["never", "Never"]] as const;

export function Tokens() {
  const tokens = useQuery({ queryKey: KEY, queryFn: ({ signal }) => get<Token[]>("/tokens", {}, signal) });
  const [creating, setCreating] = useState(false);
  const [revoked, setRevoked] = useState<Token | null>(null);
  const columns = useMemo<readonly Column<Token>[]>(
    () => [
      { id: "name", header: "Name", cell: (token) => <Name>{token.name}</Name>, width: "minmax(8rem, 1fr)" },
      { id: "id", header: "ID", cell: (token) => <Name mono>{token.id}</Name>, width: "100px" },
      { id: "role", header: "Role", cell: (token) => token.role, width: "90px" },
      { id: "job", header: "Job", cell: (token) => (token.job_id === null ? "all" : <Name>{token.job_id}</Name>), width: "minmax(6rem, 1fr)" },
      { id: "created", header: "Created", cell: (token) => <Time at={token.created_at} />, width: "150px" },
      { id: "expires", header: "Expires", cell: (token) => (token.expired ? <Status value="expired" /> : token.expires_at === null ? "never" : <Time at={token.expires_at} />), width: "150px" },
      { id: "by", header: "Created by", cell: (token) => <Name>{token.created_by}</Name>, width: "minmax(8rem, 1fr)" },
      { id: "revoke", header: "", cell: (token) => <Button look="danger" className="h-7" aria-label={`Revoke ${token.name} (${token.id})`} onClick={() => setRevoked(token)}>Revoke</Button>, align: "right", width: "100px" },
    ],
    [],
  );
  return (
    <Card title="Tokens" hint="without tokens from the configuration" actions={<Button onClick={() => setCreating(true)}><Plus aria-hidden className="size-4" />Create token</Button>} flush>
      {tokens.isPending ? (
        <div className="px-4 pb-4"><Loading /></div>
      ) : tokens.isError ? (
        <ErrorNote error={tokens.error} onRetry={() => void tokens.refetch()} className="m-4" />
      ) : (
        <Table label="Tokens" rows={tokens.data} columns={columns} rowId={(token) => token.id} height={280} empty={<Empty icon={KeyRound} title="No tokens yet">A token gives a person, a program or a job one role until it expires.</Empty>} />
      )}
      <Dialog open={creating} onClose={() => setCreating(false)} title="Create token">
        <Create onClose={() => setCreating(false)} />
      </Dialog>
      {revoked && <Revoke token={revoked} onClose={() => setRevoked(null)} />}
    </Card>
  );
}

function Create(props: { onClose: () => void }) {
  const tokens = useQueryClient();
  const [name, setName] = useState("");
  const [role, setRole] = useState<Role>("viewer");
  const [job, setJob] = useState("");
  const [expires, setExpires] = useState("30d");
  const work = useMutation({
    mutationFn: () => post<CreatedToken>("/tokens", { name: name.trim(), role, expires, ...(job.trim() ? { job_id: job.trim() } : {}) }),
    gcTime: 0, // The secret is not cached.
    onSuccess: () => void tokens.invalidateQueries({ queryKey: KEY }),
  });
  if (work.data) return <Created token={work.data} onClose={props.onClose} />;
  return (
    <form className="flex flex-col gap-4" onSubmit={(event) => { event.preventDefault(); work.mutate(); }}>
      <Field label="Name" hint="Who or what uses it; shown in the audit log" error={errorOf(work.error, "name")}>
        {(ids) => <Input {...ids} required maxLength={64} value={name} onChange={(event) => setName(event.target.value)} />}
      </Field>
      <Field label="Role" hint={ABILITIES[role]} error={errorOf(work.error, "role")}>
        {(ids) => (
          <Select {...ids} value={role} onChange={(event) => setRole(event.target.value as Role)}>
            {ROLES.map((each) => <option key={each} value={each}>{each}</option>)}
          </Select>
        )}
      </Field>
      <Field label="Job" hint="Leave empty for all jobs" error={errorOf(work.error, "job_id")}>
        {(ids) => <Input {...ids} maxLength={256} value={job} onChange={(event) => setJob(event.target.value)} />}
      </Field>
      <Field label="Expires after" error={errorOf(work.error, "expires")}>
        {(ids) => (
          <Select {...ids} value={expires} onChange={(event) => setExpires(event.target.value)}>
            {EXPIRIES.map(([value, label]) => <option key={value} value={value}>{label}</option>)}
          </Select>
        )}
      </Field>
      {work.isError && <ErrorNote error={work.error} />}
      <footer className="flex justify-end gap-2">
        <Button onClick={props.onClose}>Cancel</Button>
        <Button look="primary" type="submit" disabled={work.isPending}>Create</Button>
      </footer>
    </form>
  );
}

function Created(props: { token: CreatedToken; onClose: () => void }) {
  const { token } = props;
  const field = useRef<HTMLInputElement>(null);
  const [note, setNote] = useState("");
  const copy = async () => {
    field.current?.select();
    try {
      await navigator.clipboard.writeText(token.token);
      setNote("Copied.");
    } catch {
      // The clipboard API needs TLS or localhost.
      setNote("Selected: press Ctrl C to copy.");
    }
  };
  return (
    <div className="flex flex-col gap-4">
      <p><strong className="font-semibold">Copy the token now.</strong> It is not shown again; the coordinator keeps only its digest.</p>
      <Field label={`Token ${token.name} (${token.role})`} hint="For programs: set STRATA_TOKEN">
        {(ids) => <Input {...ids} ref={field} readOnly className="h-10 font-mono" value={token.token} onFocus={(event) => event.target.select()} />}
      </Field>
      <footer className="flex items-center justify-end gap-2">
        <span role="status" className="mr-auto text-muted">{note}</span>
        <Button onClick={() => void copy()}>{note === "Copied." ? <Check aria-hidden className="size-4" /> : <Copy aria-hidden className="size-4" />}Copy</Button>
        <Button look="primary" onClick={props.onClose}>Done</Button>
      </footer>
    </div>
  );
}

function Revoke(props: { token: Token; onClose: () => void }) {
  const { token } = props;
  const tokens = useQueryClient();
  const work = useMutation({
    mutationFn: () => remove(`/tokens/${encodeURIComponent(token.id)}`),
    onSuccess: async () => {
      await tokens.invalidateQueries({ queryKey: KEY });
      props.onClose();
    },
  });
  return (
    <Confirm open onClose={props.onClose} onConfirm={() => work.mutate()} busy={work.isPending} action="Revoke token" title={`Revoke ${token.name}?`} error={work.isError ? <ErrorNote error={work.error} /> : undefined}>
      <p>Requests with token <code className="font-mono text-sm">{token.id}</code> ({token.role}) are refused from now on, and browsers signed in with it are signed out. This cannot be undone.</p>
    </Confirm>
  );
}
