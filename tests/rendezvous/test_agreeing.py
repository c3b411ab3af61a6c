"""Agents that have met and are about to agree on ranks, when one of them is lost."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters

from strata.rendezvous.handler import CasRendezvousHandler
from strata.rendezvous.strata import create_strata_handler
from tests.support import Coordinator, eventually

PATIENCE_S = 90
"""Far less than the five minutes of a wait that nobody ends."""


def handler_of(coordinator: Coordinator, run_id: str) -> CasRendezvousHandler:
    endpoint = coordinator.address.removeprefix("http://")
    return create_strata_handler(
        RendezvousParameters("strata", endpoint, run_id, 2, 2, local_addr="127.0.0.1", read_timeout=30)
    )


def agent_of(handler: CasRendezvousHandler) -> LocalElasticAgent:
    spec = WorkerSpec(role="trainer", local_world_size=1, rdzv_handler=handler, entrypoint="/bin/true")
    return LocalElasticAgent(spec, DefaultLogsSpecs())


@pytest.mark.parametrize("gone", ["silently", "to meet anew"])
def test_an_agent_does_not_wait_for_the_rank_of_a_lost_member(coordinator: Coordinator, gone: str) -> None:
    run_id = f"agreeing-{time.monotonic_ns()}"
    handlers = [handler_of(coordinator, run_id) for _ in range(3)]
    one, two = (agent_of(handler) for handler in handlers[:2])
    third = handlers[2]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(one._rendezvous, one._worker_group)
        assert third.next_rendezvous().world_size == 2
        # The third one says nothing of its ranks. It is lost, or was away for so long that it has to begin again.
        third._stop_heartbeats()
        if gone == "to meet anew":
            third.backend.leave(third._this_node)
        second = pool.submit(two._rendezvous, two._worker_group)
        first.result(PATIENCE_S)
        second.result(PATIENCE_S)
    groups = [agent._worker_group for agent in (one, two)]
    ranks: list[int | None] = [group.group_rank for group in groups]
    assert set(ranks) == {0, 1}
    assert {group.workers[0].world_size for group in groups} == {2}
    for handler in handlers:
        handler.shutdown()


def test_a_member_that_seems_silent_counts_for_all_members_or_for_none(coordinator: Coordinator) -> None:
    run_id = f"silent-{time.monotonic_ns()}"
    one, other = (handler_of(coordinator, run_id) for _ in range(2))
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda handler: handler.next_rendezvous().rank, (one, other)))
    for handler in (one, other):
        handler._stop_heartbeats()  # The server is not notified that the other one seems lost.

    def seems_alone() -> bool:
        return other._this_node not in one.sync_state().participants

    eventually(seems_alone, within_s=PATIENCE_S, what="the other one seems lost")
    assert one._get_world() == (ranks[0], 2)
    for handler in (one, other):
        handler.shutdown()
