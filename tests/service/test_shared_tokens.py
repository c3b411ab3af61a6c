"""Tokens of several coordinators: created or revoked at one, they count, or do not, at all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.coordinator.auth.etcd_tokens import TokensUnreachable
from strata.coordinator.auth.tokens import Merged, Token, TokenStore, merge
from tests.cli.running import strata
from tests.rendezvous.etcd_server import EtcdServer
from tests.service.test_failover import Pair
from tests.support import Coordinator, eventually

SLOW_MACHINE_S = 60.0


class Together:
    """What several stores share, in memory."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.called = "place"
        self.changes = 0

    def name(self) -> str:
        return self.called

    def mark(self) -> object:
        return self.changes

    def all(self) -> dict[str, bytes]:
        return dict(self.bodies)

    def put(self, digest: str, body: bytes) -> None:
        self.changes += 1
        self.bodies[digest] = body

    def delete(self, digest: str) -> None:
        self.changes += 1
        self.bodies.pop(digest, None)


SETS = st.sets(st.sampled_from("abcdef"))


@given(here=SETS, in_common=SETS, together=SETS)
def test_a_merge_loses_no_token_and_no_revocation(
    here: set[str], in_common: set[str], together: set[str]
) -> None:
    merged = merge(here=here, in_common=in_common, together=together)
    after = (together | merged.publish) - merged.withdraw
    assert after == merged.kept, "both have the same then"
    for each in here | in_common | together:
        was_revoked = each in in_common and (each not in here or each not in together)
        assert (each in after) == (not was_revoked), each
    again = merge(here=merged.kept, in_common=merged.kept, together=after)
    assert again == Merged(publish=frozenset(), withdraw=frozenset(), kept=merged.kept)


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Together, TokenStore, TokenStore]:
    together = Together()
    return together, TokenStore(tmp_path / "a", together), TokenStore(tmp_path / "b", together)


def names(store: TokenStore) -> list[str]:
    return [token.name for token in store.all()]


def test_created_and_revoked_by_one_is_so_for_the_other(
    stores: tuple[Together, TokenStore, TokenStore],
) -> None:
    together, one, other = stores
    secret, token = one.create(name="ci", role="viewer")
    assert secret.encode() not in b"".join(together.bodies.values())
    other.sync()
    assert other.find(secret) == token
    other.revoke(token.id)
    one.sync()
    assert one.find(secret) is None
    assert together.bodies == {}


def test_what_was_there_before_is_brought_along_and_what_was_revoked_meanwhile_is_not(
    stores: tuple[Together, TokenStore, TokenStore],
) -> None:
    _, one, other = stores
    alone = TokenStore(one.path.parent)
    old, _ = alone.create(name="of a single coordinator", role="viewer")
    for each in (one, other):
        each.sync()
    assert other.find(old) is not None
    other.revoke(other.all()[0].id)  # While the first one is away.
    one.sync()
    assert one.find(old) is None
    assert names(one) == names(other) == []


def test_the_command_line_changes_the_file_of_one_that_is_away(
    stores: tuple[Together, TokenStore, TokenStore],
) -> None:
    _, one, other = stores
    kept, _ = one.create(name="kept", role="viewer")
    gone, token = one.create(name="gone", role="viewer")
    for each in (one, other):
        each.sync()
    alone = TokenStore(one.path.parent)
    alone.revoke(token.id)
    made, _ = alone.create(name="made", role="worker", job="j")
    for each in (one, other):
        each.sync()
        assert (each.find(kept) is None, each.find(gone), each.find(made) is None) == (False, None, False)


def test_an_emptied_place_gets_the_tokens_again(stores: tuple[Together, TokenStore, TokenStore]) -> None:
    together, one, other = stores
    secret, _ = one.create(name="ci", role="viewer")
    one.sync()
    together.bodies.clear()
    together.changes += 1
    together.called = "another place at the same address"
    for each in (one, other):
        each.sync()
        assert each.find(secret) is not None


def test_nothing_is_created_or_revoked_while_the_place_is_away(
    stores: tuple[Together, TokenStore, TokenStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    together, one, _ = stores
    secret, token = one.create(name="ci", role="viewer")

    def fail(*_: object) -> None:
        raise TokensUnreachable("It does not answer.")

    for name in ("put", "delete", "mark"):
        monkeypatch.setattr(together, name, fail)
    for change in (lambda: one.create(name="no", role="viewer"), lambda: one.revoke(token.id), one.sync):
        with pytest.raises(TokensUnreachable):
            change()
    assert names(one) == ["ci"]
    assert one.find(secret) is not None, "what is known counts"


def test_what_is_no_token_lets_nobody_in(stores: tuple[Together, TokenStore, TokenStore]) -> None:
    together, one, _ = stores
    token = Token(
        id="1",
        name="n",
        role="admin",
        job=None,
        created_at_s=1.0,
        expires_at_s=None,
        digest="other",
        created_by="",
    )
    together.put("not json", b"{")
    together.put("digest", json.dumps({f: getattr(token, f) for f in Token.__slots__}).encode())
    one.sync()
    assert one.all() == []


def test_expired_tokens_go_from_everywhere(
    stores: tuple[Together, TokenStore, TokenStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    together, one, other = stores
    one.create(name="old", role="viewer", expires_s=1)
    for each in (one, other):
        each.sync()
    now_s = time.time()
    monkeypatch.setattr("strata.coordinator.auth.tokens.time.time", lambda: now_s + 3 * 86_400)
    one.create(name="new", role="viewer")
    for each in (one, other):
        each.sync()
    assert names(one) == names(other) == ["new"]
    assert len(together.bodies) == 1


# --- two coordinators -----------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    folder = tmp_path / "etcd"
    folder.mkdir()
    etcd = EtcdServer(folder)
    etcd.start()
    try:
        with ExitStack() as stack:
            yield Pair(tmp_path, etcd.endpoint, stack, STRATA_LEADER_LEASE="6")
    finally:
        etcd.stop()


def caller(coordinator: Coordinator, token: str) -> str:
    """Who is calling. On this machine whoever has no token that counts is the user."""
    status, answer = coordinator.call("GET", "/api/session", token=token)
    assert status == 200, answer
    return str(answer["name"]).split(" (")[0]


def is_called(coordinator: Coordinator, token: str, name: str) -> bool:
    return caller(coordinator, token) == name


@pytest.mark.timeout(300)
def test_two_coordinators_know_the_same_tokens(pair: Pair) -> None:
    leader = pair.leader()
    standby = pair.other(leader)
    ran = strata("token", "create", "--role", "viewer", "--name", "ci", "--json", "--api", leader.url)
    made = json.loads(ran.out)
    assert caller(leader, made["token"]) == "token ci"
    eventually(lambda: caller(standby, made["token"]) == "token ci", within_s=SLOW_MACHINE_S)
    # Of the file of one of them, as an operator on its machine does.
    ran = strata(
        "token", "create", "--role=viewer", "--name=by hand", "--json", f"--data-dir={standby.data_dir}"
    )
    by_hand = json.loads(ran.out)
    for each in (leader, standby):
        eventually(partial(is_called, each, by_hand["token"], "token by hand"), within_s=SLOW_MACHINE_S)
    # Whoever is asked, the one that leads does it, and the others follow.
    api = f"{standby.url},{leader.url}"
    assert strata("token", "revoke", made["id"], "--api", api).code == 0
    assert caller(leader, made["token"]).startswith("user")
    eventually(lambda: caller(standby, made["token"]).startswith("user"), within_s=SLOW_MACHINE_S)
    leader.kill()
    eventually(lambda: pair.is_led_by(standby), within_s=SLOW_MACHINE_S)
    assert caller(standby, by_hand["token"]) == "token by hand"
    assert strata("token", "revoke", by_hand["id"], "--api", standby.url).code == 0
    leader.start()
    assert caller(leader, by_hand["token"]).startswith("user"), "before its first call it knows"
    for each in pair.both:
        assert made["token"] not in (each.data_dir / "tokens.json").read_text()
