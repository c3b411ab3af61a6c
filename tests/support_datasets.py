"""Small datasets in formats of others, written from their documented layouts."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.Codec("zstd").compress(data, asbytes=True)
    return packed


def lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def in_members(data: bytes, size_bytes: int, kind: str) -> bytes:
    """Compressed piece by piece: gzip members or zstd frames that follow each other."""
    pack = zstd if kind == "zst" else gzip.compress
    return b"".join(pack(data[at : at + size_bytes]) for at in range(0, len(data), size_bytes))


def tar(samples: Sequence[Mapping[str, bytes]]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number, sample in enumerate(samples):
            for suffix, data in sample.items():
                member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def mds(
    samples: Sequence[Mapping[str, bytes]],
    columns: Mapping[str, tuple[str, int | None]],
    *,
    shard_samples: int,
    compression: str | None = None,
) -> dict[str, bytes]:
    """The files of an MDS dataset. `columns` says for each its encoding and fixed size; values are encoded already."""
    files: dict[str, bytes] = {}
    shards = []
    names = sorted(columns)
    for number, first in enumerate(range(0, len(samples), shard_samples)):
        bodies = []
        for sample in samples[first : first + shard_samples]:
            sizes = [len(sample[name]) for name in names if columns[name][1] is None]
            bodies.append(np.array(sizes, "<u4").tobytes() + b"".join(sample[name] for name in names))
        description = json.dumps({"column_names": names}).encode()
        offsets = np.cumsum([0, *map(len, bodies)]) + 4 + 4 * (len(bodies) + 1) + len(description)
        raw = np.array([len(bodies), *offsets], "<u4").tobytes() + description + b"".join(bodies)
        name = f"shard.{number:05d}.mds"
        shard: dict[str, Any] = {
            "format": "mds",
            "version": 2,
            "samples": len(bodies),
            "column_names": names,
            "column_encodings": [columns[name][0] for name in names],
            "column_sizes": [columns[name][1] for name in names],
            "compression": compression,
            "hashes": ["sha1"],
            "raw_data": {"basename": name, "bytes": len(raw), "hashes": {"sha1": _sha1(raw)}},
            "zip_data": None,
        }
        if compression is None:
            files[name] = raw
        else:
            packed = zstd(raw) if compression.startswith("zstd") else gzip.compress(raw)
            files[f"{name}.{compression}"] = packed
            shard["zip_data"] = {
                "basename": f"{name}.{compression}",
                "bytes": len(packed),
                "hashes": {"sha1": _sha1(packed)},
            }
        shards.append(shard)
    files["index.json"] = json.dumps({"version": 2, "shards": shards}).encode()
    return files


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
