"""Uploads and downloads through the engine, beside bare obstore calls on the same real S3 server.

The server is SeaweedFS on loopback, started for the run where its binary is installed; it shares the machine's cores
with everybody. Bare means obstore's own multipart upload and parallel ranged reads with the store's part size.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from strata.bench.table import Row
from strata.checkpoint import CheckpointManager, Memory
from strata.stores import open_store

if TYPE_CHECKING:
    from strata.bench.checkpoint.suite import Load

PART_BYTES = 16 << 20
TENSORS = 64
CONCURRENCY = 4
_START_TIMEOUT_S = 60.0
MIB = 1 << 20


def s3_rows(load: Load, place: Path) -> Iterator[Row]:
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError:
        return
    binary = Path(sys.executable).parent / "weed"
    if not binary.exists() and shutil.which("weed") is None:
        return
    data = os.urandom(load.s3_bytes)
    state = {"model": dict(enumerate(torch.frombuffer(bytearray(data), dtype=torch.uint8).chunk(TENSORS)))}
    target = {"model": {key: torch.zeros_like(tensor) for key, tensor in state["model"].items()}}
    with _server(str(binary) if binary.exists() else "weed", place / "s3") as endpoint:
        options: dict[str, Any] = {
            "endpoint": endpoint,
            "access_key_id": "bench",
            "secret_access_key": "bench",
            "region": "us-east-1",
        }
        open_store("s3://bench/made", **options).put("k", b"the bucket exists now")
        bare: Any = S3Store("bench", **options, client_options={"allow_http": True})
        ups, downs, restores, bare_ups, bare_downs = [], [], [], [], []
        for _ in range(load.rounds):
            started_s = time.perf_counter()
            obstore.put(bare, "bare", data, chunk_size=PART_BYTES, max_concurrency=CONCURRENCY)
            bare_ups.append(time.perf_counter() - started_s)

            started_s = time.perf_counter()
            starts = range(0, len(data), PART_BYTES)
            with ThreadPoolExecutor(CONCURRENCY) as pool:
                found = list(
                    pool.map(
                        lambda at: obstore.get_range(
                            bare, "bare", start=at, length=min(PART_BYTES, len(data) - at)
                        ),
                        starts,
                    )
                )
            bare_downs.append(time.perf_counter() - started_s)
            del found

            url = f"s3://bench/{uuid.uuid4().hex[:12]}"
            memory = Memory(job=f"bench-{uuid.uuid4().hex[:12]}")
            with CheckpointManager(open_store(url, **options), memory=memory) as manager:
                started_s = time.perf_counter()
                manager.save(data, step=1).result()
                ups.append(time.perf_counter() - started_s)
                started_s = time.perf_counter()
                loaded = manager.load()
                downs.append(time.perf_counter() - started_s)
            assert loaded == data
            del loaded

            memory = Memory(job=f"bench-{uuid.uuid4().hex[:12]}")
            with CheckpointManager(open_store(f"{url}-state", **options), memory=memory) as manager:
                manager.save(state, step=1).result()
                started_s = time.perf_counter()
                restored = manager.restore(into=target, tiers=["S3"], tear_ok=True)  # As a job does.
                restores.append(time.perf_counter() - started_s)
                assert restored.tier == "S3"
            assert all(torch.equal(target["model"][key], tensor) for key, tensor in state["model"].items())
    for name, ours, theirs in (
        ("upload", ups, bare_ups),
        ("restore into live tensors", restores, bare_downs),
        ("download of plain bytes", downs, bare_downs),
    ):
        yield Row(
            name=f"S3 {name}",
            measured=min(theirs) / min(ours),
            unit="of bare obstore",
            target=0.9,
            peer=f"bare {load.s3_bytes / MIB / min(theirs):,.0f} MiB/s",
            note=f"{load.s3_bytes / MIB / min(ours):,.0f} MiB/s, verified; best of {len(ours)}",
        )


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, Any] | None]:
    """What to open a store of the bucket `bench` with, on a server that lives meanwhile; None where its binary is not installed."""
    binary = Path(sys.executable).parent / "weed"
    if not binary.exists() and shutil.which("weed") is None:
        yield None
        return
    with _server(str(binary) if binary.exists() else "weed", folder) as endpoint:
        keys = {"access_key_id": "bench", "secret_access_key": "bench"}
        options: dict[str, Any] = {"endpoint": endpoint, **keys, "region": "us-east-1"}
        open_store("s3://bench/made", **options).put("k", b"the bucket exists now")
        yield options


@contextlib.contextmanager
def _server(binary: str, folder: Path) -> Iterator[str]:
    (folder / "data").mkdir(parents=True)
    keys = {"accessKey": "bench", "secretKey": "bench"}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "bench", "credentials": [keys], "actions": actions}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    master, volume, filer, s3 = (_free_port() for _ in range(4))
    command = [
        binary, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={master}",
        f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", "-s3.port.iceberg=0",
        "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}", "-volume.max=50", "-master.volumeSizeLimitMB=1024",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        _wait_until_it_answers(s3)
        yield f"http://127.0.0.1:{s3}"
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_it_answers(port: int) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/")
            if connection.getresponse().status in (200, 403):
                return
        except OSError:
            pass
        finally:
            connection.close()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the S3 server did not answer on port {port} within {_START_TIMEOUT_S:.0f} s")
        time.sleep(0.1)


def _free_port() -> int:
    """A port whose twin 10,000 above, where SeaweedFS listens for gRPC, is free as well."""
    while True:
        with socket.socket() as one, socket.socket() as twin:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            if port + 10_000 > 65_535:
                continue
            with contextlib.suppress(OSError):
                twin.bind(("127.0.0.1", port + 10_000))
                return port
