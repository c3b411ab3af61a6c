"""Images and files inside samples: decoded where samples are read, and never from outside the dataset."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from strata.data import DataError, ElasticDataset, ElasticLoader, ElasticSampler
from strata.data.preview import Limits, preview
from tests.support_datasets import tar


def png(value: int, size: tuple[int, int] = (8, 6)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (value, 0, 255 - value)).save(out, "PNG")
    return out.getvalue()


def pixels_and_name(row: dict[str, Any]) -> torch.Tensor:
    return torch.from_numpy(row["png"])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_images_of_tars_are_decoded_where_they_are_read(tmp_path: Path, num_workers: int) -> None:
    (tmp_path / "a.tar").write_bytes(tar([{"png": png(i), "cls": b"1"} for i in range(12)]))
    dataset = ElasticDataset(tmp_path, media={"png": "pixels"}, transform=pixels_and_name)
    loader = ElasticLoader(
        dataset, ElasticSampler(12, global_batch_size=5, shuffle=False), num_workers=num_workers
    )
    images = torch.cat([batch.data for batch in loader])
    assert images.shape == (12, 6, 8, 3)
    assert images[:, 0, 0, 0].tolist() == list(range(12))


def test_images_as_datasets_stores_them_are_decoded(tmp_path: Path) -> None:
    rows = [{"image": {"bytes": png(i), "path": None}, "text": "x"} for i in range(3)]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    dataset = ElasticDataset(tmp_path, media={"image": "pixels"})
    assert [row["image"][0, 0, 0] for row in dataset.read([2, 0])] == [2, 0]


def test_paths_lead_to_files_beside_the_dataset(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "1.wav").write_bytes(b"RIFF....WAVE")
    (tmp_path / "clips" / "1.png").write_bytes(png(7))
    row = {
        "audio": "clips/1.wav",
        "turns": [{"picture": "clips/1.png"}, {"picture": None}, {"text": "hello"}],
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    found = ElasticDataset(tmp_path / "a.jsonl", media={"audio": "path", "turns.*.picture": "pixels"})[0]
    assert Path(found["audio"]).read_bytes() == b"RIFF....WAVE"
    assert found["turns"][0]["picture"].shape == (6, 8, 3)
    assert found["turns"][1:] == row["turns"][1:]
    assert ElasticDataset(tmp_path / "a.jsonl", media={"audio": "bytes"})[0]["audio"] == b"RIFF....WAVE"


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../secret.png", "clips/../../x", "s3://other/x", "missing.png"]
)
def test_a_path_out_of_the_dataset_or_to_nothing_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"image": name}) + "\n")
    with pytest.raises(DataError, match=r"leads out of the dataset's folder|no such file"):
        ElasticDataset(tmp_path / "a.jsonl", media={"image": "pixels"})[0]


def test_what_is_no_image_names_file_and_field(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar([{"png": b"not an image"}]))
    with pytest.raises(DataError, match=r"a\.tar.*the field 'png' is not readable"):
        ElasticDataset(tmp_path, media={"png": "pixels"})[0]
    with pytest.raises(ValueError, match="'pixels', 'bytes' or 'path'"):
        ElasticDataset(tmp_path, media={"png": "picture"})  # type: ignore[dict-item]


def test_previews_show_the_pixels_of_large_images() -> None:
    noise = np.random.default_rng(1).integers(0, 255, (400, 300, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    (row,) = preview([{"image": {"bytes": out.getvalue(), "path": "a.png"}}], Limits(thumbnail_pixels=32))
    shown = row["image"]
    assert (shown["kind"], shown["width"], shown["height"]) == ("image", 300, 400)
    small = Image.open(io.BytesIO(base64.b64decode(shown["value"].partition(",")[2])))
    assert max(small.size) == 32
    (row,) = preview([{"image": b"\x89PNG\r\n\x1a\n" + bytes(100_000)}])
    assert row["image"]["value"] is None
