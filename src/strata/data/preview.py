"""Samples as a browser may see them: small, JSON-safe, whatever they are made of.

Each field becomes `{"kind": …, "role": …, …}`: numbers and short text as they are, long ones cut with their full
length given, images as a data URL while they are small, anything binary by its size. Sizes are bounded by
construction, not by hope: no sample, however large or deep, gives a large answer. Text stays text: it is never
markup, and the code that shows it must not make it so.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.data.media import thumbnail

_LABELS = {"label", "labels", "cls", "class", "target", "targets", "y", "category"}
_MAGIC = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    samples: int = 20
    fields: int = 32
    text_chars: int = 1_000
    items: int = 32
    depth: int = 3
    image_bytes: int = 48 * 1024
    """A larger image is shown small, where it can be decoded, else by its size alone. 0 shows none."""
    thumbnail_pixels: int = 96
    """Large images and arrays that are images are shown with this edge."""


def preview(samples: Iterable[Mapping[str, Any]], limits: Limits | None = None) -> list[dict[str, Any]]:
    """The first samples, each as a mapping from field to what can be shown of it."""
    limits = limits or Limits()
    shown = []
    for number, sample in enumerate(samples):
        if number >= limits.samples:
            break
        fields = list(sample.items())
        row = {
            _short(str(name), 200): _field(str(name), value, limits)
            for name, value in fields[: limits.fields]
        }
        if len(fields) > limits.fields:
            row["…"] = {
                "kind": "note",
                "role": "feature",
                "value": f"{len(fields) - limits.fields:,} more fields",
            }
        shown.append(row)
    return shown


def _field(name: str, value: Any, limits: Limits) -> dict[str, Any]:
    last = name.rpartition(".")[2].lower()
    role = "key" if name == "__key__" else "label" if last in _LABELS else "feature"
    return {"role": role, **describe(value, limits)}


def describe(value: Any, limits: Limits, *, depth: int = 0) -> dict[str, Any]:
    """What can be shown of one value."""
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        value = (
            value.detach().cpu().float().numpy()
            if str(value.dtype).endswith("bfloat16")
            else value.detach().cpu().numpy()
        )
    match value:
        case None:
            return {"kind": "null", "value": None}
        case bool():
            return {"kind": "boolean", "value": value}
        case int() | np.integer():
            number = int(value)  # Browsers count in doubles: beyond 2^53 digits would change.
            return {"kind": "number", "value": number if abs(number) < 2**53 else _short(str(number), 100)}
        case float() | np.floating():
            real = float(value)
            return {"kind": "number", "value": real if math.isfinite(real) else str(real)}
        case str():
            return _text(value, limits)
        case bytes() | bytearray() | memoryview():
            return _binary(bytes(value), limits)
        case np.ndarray():
            return _array(value, limits)
        case Mapping():
            return _mapping(value, limits, depth)
        case Sequence():
            return _sequence(value, limits, depth)
        case _:
            return _text(str(value), limits)  # Dates, decimals and the like.


def _text(text: str, limits: Limits) -> dict[str, Any]:
    # Lone surrogates are not UTF-8: a browser could not be sent them.
    shown = _short(text, limits.text_chars).encode("utf-8", "replace").decode()
    return {"kind": "text", "value": shown, "length": len(text), "truncated": len(text) > limits.text_chars}


def _binary(data: bytes, limits: Limits) -> dict[str, Any]:
    kind = next((name for magic, name in _MAGIC if data.startswith(magic)), None)
    if kind == "webp" and data[8:12] != b"WEBP":
        kind = None
    if kind is None:
        return {"kind": "bytes", "bytes": len(data), "value": data[:32].hex(" ")}
    image: dict[str, Any] = {"kind": "image", "format": kind, "bytes": len(data), "value": None}
    if kind == "png" and len(data) >= 24:
        image["width"], image["height"] = struct.unpack(">II", data[16:24])
    if len(data) <= limits.image_bytes:
        image["value"] = _data_url(kind, data)
    elif limits.image_bytes and (small := thumbnail(data, limits.thumbnail_pixels)) is not None:
        image["value"] = _data_url("jpeg", small)
    return image


def _array(array: np.ndarray[Any, Any], limits: Limits) -> dict[str, Any]:
    about: dict[str, Any] = {"kind": "array", "dtype": str(array.dtype), "shape": list(array.shape)}
    if _is_image(array):
        height, width = array.shape[:2]
        thin = max(1, -(-max(height, width) // limits.thumbnail_pixels))
        return {
            **about,
            "kind": "image",
            "format": "png",
            "value": _data_url("png", _png(array[::thin, ::thin])),
        }
    first = array.ravel()[: limits.items].tolist()
    return {**about, "value": [describe(item, limits, depth=limits.depth)["value"] for item in first]}


def _mapping(value: Mapping[Any, Any], limits: Limits, depth: int) -> dict[str, Any]:
    if isinstance(value.get("bytes"), bytes) and set(value) <= {"bytes", "path"}:
        return _binary(value["bytes"], limits)  # How `datasets` stores images and audio.
    if depth >= limits.depth:
        return {"kind": "object", "length": len(value), "value": None, "truncated": True}
    items = list(value.items())[: limits.items]
    inner = {_short(str(key), 200): describe(item, limits, depth=depth + 1) for key, item in items}
    return {"kind": "object", "length": len(value), "value": inner, "truncated": len(items) < len(value)}


def _sequence(value: Sequence[Any], limits: Limits, depth: int) -> dict[str, Any]:
    if depth >= limits.depth:
        return {"kind": "list", "length": len(value), "value": None, "truncated": True}
    inner = [describe(item, limits, depth=depth + 1) for item in value[: limits.items]]
    if all(item["kind"] in ("number", "boolean", "null") for item in inner):
        inner = [item["value"] for item in inner]  # Tokens and feature vectors read better as plain numbers.
    return {"kind": "list", "length": len(value), "value": inner, "truncated": len(value) > limits.items}


def _is_image(array: np.ndarray[Any, Any]) -> bool:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or min(array.shape) == 0:
        return False
    return min(array.shape[:2]) >= 8 and (array.ndim == 2 or array.shape[2] in (1, 3, 4))


def _png(pixels: np.ndarray[Any, Any]) -> bytes:
    """The smallest PNG writer that browsers accept: one filter byte per row, one compressed chunk."""
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    height, width = pixels.shape[:2]
    color = {2: 0, 3: {3: 2, 4: 6}.get(pixels.shape[-1], 0)}[pixels.ndim]
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    raw = np.hstack([np.zeros((height, 1), np.uint8), rows]).tobytes()

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    return _MAGIC[0][0] + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def _data_url(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
