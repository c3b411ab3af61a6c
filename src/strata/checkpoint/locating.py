"""Where the copies of a run's checkpoints are, as far as this machine can see: its own memory, what peers hold, the destinations.

Nothing is taken over, and nothing is changed. What it finds goes to `strata.core.jobs.safety`, which says what that is worth. A
destination that does not answer is reported as unknown, never as empty.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from strata.checkpoint.catalog.listing import Catalog, Entry, where
from strata.checkpoint.catalog.manifest import Manifest
from strata.checkpoint.catalog.runs import newest_claim, read_record
from strata.checkpoint.verify import verify_store
from strata.core.jobs.safety import Copy, Safety, kind_of, safety_of
from strata.errors import StrataError
from strata.files import is_on_network
from strata.shared_memory import images_folder, memory_roots, own_rack, peers_folder
from strata.stores.protocol import Store

_MARK = "mark.json"


def locate(stores: Sequence[Store], *, step: int | None = None, verify: bool = False) -> Safety:
    """What is known of a step of the run at these destinations, by default of its newest checkpoint. With `verify` the bytes of that
    step are read, in memory and at every destination."""
    copies: list[Copy] = []
    problems: list[str] = []
    run, reached = "", 0
    entries: list[tuple[Store, Entry]] = []
    for store in stores:
        try:
            record, claim = read_record(store), newest_claim(store)
            listing = Catalog(store).list()
        except StrataError as error:
            problems.append(f"{store.url}: {error.message}")
            continue
        run = run or (record.run if record is not None else "")
        reached = max(reached, claim.step if claim is not None else 0)
        entries += [(store, entry) for entry in listing.entries]
        problems += listing.problems
    copies += [_stored(store, entry) for store, entry in entries if entry.manifest.run in ("", run)]
    if run:
        copies += _in_memory(run)
        copies += _held_by_peers(run)
    reached = max([reached, *(copy.step for copy in copies)])
    found = safety_of(copies, reached=reached, run=run, step=step, problems=problems)
    if not verify or found.step is None:
        return found
    checked = [_verified(copy, stores) if copy.step == found.step else copy for copy in copies]
    return safety_of(checked, reached=reached, run=run, step=found.step, problems=problems)


def _stored(store: Store, entry: Entry) -> Copy:
    manifest = entry.manifest
    path = where(store, manifest.parts[0].key if len(manifest.parts) == 1 else entry.key)
    kind = kind_of(store.tier, is_on_network=is_on_network(path))
    return Copy(
        checkpoint_id=manifest.checkpoint_id,
        step=manifest.step,
        saved_at=manifest.created_at,
        kind=kind,
        host=socket.gethostname() if kind == "disk" else "",
        rack=own_rack() if kind == "disk" else "",
        where=path,
    )


def _in_memory(run: str) -> Iterator[Copy]:
    """Of this machine. A mark is this user's own, in a folder that no other user may enter."""
    from strata.checkpoint.copying.staging import read_snapshot
    from strata.checkpoint.sharded.plan import Marked

    for root in memory_roots():
        for mark in sorted(images_folder(root).glob(f"*/[!.]*/*/{_MARK}")):
            snapshot = read_snapshot(mark.parent)
            if snapshot is None or snapshot.manifest.run != run:
                continue
            manifest: Manifest = snapshot.manifest
            marked = Marked.of(manifest.layout)
            yield Copy(
                checkpoint_id=manifest.checkpoint_id,
                step=manifest.step,
                saved_at=manifest.created_at,
                kind="memory",
                host=socket.gethostname(),
                rack=own_rack(),
                where=str(snapshot.path),
                part=marked.part if marked is not None else "",
                parts=marked.parts if marked is not None else (),
            )


def _held_by_peers(run: str) -> list[Copy]:
    """What agents hold in memory for other machines, as far as one of this user's on this machine knows."""
    from strata.checkpoint.peers.link import HeldCopy, PeerLink
    from strata.checkpoint.peers.wire import PeerError

    held: dict[tuple[str, str, str], HeldCopy] = {}
    for root in memory_roots():
        for path in sorted(peers_folder(root).glob("*/socket")):
            with suppress(PeerError):  # Its agent has ended.
                for each in PeerLink(str(path)).copies(run):
                    held[each.agent, each.slot, each.checkpoint_id] = each
    return [
        Copy(
            checkpoint_id=each.checkpoint_id,
            step=each.step,
            # At least the time, in milliseconds: see `strata.core.jobs.lineage`.
            saved_at=each.sequence / 1000,
            kind="peer",
            host=each.host,
            rack=each.rack,
            where=f"the memory of {each.host}",
            part=each.part,
            parts=each.parts,
        )
        for each in held.values()
        if each.is_complete
    ]


def _verified(copy: Copy, stores: Sequence[Store]) -> Copy:
    """The copy, after all of its bytes were read; as it was where they are not here to be read."""
    if copy.kind == "memory":
        from strata.checkpoint.copying.staging import read_snapshot
        from strata.checkpoint.errors import Damaged
        from strata.checkpoint.image.in_place import verify_image

        path = Path(copy.where)
        snapshot = read_snapshot(path.parent)
        if snapshot is None or snapshot.manifest.checkpoint_id != copy.checkpoint_id:
            return copy  # A newer one has taken its place meanwhile.
        try:
            verify_image(None, snapshot.manifest, path=path)
        except Damaged:
            return replace(copy, verified=False)
        return replace(copy, verified=True)
    for store in stores if copy.kind != "peer" else ():
        for entry in Catalog(store).list().entries:
            if (
                entry.manifest.checkpoint_id == copy.checkpoint_id
                and _stored(store, entry).where == copy.where
            ):
                return replace(copy, verified=all(each.is_intact for each in verify_store(store, [entry])))
    return copy
