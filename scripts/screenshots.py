"""Pictures of every view, on a desk and on a phone, for docs/screenshots: of a real training on this machine that loses a worker
and recovers.

.venv/bin/python scripts/screenshots.py            # everything
.venv/bin/python scripts/screenshots.py overview   # one of them
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from strata import TrainingOrchestrator  # noqa: E402
from strata.cli.common import get, post  # noqa: E402
from strata.errors import StrataError  # noqa: E402
from strata.launch.coordinator import CoordinatorProcess  # noqa: E402
from tests.dashboard.browser import Browser  # noqa: E402

FOLDER = ROOT / "docs" / "screenshots"
WORKERS = 3
LIGHT_TOO = ("overview", "run", "data", "incident")
PHONE = {"width": 390, "height": 844}
CONFIG = {
    "steps": 100_000,
    "batch_size": 4,
    "seq_length": 64,
    "device": "cpu",
    "checkpoint_interval": 50,
    "snapshot_interval": 5,
    "keep_checkpoints": 50,
    "log_interval": 5,
    "model": {"n_layer": 2, "n_head": 4, "n_embd": 64},
}


def main(wanted: list[str]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="strata-pictures-") as name, ExitStack() as stack:
        coordinator = CoordinatorProcess(Path(name) / "coordinator").start()
        stack.callback(coordinator.stop)
        page = stack.enter_context(Browser(coordinator.api))
        phone = stack.enter_context(Browser(coordinator.api, viewport=PHONE))

        def take(picture: str, path: str) -> None:
            if wanted and picture not in wanted:
                return
            for dark in (True, False) if picture in LIGHT_TOO else (True,):
                _take(page, path, FOLDER / f"{picture}{'' if dark else '-light'}.png", dark=dark)
            _take(phone, path, FOLDER / f"{picture}-phone.png", dark=True)

        take("first-run", "/")
        task = _train(coordinator.api)
        stack.callback(post, coordinator.api, f"/api/tasks/{task}/stop?wait=30", {})
        for picture, path in _views(coordinator.api, task).items():
            if picture == "barriers" and (not wanted or picture in wanted):
                _meet(coordinator.address, stack)
            take(picture, path)


def _take(page: Browser, path: str, file: Path, *, dark: bool) -> None:
    page.theme(dark=dark)
    page.open(path)
    page.see(role="heading", nth=0)
    page.until("document.querySelectorAll('main .skeleton').length === 0")
    page.press("Shift")  # The mouse is nowhere, and so is the focus ring.
    time.sleep(1.5)  # What comes after the first paint: previews, plans, figures.
    page.picture(file)
    print(file, flush=True)


def _train(api: str) -> str:
    """A real task that trains a while, loses a worker, recovers and trains on."""
    body = {
        "name": "gpt-on-the-standard-library",
        "type": "training",
        "worker_count": WORKERS,
        "config": CONFIG,
    }
    task = str(post(api, "/api/tasks", body)["task_id"])
    _wait(lambda: _step(api) >= 60, "training")
    victim = next(w for w in get(api, "/api/workers") if w["rank"] == WORKERS - 1)
    os.kill(int(victim["metadata"]["pid"]), signal.SIGKILL)
    _wait(lambda: get(api, "/api/recoveries"), "the recovery")
    after = _step(api)
    _wait(lambda: _step(api) >= after + 60, "training after it")
    return task


def _meet(address: str, stack: ExitStack) -> None:
    """Three workers of another job: they meet a few times, and then one of them does not come."""
    workers = [stack.enter_context(TrainingOrchestrator(address, job_id="evaluation")) for _ in range(3)]
    for number, worker in enumerate(workers):
        worker.register_worker(f"evaluator-{number}")
    for step in range(1, 7):
        _at_once([partial(worker.barrier, "scores", step, participants=3) for worker in workers])
    for worker in workers[:2]:
        threading.Thread(target=_wait_in_vain, args=(worker,), daemon=True).start()


def _at_once(calls: list[Any]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _wait_in_vain(worker: TrainingOrchestrator) -> None:
    with suppress(StrataError):
        worker.barrier("scores", 7, participants=3)


def _views(api: str, task: str) -> dict[str, str]:
    safe = next(c for c in get(api, "/api/checkpoints") if c["status"] == "completed")
    worker = f"{task}-rank0"
    return {
        "overview": "/",
        "runs": "/runs",
        "run": f"/runs/{task}",
        "workers": "/workers",
        "worker": f"/workers?worker={worker}",
        "data": f"/data?worker={worker}",
        "checkpoints": "/checkpoints",
        "checkpoint": f"/checkpoints?checkpoint={safe['id']}",
        "task": f"/runs/{task}?task={task}",
        "start-task": "/runs?start=1",
        "incidents": "/incidents",
        "incident": f"/incidents?incident={get(api, '/api/incidents')[0]['id']}",
        "coordinator": "/coordinator",
        "logs": "/logs",
        "settings": "/settings",
        "demo": "/runs/gpt-small?demo",
        "barriers": "/barriers",
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
