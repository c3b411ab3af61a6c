"""A job's copies in other machines' memory: which snapshots are reported to the agent, and what is offered when the job starts.

Carries out what `strata.core.jobs.job` and `strata.core.jobs.peers` decide. Whatever fails here costs copies, never a step: it is
said once, and training continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from strata.checkpoint.catalog.manifest import CheckpointId, Manifest
from strata.checkpoint.copying.staging import read_snapshot
from strata.checkpoint.errors import Damaged
from strata.checkpoint.image.in_place import (
    Intake,
    NotOwn,
    is_on_cpu,
    load_mapped,
    take_from_store,
    verify_image,
)
from strata.checkpoint.peers.link import HeldCopy, PeerLink
from strata.checkpoint.peers.wire import PeerError
from strata.core.jobs.job import Offer
from strata.core.jobs.peers import PEER

log = logging.getLogger("strata.training")


class PeerCopies:
    """Of one rank that keeps images."""

    def __init__(
        self,
        link: PeerLink,
        *,
        copies: int,
        rate_bytes: int,
        slot: str,
        holders: Callable[[Manifest], tuple[str, ...] | None],
    ) -> None:
        """`slot` is what this rank's images are called among all of the job's. `holders` are the machines that have the same snapshot, or
        None where another rank reports it."""
        self._link = link
        self._copies = copies
        self._rate_bytes = rate_bytes
        self._slot = slot
        self._holders = holders
        self._found: dict[str, HeldCopy] = {}
        self._failure = ""
        self.copied_step = -1
        """The newest step of this rank's images that another machine was known to have when the last one was reported."""

    def kept(self, manifest: Manifest, path: str) -> None:
        """There is a new snapshot in this machine's memory."""
        holders = self._holders(manifest)
        if holders is None:
            return
        try:
            self.copied_step = self._link.saved(
                slot=self._slot,
                folder=Path(path).parent,
                checkpoint_id=manifest.checkpoint_id,
                holders=holders,
                copies=self._copies,
                rate_bytes=self._rate_bytes,
            )
            self._failure = ""
        except PeerError as error:
            if error.message != self._failure:
                self._failure = error.message
                log.warning("step %d is not copied to another machine: %s", manifest.step, error.message)

    def pending(self) -> frozenset[CheckpointId]:
        return self._link.pending()

    def offers(self, run: str, *, generation: int, everywhere: bool) -> list[Offer]:
        """What this machine's agent keeps of a run; of other machines too, if `everywhere`."""
        look = self._link.copies if everywhere else self._link.own_copies
        try:
            found = look(run, generation=generation)
        except PeerError as error:
            log.warning("the search for copies on other machines failed: %s", error.message)
            return []
        complete = [copy for copy in found if copy.is_complete]
        self._found = {copy.address: copy for copy in complete}
        return [_offer(copy) for copy in complete]

    def load(self, offer: Offer, *, into: Any, may_tear: bool) -> tuple[Any, Manifest]:
        """Load a copy of a complete state. Raises `CheckpointError`, `StoreError` and `PeerError`."""
        if offer.holder and may_tear and is_on_cpu(into):
            reader = self._link.reader(self._found[offer.where])
            manifest = reader.manifest()
            if manifest.checkpoint_id == offer.checkpoint_id and Intake.suits(manifest.parts[0]):
                try:
                    return take_from_store(reader, manifest, into=into, path=reader.url), manifest
                except NotOwn:
                    pass
        path, manifest = self.image(offer)
        if not may_tear:
            verify_image(None, manifest, path=path)
        return load_mapped(path, manifest, into=into, verify=may_tear), manifest

    def image(self, offer: Offer) -> tuple[Path, Manifest]:
        """A copy as an image in this machine's memory; one that another machine has is fetched, and verified. Raises `Damaged` and
        `PeerError`."""
        path = self._link.pull(self._found[offer.where]) if offer.holder else Path(offer.where)
        snapshot = read_snapshot(path.parent)
        if snapshot is None or snapshot.manifest.checkpoint_id != offer.checkpoint_id:
            raise Damaged(path=str(path), reason="the copy no longer exists")
        return snapshot.path, snapshot.manifest

    def fence(self, run: str, generation: int) -> None:
        self._link.fence(run, generation)

    def settle(self, run: str, generation: int) -> None:
        self._link.settle(run, generation)

    def forget(self, run: str, generation: int) -> None:
        self._link.forget(run, generation)

    def close(self) -> None:
        self._link.close()


def _offer(copy: HeldCopy) -> Offer:
    return Offer(
        checkpoint_id=copy.checkpoint_id,
        run=copy.run,
        step=copy.step,
        generation=copy.generation,
        sequence=copy.sequence,
        lineage=copy.lineage,
        parent=copy.parent,
        durable_parent=copy.durable_parent,
        tier=PEER,
        where=copy.address,
        distance=0,
        is_sharded=bool(copy.parts),
        part=copy.part,
        parts=copy.parts,
        holder="" if copy.path else copy.machine,
    )


def machines_with(part: str, parts: Sequence[str], machines: Sequence[str]) -> tuple[str, ...]:
    """The machines of all ranks that have this part, by what each rank has."""
    return tuple(
        dict.fromkeys(machine for held, machine in zip(parts, machines, strict=True) if held == part)
    )
