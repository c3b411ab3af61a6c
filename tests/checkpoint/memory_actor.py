"""A process that imports and exports a state, and reports how much its memory has grown at each of them.

    python -m tests.checkpoint.memory_actor FOLDER LIMIT_BYTES

FOLDER holds `model.pt`. The report counts everything that is in the process's memory, pages of mapped files included.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from strata.checkpoint.export import export
from strata.checkpoint.importing import adopt


def peak_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def growth_bytes(work: Callable[[], object]) -> int:
    """How far the peak of this process's memory goes beyond what it has now."""
    Path("/proc/self/clear_refs").write_text("5")  # The peak starts again from here.
    before = peak_kb()
    work()
    return (peak_kb() - before) << 10


def round_trips(model: Path, folder: Path, limit_bytes: int) -> dict[str, int]:
    run = folder / "run"
    grown = {"import model.pt": growth_bytes(lambda: adopt(str(model), str(run), memory_bytes=limit_bytes))}
    for format in ("pt", "safetensors", "hf", "dcp"):
        out = folder / f"out-{format}"

        def write(out: Path = out, format: str = format) -> None:
            export(str(run), str(out), format=format, memory_bytes=limit_bytes)

        def read(out: Path = out, format: str = format) -> None:
            adopt(str(out), str(folder / f"run-{format}"), memory_bytes=limit_bytes)

        grown[f"export {format}"] = growth_bytes(write)
        grown[f"import {format}"] = growth_bytes(read)
        shutil.rmtree(folder / f"run-{format}")
        if out.is_dir():
            shutil.rmtree(out)
        else:
            out.unlink()
    return grown


if __name__ == "__main__":
    place = Path(sys.argv[1])
    torch.set_num_threads(1)
    (place / "small").mkdir()
    torch.save({"w": torch.randn(3000, 30).t()}, place / "small" / "model.pt")
    round_trips(place / "small" / "model.pt", place / "small", 1 << 20)  # Everything is imported once.
    print(json.dumps(round_trips(place / "model.pt", place, int(sys.argv[2]))))
