"""A small corpus written by MosaicML Streaming's own writer, which tests read; runs in an environment with that package.

    python -m benchmarks.mds_writer tests/data/written_by_mosaicml

Sample `i` is what `sample(i)` says. Knows nothing of Strata.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.streaming_package import without_images

SAMPLES = 24
SHARD_BYTES = 1 << 11
COLUMNS = {
    "id": "int",
    "text": "str",
    "raw": "bytes",
    "tokens": "ndarray:uint16:8",
    "free": "ndarray",
    "any_shape": "ndarray:int32",
    "about": "json",
    "weight": "float32",
    "count": "uint16",
    "money": "str_decimal",
}
KINDS: dict[str, tuple[str | None, list[str]]] = {
    "raw": (None, ["sha1", "xxh64"]),
    "zstd": ("zstd:9", ["sha1"]),
    "gz": ("gz", ["xxh3_64"]),
    "br": ("br:3", []),
    "bz2": ("bz2:5", []),
    "snappy": ("snappy", []),
}


def sample(i: int) -> dict[str, Any]:
    return {
        "id": i,
        "text": f"sample {i}: ünï" * (i % 3 + 1),
        "raw": bytes([i, 255 - i, 0]),
        "tokens": np.arange(i, i + 8, dtype=np.uint16),
        "free": np.full((i % 3 + 1, 2), i / 4, np.float32),
        "any_shape": np.arange(i % 4 + 1, dtype=np.int32),
        "about": {"n": i, "tags": ["a", None]},
        "weight": np.float32(i / 8),
        "count": np.uint16(1000 + i),
        "money": Decimal(f"{i}.50"),
    }


def main(folder: Path) -> None:
    without_images()
    writer_of: Any = importlib.import_module("streaming").MDSWriter
    for kind, (compression, hashes) in KINDS.items():
        shutil.rmtree(folder / kind, ignore_errors=True)
        with writer_of(
            out=str(folder / kind),
            columns=COLUMNS,
            compression=compression,
            hashes=hashes,
            size_limit=SHARD_BYTES,
        ) as writer:
            for i in range(SAMPLES):
                writer.write(sample(i))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
