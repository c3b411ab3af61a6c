"""Failovers under clients that write down all they see: the history is linearizable, and work continues by itself."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from strata import TrainingOrchestrator, api
from strata.chaos.clients import Clients
from strata.worker.errors import CoordinatorUnavailable
from tests.cli.running import strata
from tests.rendezvous.etcd_server import EtcdCluster
from tests.service.test_failover import SLOW_MACHINE_S, Pair
from tests.support import Coordinator, eventually

CALM = 60
"""Operations that are answered between two failovers."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with EtcdCluster(folder / "etcd") as etcd, ExitStack() as stack:
        yield Pair(folder, etcd.endpoints, stack)


def killed(leader: Coordinator) -> Callable[[], object]:
    leader.kill()
    return leader.start


def paused(leader: Coordinator) -> Callable[[], object]:
    os.kill(leader.pid, signal.SIGSTOP)
    return lambda: os.kill(leader.pid, signal.SIGCONT)


def asked_to_stop(leader: Coordinator) -> Callable[[], object]:
    assert leader.stop() == 0
    leader._hold_ports()
    return leader.start


FAULTS = (killed, paused, asked_to_stop, paused, paused, paused)


def fail_over(pair: Pair, count: int) -> list[float]:
    """How long clients waited for an answer, each time."""
    addresses = ",".join(each.address for each in pair.both)
    waited_s = []
    with Clients(addresses, name=f"failovers-{count}", pause_s=0.01) as clients:
        for number in range(count):
            leader = pair.leader()
            clients.wait_answered(CALM, within_s=2 * SLOW_MACHINE_S)
            at_s = time.monotonic()
            heal = FAULTS[number % len(FAULTS)](leader)
            clients.wait_answered(CALM, within_s=2 * SLOW_MACHINE_S)
            waited_s.append(time.monotonic() - at_s)
            heal()
            other = pair.other(leader)
            eventually(partial(pair.is_led_by, other), within_s=SLOW_MACHINE_S)
            if number % 20 == 19:
                print(f"{number + 1} failovers, {clients.answered:,} operations answered", flush=True)
        clients.wait_answered(CALM, within_s=2 * SLOW_MACHINE_S)
    assert clients.errors == []
    assert clients.violations() == []
    assert clients.arrivals
    print(
        f"{count} failovers, {len(clients.operations):,} operations and {len(clients.arrivals):,} arrivals; clients waited "
        f"{statistics.median(waited_s):.1f} s in the median, {max(waited_s):.1f} s at most"
    )
    return waited_s


def test_what_clients_saw_during_failovers_is_linearizable(pair: Pair) -> None:
    fail_over(pair, 3)


def test_the_api_and_the_command_line_find_the_leader_behind_a_real_standby(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = pair.leader()
    standby = pair.other(leader)
    both = f"{standby.url},{leader.url}"
    body = {"host": "behind", "reason": "test"}
    assert api.post(both, "/api/quarantine", body)
    ran = strata("quarantine", "ls", "--api", both)
    assert ran.code == 0, ran.err
    assert "behind" in ran.out
    ran = strata("quarantine", "clear", "behind", "--api", both)
    assert ran.code == 0, ran.err

    # Whoever knows the standby alone is told who leads, and is not sent there: nobody has vouched for that address.
    monkeypatch.setattr(api, "SEARCH_S", 0.5)
    with pytest.raises(api.Unreachable) as refused:
        api.post(standby.url, "/api/quarantine", body)
    assert f"it says that {leader.url} leads, which is not among the addresses given" in str(refused.value)
    worker = TrainingOrchestrator(standby.address, job_id="alone", timeout_s=5)
    try:
        with pytest.raises(CoordinatorUnavailable, match="standby"):
            worker.register_worker("alone")
    finally:
        worker.close()


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_what_clients_saw_during_two_hundred_failovers_is_linearizable(pair: Pair) -> None:
    fail_over(pair, 200)
