"""A run from start to end without a terminal: dataset, task, crash, checkpoint, logs, stop; and a coordinator that is lost
and comes back."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from strata import TrainingOrchestrator
from strata.core.data.ledger import DataCommit, RankRecord
from strata.launch.cleanup import end_processes
from strata.rpc import coordinator_pb2 as pb
from strata.shared_memory import forget_jobs
from tests.dashboard.browser import Browser
from tests.service.clients import RawSession, channel, stub
from tests.support import Coordinator, eventually
from tests.training.test_recoverable import job

pytestmark = pytest.mark.browser

DATASET = "stories"
TASK = "first-run"


@pytest.fixture
def own(tmp_path: Path, built: Path) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path / "coordinator", env={"STRATA_LAUNCHER": "local"}).start()
    yield server
    server.stop()
    # A failing test leaves its task, which outlives the coordinator.
    for run in tmp_path.glob("coordinator/tasks/task-*/run-*"):
        end_processes(f"{run.parent.name}-{run.name.removeprefix('run-')}")
        forget_jobs(run.parent.name)


@pytest.mark.timeout(900)
def test_a_run_is_started_watched_and_stopped_without_a_terminal(
    own: Coordinator, page: Browser, tmp_path: Path
) -> None:
    page.base = own.url
    register_a_dataset(page, tmp_path / "stories.jsonl")
    task = start_a_task(page, own)
    watch_a_checkpoint_complete(page, task)
    see_what_was_read(page)
    see_a_worker_die_and_recover(page, own, task)
    filter_the_logs(page, task, tmp_path)
    stop_the_task(page, own, task)
    lose_and_regain_the_coordinator(page, own)


@pytest.mark.timeout(600)
def test_survivors_of_a_lost_rank_are_shown_as_survivors(
    watched: Coordinator, page: Browser, tmp_path: Path
) -> None:
    options = {"COORDINATOR_ADDR": watched.address, "STRATA_JOB_ID": "survivors"}
    with job(tmp_path / "job", "ddp", workers=3, steps=100_000, **options) as running:
        running.await_line(lambda line: "resumed" in line, count=3)
        page.open("/runs/survivors")
        page.see("No recoveries")
        page.see(css="canvas[aria-label^='3 workers up, 0 lost']")
        os.kill(running.living()[1], signal.SIGKILL)

        def recoveries(how: str) -> list[dict[str, Any]]:
            """Those in which the rank was `lost` or `joined`."""
            of_run = [each for each in watched.get("/api/recoveries") if each["job_id"] == "survivors"]
            return [each for each in of_run if "survivors-rank1" in each[how]]

        for how in ("lost", "joined"):
            # Usually two survive. Whoever has not left within a second is there later.
            recovery, *_ = eventually(lambda how=how: recoveries(how), within_s=180)  # type: ignore[misc]
            assert re.fullmatch(rf"[12] survived in process, .*\brank1\b.* {how}", recovery["who_survived"])
            page.see(recovery["who_survived"], css="[aria-label=Recoveries] *", within_s=90)
            page.see("rank 1 ", css="[aria-label=Recoveries] *")  # Its outcome.
        joined = [e["data"] for e in watched.get("/api/events/recent") if e["event"] == "worker_joined"]
        assert sorted(e["spec"]["worker_id"] for e in joined if e["spec"]["job_id"] == "survivors") == [
            *("survivors-rank0", "survivors-rank1", "survivors-rank1", "survivors-rank2")
        ]


def test_the_shard_map_follows_training_from_epoch_to_epoch(watched: Coordinator, page: Browser) -> None:
    commit = DataCommit()

    def train(worker: TrainingOrchestrator, epoch: int, samples: int) -> None:
        nonlocal commit
        start = commit.coverage("rounds", epoch).covered.size
        trained = RankRecord(dataset="rounds", epoch=epoch, total=400, rank=0).with_span(start, samples)
        commit = commit.next([trained], world_size=1)
        step = 1000 * epoch + samples
        worker.notify_checkpoint(f"rounds-{step}", step, epoch, path=f"/ckpt/{step}", data=commit.to_json())

    def sees(epoch: int, percent: int) -> None:
        page.see(f"{percent}.0 % of epoch {epoch} trained", css="main p")
        page.see("0 samples lost, 0 repeated", css="main p")

    with TrainingOrchestrator(watched.address, job_id="rounds") as worker:
        worker.register_worker("rounds-0")
        worker.register_dataset("rounds", "/data", "parquet", 400, 10)
        train(worker, 0, 400)
        train(worker, 1, 120)
        page.open("/data?dataset=rounds")
        sees(epoch=1, percent=30)
        page.until(
            "[...document.querySelectorAll('main svg title')]"
            ".some(t => t.textContent === 'shards 0 to 39: samples 0 to 399, 120 trained')"
        )
        train(worker, 1, 400)
        train(worker, 2, 40)
        sees(epoch=2, percent=10)
        page.see("Same for the previous 2 epochs.", css="main p")


def test_a_row_that_moves_while_it_is_pressed_is_opened(watched: Coordinator, page: Browser) -> None:
    with TrainingOrchestrator(watched.address, job_id="pressed") as worker:
        worker.register_worker("pressed-0")

        def save(step: int) -> None:
            worker.notify_checkpoint(f"pressed-{step}", step, 0, path=f"/pressed/{step}")

        save(1)
        page.open("/checkpoints?job=pressed")
        page.hold(css="[role=row]:has-text('/pressed/1')")
        save(2)
        page.see(css="[role=row][aria-rowindex='2']:has-text('/pressed/2')")
        page.release()
        page.see(role="dialog", name="Checkpoint at step 1")


def test_a_line_of_the_log_that_moves_while_it_is_pressed_is_opened(
    watched: Coordinator, page: Browser
) -> None:
    with stub(watched.address) as calls, channel(watched.address) as own:
        registered = calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="talker", job_id="talker"))
        session = RawSession(own).hello("talker", registered.incarnation)
        session.wait_for("welcome")

        def say(*lines: str) -> None:
            entries = [pb.LogEntry(timestamp=time.time(), message=line) for line in lines]
            session.send(logs=pb.LogBatch(entries=entries))

        say(*(f"line {number}" for number in range(100)))
        page.open("/logs?worker=talker")
        page.hold(css="[data-row]:has-text('line 99')")
        say("line 100")
        page.see(css="[data-row]:has-text('line 100')")
        page.settle()
        page.release()
        page.see("line 99", css="[role=dialog] pre")
        page.leave()
        session.close()
        calls.DeregisterWorker(
            pb.DeregisterWorkerRequest(worker_id="talker", incarnation=registered.incarnation)
        )


def register_a_dataset(page: Browser, file: Path) -> None:
    file.write_text(
        "".join(json.dumps({"text": f"Story {n}: once upon a time."}) + "\n" for n in range(3_000))
    )
    page.open("/data")
    page.see("No datasets yet")
    page.click("button", "Register dataset")
    page.see(role="dialog", name="Register dataset")
    page.fill("ID", DATASET)
    page.fill("Path", f"{file}.missing")
    page.choose("Format", "jsonl")
    page.fill("Samples per shard", "100")
    page.click("button", "Register", exact=True)
    page.see(css="[role=dialog] [role=alert]")
    page.fill("Path", str(file))
    page.click("button", "Register", exact=True)
    page.miss(role="dialog")
    page.see(css="[role=row]", text=DATASET)
    page.see("once upon a time", css="main dd")


def start_a_task(page: Browser, own: Coordinator) -> str:
    page.open("/runs")
    page.click("button", "Start task")
    page.fill("Name *", TASK)
    page.choose("Dataset", DATASET)
    page.fill("Workers *", "2")
    for label, value in {"Steps": "1000000", "Batch size": "zero", "Checkpoint interval": "40"}.items():
        page.fill(label, value)
    page.click("button", "Start", exact=True)
    page.see("Must be a number.")
    page.fill("Batch size", "2")
    page.choose("Device", "cpu")
    page.fill("model › N embd", "32")
    page.fill("Seq length", "32")
    page.fill("Keep checkpoints", "1000")  # None is removed while the test looks at it.
    page.click("button", "Start", exact=True)
    page.see(role="dialog", name=TASK)
    task = parse_qs(urlsplit(page.url).query)["task"][0]
    assert own.get(f"/api/tasks/{task}")["config"]["batch_size"] == 2
    page.see("running", css="[role=dialog] *", within_s=120)
    return task


def watch_a_checkpoint_complete(page: Browser, task: str) -> None:
    page.open("/checkpoints")
    page.see(css="[role=row]:has-text('completed')", within_s=180)
    page.click("row", "", css=f"[role=row]:has-text('{task}'):has-text('completed')")
    page.see(role="dialog")
    page.click("button", "Verify")
    page.see("checksums match")
    page.press("Escape")


def see_what_was_read(page: Browser) -> None:
    """All ranks read in one shared order: no worker has shards of its own."""
    page.open("/data")
    page.see("All ranks of", css="main p")
    page.see(css="[aria-label='Trained samples']")
    assert page.count(css="[aria-label='Shards by worker']") == 0


def see_a_worker_die_and_recover(page: Browser, own: Coordinator, task: str) -> None:
    """The worker may be back before the page is open, so only what stays visible is checked."""
    page.open(f"/runs/{task}")
    page.see("No recoveries")
    page.see(css="[data-panel=loss] canvas")
    victim = next(w for w in own.get("/api/workers") if w["id"] == f"{task}-rank1")
    os.kill(int(victim["metadata"]["pid"]), signal.SIGKILL)
    page.see("resumed at step", css="[aria-label=Recoveries] *", within_s=180)
    page.open("/workers?view=table")
    page.see(css=f"[role=row]:has-text('{task}'):has-text('rank1'):has-text('training')")


def filter_the_logs(page: Browser, task: str, folder: Path) -> None:
    page.open("/logs")
    page.see(css="[role=log] [data-row]")
    page.choose("Run", task)
    page.fill("Search messages", "tokens/s")  # A traceback may name the loss further down.
    page.until(
        "[...document.querySelectorAll('[role=log] [data-row]')].length > 3 &&"
        " [...document.querySelectorAll('[role=log] [data-row]')].every(r => r.textContent.includes('tokens/s'))"
    )
    asked = parse_qs(urlsplit(page.url).query)
    assert (asked["q"], asked["task"]) == (["tokens/s"], [task])
    page.click("button", "Pause")
    page.see(role="button", name="Resume")
    page.settle()
    before = page.texts(css="[role=log] [data-row]")
    page.until("/\\d+ new/.test(document.querySelector('header')?.parentElement?.textContent ?? '')")
    assert page.texts(css="[role=log] [data-row]") == before, "a paused log does not change"
    saved = folder / "logs.jsonl"
    page.download(saved, "button", "Export")
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    assert lines
    assert all("tokens/s" in line["message"] and line["task_id"] == task for line in lines)


def stop_the_task(page: Browser, own: Coordinator, task: str) -> None:
    page.open(f"/runs/{task}")
    page.click("button", "Stop", exact=True)
    page.see(role="dialog", name=f"Stop {TASK}?")
    page.click("button", "Stop task")
    page.see(role="button", name="Restart", within_s=150)
    assert own.get(f"/api/tasks/{task}")["status"] == "stopped"
    page.open(f"/tasks?task={task}")
    page.see(css="[role=dialog]:has-text('stopped')")
    page.see(role="button", name="Restart")


def lose_and_regain_the_coordinator(page: Browser, own: Coordinator) -> None:
    page.open("/data")
    page.see(css="[role=row]", text=DATASET)
    # The last preload is done, and so is the code of every view.
    page.until("performance.getEntriesByType('resource').some(r => r.name.includes('/assets/demo-'))")
    own.kill()
    page.see("Disconnected.", css="[role=alert]")
    page.see("Retrying", css="[role=alert]")
    page.see(css="[data-stale]")
    page.see(css="[role=row]", text=DATASET)
    page.click("link", "Barriers", exact=True)
    page.see(role="heading", name="Barriers", exact=True)
    page.click("link", "Data", exact=True)
    page.see(css="[role=row]", text=DATASET)
    own.start()
    page.miss("Disconnected.", css="[role=alert]")
    page.see("Live", css="nav *")
    page.miss(css="[data-stale]")
