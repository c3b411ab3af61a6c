"""What every journal keeps, whatever it is made of: SQLite on a disk, etcd with a real server."""

from __future__ import annotations

import itertools
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from strata.coordinator.engine import Engine, SystemClock
from strata.coordinator.journal.copying import copy_journal
from strata.coordinator.journal.etcd import EtcdJournal, hold, parse_location
from strata.coordinator.journal.protocol import Deposed, Journal, JournalError
from strata.coordinator.journal.space import Space
from strata.coordinator.journal.sqlite import SqliteJournal
from strata.core.cluster import Cluster
from strata.core.leadership import Record
from strata.core.messages import DatasetId, DatasetRegistered, DatasetSpec, Event, ValueSwapped
from strata.etcd import EtcdClient, LeaseLost, encode
from tests.cli.running import strata
from tests.rendezvous.etcd_server import EtcdServer


def event(number: int) -> Event:
    spec = DatasetSpec(
        dataset_id=DatasetId(f"d{number}"),
        path="/d",
        format="f",
        total_samples=10,
        shard_size=1,
        shuffle=False,
        seed=0,
    )
    return DatasetRegistered(spec=spec, reason="test", at_s=float(number))


def value(number: int, size_bytes: int) -> Event:
    return ValueSwapped(
        key="k", body=bytes([number]) * size_bytes, version=number + 1, reason="swapped", at_s=0.0
    )


class Backend(ABC):
    @abstractmethod
    def opened(self) -> Any:
        """A context manager: the journal, open for writing by this one alone."""

    @abstractmethod
    def lose_events(self, first: int, last: int) -> None:
        """Take batches out of the middle, counted from 1."""

    @abstractmethod
    def spoil(self, number: int) -> None:
        """Give a batch a kind that no version knows."""

    @abstractmethod
    def set_format(self, name: str) -> None: ...

    def loaded(self) -> list[Event]:
        with self.opened() as journal:
            return list(journal.load())


class SqliteBackend(Backend):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def opened(self) -> Iterator[Journal]:
        with closing(SqliteJournal(self._folder, reserve_bytes=1 << 20)) as journal:
            yield journal

    def lose_events(self, first: int, last: int) -> None:
        self._edit("DELETE FROM events WHERE seq BETWEEN ? AND ?", first, last)

    def spoil(self, number: int) -> None:
        self._edit("UPDATE events SET kind = 'WorkerDanced' WHERE seq = ?", number)

    def set_format(self, name: str) -> None:
        self._edit("UPDATE meta SET value = ? WHERE key = 'schema'", name)

    def _edit(self, statement: str, *values: object) -> None:
        with closing(sqlite3.connect(self._folder / "journal.sqlite")) as db, db:
            db.execute(statement, values)


class EtcdBackend(Backend):
    def __init__(self, folder: Path, server: EtcdServer, prefix: str) -> None:
        self.server = server
        self.location = parse_location(f"etcd://{server.endpoint}{prefix}")
        self._space = Space(folder, reserve_bytes=1 << 20)
        self.client = EtcdClient(self.location.address)

    @contextmanager
    def opened(self) -> Iterator[EtcdJournal]:
        with (
            closing(EtcdJournal(self.location, self._space)) as journal,
            hold(journal, name="test"),
        ):
            yield journal

    def lose_events(self, first: int, last: int) -> None:
        keys = {"key": self._key(f"log/{first:016x}"), "range_end": self._key(f"log/{last + 1:016x}")}
        self.client.post("kv/deleterange", keys)

    def spoil(self, number: int) -> None:
        key = self._key(f"log/{number:016x}")
        self.client.post("kv/put", {"key": key, "value": encode(b"\x95\x01\x00\x00\x01\xc4\x02\x91\x01")})

    def set_format(self, name: str) -> None:
        self.client.post("kv/put", {"key": self._key("format"), "value": encode(name)})

    def _key(self, name: str) -> str:
        return encode(f"{self.location.prefix}/{name}")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.stop()


_prefixes = (f"/t{number}" for number in itertools.count())


@pytest.fixture
def etcd_backend(etcd: EtcdServer, tmp_path: Path) -> Iterator[EtcdBackend]:
    backend = EtcdBackend(tmp_path, etcd, next(_prefixes))
    yield backend
    backend.client.close()


@pytest.fixture(params=["sqlite", "etcd"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "sqlite":
        return SqliteBackend(tmp_path / "journal")
    found: Backend = request.getfixturevalue("etcd_backend")
    return found


# --- on both ------------------------------------------------------------------------------------------------


def test_everything_appended_is_loaded_in_order(backend: Backend) -> None:
    with backend.opened() as journal:
        for number in range(5):
            journal.append([event(number)])
    with backend.opened() as journal:
        assert list(journal.load()) == [event(number) for number in range(5)]
        journal.append([event(5), event(6)])
        assert [each.at_s for each in journal.load()] == [0, 1, 2, 3, 4, 5, 6]


def test_snapshot_takes_the_place_of_what_it_sums_up(backend: Backend) -> None:
    with backend.opened() as journal:
        journal.append([event(number) for number in range(5)])
        journal.snapshot([event(100)])
        journal.append([event(6)])
        assert list(journal.load()) == [event(100), event(6)]
        journal.snapshot([event(101)])
        journal.snapshot([event(102)])
        journal.append([event(7)])
    assert backend.loaded() == [event(102), event(7)]


def test_sizes_are_those_of_what_is_kept_and_the_same_when_it_is_opened_again(backend: Backend) -> None:
    with backend.opened() as journal:
        list(journal.load())
        for number in range(3):
            journal.append([value(number, 1_000)])
        grown = journal.sizes()
        assert grown is not None
        assert grown.records == 3
        assert 3_000 < grown.story_bytes < 4_000
        assert grown.file_bytes >= grown.story_bytes
    with backend.opened() as journal:
        list(journal.load())
        again = journal.sizes()
        assert again is not None
        assert (again.records, again.story_bytes) == (grown.records, grown.story_bytes)
        journal.snapshot([value(2, 1_000)])
        short = journal.sizes()
        assert short is not None
        assert 1_000 < short.snapshot_bytes < 1_500
        journal.append([value(3, 10)])
        after = journal.sizes()
        assert after is not None
        assert after.records == short.records + 1
        assert 10 <= after.story_bytes - short.story_bytes < 200
    with backend.opened() as journal:
        list(journal.load())
        assert journal.sizes().snapshot_bytes == after.snapshot_bytes


def test_batches_and_snapshots_of_any_size_are_kept_complete(backend: Backend) -> None:
    large = [value(number, 256 * 1024) for number in range(20)]  # 5 MB in one batch
    with backend.opened() as journal:
        journal.append(large)
        journal.append([event(1)])
    assert backend.loaded() == [*large, event(1)]
    with backend.opened() as journal:
        journal.snapshot(large)
        journal.append([event(2)])
    assert backend.loaded() == [*large, event(2)]


def test_snapshot_is_written_beside_appends_and_counts_when_it_is_complete(backend: Backend) -> None:
    with backend.opened() as journal:
        journal.append([event(1)])
        given_up = journal.begin_snapshot()
        given_up.add([event(50)])
        journal.append([event(2)])
        snapshot = journal.begin_snapshot()
        snapshot.add([event(100)])
        journal.append([event(3)])
        assert list(journal.load()) == [event(1), event(2), event(3)]
        snapshot.add([value(number, 256 * 1024) for number in range(6)])
        snapshot.commit()
        journal.append([event(4)])
        while snapshot.clean():
            pass
    large = [value(number, 256 * 1024) for number in range(6)]
    assert backend.loaded() == [event(100), *large, event(3), event(4)]


def test_empty_journal_is_an_empty_history_and_so_is_an_empty_snapshot(backend: Backend) -> None:
    assert backend.loaded() == []
    with backend.opened() as journal:
        journal.append([event(1)])
        journal.snapshot([])
    assert backend.loaded() == []


def test_second_writer_is_refused(backend: Backend) -> None:
    with backend.opened() as journal:
        with pytest.raises(JournalError, match=r"Another coordinator|is in use"), backend.opened():
            pass
        journal.append([event(1)])
    assert backend.loaded() == [event(1)]


@pytest.mark.parametrize("damage", ["lost", "spoiled", "newer format"])
def test_damage_is_a_clear_error_and_never_a_partial_history(backend: Backend, damage: str) -> None:
    with backend.opened() as journal:
        for number in range(30):
            journal.append([event(number)])
        where = str(journal)
    match damage:
        case "lost":
            backend.lose_events(10, 12)
        case "spoiled":
            backend.spoil(7)
        case "newer format":
            backend.set_format("99")
    with pytest.raises(JournalError) as caught, backend.opened() as journal:
        Engine(Cluster(), journal, SystemClock()).replay()
    assert where in caught.value.message
    assert caught.value.hint


# --- etcd alone ---------------------------------------------------------------------------------------------


class LosesAnswers(EtcdClient):
    """A network on which requests arrive and their answers do not, or not even the requests do."""

    def __init__(self, client: EtcdClient, fates: Iterator[str]) -> None:
        super().__init__(client.address)
        self._fates = fates

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        fate = next(self._fates) if path == "kv/txn" else "fine"
        if fate == "lost":
            raise ConnectionError("the request was lost")
        answer = super().post(path, body)
        if fate == "unanswered":
            raise ConnectionError("the answer was lost")
        if fate == "twice":
            super().post(path, body)
        return answer


def test_append_whose_answer_is_lost_is_there_once(etcd_backend: EtcdBackend) -> None:
    fates = itertools.cycle(["unanswered", "fine", "lost", "unanswered", "twice", "lost", "lost", "fine"])
    with etcd_backend.opened() as journal:
        journal.is_led = lambda: True
        honest, journal.log.client = journal.log.client, LosesAnswers(journal.log.client, fates)
        for number in range(40):
            journal.append([event(number), event(1_000 + number)])
        journal.snapshot([event(number) for number in range(40)])
        journal.append([event(50)])
        assert journal.position == 41
        journal.log.client.close()
        journal.log.client = honest
    assert etcd_backend.loaded() == [*(event(number) for number in range(40)), event(50)]


def test_deposed_leader_appends_nothing_and_says_so(etcd_backend: EtcdBackend) -> None:
    with ExitStack() as stack:
        old = stack.enter_context(etcd_backend.opened())
        old.append([event(1)])
        leader = old.log.look().leader
        assert leader is not None
        etcd_backend.client.post(
            "kv/deleterange", {"key": old.log.key("leader")}
        )  # As when its lease runs out.
        new = stack.enter_context(etcd_backend.opened())
        new.append([event(2)])
        for attempt in (old.append, old.snapshot):
            with pytest.raises(Deposed, match="no longer leads"):
                attempt([event(3)])
        new.append([event(4)])
    assert etcd_backend.loaded() == [event(1), event(2), event(4)]


def test_batch_that_its_leader_did_not_complete_counts_for_nothing(etcd_backend: EtcdBackend) -> None:
    with etcd_backend.opened() as journal:
        journal.append([event(1)])
        term = journal.log.look().leader.term  # type: ignore[union-attr]
        half = Record(position=2, term=term, batch=1, part=0, parts=2, body=b"the first half of a batch")
        assert journal.log.append(half) is None
    with etcd_backend.opened() as journal:
        assert list(journal.load()) == [event(1)]
        journal.append([event(2)])
    assert etcd_backend.loaded() == [event(1), event(2)]


def test_append_gives_up_when_its_lease_may_be_lost(etcd_backend: EtcdBackend) -> None:
    with etcd_backend.opened() as journal:
        asked = threading.Event()

        def is_led() -> bool:
            asked.set()
            return False

        journal.is_led = is_led
        journal.log.client.abort()
        with pytest.raises(Deposed, match="etcd cannot be reached"):
            journal.append([event(1)])
        assert asked.is_set()


def test_records_that_a_snapshot_sums_up_are_cleared_and_so_is_the_snapshot_before(
    etcd_backend: EtcdBackend,
) -> None:
    with etcd_backend.opened() as journal:
        for round_ in range(6):
            journal.append([value(number, 100_000) for number in range(20)])
            journal.snapshot([value(round_, 1_500_000)])
        found = etcd_backend.client.post(
            "kv/range",
            {
                "key": encode(f"{journal.location.prefix}/"),
                "range_end": encode(f"{journal.location.prefix}0"),
            },
        )
        sizes = sum(len(kv.get("value", "")) for kv in found["kvs"])
        assert sizes < 2 * (2_000_000 + 1_500_000) * 4 / 3, "this snapshot, and the batch before it"
    assert etcd_backend.loaded() == [value(5, 1_500_000)]


def test_lease_that_is_lost_is_not_renewed(etcd_backend: EtcdBackend) -> None:
    with closing(EtcdJournal(etcd_backend.location, Space(Path("/tmp"), reserve_bytes=1))) as journal:
        granted = str(etcd_backend.client.post("lease/grant", {"TTL": "60"})["ID"])
        assert journal.log.renew(granted)
        journal.log.revoke(granted)
        with suppress(LeaseLost):
            assert not journal.log.renew(granted)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("etcd://", "is not a journal"),
        ("postgres://h:1", "is not a journal"),
        ("etcd://h:port", "not an etcd address"),
        ("etcd://h:0", "not an etcd address"),
        ("etcd://h:99999", "not an etcd address"),
        ("etcd://a,,b", "not an etcd address"),
        ("etcd://[::1:2379", "not an etcd address"),
        ("etcd://::1:2379", r"write host:2379 or \[::1\]:2379"),
        ("etcd://h?x=1", "is not a journal"),
        ("etcd://user:secret@h:2379", "must not contain a password"),
    ],
)
def test_addresses_that_cannot_be_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_location(text)


def test_addresses_have_several_hosts_a_prefix_and_usual_ports() -> None:
    found = parse_location("etcd://a:1,b,[::1]:3/here/")
    assert found.address.endpoints == (("a", 1), ("b", 2379), ("::1", 3))
    assert found.prefix == "/here"
    assert parse_location(str(found)) == found
    assert parse_location("etcd://a").prefix == "/strata"


def test_snapshot_that_is_not_completed_leaves_the_one_before_readable(etcd_backend: EtcdBackend) -> None:
    with etcd_backend.opened() as journal:
        journal.append([event(1)])
        journal.snapshot([event(100)])
        journal.begin_snapshot().add(
            [value(number, 256 * 1024) for number in range(6)]
        )  # And then it is killed.
        assert list(journal.load()) == [event(100)]
    with etcd_backend.opened() as journal:
        assert list(journal.load()) == [event(100)]
        journal.snapshot([event(101)])
    assert etcd_backend.loaded() == [event(101)]


# --- copying ------------------------------------------------------------------------------------------------


def test_journal_is_copied_into_etcd_and_back(etcd_backend: EtcdBackend, tmp_path: Path) -> None:
    source = SqliteBackend(tmp_path / "source")
    history = [event(number) for number in range(2_500)]
    with source.opened() as journal:
        journal.append(history[:10])
        journal.snapshot(history[:10])
        journal.append(history[10:])
    url = str(etcd_backend.location)
    done = strata("journal", "copy", f"sqlite:{tmp_path / 'source'}", url)
    assert (done.code, done.err) == (0, "")
    assert "2,500 events" in done.out
    assert f"strata serve --journal {url}" in done.out
    assert etcd_backend.loaded() == history
    done = strata("journal", "copy", url, f"sqlite:{tmp_path / 'back'}")
    assert done.code == 0, done.err
    assert SqliteBackend(tmp_path / "back").loaded() == history


def test_copy_overwrites_nothing_and_takes_nothing_from_under_a_coordinator(
    etcd_backend: EtcdBackend, tmp_path: Path
) -> None:
    source = SqliteBackend(tmp_path / "source")
    with source.opened() as journal:
        journal.append([event(1)])
    with etcd_backend.opened() as shared:
        shared.append([event(2)])
        with pytest.raises(JournalError, match="is in use"):
            copy_journal(tmp_path / "source", etcd_backend.location, progress=lambda *_: None)
    with pytest.raises(JournalError, match="is not empty"):
        copy_journal(tmp_path / "source", etcd_backend.location, progress=lambda *_: None)
    assert etcd_backend.loaded() == [event(2)]
    with source.opened(), pytest.raises(JournalError, match="Another coordinator"):
        copy_journal(tmp_path / "source", etcd_backend.location, progress=lambda *_: None)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("journal", "is not a journal; write sqlite:DATA_DIR or etcd://HOST:PORT"),
        ("sqlite:", "is not a journal"),
        ("sqlite:/nowhere/at/all", "There is no journal in /nowhere/at/all"),
        ("etcd://u:p@h:1", "must not contain a password"),
        ("etcd://127.0.0.1:9", "cannot be reached"),
    ],
)
def test_copy_of_what_is_no_journal_is_refused(tmp_path: Path, source: str, problem: str) -> None:
    done = strata("journal", "copy", source, f"sqlite:{tmp_path / 'new'}")
    assert done.code != 0
    assert problem in " ".join(done.err.replace("│", " ").split())
    assert "Traceback" not in done.err
