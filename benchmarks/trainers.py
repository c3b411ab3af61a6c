"""Samples lost and repeated when trainers crash and come back with another number of workers: with Strata, and by themselves.

    python -m benchmarks.trainers [--json]

One epoch of 960 samples in batches of 4, a save every 10 steps. Each schedule is a list of starts: the number of workers, and the
step after which all of them end without a word. What counts is what the model was given, less what a later start trained again
after it had gone back: once each is right.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.trainer_peers import SAMPLES

FRAMEWORKS = {"huggingface": "Hugging Face Trainer", "lightning": "Lightning", "accelerate": "Accelerate"}
SCHEDULES = {"2, 2, 2 workers": [(2, 33), (2, 71), (2, -1)], "2, 1, 2 workers": [(2, 33), (1, 97), (2, -1)]}
LIMIT_S = 900


def run(framework: str, who: str, starts: list[tuple[int, int]], folder: Path) -> dict[str, int]:
    """Samples lost and repeated."""
    for number, (world, crash_at) in enumerate(starts, 1):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        ranks = []
        for rank in range(world):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "bench"}
            environment = (
                {key: str(value) for key, value in {**place, **launched}.items()} if world > 1 else {}
            )
            ranks.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "benchmarks.trainer_peers", framework, who),
                        *(str(folder), str(number), str(crash_at)),
                    ],
                    env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
        finally:
            for each in ranks:
                each.kill()
        statuses = {rank.returncode for rank in ranks}
        if (0 if crash_at < 0 else 9) not in statuses:
            raise SystemExit(
                f"{framework}, {who}, start {number}: ended with {statuses}\n{errors[0][-3000:]}"
            )
    return counted(folder)


def counted(folder: Path) -> dict[str, int]:
    rows: dict[int, list[tuple[int, list[int]]]] = {}
    for path in (folder / "seen").iterdir():
        for line in path.read_text().splitlines():
            step, *numbers = map(int, line.split())
            rows.setdefault(int(path.name.partition("-")[0]), []).append((step, numbers))
    first = {start: min(step for step, _ in found) for start, found in rows.items()}
    kept = [
        number
        for start, found in rows.items()
        for step, numbers in found
        for number in numbers
        if all(step < first[later] for later in first if later > start)
    ]
    return {"lost": SAMPLES - len(set(kept)), "repeated": len(kept) - len(set(kept))}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainers", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--only", default="", help="a part of a framework's or a schedule's name")
    arguments = parser.parse_args()
    found = []
    for framework, name in FRAMEWORKS.items():
        for schedule, starts in SCHEDULES.items():
            if arguments.only not in f"{framework} {schedule}":
                continue
            for who in ("strata", "own"):
                with tempfile.TemporaryDirectory() as folder:
                    lost = run(framework, who, starts, Path(folder))
                row = {"trainer": name, "starts": schedule, "resumed_by": who, **lost}
                found.append(row)
                if not arguments.json:
                    print(
                        f"{name}, {schedule}, {who}: {lost['lost']} lost + {lost['repeated']} repeated",
                        flush=True,
                    )
    if arguments.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
