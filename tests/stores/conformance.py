"""What every store promises, as one suite that every store inherits.

Here is what one caller sees; `races` is about several at once and those that are killed, `machine` about any sequence of
calls. `suite` says what a store's own subclass gives.
"""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from strata.stores import AlreadyExists, InvalidKey, NotFound, Store, Truncated
from tests.stores.machine import StoreMachine
from tests.stores.races import RacesAndKills
from tests.stores.suite import SOAK, Place

UGLY_KEYS = [
    "a b",
    "ü/é",
    "日本/😀",
    "a%20b",
    "50%",
    "a+b",
    "a&b=c",
    "a#b",
    "a?b",
    "~x",
    "x*",
    "'q'",
    "<l>",
    "a:b",
    ".x",
]
BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "a/../b",
    ".",
    "./a",
    "a\0b",
    "a\nb",
    "a\\b",
    "\ud800",
    ".strata/tmp/x",
]
BAD_KEYS += ["x" * 256, "x/" * 512 + "x"]
ORDER_KEYS = ["a", "a-b", "a.b", "a0", "ab", "b-1/x", "b/c", "b/c-d", "b/d/e", "b0", "c/é", "c/z"]


class StoreConformance(RacesAndKills):
    # --- values ---

    def test_a_value_reads_back_as_it_was_written(self, store: Store) -> None:
        for data in (
            b"x",
            b"hello",
            bytes(range(256)) * 1000,
            bytearray(b"array"),
            memoryview(b"a view")[2:],
        ):
            store.put("some/key", data)
            assert store.read("some/key") == bytes(data)

    def test_an_empty_value_is_a_value(self, store: Store) -> None:
        store.put("empty", b"")
        assert store.read("empty") == b""
        assert store.read("empty", offset=0, length=0) == b""
        store.read_into("empty", memoryview(bytearray()))
        found = store.stat("empty")
        assert found is not None
        assert found.size_bytes == 0
        assert [blob.key for blob in store.list()] == ["empty"]

    def test_the_last_write_wins(self, store: Store) -> None:
        store.put("k", b"a much longer first value")
        store.put("k", b"second")
        assert store.read("k") == b"second"

    @pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
    @pytest.mark.parametrize("tail_bytes", [0, 1, 4095])
    def test_a_large_value_survives_every_path(self, store: Store, aligned: bool, tail_bytes: int) -> None:
        size_bytes = self.large_bytes + tail_bytes
        skip = 0 if aligned else 13
        with mmap.mmap(-1, size_bytes + skip) as pages, memoryview(pages) as whole, whole[skip:] as data:
            _fill(data)
            store.put("large", data)
            self._check_large(store, data)

    def test_a_large_value_may_come_in_odd_chunks(self, store: Store) -> None:
        data = memoryview(bytearray(self.large_bytes + 77))
        _fill(data)
        cuts = sorted(random.Random(5).sample(range(len(data)), 9))
        with store.open_write("large", size_hint_bytes=len(data)) as writer:
            for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                writer.write(data[start:end])
            writer.write(b"")
            writer.commit()
        self._check_large(store, data)

    def test_memory_may_be_reused_once_its_bytes_are_written(self, store: Store) -> None:
        buffer = bytearray(self.large_bytes // 8)
        with store.open_write("k") as writer:
            for number in range(8):
                buffer[:] = bytes([number]) * len(buffer)
                writer.write(memoryview(buffer))
            buffer[:] = b"z" * len(buffer)
            writer.commit()
        assert store.read("k") == b"".join(bytes([number]) * len(buffer) for number in range(8))

    def _check_large(self, store: Store, data: memoryview) -> None:
        found = store.stat("large")
        assert found is not None
        assert found.size_bytes == len(data)
        with mmap.mmap(-1, len(data) + 4096) as pages, memoryview(pages) as room:
            for skip, offset in ((0, 0), (1, 0), (0, 4096), (0, 5)):
                with room[skip : skip + len(data) - offset] as target:
                    store.read_into("large", target, offset=offset)
                    assert target == data[offset:]
        assert store.read("large", offset=len(data) - 10) == data[-10:]
        assert store.read("large") == data

    def test_modified_time_is_about_now(self, store: Store) -> None:
        before_s = time.time()
        store.put("k", b"x")
        found = store.stat("k")
        assert found is not None
        assert before_s - 2 <= found.modified_s <= time.time() + 2

    # --- ranges ---

    def test_ranges_are_exact(self, store: Store) -> None:
        data = bytes(range(100))
        store.put("k", data)
        assert store.read("k", offset=10) == data[10:]
        assert store.read("k", offset=10, length=5) == data[10:15]
        assert store.read("k", length=3) == data[:3]
        assert store.read("k", offset=100) == b""
        assert store.read("k", offset=99, length=1) == data[99:]
        buffer = bytearray(7)
        store.read_into("k", memoryview(buffer), offset=90)
        assert buffer == data[90:97]

    @pytest.mark.parametrize(
        ("offset", "length"), [(0, 101), (99, 2), (101, None), (101, 0), (100, 1), (5000, 1)]
    )
    def test_asking_for_more_than_there_is_says_truncated(
        self, store: Store, offset: int, length: int | None
    ) -> None:
        store.put("k", bytes(100))
        with pytest.raises(Truncated, match="100 bytes") as caught:
            store.read("k", offset=offset, length=length)
        assert (caught.value.key, caught.value.tier) == ("k", store.tier)
        if length:
            with pytest.raises(Truncated):
                store.read_into("k", memoryview(bytearray(length)), offset=offset)

    def test_negative_ranges_are_the_callers_mistake(self, store: Store) -> None:
        store.put("k", b"abc")
        with pytest.raises(ValueError, match="negative"):
            store.read("k", offset=-1)
        with pytest.raises(ValueError, match="negative"):
            store.read("k", length=-1)
        with pytest.raises(ValueError, match="negative"):
            store.read_into("k", memoryview(bytearray(1)), offset=-1)

    # --- absence ---

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        store.put("folder/k", b"x")
        for key in ("nothing", "folder", "folder/k/below", "folder/other"):
            assert store.stat(key) is None
            with pytest.raises(NotFound) as caught:
                store.read(key)
            assert caught.value.key == key
            with pytest.raises(NotFound):
                store.read_into(key, memoryview(bytearray(1)))

    def test_deleting_twice_is_fine(self, store: Store) -> None:
        store.put("a/b/c", b"x")
        store.put("a/d", b"y")
        for key in ("a/b/c", "a/b/c", "never", "a", "a/d/below"):
            store.delete(key)
        assert [blob.key for blob in store.list()] == ["a/d"]
        assert store.stat("a/b/c") is None
        store.put("a/b", b"a value where a folder was")
        assert store.read("a/b") == b"a value where a folder was"

    # --- listing ---

    def test_listing_is_in_key_order_and_by_plain_prefix(self, store: Store) -> None:
        keys = [key for key in ORDER_KEYS if key != "a"]
        for number, key in enumerate(random.Random(3).sample(keys, len(keys))):
            store.put(key, bytes(number))
        assert [blob.key for blob in store.list()] == sorted(keys)
        for prefix in ("a", "a-", "b", "b/", "b/c", "b/c-", "b/d/", "c/é", "zz", "b-1", "b-1/", "."):
            assert [blob.key for blob in store.list(prefix)] == sorted(
                k for k in keys if k.startswith(prefix)
            )
        for blob in store.list():
            assert blob == store.stat(blob.key)

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        store.put("k", b"x")
        store.delete("k")
        assert list(store.list()) == []
        assert list(store.list("no/such/folder/")) == []

    def test_ugly_keys_are_kept_apart(self, store: Store) -> None:
        for key in UGLY_KEYS:
            store.put(key, key.encode())
        assert [blob.key for blob in store.list()] == sorted(UGLY_KEYS)
        for key in UGLY_KEYS:
            assert store.read(key) == key.encode()
            store.delete(key)
        assert list(store.list()) == []

    # --- keys ---

    @pytest.mark.parametrize("key", BAD_KEYS, ids=[f"bad{number}" for number in range(len(BAD_KEYS))])
    def test_bad_keys_are_refused_everywhere(self, store: Store, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.put(key, b"x"),
            lambda: store.open_write(key),
            lambda: store.read(key),
            lambda: store.read_into(key, memoryview(bytearray(1))),
            lambda: store.stat(key),
            lambda: store.delete(key),
        ]
        for call in calls:
            with pytest.raises(InvalidKey, match="cannot be a key"):
                call()
        assert list(store.list()) == []

    def test_any_good_key_round_trips(self, store: Store) -> None:
        # One letter of every kind that could be escaped, folded or trimmed on the way.
        part = st.text(
            st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters="/\\"), min_size=1
        )

        @settings(max_examples=self.machine_examples, deadline=None, database=None, derandomize=True)
        @given(st.lists(part.filter(lambda text: text not in (".", "..", ".strata")), min_size=1, max_size=3))
        def round_trip(parts: list[str]) -> None:
            key = "/".join(parts)
            store.put(key, key.encode())
            assert store.read(key) == key.encode()
            assert [blob.key for blob in store.list()] == [key]
            store.delete(key)

        round_trip()

    # --- writers ---

    def test_nothing_is_seen_before_commit(self, store: Store) -> None:
        store.put("k", b"old")
        with store.open_write("k") as writer:
            writer.write(b"new ")
            assert store.read("k") == b"old"
            writer.write(b"value")
            assert [blob.size_bytes for blob in store.list()] == [3]
            writer.commit()
            assert store.read("k") == b"new value"
        assert store.read("k") == b"new value"

    @pytest.mark.parametrize("how", ["abort", "leave", "raise"])
    @pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
    @pytest.mark.parametrize("if_absent", [False, True], ids=["plain", "if_absent"])
    def test_an_unfinished_write_leaves_nothing(
        self, store: Store, place: Place, how: str, large: bool, if_absent: bool
    ) -> None:
        chunk = bytes(self.large_bytes // 2) if large else b"some bytes"

        def write_and_give_up() -> None:
            with store.open_write("folder/k", if_absent=if_absent) as writer:
                writer.write(chunk)
                writer.write(chunk)
                if how == "abort":
                    writer.abort()
                    writer.abort()
                if how == "raise":
                    raise InterruptedError

        if how == "raise":
            with pytest.raises(InterruptedError):
                write_and_give_up()
        else:
            write_and_give_up()
        assert list(store.list()) == []
        assert store.stat("folder/k") is None
        assert self.unfinished(place) == []

    def test_an_aborted_write_keeps_the_old_value(self, store: Store) -> None:
        store.put("k", b"old")
        with store.open_write("k") as writer:
            writer.write(b"new")
        assert store.read("k") == b"old"

    def test_a_finished_writer_takes_no_more(self, store: Store) -> None:
        for finish in ("commit", "abort"):
            with store.open_write("k") as writer:
                writer.write(b"x")
                getattr(writer, finish)()
                with pytest.raises(ValueError, match="closed"):
                    writer.write(b"y")
                with pytest.raises(ValueError, match="closed"):
                    writer.commit()
        assert store.read("k") == b"x"

    @pytest.mark.parametrize("hint_bytes", [0, 1, 5, 10_000_000])
    def test_a_size_hint_is_only_a_hint(self, store: Store, hint_bytes: int) -> None:
        with store.open_write("k", size_hint_bytes=hint_bytes) as writer:
            writer.write(b"12345")
            writer.write(b"67890")
            writer.commit()
        assert store.read("k") == b"1234567890"

    # --- exclusive writes ---

    def test_if_absent_keeps_the_first(self, store: Store, place: Place) -> None:
        store.put("k", b"first", if_absent=True)
        with pytest.raises(AlreadyExists) as caught:
            store.put("k", b"second", if_absent=True)
        assert (caught.value.key, caught.value.tier) == ("k", store.tier)
        with pytest.raises(AlreadyExists):
            store.open_write("k", if_absent=True)
        assert store.read("k") == b"first"
        assert self.unfinished(place) == []
        store.put("k", b"third")
        store.delete("k")
        store.put("k", b"fourth", if_absent=True)
        assert store.read("k") == b"fourth"

    def test_if_absent_is_decided_at_commit(self, store: Store, place: Place) -> None:
        with store.open_write("k", if_absent=True) as slow:
            slow.write(b"slow")
            store.put("k", b"fast", if_absent=True)
            with pytest.raises(AlreadyExists):
                slow.commit()
        assert store.read("k") == b"fast"
        assert self.unfinished(place) == []

    # --- the rest ---

    def test_free_bytes_is_a_number_or_unknown(self, store: Store) -> None:
        free_bytes = store.free_bytes()
        assert free_bytes is None or free_bytes > 0

    def test_a_store_can_say_what_it_is(self, store: Store, place: Place) -> None:
        assert store.url == place.url
        assert store.tier in ("MEMORY", "NVME", "S3", "GCS", "AZURE")
        assert store.url in repr(store)

    def test_it_behaves_like_a_dictionary(self, place: Place) -> None:
        opened = self.open

        class Machine(StoreMachine):
            def open(self) -> Store:
                return opened(place)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=self.machine_examples * SOAK,
                stateful_step_count=25,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )


def _fill(view: memoryview) -> None:
    """Bytes that differ from block to block, so that a misplaced one shows."""
    block = random.Random(1).randbytes(1 << 16)
    for number, start in enumerate(range(0, len(view), len(block))):
        end = min(start + len(block), len(view))
        view[start:end] = block[: end - start]
        view[start : min(start + 8, end)] = number.to_bytes(8, "big")[: min(8, end - start)]
