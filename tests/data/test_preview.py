"""Whatever a sample holds, its preview is small, JSON, and true."""

from __future__ import annotations

import base64
import datetime
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.data.preview import Limits, preview


def one(value: Any, name: str = "x", limits: Limits | None = None) -> dict[str, Any]:
    (shown,) = preview([{name: value}], limits)
    field: dict[str, Any] = shown[name]
    return field


def pixels_of(url: str) -> np.ndarray[Any, Any]:
    """Decode the plain PNGs that previews write."""
    data = base64.b64decode(url.partition(",")[2])
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, found = 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        name, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + content)
        found[name] = content
        at += 12 + size
    width, height, _, color = struct.unpack(">IIBB", found[b"IHDR"][:10])
    channels = {0: 1, 2: 3, 6: 4}[color]
    raw = np.frombuffer(zlib.decompress(found[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    return raw[:, 1:].reshape(height, width, channels)


def test_text_labels_and_numbers_are_shown_as_they_are() -> None:
    assert one("hello") == {
        "kind": "text",
        "role": "feature",
        "value": "hello",
        "length": 5,
        "truncated": False,
    }
    assert one(7, "label")["role"] == "label"
    assert one(3, "img.cls")["role"] == "label"
    assert one("0001", "__key__")["role"] == "key"
    assert one(np.float32(0.5))["value"] == 0.5
    assert one(True)["kind"] == "boolean"
    assert one(datetime.date(2024, 5, 1))["value"] == "2024-05-01"


def test_long_text_is_cut_and_its_length_given() -> None:
    field = one("x" * 5_000)
    assert (len(field["value"]), field["length"], field["truncated"]) == (1_000, 5_000, True)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        2**70,
        "\ud800 alone",
        b"\x00\xff",
        [float("-inf")],
        {"a": {1, 2}},
        object(),
    ],
)
def test_what_json_cannot_hold_becomes_something_it_can(value: Any) -> None:
    json.dumps(preview([{"x": value}]), allow_nan=False).encode()


def test_small_images_are_shown_and_large_ones_described() -> None:
    png = b"\x89PNG\r\n\x1a\n" + b"\x00\x00\x00\rIHDR" + struct.pack(">II", 640, 480) + b"rest"
    field = one(png)
    assert (field["kind"], field["width"], field["height"]) == ("image", 640, 480)
    assert base64.b64decode(field["value"].partition(",")[2]) == png
    jpeg = one(b"\xff\xd8\xff" + bytes(100_000))
    assert (jpeg["format"], jpeg["bytes"], jpeg["value"]) == ("jpeg", 100_003, None)
    assert one({"bytes": png, "path": "a.png"})["kind"] == "image"
    assert one(b"RIFF....WAVEfmt")["kind"] == "bytes"


@pytest.mark.parametrize("shape", [(28, 28), (28, 28, 1), (300, 200, 3), (16, 16, 4)])
def test_arrays_that_are_images_become_thumbnails(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    field = one(array)
    assert field["kind"] == "image"
    shown = pixels_of(field["value"])
    assert max(shown.shape[:2]) <= 96
    thin = max(1, -(-max(shape[:2]) // 96))
    np.testing.assert_array_equal(shown, array.reshape(*shape[:2], -1)[::thin, ::thin])


def test_tensors_and_vectors_show_their_beginning_and_their_shape() -> None:
    field = one(torch.arange(1_000).reshape(10, 100))
    assert (field["shape"], field["dtype"], field["value"][:3]) == ([10, 100], "int64", [0, 1, 2])
    assert one(torch.ones(3, dtype=torch.bfloat16))["value"] == [1.0, 1.0, 1.0]
    assert one(list(range(100)))["value"] == list(range(32))
    assert one(np.array([np.nan]))["value"] == ["nan"]


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5_000),
        st.binary(max_size=5_000),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=60), st.dictionaries(st.text(max_size=300), inner, max_size=60)
    ),
    max_leaves=60,
)


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.text(max_size=8), anything, max_size=4), max_size=4))
def test_a_preview_is_always_json_and_always_bounded(samples: list[dict[str, Any]]) -> None:
    shown = preview(samples * 10, Limits(text_chars=50, items=8))
    assert len(shown) <= 20
    assert len(json.dumps(shown, allow_nan=False).encode()) < 2_000_000
    assert all(len(row) <= 33 for row in shown)


def test_depth_and_width_are_bounded() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep] * 50
    assert len(json.dumps(preview([{"x": deep}], Limits(items=4)))) < 20_000
    wide = preview([{str(i): i for i in range(100)}])[0]
    assert wide["…"]["value"] == "68 more fields"
