"""Failovers under clients that write down all they see: the history is linearizable, and work continues by itself."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from strata.chaos.clients import Clients
from tests.harness.etcd_server import EtcdCluster
from tests.service.test_failover import SLOW_MACHINE_S, Pair
from tests.support import Coordinator, eventually

CALM = 60
"""Operations that are answered between two failovers."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with EtcdCluster(tmp_path / "etcd") as etcd, ExitStack() as stack:
        yield Pair(tmp_path, etcd.endpoints, stack)


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


FAULTS = (killed, paused, asked_to_stop)


def fail_over(pair: Pair, count: int) -> list[float]:
    """How long clients waited for an answer, each time."""
    addresses = ",".join(each.address for each in pair.both)
    waited_s = []
    with Clients(addresses, name="failovers", pause_s=0.005) as clients:
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
    fail_over(pair, len(FAULTS))


@pytest.mark.slow
def test_what_clients_saw_during_two_hundred_failovers_is_linearizable(pair: Pair) -> None:
    fail_over(pair, 200)
