"""One flipped bit, and who notices: Strata beside torch.save, safetensors and DCP.

Each saver writes the same small state; then, many times over, one random bit of one of its files is flipped and the state
is loaded. What loads with other values than were saved was loaded silently wrong.
"""

from __future__ import annotations

import importlib
import logging
import random
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strata.bench.checkpoint.peers import make_state, process_group
from strata.checkpoint import CheckpointManager, Memory

Load = Callable[[], dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    name: str
    flips: int
    noticed: int
    harmless: int
    silently_wrong: int


def count(folder: Path, *, flips: int, size_bytes: int = 1 << 20, seed: int = 1) -> list[Verdict]:
    verdicts = []
    state = make_state(8, size_bytes)
    with process_group(folder):
        for name, save in _SAVERS.items():
            place = folder / name.replace(" ", "-")
            place.mkdir(parents=True)
            try:
                load = save(state, place)
            except ImportError:
                continue
            verdicts.append(_count_one(name, load, state["model"], place, flips, random.Random(seed)))
    return verdicts


def _count_one(
    name: str, load: Load, wanted: dict[str, torch.Tensor], place: Path, flips: int, chance: random.Random
) -> Verdict:
    files = [path for path in place.rglob("*") if path.is_file() and path.stat().st_size]
    sizes = [path.stat().st_size for path in files]
    noticed = harmless = wrong = 0
    for _ in range(flips):
        (path,) = chance.choices(files, sizes)
        whole = path.read_bytes()
        damaged = bytearray(whole)
        bit = chance.randrange(len(damaged) * 8)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded = load()
        except KeyboardInterrupt:
            raise
        except BaseException:  # DCP's own error is not an Exception.
            noticed += 1
        else:
            same = loaded.keys() == wanted.keys() and all(
                torch.equal(loaded[key], wanted[key]) for key in wanted
            )
            harmless += same
            wrong += not same
        path.write_bytes(whole)
    return Verdict(name=name, flips=flips, noticed=noticed, harmless=harmless, silently_wrong=wrong)


def _strata(state: Any, place: Path) -> Load:
    memory = Memory(job=f"bench-{uuid.uuid4().hex[:12]}")
    with CheckpointManager(place, memory=memory) as manager:
        manager.save(state, step=1).result()

    def load() -> dict[str, torch.Tensor]:
        logging.disable(logging.WARNING)
        try:
            with CheckpointManager(place, memory=memory) as manager:
                found: dict[str, torch.Tensor] = manager.load()["model"]
                return found
        finally:
            logging.disable(logging.NOTSET)

    return load


def _torch_save(state: Any, place: Path) -> Load:
    path = place / "state.pt"
    torch.save(state, path)
    return lambda: dict(torch.load(path, weights_only=True)["model"])


def _safetensors(state: Any, place: Path) -> Load:
    from safetensors.torch import load_file, save_file

    path = str(place / "state.safetensors")
    save_file(state["model"], path)
    return lambda: load_file(path)


def _dcp(state: Any, place: Path) -> Load:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state["model"]}, checkpoint_id=place)

    def load() -> dict[str, torch.Tensor]:
        target = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}
        dcp.load(target, checkpoint_id=place)
        return target["model"]

    return load


_SAVERS: dict[str, Callable[[Any, Path], Load]] = {
    "strata": _strata,
    "torch.save": _torch_save,
    "safetensors": _safetensors,
    "dcp": _dcp,
}
