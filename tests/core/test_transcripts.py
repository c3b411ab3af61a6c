"""Stories that can be read: each file in `tests/testdata` is a dialogue with the core, and this plays it.

A line that begins with `>` is said to the core; the lines below it are what follows, up to the next blank line.
Verbs: join, leave, drop, hear, wait, arrive, dataset, plan, epoch, save, remove, reconcile, restart, snapshot, show. After a
change that is meant, `STRATA_REWRITE_TRANSCRIPTS=1 pytest tests/core/test_transcripts.py` writes the answers anew;
read the difference before you keep it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from strata.core import views
from strata.core.messages import DatasetRegistered, Decision, Event, JobId, Refused, ShardsMoved, WorkerJoined
from tests.core.builders import Fleet, data_json, limits, trained

TRANSCRIPTS = sorted((Path(__file__).parent.parent / "testdata").glob("*.txt"))
SHOWN_FIELDS = (
    "worker_id",
    "checkpoint_id",
    "barrier_id",
    "step",
    "round",
    "incarnation",
    "generation",
    "missing",
)
NUMBERS = {
    "expected": int,
    "step": int,
    "incarnation": int,
    "generation": int,
    "run_generation": int,
    "saved_generation": int,
    "timeout_s": float,
    "epoch": int,
}


class Player:
    """Understands the verbs of a transcript. Time-outs are short, so that stories are."""

    def __init__(self) -> None:
        self.fleet = Fleet(limits(heartbeat_timeout_s=30.0, barrier_timeout_s=60.0))

    def say(self, line: str) -> Iterator[str]:
        verb, *words = line.split()
        names = [word for word in words if "=" not in word]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        try:
            yield from getattr(self, f"do_{verb}")(*names, **options)
        except Refused as refusal:
            yield f"refused ({refusal.code}): {refusal}"

    def do_join(
        self,
        *names: str,
        job: str = "default",
        registration: str = "",
        run: str = "",
        run_generation: str = "0",
    ) -> Iterator[str]:
        for name in names:
            known = len(self.fleet.journal)
            incarnation = self.fleet.join(
                name, job, registration=registration, run_id=run, run_generation=int(run_generation)
            )
            events = self.fleet.journal[known:]
            yield from (
                map(told, events) if events else [f"known already: {name} is incarnation {incarnation}"]
            )

    def do_leave(self, name: str, reason: str = "") -> Iterator[str]:
        return said(self.fleet.leave(name, reason=reason))

    def do_drop(self, name: str) -> Iterator[str]:
        self.fleet.drop(name)
        return iter(())

    def do_hear(self, *names: str) -> Iterator[str]:
        self.fleet.beat(*names)
        return iter(())

    def do_wait(self, seconds: str) -> Iterator[str]:
        return said(self.fleet.tick(float(seconds)))

    def do_arrive(self, name: str, barrier: str, call: str = "1", **options: str) -> Iterator[str]:
        named: dict[str, Any] = {key: NUMBERS[key](value) for key, value in options.items()}
        ticket, decision = self.fleet.arrive(name, barrier, call_id=f"{name}-{call}", **named)
        yield from said(decision)
        if ticket.outcome is not None:
            yield f"knows already, of round {ticket.round}: {ticket.outcome.reason}"
        elif not decision.events:
            yield f"waits as number {ticket.order + 1}"

    def do_dataset(self, name: str, samples: str = "100", shard: str = "10") -> Iterator[str]:
        yield from said(
            self.fleet.register(name, samples=int(samples), shard=int(shard)), nothing="known already"
        )

    def do_plan(self) -> Iterator[str]:
        return said(self.fleet.plan(), nothing="plans match their members")

    def do_epoch(self, name: str, epoch: str, dataset: str = "d") -> Iterator[str]:
        return said(self.fleet.open_epoch(name, int(epoch), dataset), nothing="planned already")

    def do_save(self, name: str, checkpoint: str, trained_to: str = "", **options: str) -> Iterator[str]:
        position = data_json(trained([(0, int(trained_to))])) if trained_to else ""
        tiers = tuple(options.pop("tiers", "local").split(","))
        options["run_id"] = options.pop("run", "")
        named: dict[str, Any] = {key: NUMBERS.get(key, str)(value) for key, value in options.items()}
        return said(
            self.fleet.save(name, checkpoint, data_json=position, tiers=tiers, **named),
            nothing="known already",
        )

    def do_remove(self, name: str, checkpoint: str) -> Iterator[str]:
        return said(self.fleet.save(name, checkpoint, status="removed"), nothing="removed already")

    def do_reconcile(
        self, name: str, *present: str, run: str = "", run_generation: str = "0"
    ) -> Iterator[str]:
        reply, decision = self.fleet.reconcile(name, *present, run_id=run, run_generation=int(run_generation))
        yield from said(decision)
        yield f"{reply.removed} removed, unknown: {' '.join(reply.unknown) or 'none'}"

    def do_restart(self) -> Iterator[str]:
        self.fleet = self.fleet.replayed()
        yield f"replayed {len(self.fleet.journal)} events"

    def do_snapshot(self) -> Iterator[str]:
        """A restart from a snapshot alone."""
        self.fleet = self.fleet.compacted()
        yield f"replayed a snapshot of {len(self.fleet.journal)} events"

    def do_show(self, what: str, job: str = "default", dataset: str = "d", epoch: str = "0") -> Iterator[str]:
        cluster = self.fleet.cluster
        match what:
            case "workers":
                for worker in views.workers(cluster):
                    rank = "-" if worker.rank is None else worker.rank
                    yield f"{worker.id} {worker.status} rank {rank}, incarnation {worker.incarnation}: {worker.reason}"
            case "barriers":
                for barrier in views.barriers(cluster, limit=100):
                    missing = f", missing {' '.join(barrier.missing)}" if barrier.missing else ""
                    yield f"{barrier.id} {barrier.status}, {barrier.arrived} of {barrier.total}{missing}"
            case "shards":
                owners = self.fleet.owners(dataset, int(epoch), job)
                done = {
                    s.shard_id: s.done
                    for w in self.fleet.ranks(job)
                    for s in self._shards(w, job, dataset, epoch)
                }
                held: dict[str | None, list[str]] = {}
                for shard, owner in owners.items():
                    held.setdefault(owner, []).append(
                        f"{shard}+{done[shard]}" if done.get(shard) else str(shard)
                    )
                for owner in sorted(held, key=str):
                    yield f"{owner or 'nobody'}: {' '.join(held[owner])}"
            case "latest":
                yield str(self.fleet.latest(job))

    def _shards(self, worker: str, job: str, dataset: str, epoch: str) -> Iterator[Any]:
        key: Any = (JobId(job), dataset, int(epoch))
        return self.fleet.cluster.datasets.shards_of(worker, key)  # type: ignore[arg-type]


def said(decision: Decision, *, nothing: str = "") -> Iterator[str]:
    yield from map(told, decision.events)
    if nothing and not decision.events:
        yield nothing


def told(event: Event) -> str:
    """The kind, what identifies it, and why."""
    facts = {f.name: getattr(event, f.name) for f in fields(event) if f.name in SHOWN_FIELDS}
    if not getattr(event, "run_id", "a run"):
        facts.pop("generation", None)  # Of no run.
    if isinstance(event, WorkerJoined):
        facts = {"worker_id": event.spec.worker_id} | facts
    if isinstance(event, ShardsMoved):
        facts = {"dataset": event.dataset_id, "epoch": event.epoch, "version": event.version}
    if isinstance(event, DatasetRegistered):
        facts = {"dataset": event.spec.dataset_id}
    shown = " ".join(
        f"{name.removesuffix('_id')}={','.join(value) if isinstance(value, tuple) else value}"
        for name, value in facts.items()
        if value != ()
    )
    return f"{type(event).__name__} {shown}: {event.reason}"


def blocks(text: str) -> Iterator[list[str]]:
    """Lines between blank lines."""
    yield from ([line for line in block.split("\n") if line] for block in text.split("\n\n") if block.strip())


def played(text: str) -> str:
    player, answer = Player(), []
    for block in blocks(text):
        lines: list[str] = []
        for line in block:
            if line.startswith("#"):
                lines.append(line)
            elif line.startswith(">"):
                lines.append(line)
                lines += player.say(line[1:].strip())
        answer.append("\n".join(lines))
    return "\n\n".join(answer) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_core_says_what_the_transcript_says(path: Path) -> None:
    written = path.read_text()
    answer = played(written)
    if os.environ.get("STRATA_REWRITE_TRANSCRIPTS"):
        path.write_text(answer)
        return
    assert answer == written


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 6
