"""How fast the stores are beside the bare calls underneath: `python -m tests.stores.speed [local] [s3]`.

Each round measures both, in turn, so that other work on the machine disturbs both alike; the ratio is of medians.
Run it on a quiet machine.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from strata.stores import open_store
from strata.stores.direct import CHUNK_BYTES
from strata.stores.object import MAX_CONCURRENCY, PART_BYTES
from tests.support_seaweed import ACCESS_KEY, SECRET_KEY, seaweed

GIB = 1 << 30
ROUNDS = 7


def compare(what: str, size_bytes: int, bare: Callable[[], object], ours: Callable[[], object]) -> None:
    times_s: dict[str, list[float]] = {"bare": [], "ours": []}
    for number in range(ROUNDS + 1):
        for name, run in (("bare", bare), ("ours", ours)) if number % 2 else (("ours", ours), ("bare", bare)):
            began_s = time.perf_counter()
            run()
            if number:  # The first round warms up.
                times_s[name].append(time.perf_counter() - began_s)
    bare_s, ours_s = statistics.median(times_s["bare"]), statistics.median(times_s["ours"])
    rates = f"bare {size_bytes / bare_s / 1e6:7.0f} MB/s   store {size_bytes / ours_s / 1e6:7.0f} MB/s"
    print(f"{what:32} {rates}   ratio {bare_s / ours_s:.2f}", flush=True)


def local(folder: Path, pages: memoryview) -> None:
    store = open_store(folder / "values")
    bare_path = folder / "bare"

    def write_bare() -> None:
        bare_path.unlink(missing_ok=True)
        fd = os.open(bare_path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        for start in range(0, len(pages), CHUNK_BYTES):
            os.pwrite(fd, pages[start : start + CHUNK_BYTES], start)
        os.fsync(fd)
        os.close(fd)

    def write_store() -> None:
        store.delete("k")
        store.put("k", pages)

    def read_bare() -> None:
        fd = os.open(bare_path, os.O_RDONLY | os.O_DIRECT)

        def read(start: int) -> None:
            os.preadv(fd, [pages[start : start + CHUNK_BYTES]], start)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(read, range(0, len(pages), CHUNK_BYTES)))
        os.close(fd)

    compare("local write (O_DIRECT, fsync)", len(pages), write_bare, write_store)
    compare("local read (O_DIRECT, 2 threads)", len(pages), read_bare, lambda: store.read_into("k", pages))


def s3(folder: Path, pages: memoryview) -> None:
    import obstore
    from obstore.store import S3Store

    with seaweed(folder / "seaweed") as server:
        client = S3Store(
            "speed",
            endpoint=server.endpoint,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        store = open_store("s3://speed", **server.options())
        starts = list(range(0, len(pages), PART_BYTES))

        def put_bare() -> None:
            obstore.put(client, "bare", pages, chunk_size=PART_BYTES, max_concurrency=MAX_CONCURRENCY)

        def get_bare() -> None:
            obstore.get_ranges(client, "bare", starts=starts, lengths=[PART_BYTES] * len(starts))

        compare("s3 up (multipart)", len(pages), put_bare, lambda: store.put("ours", pages))
        compare("s3 down (parallel ranges)", len(pages), get_bare, lambda: store.read_into("ours", pages))


def main() -> None:
    wanted = sys.argv[1:] or ["local", "s3"]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile(dir="/dev/shm") as shared:
        shared.truncate(GIB)
        with mmap.mmap(shared.fileno(), GIB) as mapped, memoryview(mapped) as pages:
            block = os.urandom(1 << 20)
            for start in range(0, GIB, len(block)):
                pages[start : start + len(block)] = block
            if "local" in wanted:
                local(Path(folder), pages)
            if "s3" in wanted:
                with pages[: GIB // 4] as quarter:
                    s3(Path(folder), quarter)


if __name__ == "__main__":
    main()
