"""Which node of a cluster runs how many workers. Pure: no Ray here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def workers_by_agent(workers: int, capacities: Sequence[int]) -> list[int] | None:
    """How many workers each agent runs, an agent per node: as even as the nodes' capacity allows. None: too little of it."""
    if sum(capacities) < workers:
        return None
    given = [0] * len(capacities)
    for _ in range(workers):
        emptiest = min(
            (i for i, capacity in enumerate(capacities) if given[i] < capacity), key=lambda i: given[i]
        )
        given[emptiest] += 1
    return [count for count in given if count]


def capacity_of(resources: Mapping[str, float], *, cpus: float, gpus: int) -> int:
    """How many workers a node's free resources are enough for."""
    by_cpu = int(resources.get("CPU", 0.0) / cpus + 1e-6)
    return min(by_cpu, int(resources.get("GPU", 0.0) / gpus)) if gpus else by_cpu
