"""How to reach every sample of a dataset, built once and kept in one file.

    strata index --samples s3://bucket/train/*.jsonl.gz -o s3://bucket/train.samples
    dataset = ElasticDataset("s3://bucket/train.samples")

Tars, lines and compressed files say nowhere how many samples they hold, so they have to be read once. `discover` does so file
by file, and keeps each file's index in the cache, also while it is built: killed, it continues in the middle of the file. `save`
puts all of them into one file, beside the data or anywhere; a dataset opened from it reads nothing else before the first sample.
The file names the version of each object: a dataset that was changed since is refused where it was.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np

import strata
from strata.data.errors import DataError
from strata.data.reader import SAMPLES_SUFFIX, DataFile, DatasetFiles
from strata.data.readers.base import FileIndex
from strata.data.streaming.sources import is_remote, open_source, put_object
from strata.files import write_file

VERSION = 1


def save(found: DatasetFiles, place: str | os.PathLike[str]) -> int:
    """Write the index of a dataset, and say how many bytes it has."""
    text = os.fspath(place)
    if not text.endswith(SAMPLES_SUFFIX):
        raise DataError.at(
            text, f"the index of a dataset ends in {SAMPLES_SUFFIX}", hint=f"Name it {text}{SAMPLES_SUFFIX}."
        )
    about = {
        "version": VERSION,
        "format": found.format,
        "files": [
            {
                "path": file.path if is_remote(file.path) else os.path.abspath(file.path),
                "size_bytes": file.size_bytes,
                "samples": file.samples,
                "bad": file.bad,
                "version": file.version,
            }
            for file in found.files
        ],
    }
    arrays = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for number, index in enumerate(found.indexes):
        arrays |= {f"{number}/{name}": array for name, array in index.arrays.items()}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    data = buffer.getvalue()
    if is_remote(text):
        put_object(text, data)
    else:
        try:
            write_file(Path(text), data, durable=True, mode=0o644)
        except OSError as error:
            raise DataError.at(text, f"it cannot be written ({error.strerror or error})") from error
    return len(data)


def load(place: str) -> DatasetFiles:
    """What `save` wrote."""
    source = open_source(place)
    try:
        data = source.read(0, source.size_bytes)
    finally:
        source.close()
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as saved:
            arrays = {name: saved[name] for name in saved.files}
        about = json.loads(arrays.pop("about").tobytes())
        if about["version"] > VERSION:
            raise ValueError(
                f"it has version {about['version']}, written by a newer Strata; this is Strata {strata.__version__}, which reads "
                f"up to {VERSION}"
            )
        if about["version"] != VERSION:
            raise ValueError(f"unknown version {about['version']}")
        files = tuple(DataFile(**file) for file in about["files"])
        by_file: list[dict[str, np.ndarray]] = [{} for _ in files]
        for name, array in arrays.items():
            number, _, own = name.partition("/")
            by_file[int(number)][own] = array
        indexes = tuple(
            FileIndex(rows=file.samples, bad=file.bad, arrays=own)
            for file, own in zip(files, by_file, strict=True)
        )
        return DatasetFiles(format=str(about["format"]), files=files, indexes=indexes)
    except (ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise DataError.at(
            place, f"not the index of a dataset ({error})", hint="Build it: strata index --samples."
        ) from error
