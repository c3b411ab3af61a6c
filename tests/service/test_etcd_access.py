"""A journal in an etcd with access control: certificates of clients, users with passwords."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from strata.coordinator.journal.etcd import EtcdJournal, EtcdLocation, hold, parse_location
from strata.coordinator.journal.protocol import JournalError
from strata.coordinator.journal.space import Space
from strata.etcd import EtcdAddress, EtcdClient, encode, tls_context
from tests.rendezvous.etcd_server import EtcdServer
from tests.service.test_journal_conformance import event
from tests.service.test_tls import Authority
from tests.support import Coordinator, eventually

PASSWORD = "correct horse battery staple"


def check(location: EtcdLocation, folder: Path) -> None:
    """It can be led, written, summed up and read."""
    with (
        closing(EtcdJournal(location, Space(folder, reserve_bytes=1))) as journal,
        hold(journal, name="test"),
    ):
        journal.append([event(1)])
        journal.snapshot([event(1)])
        journal.snapshot([event(1)])  # Clears etcd's history, where it may.
        journal.append([event(2)])
        assert list(journal.load()) == [event(1), event(2)]


def refused(location: EtcdLocation, folder: Path) -> str:
    with (
        closing(EtcdJournal(location, Space(folder, reserve_bytes=1))) as journal,
        pytest.raises(JournalError, match="cannot be reached") as caught,
        hold(journal, name="test"),
    ):
        pass
    assert PASSWORD not in str(caught.value)
    return caught.value.message


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "etcd-test")


def test_etcd_with_tls_takes_those_who_show_a_certificate(authority: Authority, tmp_path: Path) -> None:
    (cert, key), (our_cert, our_key) = authority.issue("server"), authority.issue("strata")
    server = EtcdServer(
        tmp_path,
        options=[
            f"--cert-file={cert}",
            f"--key-file={key}",
            f"--trusted-ca-file={authority.cert}",
            "--client-cert-auth",
        ],
    )
    server.scheme = "https"
    server.tls = tls_context(str(authority.cert), str(our_cert), str(our_key))
    server.start()
    try:
        url = f"etcds://localhost:{server.port}/a"
        check(parse_location(url, ca=authority.cert, cert=our_cert, key=our_key), tmp_path)
        refused(parse_location(url, ca=authority.cert), tmp_path)
        refused(parse_location(f"etcds://localhost:{server.port}/a"), tmp_path)
        refused(parse_location(f"etcd://localhost:{server.port}/a"), tmp_path)
        coordinator = Coordinator(
            tmp_path / "data",
            env={
                "STRATA_JOURNAL": f"etcd://localhost:{server.port}/b",
                "STRATA_LEADER_LEASE": "6",  # One that loses it on a busy machine is nowhere for a moment.
                "STRATA_ETCD_CA": str(authority.cert),
                "STRATA_ETCD_CERT": str(our_cert),
                "STRATA_ETCD_KEY": str(our_key),
            },
        ).start()
        try:
            eventually(lambda: coordinator.get("/api/status")["role"] == "leader", within_s=60)
        finally:
            coordinator.stop()
    finally:
        server.stop()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EtcdServer]:
    """One whose user `strata` may use the prefix /mine."""
    (tmp_path / "etcd").mkdir()
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    client = EtcdClient(EtcdAddress(endpoints=(("127.0.0.1", server.port),)))
    requests: list[tuple[str, dict[str, Any]]] = [
        ("user/add", {"name": "root", "password": "another password"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("user/add", {"name": "strata", "password": PASSWORD}),
        ("role/add", {"name": "mine"}),
        (
            "role/grant",
            {
                "name": "mine",
                "perm": {"permType": "READWRITE", "key": encode("/mine/"), "range_end": encode("/mine0")},
            },
        ),
        ("user/grant", {"user": "strata", "role": "mine"}),
        ("enable", {}),
    ]
    for path, body in requests:
        if path == "user/grant" and body["role"] == "root":
            client.post("auth/role/add", {"name": "root"})
        client.post(f"auth/{path}", body)
    client.close()
    yield server
    server.stop()


def test_etcd_with_users_takes_those_who_know_the_password(guarded: EtcdServer, tmp_path: Path) -> None:
    url = f"etcd://{guarded.endpoint}"
    check(parse_location(f"{url}/mine", user="strata", password=PASSWORD), tmp_path)
    assert "password" in refused(parse_location(f"{url}/mine", user="strata", password="wrong"), tmp_path)
    assert "user" in refused(parse_location(f"{url}/mine"), tmp_path)
    assert "permission denied" in refused(
        parse_location(f"{url}/other", user="strata", password=PASSWORD), tmp_path
    )


def test_token_that_has_run_out_is_asked_for_again(guarded: EtcdServer) -> None:
    address = EtcdAddress(endpoints=(("127.0.0.1", guarded.port),), user="strata", password=PASSWORD)
    client = EtcdClient(address)
    try:
        client.post("kv/put", {"key": encode("/mine/a"), "value": encode("1")})
        guarded.stop()
        guarded.start()  # Its tokens were in its memory.
        assert client.post("kv/range", {"key": encode("/mine/a")})["count"] == "1"
    finally:
        client.close()
