"""Pictures of every view, for docs/screenshots: of a real training on this machine that loses a worker and recovers.

.venv/bin/python scripts/screenshots.py            # everything
.venv/bin/python scripts/screenshots.py overview   # one of them
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from strata.cli.common import get  # noqa: E402
from strata.launch.coordinator import CoordinatorProcess  # noqa: E402
from strata.launch.sample_job import DATASET, SampleJob  # noqa: E402
from strata.launch.torchrun import Agent  # noqa: E402
from strata.training.job import forget_job  # noqa: E402
from tests.dashboard.browser import Browser  # noqa: E402

FOLDER = ROOT / "docs" / "screenshots"
JOB = "gpt-stdlib"
WORKERS = 4


def main(wanted: list[str]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="strata-pictures-") as name, ExitStack() as stack:
        folder = Path(name)
        coordinator = CoordinatorProcess(folder / "coordinator").start()
        stack.callback(coordinator.stop)
        job = SampleJob(folder=folder, name=JOB, workers=WORKERS, steps=1_000_000, save_every=20, width=64)
        job.prepare()
        spec = job.torchrun(
            rdzv_backend="strata", rdzv_endpoint=coordinator.address, coordinator=coordinator.address
        )
        stack.callback(forget_job, JOB)
        agent = Agent(spec, log=folder / "training.log")
        stack.callback(agent.stop)
        _make_history(coordinator.api, agent)
        page = stack.enter_context(Browser(coordinator.api))
        for picture, path in _views(coordinator.api).items():
            for dark in (True, False):
                file = f"{picture}{'' if dark else '-light'}.png"
                if wanted and picture not in wanted:
                    continue
                page.theme(dark=dark)
                page.open(path)
                page.see(role="heading", nth=0)
                page.until("document.querySelectorAll('main .skeleton').length === 0")
                time.sleep(
                    4 if picture in ("overview", "run") else 1.5
                )  # Lines need a few points to be lines.
                page.picture(FOLDER / file)
                print(FOLDER / file, flush=True)


def _make_history(api: str, agent: Agent) -> None:
    """Train a while, lose a worker, recover, train on."""
    _wait(lambda: _step(api) >= 60, "training")
    victim = next(w for w in get(api, "/api/workers") if w["id"] == f"{JOB}-rank{WORKERS - 1}")
    os.kill(int(victim["metadata"]["pid"]), signal.SIGKILL)
    _wait(lambda: get(api, "/api/recoveries"), "the recovery")
    after = _step(api)
    _wait(lambda: _step(api) >= after + 60, "training after it")
    assert agent.is_running


def _views(api: str) -> dict[str, str]:
    safe = next(c for c in get(api, "/api/checkpoints") if c["status"] == "completed")
    return {
        "overview": "/",
        "runs": "/runs",
        "run": f"/runs/{JOB}",
        "workers": "/workers",
        "worker": f"/workers?worker={JOB}-rank0",
        "data": f"/data?dataset={DATASET}&worker={JOB}-rank0",
        "checkpoints": "/checkpoints",
        "checkpoint": f"/checkpoints?checkpoint={safe['id']}",
        "barriers": "/barriers",
        "tasks": "/tasks",
        "start-task": "/tasks?start=1",
        "logs": "/logs",
        "settings": "/settings",
        "demo": "/?demo",
    }


def _step(api: str) -> int:
    return max((int(w["current_step"]) for w in get(api, "/api/workers")), default=0)


def _wait(ready: Any, what: str) -> None:
    until_s = time.monotonic() + 300
    while not ready():
        if time.monotonic() > until_s:
            raise SystemExit(f"waited in vain for {what}")
        time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1:])
