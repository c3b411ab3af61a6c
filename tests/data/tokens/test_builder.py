"""Building: the same bytes however it is done, through kills, full disks and company."""

from __future__ import annotations

import gzip
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from strata.data.tokens.building import merge
from strata.data.tokens.building.builder import BuildOptions, build_index
from strata.data.tokens.building.parts import PartSummary
from strata.data.tokens.errors import BuildFailed, SourceUnreadable, WouldOverwrite
from tests.data.tokens.bpe import train
from tests.data.tokens.corpora import WordTokenizer, build, text_of, texts, write_jsonl

CHUNK = 20_000


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "data"
    folder.mkdir()
    jsonl = write_jsonl(folder / "a.jsonl", texts(600))
    (folder / "b.txt").write_text("\n".join(texts(300, seed=1)))
    (folder / "c.jsonl.gz").write_bytes(
        gzip.compress(write_jsonl(folder / "c", texts(50)).read_bytes(), mtime=0)
    )
    return [jsonl, folder / "b.txt", folder / "c.jsonl.gz"]


def partial(output: Path) -> Path:
    return output.with_name(f"{output.name}.partial")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "object"])
def test_same_bytes_whatever_the_number_of_processes(
    tmp_path: Path, sources: list[Path], tokenizer: str
) -> None:
    chosen = {"bytes": "bytes", "bpe": str(train(tmp_path / "t.json")), "object": WordTokenizer()}[tokenizer]
    results = []
    for workers in (1, 2, 3):
        output = tmp_path / str(workers) / "x.index"
        report = build(output, sources, tokenizer=chosen, workers=workers, chunk_bytes=CHUNK, eos=0)
        assert report.header.total_tokens > 1000
        results.append(output.read_bytes())
        assert sorted(path.name for path in output.parent.iterdir()) == ["x.index", "x.json"]
    assert results[0] == results[1] == results[2]


def test_same_bytes_from_copies_elsewhere_with_other_times(tmp_path: Path, sources: list[Path]) -> None:
    first = build(tmp_path / "x.index", sources).path.read_bytes()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copies = []
    for path in sources:
        copies.append(elsewhere / path.name)
        copies[-1].write_bytes(path.read_bytes())
        os.utime(copies[-1], (1, 1))
    assert build(elsewhere / "x.index", copies).path.read_bytes() == first


SCRIPT = """
    import signal, sys
    from strata.data.tokens.building import merge
    from strata.data.tokens.building.builder import BuildOptions, build_index
    merge.COMMIT_BYTES = 100_000
    output, tokenizer, workers, hold_at, *files = sys.argv[1:]
    add = merge.Merge.add
    def add_or_hold(self, part):
        add(self, part)
        if 0 < int(hold_at) <= self.next_chunk:
            signal.pause()
    merge.Merge.add = add_or_hold
    report = build_index(files, output, tokenizer=tokenizer, options=BuildOptions(workers=int(workers), chunk_bytes=20_000))
    print("resumed", report.resumed_chunks)
"""


def builder_process(
    output: Path, tokenizer: object, workers: int, files: list[Path], *, hold_at: int = 0
) -> subprocess.Popen[str]:
    """A build that gets no further than `hold_at` merged chunks, if that is given."""
    words = [output, tokenizer, workers, hold_at, *files]
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished_chunks(output: Path) -> int:
    """Journaled, or waiting to be; a part may for a moment be both."""
    journaled = sum(path.read_bytes().count(b"\n") for path in partial(output).glob("*/journal"))
    return journaled + sum(int(path.stem) >= journaled for path in partial(output).glob("*/*.json"))


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_build_continues_and_gives_the_same_bytes(tmp_path: Path, workers: int) -> None:
    data = [write_jsonl(tmp_path / f"{i}.jsonl", texts(4000, seed=i, longest=60)) for i in range(2)]
    tokenizer = train(tmp_path / "t.json")
    reference = build(
        tmp_path / "reference.index", data, tokenizer=str(tokenizer), workers=1, chunk_bytes=CHUNK
    ).path.read_bytes()
    output = tmp_path / "x.index"
    for wanted in (2, 12, 30):
        process = builder_process(output, tokenizer, workers, data, hold_at=40)  # of 94
        children: list[psutil.Process] = []
        while process.poll() is None and finished_chunks(output) < wanted:
            children = psutil.Process(process.pid).children() or children
            time.sleep(0.005)  # nothing announces a finished chunk but its file
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
        assert not output.exists()
        assert not psutil.wait_procs(children, timeout=60)[1]  # no tokenizing process outlives its build
    assert finished_chunks(output) >= 30
    process = builder_process(output, tokenizer, workers, data)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    resumed = re.search(r"resumed (\d+)", out)
    assert resumed is not None
    assert int(resumed[1]) >= 30
    assert output.read_bytes() == reference
    assert not partial(output).exists()


def test_torn_part_and_torn_journal_are_done_again(
    tmp_path: Path, sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "COMMIT_BYTES", 1)
    reference = build(tmp_path / "reference.index", sources, chunk_bytes=CHUNK, workers=1).path.read_bytes()
    output = tmp_path / "x.index"
    with interrupted_after(3, monkeypatch):
        build(output, sources, chunk_bytes=CHUNK, workers=1)
    (journal,) = partial(output).glob("*/journal")
    assert journal.read_bytes().count(b"\n") == 3
    journal.write_bytes(journal.read_bytes()[:-40])  # power was lost while the third line was written
    with (journal.parent / "index").open("ab") as file:
        file.write(b"never journaled")
    report = build(output, sources, chunk_bytes=CHUNK, workers=1)
    assert report.resumed_chunks == 2
    assert output.read_bytes() == reference

    monkeypatch.setattr(merge, "COMMIT_BYTES", 1 << 30)
    output = tmp_path / "y.index"
    with interrupted_after(3, monkeypatch):
        build(output, sources, chunk_bytes=CHUNK, workers=1)
    torn = sorted(partial(output).glob("*/*.tokens"))[1]
    torn.write_bytes(bytes(torn.stat().st_size))
    report = build(output, sources, chunk_bytes=CHUNK, workers=1)
    assert report.resumed_chunks == 2
    assert output.read_bytes() == reference


@contextmanager
def interrupted_after(chunks: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if Ctrl-C were pressed once so many chunks are merged."""
    add = merge.Merge.add

    def counted(self: merge.Merge, part: PartSummary) -> None:
        add(self, part)
        if self.next_chunk == chunks:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(merge.Merge, "add", counted)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_other_options_do_not_reuse_what_is_left(
    tmp_path: Path, sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "x.index"
    with interrupted_after(3, monkeypatch):
        build(output, sources, chunk_bytes=CHUNK, workers=1)
    assert finished_chunks(output) >= 3
    report = build(output, sources, chunk_bytes=CHUNK, workers=1, eos=256)
    assert report.resumed_chunks == 0
    assert (
        output.read_bytes()
        == build(tmp_path / "y.index", sources, eos=256, chunk_bytes=CHUNK).path.read_bytes()
    )


def test_builders_of_the_same_output_wait_for_each_other(tmp_path: Path) -> None:
    data = {name: write_jsonl(tmp_path / f"{name}.jsonl", texts(4000, seed=ord(name))) for name in "ab"}
    tokenizer = train(tmp_path / "t.json")
    references = {
        build(
            tmp_path / name / "x.index", [path], tokenizer=str(tokenizer), chunk_bytes=CHUNK
        ).path.read_bytes()
        for name, path in data.items()
    }
    output = tmp_path / "x.index"
    processes = [builder_process(output, tokenizer, 1, [data[name]]) for name in "aabb"]
    for process in processes:
        _, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
    assert output.read_bytes() in references
    assert not partial(output).exists()


class Poisoned(WordTokenizer):
    """Dies of the word "poison", as one does that runs out of memory; not in the process that made it."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def encode(self, text: str) -> list[int]:
        if "poison" in text and os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(text)


def test_death_of_a_tokenizing_process_names_the_position(tmp_path: Path) -> None:
    lines = texts(2000)
    lines[1500] = "poison"
    data = write_jsonl(tmp_path / "a.jsonl", lines)
    output = tmp_path / "x.index"
    with pytest.raises(BuildFailed, match=r"killed by signal 9\) while reading .*a\.jsonl, bytes [\d,]+ to"):
        build(output, [data], tokenizer=Poisoned(), workers=2, chunk_bytes=CHUNK)
    assert not output.exists()
    report = build(output, [data], tokenizer=Poisoned(), workers=1, chunk_bytes=CHUNK)
    assert report.resumed_chunks > 0
    assert report.header.num_records == 2000


def test_full_disk_is_an_error_and_the_same_command_continues(tmp_path: Path, sources: list[Path]) -> None:
    output = tmp_path / "x.index"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(BuildFailed, match=r"x\.index.*(File too large|No space).*same command continues"):
            build(output, sources, chunk_bytes=CHUNK, workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not output.exists()
    report = build(output, sources, chunk_bytes=CHUNK, workers=1)
    assert report.resumed_chunks > 0
    assert output.read_bytes() == build(tmp_path / "y.index", sources, chunk_bytes=CHUNK).path.read_bytes()


def test_source_that_grows_meanwhile_is_refused(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", texts(50))

    class Growing(WordTokenizer):
        def encode(self, text: str) -> list[int]:
            with data.open("a") as file:
                file.write("\n")
            return super().encode(text)

    with pytest.raises(SourceUnreadable, match=r"a\.jsonl: changed while it was being indexed"):
        build(tmp_path / "x.index", [data], tokenizer=Growing())
    assert not (tmp_path / "x.index").exists()


def test_standing_index_is_kept_if_it_fits_and_replaced_if_not(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", ["one"])
    output = tmp_path / "x.index"
    assert not build(output, [data]).reused
    assert build(output, [data]).reused
    assert not build(output, [data], force=True).reused
    assert not build(output, [data], eos=256).reused
    assert not build(output, [data], entry_interval=5).reused
    write_jsonl(data, ["two"])
    report = build(output, [data], entry_interval=5)
    assert not report.reused
    assert text_of(output) == "two"
    assert not build(output, [data], tokenizer=WordTokenizer()).reused
    assert not build(output, [data], tokenizer=WordTokenizer()).reused  # its code may have changed


def test_failed_build_leaves_the_old_index_alone(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", ["one"])
    output = build(tmp_path / "x.index", [data]).path
    before = output.read_bytes()
    data.write_text("bad\n")
    with pytest.raises(Exception, match="not valid JSON"):
        build(output, [data])
    assert output.read_bytes() == before


def test_nothing_of_the_users_is_written_over(tmp_path: Path) -> None:
    data = tmp_path / "train.json"
    write_jsonl(data, ["one"])
    other = tmp_path / "notes.bin"
    other.write_text("not an index")
    config = tmp_path / "config.json"
    config.write_text('{"lr": 1}')
    for output, reason in (
        (tmp_path / "train.index", "is one of the data files"),  # its note would be train.json
        (data, r"ends with \.json"),
        (other, "is not a token index"),
        (tmp_path / "config.index", "is not index metadata"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(WouldOverwrite, match=reason):
            build(output, [data])
    assert (other.read_text(), config.read_text()) == ("not an index", '{"lr": 1}')


def test_progress_adds_up_also_after_an_interruption(
    tmp_path: Path, sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen:
        def begin(self, *, total_bytes: int, done_bytes: int) -> None:
            self.total_bytes, self.done_bytes = total_bytes, done_bytes

        def advance(self, *, source_bytes: int, tokens: int) -> None:
            self.done_bytes += source_bytes

    monkeypatch.setattr(merge, "COMMIT_BYTES", 30_000)
    with interrupted_after(4, monkeypatch):
        build(tmp_path / "x.index", sources, chunk_bytes=CHUNK, workers=1)
    for output in (tmp_path / "x.index", tmp_path / "y.index"):
        seen = Seen()
        build_index(sources, output, options=BuildOptions(chunk_bytes=CHUNK, workers=1), progress=seen)
        assert seen.done_bytes == seen.total_bytes > 0


def test_build_works_in_a_thread_beside_others(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", texts(500))
    thread = threading.Thread(
        target=build, args=(tmp_path / "x.index", [data]), kwargs={"workers": 2, "chunk_bytes": CHUNK}
    )
    thread.start()
    thread.join()
    assert text_of(tmp_path / "x.index") == "".join(texts(500))


@pytest.mark.parametrize(
    "options",
    [{"text_key": ""}, {"entry_interval": 0}, {"workers": 0}, {"on_bad": "ignore"}, {"chunk_bytes": 0}],
)
def test_senseless_options_are_value_errors(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        BuildOptions(**options)  # type: ignore[arg-type]
