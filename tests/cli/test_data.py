"""`strata data` and `strata index --samples`: what is in a dataset, before training."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from strata.data import DataError, DatasetReader
from tests.cli.running import strata
from tests.support_datasets import lines, mds, tar

ROWS = [{"id": i, "text": f"sample {i}", "nested": {"tags": ["a", "b"]}} for i in range(100)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[:60])))
    (tmp_path / "data" / "b.jsonl").write_bytes(lines(ROWS[60:]))
    return tmp_path / "data"


def test_stat_tells_samples_fields_and_files(folder: Path) -> None:
    ran = strata("data", "stat", str(folder))
    assert ran.code == 0
    assert "100 samples in 2 jsonl files" in ran.out
    for word in ("nested", "object", "text", "a.jsonl.gz", "60"):
        assert word in ran.out
    found = json.loads(strata("data", "stat", str(folder), "--json").out)
    assert (found["samples"], found["format"], len(found["files"])) == (100, "jsonl", 2)
    assert [field["field"] for field in found["fields"]] == ["id", "text", "nested"]


def test_head_and_sample_show_samples(folder: Path) -> None:
    ran = strata("data", "head", str(folder), "-n", "2")
    assert "sample 0" in ran.out
    assert "sample 1" in ran.out
    assert "sample 2" not in ran.out
    drawn = json.loads(strata("data", "sample", str(folder), "-n", "3", "--seed", "4", "--json").out)
    assert len({each["sample"] for each in drawn}) == 3
    for each in drawn:
        assert each["fields"]["id"]["value"] == each["sample"]


def test_verify_names_what_is_damaged(tmp_path: Path) -> None:
    samples = [{"x": f"{i}".encode()} for i in range(30)]
    files = mds(samples, {"x": ("str", None)}, shard_samples=10)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    ran = strata("data", "verify", str(tmp_path))
    assert (ran.code, "30 samples read, 3 digests compared: intact" in ran.out) == (0, True)
    name = "shard.00001.mds"
    (tmp_path / name).write_bytes(files[name][:-1] + b"!")
    ran = strata("data", "verify", str(tmp_path), "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["intact"], found["samples"]) == (1, False, 20)
    assert name in found["damaged"][0]["path"]


def test_a_url_that_holds_nothing_is_a_sentence(tmp_path: Path) -> None:
    for command in ("stat", "head", "sample", "verify"):
        ran = strata("data", command, str(tmp_path / "nothing"))
        assert ran.code == 1
        assert "no such file" in ran.err
        assert "Traceback" not in ran.err


def test_samples_are_indexed_once_for_every_machine(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "all.samples"
    ran = strata("index", "--samples", str(folder), "-o", str(place))
    assert (ran.code, "100 samples in 2 jsonl files" in ran.out) == (0, True)
    reader = DatasetReader(place)
    assert reader.read([99, 0, 59]) == [ROWS[99], ROWS[0], ROWS[59]]
    assert "100 samples" in strata("data", "stat", str(place)).out
    (tmp_path / "t.tar").write_bytes(tar([{"txt": b"one"}, {"txt": b"two"}]))
    kept = json.loads(strata("index", "--samples", str(tmp_path / "t.tar"), "--json").out)
    assert (kept["samples"], kept["format"], kept["output"]) == (2, "webdataset", None)


def test_an_index_of_samples_that_is_none_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "ends in .samples" in strata("index", "--samples", str(folder), "-o", str(tmp_path / "x.idx")).err
    (tmp_path / "bad.samples").write_bytes(b"not an index")
    with pytest.raises(DataError, match=r"bad\.samples.*not the index of a dataset"):
        DatasetReader(tmp_path / "bad.samples")
    ran = strata("index", str(folder / "b.jsonl"))
    assert (ran.code, "--output" in ran.err) == (2, True)


@pytest.mark.parametrize(
    "command", [("data", "stat"), ("data", "head"), ("data", "sample"), ("index", "--samples")]
)
def test_the_next_step_is_said_in_words_of_the_command_line(command: tuple[str, ...], tmp_path: Path) -> None:
    """What an error suggests is typed as it stands, and helps."""
    (tmp_path / "a.txt").write_text("text\n")
    (tmp_path / "b.jsonl").write_bytes(lines(ROWS[:3]))
    ran = strata(*command, str(tmp_path))
    assert (ran.code, "--format" in ran.err, "format=" in ran.err) == (1, True, False)
    assert strata(*command, str(tmp_path / "b.jsonl"), "--format", "text").code == 0
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(lines(ROWS[:1]) + b"{no json\n" + lines(ROWS[1:2]))
    if command[0] == "data":
        ran = strata("data", "head", str(bad))
        assert (ran.code, "--on-bad skip" in ran.err, "on_bad=" in ran.err) == (1, True, False)
    ran = strata(*command, str(bad), "--on-bad", "skip")
    assert ran.code == 0, ran.err


def test_what_verify_was_asked_to_skip_is_not_damage(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(lines(ROWS[:1]) + b"{no json\n" + lines(ROWS[1:2]))
    ran = strata("data", "verify", str(bad))
    assert (ran.code, "line 2" in ran.out) == (1, True)
    ran = strata("data", "verify", str(bad), "--on-bad", "skip")
    assert (ran.code, "2 samples read" in ran.out) == (0, True)
