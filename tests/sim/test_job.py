"""Two thousand lives and deaths of an elastic job, each decided by its seed, and proof that mistakes would be noticed.

`STRATA_SIM_SEED=17` runs one seed, `STRATA_SIM_JOB_RUNS=100000` more of them; `python -m tests.sim --job --seed 17 --story`
tells everything that happened in one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from strata.core.data.ledger import LedgerChain
from strata.core.jobs import job as core_job
from strata.core.jobs import runs as core_runs
from strata.core.jobs.finishing import Finishing
from strata.core.jobs.job import (
    Fence,
    Finished,
    JobProtocol,
    LoadReport,
    LoadShards,
    Offer,
    Save,
    SaveEnded,
    Source,
    StartAnew,
    Stop,
    Survey,
)
from strata.core.jobs.lineage import Lineage
from strata.core.jobs.peers import PEER, Accepted, Copy, CopyTable, Peer, targets
from strata.core.jobs.runs import Claim, Take
from strata.core.types import CheckpointId
from tests.sim import job as sim
from tests.sim.job import ShardedLife, SimulationFailed, fingerprint, simulate

RUNS = int(os.environ.get("STRATA_SIM_JOB_RUNS", "2000"))
PER_TEST = 200
ONE_SEED = os.environ.get("STRATA_SIM_SEED")
SEARCH = 1500
"""So many seeds at most until a planted mistake is found."""


def batches() -> list[range]:
    if ONE_SEED is not None:
        return [range(int(ONE_SEED), int(ONE_SEED) + 1)]
    return [range(first, min(first + PER_TEST, RUNS)) for first in range(0, RUNS, PER_TEST)]


HAPPENED: Counter[str] = Counter()
"""In all batches that this process has run, for what is too rare to be in each."""


@pytest.mark.parametrize("seeds", batches(), ids=lambda seeds: f"seeds-{seeds.start}-{seeds.stop - 1}")
def test_a_restart_never_costs_what_was_saved(seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts.update(simulate(seed))
    HAPPENED.update(counts)
    HAPPENED["seeds"] += len(seeds)
    if len(seeds) == PER_TEST:  # A simulation in which nothing goes wrong proves nothing.
        expected = {"crashes": 100, "machines lost": 30, "zombies": 30, "damages": 30, "outages": 20}
        expected |= {"resumed": 100, "anew": 50, "removed": 200, "skipped": 200, "resharded": 20}
        expected |= {"rescued": 30, "copies": 150, "copies refused": 20, "copies cut off": 100}
        for what, least in expected.items():
            assert counts[what] > least, f"only {counts[what]} {what}"


def test_what_is_rare_has_happened_too() -> None:
    """Runs after the batches above. Where those are few, or spread over processes, nothing follows from what this one has seen."""
    if HAPPENED["seeds"] < 1_000:
        return
    expected = {"stopped": 50, "filled": 20, "older": 20, "rescued furthest": 50, "restored from peers": 20}
    expected |= {"finished by agent": 120, "resumed from agent": 20, "agent refused": 80, "agents killed": 50}
    for what, least in expected.items():
        assert HAPPENED[what] >= least * HAPPENED["seeds"] / 4_000, f"only {HAPPENED[what]} {what}"


def test_one_seed_is_one_story() -> None:
    assert fingerprint(7) == fingerprint(7)
    assert fingerprint(7) != fingerprint(8)


Patch = Callable[[pytest.MonkeyPatch], None]
MISTAKES: dict[str, Patch] = {}
OF_SHARDED_STATE: set[str] = set()
"""Looked for in simulations of sharded state alone, where the same mistake elsewhere does not count."""


def mistake(name: str, *, sharded: bool = False) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        MISTAKES[name] = patch
        if sharded:
            OF_SHARDED_STATE.add(name)
        return patch

    return register


def wrapping(owner: Any, name: str, around: Callable[..., Any]) -> Patch:
    """Replace `owner.name` by `around(original, *arguments)`."""
    original = getattr(owner, name)

    def patched(*arguments: Any, **options: Any) -> Any:
        return around(original, *arguments, **options)

    return lambda monkeypatch: monkeypatch.setattr(owner, name, patched)


@mistake("a destination that does not answer is taken to be empty")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def surveyed(original: Any, self: JobProtocol, surveys: Sequence[Survey]) -> Any:
        blind = [
            replace(s, unreachable=(), offers=tuple(o for o in s.offers if not o.is_durable))
            if s.unreachable
            else s
            for s in surveys
        ]
        return original(self, blind)

    wrapping(JobProtocol, "surveyed", surveyed)(monkeypatch)


@mistake("an agent publishes whatever generation has started")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Finishing, "admit", lambda self, snapshot, *, claimed, is_there: None)


@mistake("an agent does not wait for the ranks of other machines", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Finishing, "_unreported", lambda self, at: [])


@mistake("an agent uploads a snapshot that some ranks do not have", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Finishing, "_chosen", lambda self, at: self._left[0])


@mistake("training starts anew when nothing that is stored can be loaded")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(original: Any, self: JobProtocol) -> Any:
        found = original(self)
        return StartAnew(reason="") if isinstance(found, Stop) and found.kind == "unloadable" else found

    wrapping(JobProtocol, "_choose", choose)(monkeypatch)


@mistake("of two rescues the one that is behind is the newer")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def rescue(_: Any, self: JobProtocol, checkpoint_id: CheckpointId, *, step: int) -> Save:
        now_ms = self.lineage.sequence + 1000 - step
        return self.save(checkpoint_id, step=step, now_ms=now_ms, durable=False)

    wrapping(JobProtocol, "rescue", rescue)(monkeypatch)


@mistake("rescues of different steps have one name")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def rescue(original: Any, self: JobProtocol, checkpoint_id: CheckpointId, *, step: int) -> Any:
        return original(self, CheckpointId(checkpoint_id.partition("-")[2]), step=step)

    wrapping(JobProtocol, "rescue", rescue)(monkeypatch)


@mistake("a save does not wait for the copies of the snapshot before it", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_job, "_being_sent", lambda ready, keep: "")


@mistake("an arriving copy takes the place of the newest complete one", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(original: Any, self: CopyTable, copy: Copy) -> Any:
        answer = original(self, copy)
        if isinstance(answer, Accepted) and not answer.is_there:
            self.complete.pop(copy.slot, None)
        return answer

    wrapping(CopyTable, "begin", begin)(monkeypatch)


@mistake("what a superseded generation sends is kept")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyTable, "fence", lambda self, run, generation: None)


@mistake("a superseded generation gives up the copies of those before it")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(original: Any, self: CopyTable, run: str, generation: int) -> Any:
        return original(self, run, max(generation, self.generations.get(run, 0)))

    wrapping(CopyTable, "settle", settle)(monkeypatch)


@mistake("copies stay in the rack of those who made them")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def near(sender: str, holders: Any, roster: Any, *, copies: int) -> list[Peer]:
        roster = list(roster)
        racks = {peer.rack for peer in roster if peer.machine == sender}
        return targets(sender, holders, [peer for peer in roster if peer.rack in racks], copies=copies)

    monkeypatch.setattr(sim, "targets", near)


@mistake("copies on other machines are not looked for")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def surveyed(original: Any, self: JobProtocol, surveys: Sequence[Survey]) -> Any:
        blind = [replace(s, offers=tuple(o for o in s.offers if o.tier != PEER)) for s in surveys]
        return original(self, blind)

    wrapping(JobProtocol, "surveyed", surveyed)(monkeypatch)


@mistake("a rescue is older than what was saved before it")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def rescue(original: Any, self: JobProtocol, checkpoint_id: CheckpointId, *, step: int) -> Any:
        save = original(self, checkpoint_id, step=step)
        return replace(save, placement=replace(save.placement, sequence=0))

    wrapping(JobProtocol, "rescue", rescue)(monkeypatch)


@mistake("a copy that could not be loaded is tried for ever")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobProtocol, "_strike", lambda self, rank, load, struck: None)


@mistake("after a damaged copy, training starts anew")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(original: Any, self: JobProtocol, reports: Sequence[LoadReport]) -> Any:
        if any(report.fault == "copy" for report in reports):
            return StartAnew(reason="")
        return original(self, reports)

    wrapping(JobProtocol, "loaded", loaded)(monkeypatch)


@mistake("a destination that is away while it is read costs the checkpoint")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(original: Any, self: JobProtocol, reports: Sequence[LoadReport]) -> Any:
        return original(self, [replace(r, fault="copy") if r.fault == "away" else r for r in reports])

    wrapping(JobProtocol, "loaded", loaded)(monkeypatch)


@mistake("the highest step is the newest")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offer, "order", property(lambda self: (self.step, self.sequence)))


@mistake("durable checkpoints come before snapshots, however old")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Offer, "order", property(lambda self: (self.generation, self.sequence + 10**9 * self.is_durable))
    )


@mistake("fences are ignored")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fence, "refuses", lambda self, offer: False)


@mistake("the checkpoints of another run are taken")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def surveyed(original: Any, self: JobProtocol, surveys: Sequence[Survey]) -> Any:
        adopted = [
            replace(s, offers=tuple(replace(o, run=self.lineage.run) for o in s.offers)) for s in surveys
        ]
        return original(self, adopted)

    wrapping(JobProtocol, "surveyed", surveyed)(monkeypatch)


@mistake("what a user has removed is restored from memory")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def surveyed(original: Any, self: JobProtocol, surveys: Sequence[Survey]) -> Any:
        return original(self, [replace(s, removed=()) for s in surveys])

    wrapping(JobProtocol, "surveyed", surveyed)(monkeypatch)


@mistake("the generation does not travel")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(original: Any, self: Lineage, *arguments: Any, **options: Any) -> Any:
        return replace(original(self, *arguments, **options), generation=0)

    wrapping(Lineage, "place", place)(monkeypatch)


@mistake("a superseded process may publish")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "is_superseded", lambda generation, claimed: False)


@mistake("a live job is taken over")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(newest: Claim | None, **facts: Any) -> Any:
        return Take(generation=newest.generation + 1 if newest else 1, reason="")

    monkeypatch.setattr(sim, "judge", judge)


@mistake("a restart of the same launch waits for its own dead claim for ever")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_runs, "SILENT_S", 1e9)
    wrapping(
        sim,
        "judge",
        lambda original, newest, **f: original(newest, **{**f, "launch": "", "holder_has_ended": None}),
    )(monkeypatch)


@mistake("the sequence follows the clock alone")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(original: Any, self: Lineage, checkpoint_id: Any, *, now_ms: int, durable: bool) -> Any:
        self.sequence = 0
        return original(self, checkpoint_id, now_ms=now_ms, durable=durable)

    wrapping(Lineage, "place", place)(monkeypatch)


@mistake("the ledger counts a save as durable when it begins")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(original: Any, self: LedgerChain, records: Any, checkpoint_id: str, **options: Any) -> Any:
        record = original(self, records, checkpoint_id, **options)
        self.confirm(checkpoint_id)
        return record

    wrapping(LedgerChain, "commit", commit)(monkeypatch)


@mistake("the ledger forgets what a failed save held")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(original: Any, self: LedgerChain, checkpoint_id: str) -> None:
        self._pending = [save for save in self._pending if save.checkpoint_id != checkpoint_id]

    wrapping(LedgerChain, "fail", fail)(monkeypatch)


@mistake("a snapshot in memory counts as a base of the ledger")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def restore(original: Any, self: LedgerChain, record: Any, **options: Any) -> None:
        original(self, record, **{**options, "durable": True})

    wrapping(LedgerChain, "restore", restore)(monkeypatch)


@mistake("retention keeps one too few")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapping(
        sim,
        "removable",
        lambda original, c, **o: original(c, **{**o, "keep_count": max(1, o["keep_count"] - 1)}),
    )(monkeypatch)


@mistake("retention removes what is still being uploaded")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapping(sim, "removable", lambda original, c, **o: original(c, **{**o, "in_use": ()}))(monkeypatch)


@mistake("retention never removes anything")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "removable", lambda checkpoints, **options: [])


@mistake("every start begins a lineage of its own")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def go_back_to(original: Any, self: Lineage, checkpoint: Any, *, durable: bool) -> None:
        original(self, checkpoint, durable=durable)
        self.name, self.parent = "", None

    wrapping(Lineage, "go_back_to", go_back_to)(monkeypatch)


@mistake("a run ends while its final save is under way")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(original: Any, self: JobProtocol, step: int, *arguments: Any, **options: Any) -> Any:
        found = original(self, step, *arguments, **options)
        return found if isinstance(found, Save | Stop) else Finished(step=step)

    wrapping(JobProtocol, "finish", finish)(monkeypatch)


@mistake("a run whose last step was saved does not look whether it arrived")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(original: Any, self: JobProtocol, step: int, *arguments: Any, **options: Any) -> Any:
        if step % self.save_every == 0:
            return Finished(step=step)
        return original(self, step, *arguments, **options)

    wrapping(JobProtocol, "finish", finish)(monkeypatch)


@mistake("a run ends although a destination is missing its final state")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn(original: Any, self: JobProtocol, news: Sequence[SaveEnded]) -> Any:
        return original(self, [replace(ended, missing=()) for ended in news])

    wrapping(JobProtocol, "learn", learn)(monkeypatch)


@mistake("ranks decide by their own clocks")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**9))

    def save(original: Any, self: JobProtocol, *arguments: Any, now_ms: int, **options: Any) -> Any:
        return original(self, *arguments, now_ms=now_ms + next(ticks), **options)

    wrapping(JobProtocol, "save", save)(monkeypatch)


@mistake("a sharded save begins although a rank has no image", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_job, "_without_image", lambda ready: "")


@mistake("a sharded save overwrites the last complete snapshot", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobProtocol, "_last_complete", lambda self, ready: None)


@mistake("a save does not wait until the last complete snapshot can be kept", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def save_shards(original: Any, self: JobProtocol, *arguments: Any, **options: Any) -> Any:
        save = original(self, *arguments, **options)
        return replace(save, keep=None) if isinstance(save, Save) else save

    monkeypatch.setattr(core_job, "_unable_to_keep", lambda ready, keep: "")
    wrapping(JobProtocol, "save_shards", save_shards)(monkeypatch)


@mistake("a rank overwrites its oldest image, whatever is complete", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def save_shards(original: Any, self: JobProtocol, *arguments: Any, **options: Any) -> Any:
        save = original(self, *arguments, **options)
        return replace(save, keep=None) if isinstance(save, Save) else save

    wrapping(JobProtocol, "save_shards", save_shards)(monkeypatch)


@mistake("a save begins while the one before is still being copied", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(original: Any, self: ShardedLife, rank: int) -> Any:
        return replace(original(self, rank), has_image=any(image.is_free for image in self.slots[rank]))

    wrapping(ShardedLife, "_ready", ready)(monkeypatch)


@mistake("a snapshot that one rank has is taken for complete", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        core_job, "_is_complete", lambda checkpoint_id, ready: any(checkpoint_id in r.held for r in ready)
    )


@mistake("a snapshot is complete only if every replica has it", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        core_job, "_is_complete", lambda checkpoint_id, ready: all(checkpoint_id in r.held for r in ready)
    )


@mistake("the snapshot that was resumed from is overwritten before there is another", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(original: Any, self: JobProtocol, reports: Sequence[LoadReport]) -> Any:
        found = original(self, reports)
        self._resumed = None
        return found

    wrapping(JobProtocol, "loaded", loaded)(monkeypatch)


@mistake("a rank with space for one image waits for ever", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(original: Any, self: ShardedLife, rank: int) -> Any:
        return replace(original(self, rank), has_one_image=False)

    wrapping(ShardedLife, "_ready", ready)(monkeypatch)


@mistake("a durable save that was skipped is forgotten", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def due(original: Any, self: JobProtocol, step: int) -> Any:
        self._is_owed = False
        return original(self, step)

    wrapping(JobProtocol, "due", due)(monkeypatch)


@mistake("a run ends although a destination was too busy for its final state", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def save_shards(
        original: Any, self: JobProtocol, checkpoint_id: Any, *arguments: Any, **options: Any
    ) -> Any:
        save = original(self, checkpoint_id, *arguments, **options)
        if checkpoint_id in self._left_out:
            self._left_out[checkpoint_id] = ()
        return save

    wrapping(JobProtocol, "save_shards", save_shards)(monkeypatch)


@mistake("what memory has a part of is taken for a checkpoint", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_job, "_missing_parts", lambda copies: 0)


@mistake("what is damaged is read again and again", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobProtocol, "_strike_sources", lambda self, load, report: None)


@mistake("one damaged part costs the checkpoint", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(original: Any, self: JobProtocol, load: LoadShards, report: LoadReport) -> None:
        original(self, load, replace(report, struck=()))

    wrapping(JobProtocol, "_strike_sources", strike)(monkeypatch)


@mistake("a sharded checkpoint whose destination is away is given up", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(original: Any, self: JobProtocol, load: LoadShards, report: LoadReport) -> None:
        original(self, load, replace(report, fault="copy"))

    wrapping(JobProtocol, "_strike_sources", strike)(monkeypatch)


@mistake("training resumes although a rank could not read its part", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(original: Any, self: JobProtocol, reports: Sequence[LoadReport]) -> Any:
        return original(self, [*reports[:1], *(LoadReport() for _ in reports[1:])])

    wrapping(JobProtocol, "loaded", loaded)(monkeypatch)


@mistake("slices are read from destinations although memory has them", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapping(
        LoadShards, "seen_from", lambda original, self, machine: list(reversed(original(self, machine)))
    )(monkeypatch)


@mistake("images of two steps are mixed", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_shards(original: Any, self: JobProtocol, copies: Any, *, may_tear: bool) -> Any:
        load = original(self, copies, may_tear=may_tear)
        others = [
            Source(rank=rank, machine=self._machines[rank], offer=offer)
            for (rank, _, _), offer in self._offers.items()
            if offer.is_sharded and not offer.is_durable
        ]
        self._load = replace(load, sources=(*others, *load.sources))
        return self._load

    wrapping(JobProtocol, "_load_shards", load_shards)(monkeypatch)


@mistake("a zombie completes the manifest of its sharded checkpoint", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "is_superseded", lambda generation, claimed: False)


@mistake("a zombie's sharded manifest counts", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fence, "refuses", lambda self, offer: False)


@mistake("a manifest is published before all parts are there", sharded=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(original: Any, self: ShardedLife, order: Save, checkpoint: Any) -> Any:
        for _ in original(self, order, checkpoint):
            upload = self.in_flight.get(checkpoint.checkpoint_id)
            if upload is not None and len(self.parts) > 1:
                upload.checkpoint = checkpoint.copy(parts=checkpoint.parts[:1])
            yield

    wrapping(ShardedLife, "_copy", copy)(monkeypatch)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[name](monkeypatch)
    for seed in range(1, 2 * SEARCH, 2) if name in OF_SHARDED_STATE else range(SEARCH):
        try:
            simulate(seed)
        except SimulationFailed:
            return
    pytest.fail(f"{SEARCH} simulations did not notice: {name}")
