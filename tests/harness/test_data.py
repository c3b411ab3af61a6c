"""The harness's data package: the promised names, texts and command lines."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from elastic_harness.data import (
    DatasetState,
    IndexBuilder,
    IndexEntry,
    IndexHeader,
    ResumableDataset,
    TokenIndexFile,
    create_dataloader,
)
from elastic_harness.errors import DataLoadingError


class Words:
    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    names = []
    for i in range(2):
        path = tmp_path / f"data_{i}.jsonl"
        path.write_text("".join(json.dumps({"text": "word " * (j + 1)}) + "\n" for j in range(10)))
        names.append(str(path))
    return names


@pytest.fixture
def index(tmp_path: Path, data: list[str]) -> TokenIndexFile:
    IndexBuilder(Words(), 10).build(data, tmp_path / "index.bin")
    return TokenIndexFile(tmp_path / "index.bin")


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic_harness.data.index_builder", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


# Index ----------------------------------------------------------------------------------------------------


def test_build_gives_the_header_and_writes_the_note(tmp_path: Path, data: list[str]) -> None:
    header = IndexBuilder(tokenizer=Words(), entry_interval=10).build(data, tmp_path / "index.bin")
    assert isinstance(header, IndexHeader)
    assert (header.num_files, header.total_tokens, header.entry_interval) == (2, 110, 10)
    note = json.loads((tmp_path / "index.json").read_text())
    assert (note["files"], note["total_tokens"]) == (data, 110)


def test_index_file_finds_positions(index: TokenIndexFile, data: list[str]) -> None:
    assert (index.total_tokens, index.num_files) == (110, 2)
    assert index.find_position(0) == (0, 0, 0)
    file_index, byte_offset, token_offset = index.find_position(55 + 2)
    line = Path(data[file_index]).read_bytes()[byte_offset:].split(b"\n")[0]
    assert (file_index, json.loads(line)["text"].split(), token_offset) == (1, ["word", "word"], 1)
    with pytest.raises(ValueError, match="exceeds total tokens"):
        index.find_position(1110)


def test_header_and_entry_survive_their_bytes() -> None:
    header = IndexHeader(version=1, num_entries=100, total_tokens=50_000, num_files=5, entry_interval=10_000)
    assert IndexHeader.from_bytes(header.to_bytes()) == header
    entry = IndexEntry(file_index=1, byte_offset=12_345, cumulative_tokens=67_890)
    assert IndexEntry.from_bytes(entry.to_bytes()) == entry
    with pytest.raises(ValueError, match="bad magic number"):
        IndexHeader.from_bytes(b"BADMAGIC" + bytes(40))


def test_missing_text_key_reads_as_in_the_guide(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"content": "x", "id": 1}\n')
    with pytest.raises(DataLoadingError) as caught:
        IndexBuilder("bytes").build(path, tmp_path / "train.index")
    assert caught.value.message == "KeyError: 'text'"
    text = str(caught.value)
    assert f"{path}, line 1" in text
    assert "available keys 'content', 'id'" in text
    assert 'data.text_key: "content"' in text
    assert IndexBuilder("bytes", text_key="content").build(path, tmp_path / "train.index").total_tokens == 1


def test_bad_record_names_file_and_line_or_is_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "x"}\noops\n')
    with pytest.raises(DataLoadingError) as caught:
        IndexBuilder("bytes").build(path, tmp_path / "train.index")
    assert caught.value.message.startswith(f"Failed to load data from '{path}': line 2: not valid JSON")
    builder = IndexBuilder("bytes", on_bad="skip")
    builder.build(path, tmp_path / "train.index")
    assert builder.report is not None
    assert builder.report.meta.bad_records == 1


# Command line ---------------------------------------------------------------------------------------------


def test_command_line_of_the_guide(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text('{"text": "hello"}\n')
    result = run(
        "--data-files",
        "data/train.jsonl",
        "--tokenizer",
        "bytes",
        "--output",
        "data/train.index",
        cwd=tmp_path,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "5 tokens" in result.stdout
    assert TokenIndexFile(tmp_path / "data/train.index").total_tokens == 5
    result = run("data/train.jsonl", "-o", "index.bin", cwd=tmp_path)
    assert result.returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["data", "index.bin", "index.json"]
    assert (tmp_path / "index.bin").read_bytes() == (tmp_path / "data/train.index").read_bytes()
    assert "up to date" in run("data/train.jsonl", "-o", "index.bin", cwd=tmp_path).stdout


def test_command_line_never_shows_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": 3}\n')
    for arguments, code, said in (
        (["a.jsonl", "-o", "x.index"], 1, "Failed to load data from 'a.jsonl': line 2"),
        (["none.jsonl", "-o", "x.index"], 1, "No such file"),
        (["a.jsonl", "-o", "a.jsonl"], 1, "is one of the data files"),
        (["a.jsonl", "-o", "x.index", "-t", "none.json"], 1, "There is no tokenizer file"),
        (["-o", "x.index"], 2, "no data files"),
        (["a.jsonl"], 2, "--output"),
        (["a.jsonl", "-o", "x.index", "--workers", "0"], 2, "workers must be positive"),
    ):
        result = run(*arguments, cwd=tmp_path)
        assert result.returncode == code, result.stderr
        assert said in result.stderr
        assert "Traceback" not in result.stderr
    result = run("a.jsonl", "-o", "x.index", "--on-bad", "skip", cwd=tmp_path)
    assert "Skipped 1 bad records" in result.stdout
    assert "a.jsonl, line 2: the value of 'text' is a number" in result.stdout


def test_strata_index_is_the_same_engine(tmp_path: Path) -> None:
    import typer

    from strata.cli.datasets.index import index

    app = typer.Typer()
    app.command()(index)
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "hello"}\n')
    output = tmp_path / "a.index"
    arguments = [str(path), "--output", str(output), "--text-key", "body", "--workers", "1"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["total_tokens"] == 5
    other = IndexBuilder("bytes", text_key="body")
    other.build(path, tmp_path / "b.index")
    assert output.read_bytes() == (tmp_path / "b.index").read_bytes()
    assert "up to date" in CliRunner().invoke(app, arguments).output


# Dataset --------------------------------------------------------------------------------------------------


def test_missing_index_reads_as_in_the_guide(tmp_path: Path) -> None:
    with pytest.raises(DataLoadingError) as caught:
        ResumableDataset("data/train.jsonl", tmp_path / "train.index", "gpt2", 16)
    assert caught.value.message == "Failed to load data from 'data/train.jsonl': Token index file not found"
    command = (
        "python -m elastic_harness.data.index_builder --data-files data/train.jsonl "
        f"--tokenizer gpt2 --output {tmp_path}/train.index"
    )
    assert command in str(caught.value)


def test_stale_index_is_refused_with_the_command_that_rebuilds_it(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "old"}\n')
    IndexBuilder("bytes").build(path, tmp_path / "train.index")
    path.write_text('{"text": "new and longer"}\n')
    with pytest.raises(DataLoadingError, match="is stale") as caught:
        ResumableDataset(path, tmp_path / "train.index", "bytes", 4)
    (suggestion,) = caught.value.suggestions
    words = shlex.split(suggestion.removeprefix("Build it again: "))
    assert words[:3] == ["python", "-m", "elastic_harness.data.index_builder"]
    subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True)
    assert ResumableDataset(path, tmp_path / "train.index", "bytes", 4).total_tokens == len("new and longer")


def test_index_of_something_else_is_refused(tmp_path: Path, data: list[str], index: TokenIndexFile) -> None:
    fake = tmp_path / "fake.index"
    fake.write_text("no index")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"index_file": fake}, "bad magic number"),
        ({"data_files": data[:1]}, "built from 2 files"),
        ({"tokenizer": "bytes"}, "tokenized with .*Words, not with bytes"),
        ({"text_key": "body"}, "holds the texts under 'text', not 'body'"),
        ({"data_files": [data[0], str(tmp_path / "none.jsonl")]}, "No such file"),
    ]
    for arguments, reason in refused:
        with pytest.raises(DataLoadingError, match=reason):
            ResumableDataset(**{"data_files": data, "index_file": index, "tokenizer": Words(), **arguments})
    trusted = ResumableDataset([str(tmp_path / "none.jsonl")], index, None, 4, verify=False)
    assert trusted.total_tokens == 110


def test_state_holds_the_promised_keys_and_resumes(data: list[str], index: TokenIndexFile) -> None:
    def dataset() -> ResumableDataset:
        return ResumableDataset(data_files=data, index_file=index, tokenizer=Words(), seq_length=4)

    whole = [batch["input_ids"] for batch in create_dataloader(dataset(), batch_size=3, num_workers=0)]
    first = dataset()
    assert first.total_tokens == 110
    iterator = iter(create_dataloader(first, batch_size=3, num_workers=1))
    seen = [next(iterator)["input_ids"], next(iterator)["input_ids"]]
    state = first.state_dict()
    assert (state["total_tokens_processed"], state["world_size"], state["epoch"]) == (24, 1, 0)
    second = dataset()
    second.load_state_dict(state)
    second.set_epoch(0)
    seen += [batch["input_ids"] for batch in create_dataloader(second, batch_size=3)]
    assert torch.equal(torch.cat(seen), torch.cat(whole))
    second.set_epoch(10)
    assert second.state_dict()["epoch"] == 10
    with pytest.raises(DataLoadingError, match="seq_length was 4, is 8"):
        ResumableDataset(data, index, None, 8).load_state_dict(state)


def test_batches_are_int64_and_labels_are_the_next_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abcdefghij"}\n')
    IndexBuilder("bytes").build(path, tmp_path / "a.index")
    dataset = ResumableDataset(path, tmp_path / "a.index", "bytes", 4, shuffle=False)
    (batch,) = create_dataloader(dataset, batch_size=8)
    assert {key: value.dtype for key, value in batch.items()} == {
        "input_ids": torch.int64,
        "labels": torch.int64,
    }
    inputs = [bytes(row).decode() for row in batch["input_ids"].tolist()]
    assert inputs == ["abcd", "efgh", "i\0\0\0"]
    assert batch["labels"].tolist() == [list(b"bcde"), list(b"fghi"), [ord("j"), -100, -100, -100]]
    logits = torch.zeros(3, 4, 257)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert torch.isfinite(loss)


def test_dataset_state_has_its_defaults_and_survives_its_dict() -> None:
    assert DatasetState().to_dict() == {
        "total_tokens_processed": 0,
        "current_file_index": 0,
        "current_byte_offset": 0,
        "world_size_at_checkpoint": 1,
        "epoch": 0,
    }
    state = DatasetState(
        total_tokens_processed=12345,
        current_file_index=2,
        current_byte_offset=5000,
        world_size_at_checkpoint=4,
        epoch=3,
    )
    assert DatasetState.from_dict(state.to_dict()) == state


def test_building_an_index_loads_neither_torch_nor_pyarrow(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    script = (
        "import sys; from elastic_harness.data import IndexBuilder; "
        "IndexBuilder('bytes').build('a.jsonl', 'a.index'); "
        "print([name for name in ('torch', 'pyarrow', 'tokenizers') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_position_of_another_program_says_what_it_lacks(data: list[str], index: TokenIndexFile) -> None:
    dataset = ResumableDataset(data, index, None, seq_length=8)
    with pytest.raises(DataLoadingError, match="has no 'total_tokens_processed'; it has epoch, samples_seen"):
        dataset.load_state_dict({"epoch": 1, "samples_seen": 40})
