"""Who reads which part of the data: the ranks of a mesh, or all ranks.

Ranks with the same place in the mesh (a tensor-parallel group) read the same batches and are one **data rank**. What they
trained counts once, and where they disagree about it, that is said with the names of the ranks. A mesh that leaves out ranks,
or counts some twice, is refused on every rank at once, when the job is entered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strata.core.text import counted
from strata.data.loading.loader import ElasticLoader
from strata.errors import StrataError
from strata.training.exchange import gather, rank_and_world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MeshRanks = tuple[int, ...]
"""The ranks of a mesh, row by row: their places in it are their data ranks."""


class DataWorld:
    """This rank's part in reading the data. Before `join` it is unknown."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        if mesh is not None and not hasattr(mesh, "get_coordinate"):
            raise TypeError(
                f"mesh must be a torch.distributed.device_mesh.DeviceMesh, not {type(mesh).__name__}: the dimensions along "
                "which data differs, such as mesh['dp']"
            )
        self._mesh = mesh
        self.rank, self.size = rank_and_world()
        self._groups = [[rank] for rank in range(self.size)]
        """The ranks of each data rank."""

    def join(self, data: ElasticLoader) -> None:
        """Take part in reading `data`. Collective; raises the same error on every rank."""
        mine = None if self._mesh is None else tuple(self._mesh.mesh.flatten().tolist())
        meshes = gather(mine)
        if any(ranks is not None for ranks in meshes):
            self._groups = _groups(meshes)
            self.size = len(self._groups)
            own = rank_and_world()[0]
            self.rank = next(place for place, ranks in enumerate(self._groups) if own in ranks)
        data.set_world(self.rank, self.size)
        if len(meshes) > self.size:
            self._check_same(gather(_description(data)))

    def _check_same(self, descriptions: Sequence[str]) -> None:
        for first, *others in self._groups:
            for other in others:
                if descriptions[other] != descriptions[first]:
                    raise StrataError(
                        f"Ranks {first} and {other} have the same position in the mesh but different data: rank {first} reads "
                        f"{descriptions[first]}, rank {other} {descriptions[other]}.",
                        hint="Give the loaders of these ranks the same dataset, seed and batch size, or pass in mesh= the "
                        "dimensions along which they differ.",
                    )

    def gather(self, mine: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """What each data rank has trained, once each. Collective; raises on every rank where ranks of one differ."""
        everyone = gather(mine)
        for place, ranks in enumerate(self._groups):
            if odd := [rank for rank in ranks if everyone[rank] != everyone[ranks[0]]]:
                raise StrataError(
                    f"Ranks that read the same part of the data (data rank {place} of {self.size}: ranks "
                    f"{', '.join(map(str, ranks))}) have not trained the same batches: "
                    f"{_list(odd)} differ{'s' if len(odd) == 1 else ''} from rank {ranks[0]}.",
                    hint="All of them must take each batch and step together: check for a rank that skips batches or steps.",
                )
        return [everyone[ranks[0]] for ranks in self._groups]


def _description(data: ElasticLoader) -> str:
    plan, sampler = data.sampler.plan(), data.sampler
    facts = [
        counted(plan.total, "sample"),
        f"seed {sampler.seed}" if sampler.shuffle else "not shuffled",
        f"global batch {plan.global_batch_size:,}",
        *([f"micro-batch {plan.micro_batch_size:,}"] if plan.micro_batch_size else []),
        *(["last batch dropped"] if plan.drop_last else []),
    ]
    return f"'{sampler.dataset}' ({', '.join(facts)})"


def _groups(meshes: Sequence[MeshRanks | None]) -> list[list[int]]:
    """The ranks of each data rank, from the mesh that each rank was given."""
    everyone = set(range(len(meshes)))
    if without := [rank for rank, mesh in enumerate(meshes) if mesh is None]:
        raise _refused(f"{_list(without)} {_was(without)} given no mesh, and others one")
    given = [mesh for mesh in meshes if mesh is not None]
    if outside := [rank for rank, mesh in enumerate(given) if rank not in mesh]:
        raise _refused(f"{_list(outside)} {'is' if len(outside) == 1 else 'are'} not in the mesh")
    distinct = sorted(set(given))
    if len(sizes := {len(mesh) for mesh in distinct}) > 1:
        raise _refused(f"its groups have different sizes ({', '.join(map(str, sorted(sizes)))})")
    members = [rank for mesh in distinct for rank in mesh]
    if twice := sorted({rank for rank in members if members.count(rank) > 1}):
        raise _refused(f"{_list(twice)} {'is' if len(twice) == 1 else 'are'} in several of its groups")
    assert set(members) == everyone  # Each is in its own, and no other rank is anywhere.
    places: defaultdict[int, list[int]] = defaultdict(list)
    for mesh in distinct:
        for place, rank in enumerate(mesh):
            places[place].append(rank)
    return [sorted(places[place]) for place in range(len(places))]


def _refused(reason: str) -> StrataError:
    world = rank_and_world()[1]
    return StrataError(
        f"The mesh given to strata.elastic does not divide the {counted(world, 'rank')} of this job evenly: {reason}.",
        hint="Build one mesh over all ranks and pass the part of it along which data differs: "
        "mesh = init_device_mesh('cuda', (dp, tp), mesh_dim_names=('dp', 'tp')); strata.elastic(..., mesh=mesh['dp']).",
    )


def _list(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _was(ranks: Sequence[int]) -> str:
    return "was" if len(ranks) == 1 else "were"
