"""Images, audio and other files inside samples: as pixels, bytes or paths.

    ElasticDataset("s3://bucket/clips/*.jsonl", media={"image": "pixels", "audio": "path", "turns.*.picture": "bytes"})

A field holds the file itself (bytes), `{"bytes": …, "path": …}` as `datasets` stores it, or the path of a file, which is looked for
beside the file that the sample comes from. Fields inside others are named with dots, `*` stands for every entry of a list.
Decoding takes place where samples are read: in loader processes, if there are any.

A path that leads out of the dataset's folder is refused: samples are data of others.
"""

from __future__ import annotations

import io
import os
import posixpath
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from strata.data.errors import DataError
from strata.data.streaming.sources import is_remote, open_source
from strata.errors import MissingDependency

How = Literal["pixels", "bytes", "path"]
"""An array of height × width × 3 bytes, the content of the file, or its whole path or URL."""
MAX_PIXELS = 256 * 2**20


def checked(media: Mapping[str, How]) -> dict[tuple[str, ...], How]:
    for name, how in media.items():
        if how not in ("pixels", "bytes", "path"):
            raise ValueError(f"media['{name}'] must be 'pixels', 'bytes' or 'path', not {how!r}")
    return {tuple(name.split(".")): how for name, how in media.items()}


def with_media(row: dict[str, Any], media: Mapping[tuple[str, ...], How], *, file: str) -> dict[str, Any]:
    """A sample of `file` with its media as they are wanted; the sample itself is left alone."""
    changed: Any = row
    for steps, how in media.items():

        def change(value: Any, how: How = how, name: str = ".".join(steps)) -> Any:
            try:
                return _as_wanted(value, how, file)
            except (ValueError, OSError) as error:
                raise DataError.at(file, f"the field '{name}' is not readable ({error})") from error

        changed = _at(changed, steps, change)
    return dict(changed)


def decode_image(data: bytes) -> NDArray[np.uint8]:
    """Height × width × 3, whatever kind of image it is. Raises `ValueError` for what is none."""
    image = _opened(data)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"an image of {image.width:,} × {image.height:,} pixels")
    return np.array(image.convert("RGB"), np.uint8)


def thumbnail(data: bytes, edge: int) -> bytes | None:
    """A small JPEG of an image; None where it cannot be decoded, or nothing is installed that could."""
    try:
        image = _opened(data)
        image.draft("RGB", (edge, edge))  # Of a JPEG, decode only as much as is shown.
        if image.width * image.height > MAX_PIXELS:
            return None
        image.thumbnail((edge, edge))
        out = io.BytesIO()
        image.convert("RGB").save(out, "JPEG", quality=80)
        return out.getvalue()
    except (MissingDependency, ValueError, OSError):
        return None


def _opened(data: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependency("pillow", extra="images", feature="Decoding images") from error
    try:
        return Image.open(io.BytesIO(data))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"not an image: {error}") from error


def _at(value: Any, steps: tuple[str, ...], change: Callable[[Any], Any]) -> Any:
    """A copy of `value` in which what the steps lead to is changed. What is not there, or null, stays so."""
    if value is None:
        return None
    if not steps:
        return change(value)
    first, rest = steps[0], steps[1:]
    if first == "*" and isinstance(value, list | tuple):
        return [_at(each, rest, change) for each in value]
    if isinstance(value, Mapping) and first in value:
        return {**value, first: _at(value[first], rest, change)}
    return value


def _as_wanted(value: Any, how: How, file: str) -> Any:
    if isinstance(value, Mapping) and set(value) <= {"bytes", "path"}:
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes | bytearray | memoryview):
        if how == "path":
            raise ValueError("it holds the file itself, and has no path")
        return decode_image(bytes(value)) if how == "pixels" else bytes(value)
    if not isinstance(value, str):
        raise ValueError(f"it holds a {type(value).__name__}, neither a file nor a path")
    path = _beside(value, file)
    if how == "path":
        return path
    source = open_source(path)
    try:
        data = source.read(0, source.size_bytes)
    finally:
        source.close()
    return decode_image(data) if how == "pixels" else data


def _beside(name: str, file: str) -> str:
    """The path of a file that a sample names, below the folder of the file that holds the sample."""
    if is_remote(name) or posixpath.isabs(name) or ".." in name.split("/") or "\0" in name:
        raise ValueError(f"'{name[:200]}' leads out of the dataset's folder")
    if is_remote(file):
        return f"{file.rpartition('/')[0]}/{name}"
    return os.path.join(os.path.dirname(os.path.abspath(file)), name)
