"""An index whose building was killed in the middle of one file continues there, and comes out the same."""

from __future__ import annotations

import gzip
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from strata.data import DatasetReader, discover
from strata.data.streaming import index_cache
from strata.data.streaming.sources import BLOCK_BYTES
from strata.stores import open_store
from tests.support_datasets import in_members, lines, tar, zstd
from tests.support_s3_proxy import Hang, Hold, Request, s3_proxy
from tests.support_seaweed import seaweed

KILLED = """
import os, signal, sys
from strata.data import discover
from strata.data.streaming import index_cache

index_cache.KEEP_EVERY_S = index_cache._COST_LIMIT = 0.0


class Killed:
    done = 0

    def begin(self, *, total_bytes, done_bytes):
        self.total = total_bytes

    def advance(self, *, done_bytes, samples):
        self.done += done_bytes
        if self.done > self.total * float(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)


discover(sys.argv[1], progress=Killed())
"""


class Bar:
    """What a progress bar would show first, and in all."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.total = 0

    def begin(self, *, total_bytes: int, done_bytes: int) -> None:
        self.total = total_bytes

    def advance(self, *, done_bytes: int, samples: int) -> None:
        self.steps.append(done_bytes)


def rows(count: int = 40_000) -> list[dict[str, object]]:
    dice = random.Random(1)
    return [{"id": i, "text": dice.randbytes(180).hex()} for i in range(count)]


def content(name: str) -> bytes:
    if "tar" in name:
        members = tar(
            [{"json": b'{"id": %d}' % i, "bin": random.Random(i).randbytes(900)} for i in range(9_000)]
        )
        return gzip.compress(members, 1)
    data = lines(rows())
    match name:
        case "frames.jsonl.zst":
            return in_members(data, 300_000, "zst")
        case "one.jsonl.zst":
            return zstd(data)
        case "one.jsonl.gz":
            return gzip.compress(data, 1)
        case _:
            return data


NAMES = ["one.jsonl.gz", "frames.jsonl.zst", "one.jsonl.zst", "shard.tar.gz"]


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_build_continues_in_the_middle_of_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_bytes(content(name))
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "undisturbed"))
    undisturbed = discover(path)

    cache = tmp_path / "cache"
    monkeypatch.setenv("STRATA_CACHE_DIR", str(cache))
    for share in ("0.5", "0.85") if name == "one.jsonl.gz" else ("0.7",):
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, str(path), share], capture_output=True, text=True
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert list(cache.glob("index/*.part.npz"))
    bar = Bar()
    again = discover(path, progress=bar)
    assert bar.steps[0] > 0.3 * bar.total, "it has read again what it had read"
    assert sum(bar.steps) == bar.total
    assert not list(cache.glob("index/*.part.npz"))

    assert again == undisturbed
    assert again.indexes[0].rows == undisturbed.indexes[0].rows
    assert again.indexes[0].arrays.keys() == undisturbed.indexes[0].arrays.keys()
    for key, array in undisturbed.indexes[0].arrays.items():
        np.testing.assert_array_equal(again.indexes[0].arrays[key], array, err_msg=key)
    numbers = random.Random(2).sample(range(len(DatasetReader(again))), 20)
    assert [row.get("id", row.get("json")) for row in DatasetReader(again).read(numbers)] == (
        [{"id": n} for n in numbers] if "tar" in name else numbers
    )


def kept_bytes(cache: Path) -> int:
    """Up to where in the only file what was kept of its index reaches."""
    for kept in cache.glob("index/*.part.npz"):
        with np.load(kept) as arrays:
            return int(arrays["lines_at"][0])
    return 0


@pytest.mark.s3
def test_the_command_continues_in_the_middle_of_a_file_after_sigkill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`strata index --samples` of an object, held by the server in the middle of it and killed there."""
    records = [{"id": i, "text": "x" * 60_000} for i in range(400)]
    data = lines(records)
    assert len(data) > 5 * BLOCK_BYTES
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STRATA_CACHE_LIMIT_MB", "0")  # What is read again is asked of the server again.
    command = [sys.executable, "-m", "strata.cli.main", "index", "--samples", "s3://killed/all.jsonl"]
    command += ["-o", str(tmp_path / "all.samples")]

    def starts_at(request: Request) -> int:
        return int(request.headers.get("range", "bytes=-1-").removeprefix("bytes=").split("-")[0] or -1)

    with seaweed(tmp_path / "seaweed") as server, s3_proxy(server.endpoint) as proxy:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        open_store("s3://killed").put("all.jsonl", data)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        release = threading.Event()
        proxy.spoil(Hang(), when=lambda request: starts_at(request) >= 4 * BLOCK_BYTES)
        proxy.spoil(Hold(release), when=lambda request: starts_at(request) >= 2 * BLOCK_BYTES)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as killed:
            while not proxy.spoilt:
                assert killed.poll() is None, killed.stderr.read() if killed.stderr else ""
                time.sleep(0.02)
            # It keeps what it has so often: with the block that it waits for, at the latest.
            time.sleep(index_cache.KEEP_EVERY_S)
            release.set()
            while kept_bytes(tmp_path / "cache") < BLOCK_BYTES:
                assert killed.poll() is None
                time.sleep(0.02)
            killed.send_signal(signal.SIGKILL)
        kept = kept_bytes(tmp_path / "cache")
        assert not (tmp_path / "all.samples").exists()
        proxy.heal()
        proxy.seen.clear()
        again = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (again.returncode, "400 samples in 1 jsonl file" in again.stdout) == (0, True), again.stderr
        asked = [
            request.headers["range"].removeprefix("bytes=").split("-")
            for request in proxy.seen
            if starts_at(request) >= 0
        ]
        read_bytes = sum(int(last) - int(first) + 1 for first, last in asked)
        assert read_bytes <= len(data) - kept + 100_000, "it has read again what it had read"
        found = DatasetReader(tmp_path / "all.samples")
        assert [row["id"] for row in found.read([399, 0, 200])] == [399, 0, 200]


def test_what_was_kept_of_another_version_of_a_file_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.jsonl.gz"
    path.write_bytes(content("one.jsonl.gz"))
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), "0.5"], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    path.write_bytes(gzip.compress(lines(rows(10_000)), 1))
    assert discover(path).total == 10_000


def test_a_damaged_unfinished_index_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_bytes(content("plain.jsonl"))
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))
    subprocess.run([sys.executable, "-c", KILLED, str(path), "0.5"], capture_output=True, check=False)
    (kept,) = (tmp_path / "cache" / "index").glob("*.part.npz")
    kept.write_bytes(kept.read_bytes()[:100])
    assert discover(path).total == 40_000
    assert index_cache.KEEP_EVERY_S > 0
