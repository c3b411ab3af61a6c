"""Real ranks on gloo, each a process: a module is run once for each, and each says one thing as JSON.

They are forked from one process that has imported torch and strata already. The module calls `join` with the folder it was given, and `say` with what it has found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import distributed

from strata.torch_compat.groups import settle_at_exit
from tests.support_forks import ForkServer

LIMIT_S = 240.0
RANKS = ForkServer(
    *("strata.training.job", "strata.trainer.parallel", "strata.checkpoint.dcp", "tests.support_ranks"),
    "torch._dynamo",  # FSDP2 imports it with the first model.
)


def ranks(
    module: str,
    *arguments: str,
    folder: Path,
    world: int,
    environment: Mapping[str, str] | None = None,
    statuses: list[int] | None = None,
    server: ForkServer = RANKS,
) -> list[Any]:
    """What each rank of `python -m MODULE FOLDER ARGUMENTS` has said, in rank order. With `statuses`, they end with those, and
    what they said is left in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meeting").unlink(missing_ok=True)
    started = []
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        started.append(
            server.start(
                module,
                str(folder),
                *arguments,
                output=folder / f"output-{rank}",
                env={
                    **os.environ,
                    **{name: str(value) for name, value in place.items()},
                    "OMP_NUM_THREADS": "1",
                    **(environment or {}),
                },
            )
        )
    try:
        said = [process.communicate(LIMIT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    expected = [0] * world if statuses is None else statuses
    assert [process.returncode for process in started] == expected, "\n".join(said)
    if statuses is not None:
        return []
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


def join(folder: Path) -> tuple[int, int]:
    """Meet the other ranks: this one's number, and how many there are."""
    settle_at_exit()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world
    )
    return rank, world


def say(folder: Path, value: Any) -> None:
    """What this rank has found; then it leaves, when all have."""
    (folder / f"rank{distributed.get_rank()}.json").write_text(json.dumps(value))
    distributed.barrier()
    distributed.destroy_process_group()
