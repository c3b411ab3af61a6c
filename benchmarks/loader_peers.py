"""Samples a second of one shuffled epoch, read by other projects' loaders in their environments, and by ours.

    python -m benchmarks.loader_peers [--samples 20000] [--rounds 5]     measures everybody in turn, and prints a table

Every loader reads the same samples of 1,024 token ids in batches of 32, in this process alone, without loader processes: what is compared is
the loader, not the disk, and all files are in the page cache after the first round, which does not count. MosaicML Streaming and
ours read the same MDS folder, which MosaicML has written; the others and ours the same array on disk, as a dataset with `__getitem__`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

TOKENS, BATCH, SEED = 1024, 32, 7
ARRAY, MDS = "tokens.npy", "mds"


class Rows:
    """The array on disk as a dataset."""

    def __init__(self, folder: Path) -> None:
        self._rows = np.load(folder / ARRAY, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return np.array(self._rows[index])


def write_mds(folder: Path) -> None:
    rows = Rows(folder)
    with _streaming().MDSWriter(out=str(folder / MDS), columns={"tokens": "ndarray:int32"}) as writer:
        for index in range(len(rows)):
            writer.write({"tokens": rows[index]})


def torchdata(folder: Path) -> Iterator[Any]:
    loading: Any = importlib.import_module("torchdata.stateful_dataloader")
    return iter(loading.StatefulDataLoader(Rows(folder), batch_size=BATCH, shuffle=True))


def grain(folder: Path) -> Iterator[Any]:
    library: Any = importlib.import_module("grain.python")
    rows: Any = Rows(folder)
    dataset = library.MapDataset.source(rows).shuffle(seed=SEED).batch(BATCH)
    return iter(dataset.to_iter_dataset())


def datasets(folder: Path) -> Iterator[Any]:
    library: Any = importlib.import_module("datasets")
    rows = Rows(folder)
    kept = folder / "huggingface"
    if not kept.exists():
        tokens = {"tokens": [rows[index] for index in range(len(rows))]}
        library.Dataset.from_dict(tokens).save_to_disk(str(kept))
    found = library.load_from_disk(str(kept)).shuffle(seed=SEED).with_format("torch")
    return iter(found.iter(batch_size=BATCH))


def streaming(folder: Path) -> Iterator[Any]:
    library = _streaming()
    loading: Any = importlib.import_module("torch.utils.data")
    found = library.StreamingDataset(
        local=str(folder / MDS), shuffle=True, batch_size=BATCH, shuffle_seed=SEED
    )
    return iter(loading.DataLoader(found, batch_size=BATCH))


def _streaming() -> Any:
    from streaming_package import import_streaming  # type: ignore[import-not-found, unused-ignore]

    return import_streaming()


def ours(folder: Path) -> Iterator[Any]:
    return _strata(Rows(folder))


def ours_mds(folder: Path) -> Iterator[Any]:
    data: Any = importlib.import_module("strata.data")
    return _strata(data.ElasticDataset(str(folder / MDS)))


def _strata(dataset: Any) -> Iterator[Any]:
    strata: Any = importlib.import_module("strata")
    sampler = strata.ElasticSampler(len(dataset), global_batch_size=BATCH, seed=SEED, dataset="bench")
    return iter(strata.ElasticLoader(dataset, sampler))


KINDS = {each.__name__: each for each in (torchdata, grain, datasets, streaming, ours, ours_mds)}


def serve(kind: str, folder: Path) -> None:
    """An epoch for each line that is read."""
    for _ in sys.stdin:
        started_s, count = time.monotonic(), 0
        batches = KINDS[kind](folder)
        for _batch in batches:
            count += 1
        print(json.dumps({"batches": count, "seconds": time.monotonic() - started_s}), flush=True)


def measure(samples: int, rounds: int, pythons: dict[str, str]) -> dict[str, float]:
    """Samples a second of each, the median of rounds in which all take turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(
            folder / ARRAY, np.random.default_rng(1).integers(0, 50_000, (samples, TOKENS), dtype=np.int32)
        )
        script = str(Path(__file__).resolve())
        if "streaming" in pythons:
            subprocess.run([pythons["streaming"], script, "--write-mds", name], check=True)
        kinds = pythons | {"ours": sys.executable}
        if (folder / MDS).exists():
            kinds["ours_mds"] = sys.executable
        running = {
            kind: subprocess.Popen(
                [python, script, "--serve", kind, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for kind, python in kinds.items()
        }
        found: dict[str, list[float]] = {kind: [] for kind in running}
        try:
            for number in range(rounds + 1):
                for kind, process in running.items():
                    assert process.stdin is not None
                    assert process.stdout is not None
                    process.stdin.write("go\n")
                    process.stdin.flush()
                    answer = json.loads(process.stdout.readline())
                    assert answer["batches"] == -(-samples // BATCH), (kind, answer)
                    if number:
                        found[kind].append(samples / answer["seconds"])
        finally:
            for process in running.values():
                process.kill()
                process.wait()
    return {kind: statistics.median(each) for kind, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "FOLDER"))
    parser.add_argument("--write-mds", metavar="FOLDER")
    asked = parser.parse_args()
    if asked.write_mds:
        write_mds(Path(asked.write_mds))
    elif asked.serve:
        serve(asked.serve[0], Path(asked.serve[1]))
    else:
        from benchmarks.data import pythons_of_peers

        pythons = {kind: str(python) for kind, python in pythons_of_peers().items() if kind in KINDS}
        for kind, rate in measure(asked.samples, asked.rounds, pythons).items():
            print(f"{kind:12} {rate:10,.0f} samples/s")


if __name__ == "__main__":
    main()
