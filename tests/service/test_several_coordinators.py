"""A client with several addresses finds the coordinator that leads, and finds the next one when that is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata import TrainingOrchestrator, api
from strata.client import Client
from strata.rpc.cas import CoordinatorCasClient
from strata.worker import session
from strata.worker.errors import CoordinatorUnavailable, NoLeader
from tests.support import Coordinator, eventually
from tests.support_proxy import Proxy
from tests.support_standby import HttpStandby, Standby, nobody, silent


@pytest.fixture
def standby() -> Iterator[Standby]:
    with Standby() as server:
        yield server


@pytest.fixture
def http_standby() -> Iterator[HttpStandby]:
    with HttpStandby() as server:
        yield server


def test_a_worker_finds_the_leader_behind_a_dead_one_a_silent_one_and_a_standby(
    shared: Coordinator, standby: Standby
) -> None:
    standby.leader = shared.address
    with nobody() as dead, silent() as frozen:
        addresses = f"127.0.0.1:{dead},127.0.0.1:{frozen},{standby.address},{shared.address}"
        with TrainingOrchestrator(addresses, job_id="finds") as worker:
            worker.register_worker("finds-0")
            assert worker.wait_connected()
            worker.notify_checkpoint("finds-1", 1, path="/c/1", size_bytes=1)
            assert standby.calls == ["RegisterWorker"], "the leader is asked first from then on"
    assert any(row["id"] == "finds-1" for row in shared.get("/api/checkpoints?job=finds"))


def test_a_session_follows_the_leader_and_waiting_barriers_go_with_it(tmp_path: Path) -> None:
    """One coordinator, which comes back at another address: what workers see of a failover."""
    first = Coordinator(tmp_path / "data").start()
    with Standby() as standby:
        second = Coordinator(tmp_path / "data")
        with nobody() as grpc_port, nobody() as http_port:
            second.grpc_port, second.http_port = grpc_port, http_port
        second._hold_ports()
        addresses = f"{standby.address},{first.address},{second.address}"
        try:
            one, two = (TrainingOrchestrator(addresses, job_id="moves") for _ in range(2))
            with one, two:
                for number, worker in enumerate((one, two)):
                    worker.register_worker(f"moves-{number}")
                    assert worker.wait_connected()
                results: list[int] = []
                waiting = threading.Thread(
                    target=lambda: results.append(one.barrier("b", 1, timeout_s=120).arrival_order)
                )
                waiting.start()
                eventually(lambda: any(each["arrived"] for each in first.get("/api/barriers")), within_s=30)
                first.kill()
                second.start()
                standby.leader = second.address
                two.barrier("b", 1, timeout_s=120)
                waiting.join(60)
                assert len(results) == 1
        finally:
            first.stop()
            second.stop()


def test_none_that_leads_is_one_message_that_names_each(
    standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LEAST_ATTEMPT_S", 30.0)  # What the standby says last is heard, too.
    with nobody() as dead:
        worker = TrainingOrchestrator(f"127.0.0.1:{dead},{standby.address}", timeout_s=5.0)
        try:
            with pytest.raises(NoLeader) as refused:
                worker.register_worker("lost")
        finally:
            worker.close()
        text = str(refused.value)
        assert text.startswith("None of the coordinators leads: ")
        assert f"127.0.0.1:{dead}: " in text
        assert f"{standby.address}: This coordinator is a standby; no coordinator leads" in text
        assert isinstance(refused.value, CoordinatorUnavailable), "training continues, as without any"


def test_a_call_is_retried_until_a_coordinator_leads(shared: Coordinator, standby: Standby) -> None:
    with Proxy(shared.grpc_port) as road:
        road.refusing = True
        worker = TrainingOrchestrator(f"{standby.address},{road.address}", job_id="late", timeout_s=60)
        registering = threading.Thread(target=lambda: worker.register_worker("late-0"))
        try:
            registering.start()
            eventually(lambda: len(standby.calls) > 2, within_s=30)
            road.refusing = False
            standby.leader = road.address
            registering.join(60)
            assert worker.wait_connected()
        finally:
            worker.close()
            registering.join(60)


def test_a_worker_sends_no_token_to_an_address_that_was_not_named(
    standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_TOKEN", "secret")
    monkeypatch.setattr(session, "LEAST_ATTEMPT_S", 30.0)  # What the standby says last is heard, too.
    with Standby() as evil:
        standby.leader = evil.address
        worker = TrainingOrchestrator(standby.address, timeout_s=5)
        client = CoordinatorCasClient(standby.address, timeout_s=30)
        try:
            with pytest.raises(CoordinatorUnavailable, match="standby"):
                worker.register_worker("named")
            with pytest.raises(ConnectionError, match="standby"):
                client.cas("key", b"value", None)
        finally:
            worker.close()
            client.close()
        assert set(standby.tokens) == {"Bearer secret"}
        assert evil.calls == []


def test_a_swap_goes_to_the_leader_and_is_not_repeated_when_its_outcome_is_unknown(
    shared: Coordinator, standby: Standby
) -> None:
    standby.leader = shared.address
    client = CoordinatorCasClient(f"{standby.address},{shared.address}", timeout_s=10)
    made, value, token = client.cas("several/key", b"one", None)
    assert (made, value) == (True, b"one")
    assert client.get("several/key") == (b"one", token)
    assert standby.calls == ["SwapValue"]
    client.close()
    with silent() as frozen:
        unsure = CoordinatorCasClient(f"127.0.0.1:{frozen},{shared.address}", timeout_s=5)
        with pytest.raises(ConnectionError):
            unsure.cas("several/key", b"two", token)
        assert client_value(shared) == b"one"
        assert unsure.cas("several/key", b"two", token)[0], "the next call asks another one"
        unsure.close()


def client_value(coordinator: Coordinator) -> bytes:
    client = CoordinatorCasClient(coordinator.address, timeout_s=10)
    try:
        found = client.get("several/key")
        assert found is not None
        return found[0]
    finally:
        client.close()


def test_an_agent_is_present_at_the_leader(shared: Coordinator, standby: Standby) -> None:
    standby.leader = shared.address
    with nobody() as dead:
        client = CoordinatorCasClient(f"127.0.0.1:{dead},{standby.address},{shared.address}", timeout_s=10)
        client.cas("several/state", b"x", None)
        presence = client.join(
            "several/state", node="n0", run_id="run", host="here", on_leave=lambda reason, within_s: None
        )
        try:
            eventually(lambda: presence.is_connected, within_s=30)
        finally:
            presence.close()
            client.close()


def test_the_api_is_found_behind_a_dead_one_and_a_standby(
    shared: Coordinator, http_standby: HttpStandby
) -> None:
    http_standby.leader = shared.url
    with nobody() as dead:
        addresses = f"http://127.0.0.1:{dead},{http_standby.url},{shared.url}"
        client = Client(addresses)
        assert api.post(addresses, "/api/quarantine", {"host": "several", "reason": "test"})
        api.delete(addresses, "/api/quarantine/several")
        assert client.tasks() == []
    assert len(http_standby.authorizations) == 1, "who led last is asked first"


def test_a_token_goes_to_no_address_that_the_user_has_not_named(
    shared: Coordinator, http_standby: HttpStandby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_TOKEN", "secret")
    monkeypatch.setattr(api, "SEARCH_S", 0.5)
    with HttpStandby() as evil:
        http_standby.leader = evil.url
        with pytest.raises(
            api.Unreachable, match=f"{evil.url} leads, which is not among the addresses given"
        ):
            api.post(http_standby.url, "/api/quarantine", {"host": "h", "reason": "r"})
        assert evil.authorizations == []
        evil.leader = evil.url
        with pytest.raises(api.ApiError):
            api.get(http_standby.url, "/api/tasks")
        assert set(evil.authorizations) == {None}, "a redirect of a proxy's is followed without the token"
    assert set(http_standby.authorizations) == {"Bearer secret"}


def test_the_api_says_what_each_answered_when_nobody_leads(
    http_standby: HttpStandby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "SEARCH_S", 0.5)
    with nobody() as dead, pytest.raises(api.Unreachable) as refused:
        api.post(f"http://127.0.0.1:{dead},{http_standby.url}", "/api/tasks", {})
    text = str(refused.value)
    assert f"http://127.0.0.1:{dead}: [Errno 111] Connection refused" in text
    assert f"{http_standby.url}: it is a standby and knows no leader" in text


def test_a_change_that_may_have_arrived_is_not_repeated(shared: Coordinator) -> None:
    with silent() as frozen:
        addresses = f"http://127.0.0.1:{frozen},{shared.url}"
        body = {"host": "twice", "reason": "test"}
        with pytest.raises(api.Unreachable):
            api.post(addresses, "/api/quarantine", body, timeout_s=0.3)
        assert not any(row["host"] == "twice" for row in shared.get("/api/quarantine"))
        assert api.get_rows(addresses, "/api/quarantine") is not None, "the next call asks another one"
