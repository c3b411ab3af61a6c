"""A rank of three: `parting_script FOLDER PORT...`. In each round they meet at another port and exchange until one of them leaves."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed

from strata.torch_compat.aborting import ProcessGroups


def round_(number: int, rank: int, world: int) -> str:
    """How it ended for this rank."""
    groups = ProcessGroups()
    before = groups.fails_by_itself
    groups.join("gloo")
    assert (before, groups.fails_by_itself) == (False, True)
    held = distributed.group.WORLD  # As a wrapper of a model does.
    values = torch.ones(1 + 100_000 * (number % 2))
    try:
        for exchange in range(1_000_000):
            if rank == number % world and exchange == 10 + number:
                return "left"
            distributed.all_reduce(values)
        return "not over"
    except RuntimeError:
        return "failed"
    finally:
        groups.leave()
        del held


def main() -> None:
    folder, ports = Path(sys.argv[1]), sys.argv[2:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["MASTER_ADDR"], os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "127.0.0.1", "True"
    ends = []
    for number, port in enumerate(ports):
        os.environ["MASTER_PORT"] = port
        ends.append(round_(number, rank, world))
    (folder / f"rank{rank}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
