"""Token streams measured: building an index beside the bare tokenizer and the bare disk, then reading one.

    python -m strata.bench.data.tokens [--json] [--tokens 1000000000] [--text-mb 32] [--folder /fast/disk]

Text is made up here from a seed; the BPE tokenizer is trained on it on the spot. The index that is read was
built by the builder itself, one token per byte, from a tenth more text than it has tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from strata.bench.table import Row, report
from strata.data.tokens.building.builder import BuildOptions, build_index
from strata.data.tokens.building.pool import available_cores
from strata.data.tokens.index import TokenIndex

SEQ_LENGTH = 1024
BATCH_SIZE = 8
MEMORY_BACKED = Path("/dev/shm")


def run(*, tokens: int = 1_000_000_000, text_mb: int = 32, folder: Path | None = None) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="strata-bench-", dir=folder) as name:
        disk = Path(name)
        yield _build_beside_bare_tokenizer(disk, text_mb)
        yield _build_bytes_in_memory(text_mb * 4)
        index, row = _build_large(disk, tokens)
        yield row
        yield _open(index)
        yield _read(index)
        yield _memory(disk, index)
        yield _resume(index)


# Building -------------------------------------------------------------------------------------------------


def write_corpus(path: Path, size_bytes: int, *, seed: int = 0) -> Path:
    """JSONL of documents of a few hundred words; word frequencies fall off as in natural text."""
    rng = random.Random(seed)
    letters = "eeeeetttaaaooiinnsshhrrdlcumwfgypbvk"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 11))) for _ in range(30_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    block = "".join(
        json.dumps({"id": i, "text": " ".join(rng.choices(words, weights, k=rng.randint(50, 500)))}) + "\n"
        for i in range(2000)
    ).encode()
    with path.open("wb") as file:
        while file.tell() < size_bytes:
            file.write(block)
    return path


def _build_beside_bare_tokenizer(folder: Path, text_mb: int) -> Row:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    data = write_corpus(folder / "bpe.jsonl", text_mb * 1_000_000)
    texts = [json.loads(line)["text"] for line in data.open()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts[:2000], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))

    def bare() -> None:
        for first in range(0, len(texts), 1000):
            tokenizer.encode_batch(texts[first : first + 1000])

    def build() -> None:
        options = BuildOptions(force=True)
        build_index([data], folder / "bpe.index", tokenizer=str(folder / "tokenizer.json"), options=options)

    bare_s, build_s = _best_of(3, bare, build)
    size_mb = data.stat().st_size / 1e6
    return Row(
        name="index build, BPE, beside the bare tokenizer",
        measured=100 * bare_s / build_s,
        unit="%",
        target=80,
        peer=f"encode_batch {size_mb / bare_s:.1f} MB/s on {available_cores()} cores",
        note=f"{size_mb / build_s:.1f} MB/s from JSONL to published index, {size_mb:.0f} MB; best of 3, taking turns",
    )


def _build_bytes_in_memory(size_mb: int) -> Row:
    """Without a disk, to see what the code costs."""
    where = MEMORY_BACKED if MEMORY_BACKED.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="strata-bench-", dir=where) as name:
        folder = Path(name)
        data = write_corpus(folder / "bytes.jsonl", size_mb * 1_000_000)

        def build() -> None:
            build_index([data], folder / "bytes.index", options=BuildOptions(force=True))

        before_s = _cpu_s()
        (build_s,) = _best_of(3, build)
        cpu_s = (_cpu_s() - before_s) / 3
        size_mb = data.stat().st_size // 1_000_000
    return Row(
        name="index build, byte-level",
        measured=size_mb / build_s,
        unit="MB/s",
        target=100,
        note=f"{size_mb} MB of JSONL in {where or 'a temporary folder'}, best of 3; {size_mb / cpu_s:.0f} MB per CPU second",
    )


def _build_large(folder: Path, tokens: int) -> tuple[Path, Row]:
    data = write_corpus(folder / "large.jsonl", int(tokens * 1.1))
    result = build_index([data], folder / "large.index")
    limit_s = _timed(lambda: _write_and_sync(folder / "limit", result.path.stat().st_size))
    data_mb = data.stat().st_size / 1e6
    return result.path, Row(
        name="index build, byte-level, on disk and synced",
        measured=data_mb / result.seconds,
        unit="MB/s",
        peer=f"{data_mb / limit_s:.0f} MB/s if only the {result.path.stat().st_size / 1e9:.1f} GB of it were written",
        note=f"{result.header.total_tokens:,} tokens, {result.header.num_records:,} records",
    )


def _write_and_sync(path: Path, size_bytes: int) -> None:
    block = os.urandom(8 << 20)
    with path.open("wb") as file:
        while file.tell() < size_bytes:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


# Reading --------------------------------------------------------------------------------------------------


def _open(path: Path) -> Row:
    def opened() -> None:
        with TokenIndex(path) as index:
            _ = index.tokens[index.total_tokens // 2], index.meta

    times_ms = [1000 * _timed(opened) for _ in range(20)]
    return Row(
        name="open an index and read from its middle",
        measured=statistics.median(times_ms),
        unit="ms",
        target=10,
        better="lower",
        note=f"{_tokens(path)}; median of 20, slowest {max(times_ms):.2f} ms",
    )


def _read(path: Path) -> Row:
    from strata.data.tokens.dataset import TokenDataset, TokenLoader

    with TokenIndex(path) as index:
        dataset = TokenDataset(index, seq_length=SEQ_LENGTH, rank=0, world_size=1)
        batches = min(4000, dataset.num_sequences // BATCH_SIZE)
        numbers = [numbers for _, numbers in islice(dataset.numbers(dataset.plan(BATCH_SIZE)), batches)]
        loader = iter(TokenLoader(dataset, BATCH_SIZE, num_workers=1))
        next(loader)  # the process has started
        elapsed_s = _timed(lambda: deque(islice(loader, batches - 1), maxlen=0))
        alone_s = _timed(lambda: deque(map(dataset.reader.read, numbers), maxlen=0))
    total = batches * BATCH_SIZE * SEQ_LENGTH
    return Row(
        name="shuffled reading by one loader process",
        measured=total / elapsed_s / 1e6,
        unit="M tokens/s",
        target=1,
        peer=f"{total / alone_s / 1e6:.1f} M tokens/s without a process in between",
        note=f"{_tokens(path)}, batches of {BATCH_SIZE} x {SEQ_LENGTH}, int64 tensors",
    )


_MEMORY_SCRIPT = """
import sys
from itertools import islice
from strata.core.data.order import EpochOrder
from strata.data.loading.steps import StepPlan
from strata.data.tokens.index import TokenIndex
from strata.data.tokens.sequences import SequenceReader, sequence_numbers
def peak_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1e3
reader = SequenceReader(TokenIndex(sys.argv[1]), 1024)
plan = StepPlan(epoch=0, total=reader.count, start=0, global_batch_size=8, rank=0, world_size=1)
before_mb = peak_mb()
for _, numbers in islice(sequence_numbers(plan, EpochOrder(total=reader.count)), 20_000):
    reader.read(numbers)
print(peak_mb() - before_mb)
"""


def _memory(folder: Path, large: Path) -> Row:
    small_data = write_corpus(folder / "small.jsonl", _total_tokens(large) // 50)
    small = build_index([small_data], folder / "small.index").path

    def grown_mb(path: Path) -> float:
        command = [sys.executable, "-c", _MEMORY_SCRIPT, str(path)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    small_mb, large_mb = grown_mb(small), grown_mb(large)
    return Row(
        name="peak memory a shuffled reader adds",
        measured=large_mb,
        unit="MB",
        target=150,
        better="lower",
        peer=f"{small_mb:.0f} MB on an index 1/50 as large",
        note=f"{large.stat().st_size / 1e6:,.0f} MB of index, up to 160,000 sequences read at random",
    )


def _resume(path: Path) -> Row:
    """From a saved state to the first batch."""
    from strata.data.tokens.dataset import TokenDataset, TokenLoader

    with TokenIndex(path) as index:
        probe = TokenDataset(index, seq_length=SEQ_LENGTH, rank=0, world_size=1)
        late = probe.num_sequences * 99 // 100 * SEQ_LENGTH

        def first_batch(tokens: int) -> None:
            dataset = TokenDataset(index, seq_length=SEQ_LENGTH, rank=0, world_size=1)
            dataset.load_state_dict({"total_tokens_processed": tokens})
            next(iter(TokenLoader(dataset, BATCH_SIZE)))

        pairs_ms = [
            (1000 * _timed(lambda: first_batch(0)), 1000 * _timed(lambda: first_batch(late)))
            for _ in range(50)
        ]
    start_ms, late_ms = (statistics.median(times) for times in zip(*pairs_ms, strict=True))
    return Row(
        name="resume at 99 % of an epoch, beside 0 %",
        measured=late_ms / start_ms,
        unit="x",
        target=1.2,
        better="lower",
        note=f"{late_ms:.2f} ms and {start_ms:.2f} ms from state to first batch; medians of 50, taking turns",
    )


# Measuring ------------------------------------------------------------------------------------------------


def _timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _best_of(rounds: int, *works: Callable[[], object]) -> list[float]:
    """Each work's best time; they take turns, so that a noisy moment does not hit one alone."""
    times = [[_timed(work) for work in works] for _ in range(rounds)]
    return [min(column) for column in zip(*times, strict=True)]


def _cpu_s() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def _total_tokens(path: Path) -> int:
    with TokenIndex(path) as index:
        return index.total_tokens


def _tokens(path: Path) -> str:
    return f"{_total_tokens(path):,} tokens"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m strata.bench.data.tokens", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="size of the index that is read")
    parser.add_argument("--text-mb", type=int, default=32, help="text for the BPE comparison")
    parser.add_argument("--folder", type=Path, help="where to work; needs three bytes for each token")
    arguments = parser.parse_args(argv)
    rows = run(tokens=arguments.tokens, text_mb=arguments.text_mb, folder=arguments.folder)
    report("Token streams", rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
