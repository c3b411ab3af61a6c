"""An index and its sources: touched is fine, changed is refused with the command that mends it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from strata.data.tokens import freshness
from strata.data.tokens.building.sources import BLOCK_BYTES, digest_file
from strata.data.tokens.building.tokenizers import load_tokenizer
from strata.data.tokens.errors import SourceUnreadable, StaleIndex
from strata.data.tokens.freshness import check_sources, check_tokenizer, note_path
from strata.data.tokens.index import TokenIndex
from tests.data.tokens.bpe import train
from tests.data.tokens.corpora import WordTokenizer, build, texts, tokens_of, write_jsonl


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(20))


@pytest.fixture
def index(tmp_path: Path, data: Path) -> TokenIndex:
    return TokenIndex(build(tmp_path / "x.index", [data]).path)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The sources that were read to the end to compare them."""
    seen: list[Path] = []

    def counted(path: Path) -> str:
        seen.append(path)
        return digest_file(path)

    monkeypatch.setattr(freshness, "digest_file", counted)
    return seen


def test_note_names_files_and_tokens(index: TokenIndex, data: Path) -> None:
    note = json.loads(note_path(index.path).read_text())
    assert note_path(index.path).name == "x.json"
    assert note["files"] == [str(data)]
    assert note["total_tokens"] == index.total_tokens


def test_untouched_source_is_not_read(index: TokenIndex, data: Path, reads: list[Path]) -> None:
    check_sources(index, [data])
    assert reads == []


def test_touched_source_is_read_once_and_accepted(index: TokenIndex, data: Path, reads: list[Path]) -> None:
    os.utime(data, (1, 1))
    check_sources(index, [data])
    check_sources(index, [data])
    assert reads == [data]


def test_copy_elsewhere_is_accepted(index: TokenIndex, data: Path, tmp_path: Path, reads: list[Path]) -> None:
    copy = tmp_path / "elsewhere.jsonl"
    shutil.copy(data, copy)
    check_sources(index, [copy])
    assert reads == [copy]


def test_lost_or_foreign_note_costs_a_reading_only(index: TokenIndex, data: Path, reads: list[Path]) -> None:
    note = note_path(index.path)
    for content in (None, "{}", "nonsense", json.dumps({"identity": "other", "sightings": []})):
        if content is None:
            note.unlink()
        else:
            note.write_text(content)
        check_sources(index, [data])
    assert len(reads) == 4


def test_one_changed_byte_is_refused_even_with_the_old_time(index: TokenIndex, data: Path) -> None:
    status = data.stat()
    changed = data.read_bytes().replace(b"fox", b"fax", 1)
    note_path(index.path).unlink()  # the note would vouch for a file with this size and time
    data.write_bytes(changed)
    os.utime(data, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(StaleIndex, match="its bytes differ"):
        check_sources(index, [data])


def test_changed_source_is_refused_with_a_command_that_works(index: TokenIndex, data: Path) -> None:
    with data.open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(StaleIndex) as caught:
        check_sources(index, [data])
    assert f"{data} has changed since it was built" in str(caught.value)
    assert caught.value.rebuild in str(caught.value)
    words = shlex.split(caught.value.rebuild)
    assert words == ["strata", "index", str(data), "--tokenizer", "bytes", "--output", str(index.path)]
    build(index.path, [data])
    with TokenIndex(index.path) as rebuilt:
        check_sources(rebuilt, [data])


def test_command_keeps_what_was_not_the_default(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a b.jsonl", ["x"], key="body")
    data.write_text(data.read_text() + "bad\n")
    tokenizer = train(tmp_path / "t.json")
    options = {"text_key": "body", "eos": "<|endoftext|>", "on_bad": "skip", "entry_interval": 7}
    report = build(tmp_path / "x.index", [data], tokenizer=str(tokenizer), **options)
    with TokenIndex(report.path) as index:
        words = shlex.split(freshness.rebuild_command(index, [data]))
    expected = f"--text-key body --eos 0 --entry-interval 7 --on-bad skip --tokenizer {tokenizer}".split()
    assert str(data) in words
    assert {*expected} <= {*words}


def test_nameless_tokenizer_is_rebuilt_from_python(tmp_path: Path, data: Path) -> None:
    report = build(tmp_path / "x.index", [data], tokenizer=WordTokenizer())
    data.write_text("{}")
    with TokenIndex(report.path) as index, pytest.raises(StaleIndex) as caught:
        check_sources(index, [data])
    assert caught.value.rebuild == f"IndexBuilder(tokenizer).build({[str(data)]}, {str(report.path)!r})"


def test_other_files_are_refused_by_name(index: TokenIndex, tmp_path: Path, data: Path) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", texts(20, seed=9))
    with pytest.raises(StaleIndex, match=r"built from a\.jsonl, not from .*other\.jsonl"):
        check_sources(index, [other])
    with pytest.raises(StaleIndex, match=r"built from 1 files \(a\.jsonl\), not from 2"):
        check_sources(index, [data, other])


def test_missing_source_is_named(index: TokenIndex, data: Path) -> None:
    data.unlink()
    with pytest.raises(SourceUnreadable, match=r"a\.jsonl: No such file"):
        check_sources(index, [data])


def test_order_of_files_matters(tmp_path: Path) -> None:
    a, b = (write_jsonl(tmp_path / f"{name}.jsonl", [name]) for name in "ab")
    report = build(tmp_path / "x.index", [a, b])
    assert tokens_of(report.path) == [97, 98]
    with TokenIndex(report.path) as index:
        check_sources(index, [a, b])
        with pytest.raises(StaleIndex):
            check_sources(index, [b, a])


def test_tokenizer_that_behaves_otherwise_is_refused(tmp_path: Path, index: TokenIndex, data: Path) -> None:
    check_tokenizer(index, load_tokenizer("bytes"), [data])
    with pytest.raises(StaleIndex, match=r"tokenized with bytes, not with .*WordTokenizer"):
        check_tokenizer(index, load_tokenizer(WordTokenizer()), [data])

    class LikeBytes:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    check_tokenizer(index, load_tokenizer(LikeBytes()), [data])


def test_digest_covers_every_block_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_bytes(b"x" * (2 * BLOCK_BYTES + 5))
    report = build(tmp_path / "x.index", [path], workers=2)
    assert report.meta.files[0].digest == digest_file(path)
    digests = {digest_file(path)}
    for at in (0, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 4):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"y")
        digests.add(digest_file(path))
    assert len(digests) == 5
