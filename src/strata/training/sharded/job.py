"""How an elastic job saves and restores a state that is spread over its ranks. Carries out what `strata.core.jobs.job` decides."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.planner import ReadItem

from strata.checkpoint.catalog.manifest import Manifest
from strata.checkpoint.copying.staging import read_snapshot
from strata.checkpoint.errors import CheckpointError, Damaged, StateMismatch
from strata.checkpoint.image.in_place import verify_image
from strata.checkpoint.image.layout import Plan, Prepared
from strata.checkpoint.manager import CheckpointManager
from strata.checkpoint.peers.wire import PeerError
from strata.checkpoint.sharded.images import ImageFound, Unusable, describe_image, nested_state
from strata.checkpoint.sharded.layout import Stored
from strata.checkpoint.sharded.plan import Marked, ShardPlan, chunks_of
from strata.checkpoint.sharded.plan import Path as StatePath
from strata.checkpoint.sharded.publishing import Shards
from strata.checkpoint.sharded.restoring import Reading, ShardedSource, slice_of
from strata.core.jobs.job import LoadReport, LoadShards
from strata.stores.protocol import Store, StoreError
from strata.torch_compat.dtensors import local_of
from strata.training.data_world import DataWorld
from strata.training.exchange import exchange_device, gather
from strata.training.peer_copies import PeerCopies
from strata.training.sharded.shards import RNG, Locals, ShardedState, is_generator_of
from strata.training.state import TrainingState

log = logging.getLogger("strata.training")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """What a rank tells the others before they read."""

    images: tuple[ImageFound, ...] = ()
    manifests: Mapping[str, Manifest] | None = None
    """Of the checkpoint, by the destination's URL."""
    error: str = ""
    struck: tuple[str, ...] = ()


class ShardedJob:
    """One rank's part in saving and restoring."""

    def __init__(
        self, state: TrainingState, *, rank: int, world_size: int, machine: str, data_world: DataWorld
    ) -> None:
        self._state = ShardedState(state)
        self._rank = rank
        self._world_size = world_size
        self._machine = machine
        self._data_world = data_world
        self._plan: ShardPlan | None = None
        self._planned_for: Plan | None = None
        self._locals = Locals()
        self._local: dict[str, Any] = {}
        self._captured: dict[str, Any] = {}

    # --- saving ---------------------------------------------------------------------------------------------

    def capture(self, manager: CheckpointManager, *, step: int, epoch: int) -> Prepared:
        """Look at the state as it is now."""
        self._captured = self._state.capture(
            step=step, epoch=epoch, rank=self._rank, world_size=self._world_size
        )
        self._local = self._locals.of(self._captured)
        return manager.prepared(self._local)

    @property
    def part_names(self) -> tuple[str, ...]:
        """What each rank has of the state."""
        assert self._plan is not None
        return tuple(self._plan.part_names)

    @property
    def part(self) -> str:
        """What this rank has of the state, where others have the same; empty where no other has, or that is not known yet."""
        if self._plan is None or len(set(self._plan.part_names)) == len(self._plan.part_names):
            return ""
        return self._plan.part_names[self._rank]

    def needs_plan(self, prepared: Prepared) -> bool:
        """Whether the structure of the state is not that of the save before. Once one rank says so, all make a plan."""
        return self._plan is None or prepared.plan is not self._planned_for

    def make_plan(self, prepared: Prepared) -> None:
        """Collective. Raises `UnsupportedState` on every rank where one cannot be made on any."""
        mine: Any
        try:
            mine = chunks_of(self._captured)
        except CheckpointError as error:
            mine = error
        tables = gather(mine)
        for table in tables:
            if isinstance(table, CheckpointError):
                raise table
        self._plan = ShardPlan(tables=tuple(tables), rank=self._rank)
        self._planned_for = prepared.plan

    def shards(self) -> Shards:
        """What is to be saved; lets go of the state."""
        assert self._plan is not None
        shards = Shards(plan=self._plan, state=self._local)
        self._local, self._captured = {}, {}
        return shards

    # --- restoring ------------------------------------------------------------------------------------------

    def load(
        self,
        load: LoadShards,
        *,
        manager: CheckpointManager | None,
        stores: Sequence[Store],
        manifests: Mapping[str, Manifest],
        peers: PeerCopies | None = None,
    ) -> tuple[Any, LoadReport]:
        """Collective: every rank reads what it needs. `manifests` are those that this rank has found, by destination."""
        described = gather(self._describe(load, manifests, manager, peers))
        if any(each.error for each in described):
            mine = described[self._rank]
            if not mine.error:
                return None, LoadReport()
            return None, LoadReport(error=mine.error, fault="copy", struck=mine.struck)
        images = {image.name: image for each in described for image in each.images}
        reading: Reading | None = None
        values: dict[StatePath, Any] = {}
        report = LoadReport()
        try:
            reading, values = self._read(load, images, described[0].manifests or {}, manager, stores)
        except StateMismatch as error:
            report = LoadReport(error=error.message, fault="state")
        except Unusable as error:
            report = LoadReport(
                error=error.message, fault="away" if error.is_away else "copy", struck=error.names
            )
        except (StoreError, CheckpointError, OSError) as error:
            report = LoadReport(error=getattr(error, "message", str(error)), fault="copy")
        lost = self._have_sent(reading, images)
        if lost and report.fault == "none":
            report = LoadReport(error="it could not be read there", fault="copy", struck=lost)
        if report.fault != "none":
            return None, report
        position = next(
            manifest.data
            for manifest in (*(i.manifest for i in images.values()), *(described[0].manifests or {}).values())
        )
        return {**nested_state(values), "position": position}, report

    def adopt(self, state: Mapping[str, Any]) -> None:
        self._state.adopt(state, rank=self._generator(int(state.get("world_size", self._world_size))))

    def _generator(self, world_before: int) -> int:
        """Whose random numbers this rank continues: its own; but in another world, ranks that read the same data also draw the same
        numbers, or what they hold in common would no longer be the same."""
        is_alone = self._data_world.size == self._world_size
        return self._rank if is_alone or world_before == self._world_size else self._data_world.rank

    def _describe(
        self,
        load: LoadShards,
        manifests: Mapping[str, Manifest],
        manager: CheckpointManager | None,
        peers: PeerCopies | None,
    ) -> _Described:
        """The images of this machine that this rank has offered, and where nothing may be torn, whether they are intact."""
        found: list[ImageFound] = []
        errors: list[str] = []
        struck: list[str] = []
        for source in load.sources:
            if source.rank != self._rank or not source.machine:
                continue
            path = source.offer.where
            try:
                if source.offer.holder:
                    assert peers is not None
                    path = str(peers.image(source.offer)[0])
                snapshot = read_snapshot(Path(path).parent)
                if snapshot is None or snapshot.manifest.checkpoint_id != load.offer.checkpoint_id:
                    raise Damaged(path=path, reason="the image no longer exists")
                if not load.may_tear and not (manager is not None and manager.verify_snapshot(snapshot.path)):
                    verify_image(None, snapshot.manifest, path=snapshot.path)
                found.append(
                    describe_image(
                        path, snapshot.manifest, name=source.name, rank=self._rank, machine=source.machine
                    )
                )
            except (CheckpointError, PeerError, OSError) as error:
                errors.append(getattr(error, "message", str(error)))
                struck.append(source.name)
        mine = {
            url: manifest
            for url, manifest in manifests.items()
            if any(not source.machine and source.offer.where == url for source in load.sources)
        }
        return _Described(images=tuple(found), manifests=mine, error="; ".join(errors), struck=tuple(struck))

    def _read(
        self,
        load: LoadShards,
        images: Mapping[str, ImageFound],
        manifests: Mapping[str, Manifest],
        manager: CheckpointManager | None,
        stores: Sequence[Store],
    ) -> tuple[Reading | None, dict[StatePath, Any]]:
        """The leaves of the state: tensors, which are the live ones, and objects. Reads all that can be read from here."""
        source = ShardedSource()
        by_url = {store.url: store for store in stores}
        for each in load.seen_from(self._machine):
            if each.machine:
                source.add_image(images[each.name], is_here=each.machine == self._machine)
            else:
                url = each.offer.where
                source.add_destination(by_url[url], manifests[url], struck=load.struck)
        tensors = {
            source.paths[name]: (entry.properties.dtype, entry.size) for name, entry in source.tensors.items()
        }
        mine = {self._rank, self._data_world.rank}
        objects = source.objects(leave_out=lambda path: path[0] == RNG and not is_generator_of(mine, path))
        targets = self._state.targets(tensors, ranks=mine)
        own = _own_image(images, manager)
        if own is not None and manager is not None and _is_same(own, targets):
            self._map_own(own, targets, manager)
            return None, source.in_order({**objects, **targets})
        named = {".".join(map(str, path)): target for path, target in targets.items()}
        reading = source.plan(named)
        with torch.no_grad():
            reading.read()
        return reading, source.in_order({**objects, **targets})

    def _map_own(
        self,
        own: ImageFound,
        targets: Mapping[StatePath, torch.Tensor],
        manager: CheckpointManager,
    ) -> None:
        try:
            manager.restore_copy(
                own.manifest.checkpoint_id,
                where=own.path,
                into=_Bound({path: local_of(target).detach() for path, target in targets.items()}),
                tear_ok=True,  # Where nothing may be torn, it has been verified.
            )
        except CheckpointError as error:
            raise Unusable(error, names=[own.name]) from error

    # --- between machines -----------------------------------------------------------------------------------

    def _have_sent(self, reading: Reading | None, images: Mapping[str, ImageFound]) -> tuple[str, ...]:
        """Collective: slices in the memory of one machine go to the ranks of others that need them, one after the other. The names of
        images that some could not be read from."""
        if not images or self._world_size == 1:
            return ()
        wanted = [] if reading is None else reading.elsewhere()
        everyone = gather([(file.name, item, stored) for file, item, stored in wanted])
        lost: set[str] = set()
        for rank, slices in enumerate(everyone):
            for name, item, stored in slices:
                owner = images[name].rank
                if owner == self._rank:
                    self._send(images[name], item, stored, to=rank)
                elif rank == self._rank:
                    assert reading is not None
                    if not self._receive(reading, item, stored, owner):
                        lost.add(name)
        return tuple(sorted(lost))

    def _send(self, image: ImageFound, item: ReadItem, stored: Stored, *, to: int) -> None:
        device = exchange_device()
        try:
            found = slice_of(image, item, stored)
        except (Damaged, StoreError) as error:
            log.warning("rank %d requested data that cannot be read: %s", to, error)
            distributed.send(torch.zeros(1, dtype=torch.uint8, device=device), to)
            return
        distributed.send(torch.ones(1, dtype=torch.uint8, device=device), to)
        if found.numel():
            distributed.send(found.reshape(-1).view(torch.uint8).to(device), to)

    def _receive(self, reading: Reading, item: ReadItem, stored: Stored, owner: int) -> bool:
        device = exchange_device()
        is_there = torch.empty(1, dtype=torch.uint8, device=device)
        distributed.recv(is_there, owner)
        if not is_there.item():
            return False
        target = reading.target(item)
        assert stored.dtype is not None
        if target.numel():
            raw = torch.empty(target.numel() * stored.dtype.itemsize, dtype=torch.uint8, device=device)
            distributed.recv(raw, owner)
            with torch.no_grad():
                target.copy_(raw.view(stored.dtype).reshape(tuple(item.lengths)))
        return True


class _Bound:
    """Targets by path (`strata.checkpoint.image.in_place.Binding`)."""

    def __init__(self, targets: Mapping[StatePath, torch.Tensor]) -> None:
        self._targets = targets

    @property
    def is_on_cpu(self) -> bool:
        return all(target.device.type == "cpu" for target in self._targets.values())

    def bind(self, saved: Any) -> Any:
        return nested_state(self._targets)


def _own_image(images: Mapping[str, ImageFound], manager: CheckpointManager | None) -> ImageFound | None:
    """The one that this process has taken over; not one that it has only found."""
    own = {info.path for info in manager.snapshots()} if manager is not None else set()
    return next((image for image in images.values() if image.path in own), None)


def _is_same(image: ImageFound, targets: Mapping[StatePath, torch.Tensor]) -> bool:
    """Whether an image holds just what this rank is to hold."""
    marked = Marked.of(image.manifest.layout)
    if marked is None:
        return False
    held = {chunk for chunk in marked.chunks if chunk.dtype}
    return held == set(chunks_of(nested_state(targets)))
