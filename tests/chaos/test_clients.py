"""What clients saw of a coordinator that is killed again and again can be explained; and what cannot be, is found."""

from __future__ import annotations

from pathlib import Path

from strata.chaos.clients import Arrival, Clients, barrier_violations
from tests.support import Coordinator


def test_what_clients_saw_of_a_coordinator_that_is_killed_again_and_again_is_linearizable(
    tmp_path: Path,
) -> None:
    env = {"STRATA_HEARTBEAT_TIMEOUT": "600", "STRATA_DISCONNECT_GRACE": "600"}
    server = Coordinator(tmp_path / "data", env=env).start()
    try:
        with Clients(server.address, name="killed") as clients:
            for _ in range(2):
                clients.wait_answered(100, within_s=60)
                server.kill()
                server.start()
            clients.wait_answered(100, within_s=60)
        assert clients.errors == []
        assert clients.violations() == []
        assert len({each.action[0] for each in clients.operations}) == 4
        assert clients.arrivals
        assert any(each.answered_s is None for each in clients.operations), "no kill met an operation"
    finally:
        server.stop()


def arrival(step: int, order: int, *, called_s: float = 0.0, answered_s: float = 1.0) -> Arrival:
    return Arrival(worker=f"w{order}", step=step, called_s=called_s, answered_s=answered_s, order=order)


def test_a_barrier_that_releases_twice_or_early_is_found() -> None:
    fine = [arrival(1, 0), arrival(1, 1), arrival(2, 0)]
    assert barrier_violations(fine, members=2) == []
    assert barrier_violations([*fine, arrival(1, 1)], members=2)
    assert barrier_violations([arrival(1, 2)], members=2)
    early = [arrival(1, 0, answered_s=1.0), arrival(1, 1, called_s=2.0, answered_s=3.0)]
    assert barrier_violations(early, members=2)
