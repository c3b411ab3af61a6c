"""Tasks that really run on this machine: they train, outlive whoever is killed, stop without a trace and go on."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from strata.client import Client
from tests.support import eventually
from tests.tasks.conftest import STOP_S, Tasks

LITTLE_MEMORY = Path(f"/sys/fs/cgroup/memory/strata-test-{os.getpid()}")
TINY: dict[str, Any] = {
    "batch_size": 2,
    "seq_length": 32,
    "checkpoint_interval": 20,
    "snapshot_interval": 5,
    "log_interval": 5,
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 16},
    "device": "cpu",
}

AGAIN = "not started again: the same {} and no step was completed in between"


def workers(tasks: Tasks, task_id: str) -> dict[str, int]:
    """Process ids of the task's workers that train."""
    return {
        w["id"]: int(w["metadata"]["pid"])
        for w in tasks.server.get("/api/workers")
        if w["id"].startswith(task_id) and w["status"] in ("training", "checkpointing")
    }


@pytest.mark.timeout(600)
def test_a_task_trains_through_a_killed_worker_and_a_killed_coordinator_to_its_end(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "held.toml").write_text(
        f"script = '{Path(__file__).with_name('held.py')}'\n"
        f"arguments = ['--steps', '{{steps}}', '--slow', '{slow}']\n[config.steps]\ntype = 'integer'\n"
    )
    tasks = Tasks(tmp_path / "data", {"STRATA_TASK_WORKERS": "2", "STRATA_RECIPES_DIR": str(recipes)})
    tasks.server.start()
    try:
        steps = 1_000
        task_id = tasks.submit("held", workers=2, steps=steps)
        behind = tasks.submit(workers=1, steps=1, **TINY)
        begun = tasks.until(task_id, lambda task: task["step"] > 0 and len(task["worker_ids"]) == 2)
        assert (begun["status"], begun["total_steps"], begun["attempts"]) == ("running", steps, 1)
        assert sorted(begun["worker_ids"]) == [f"{task_id}-rank0", f"{task_id}-rank1"]
        waiting = tasks.get(behind)
        assert waiting["reason"] == "number 1 in the queue: it needs 1 workers, and 0 workers are free"
        assert tasks.server.post(f"/api/tasks/{behind}/stop", {})[1]["status"] == "stopped"

        victim = eventually(lambda: workers(tasks, task_id).get(f"{task_id}-rank1"), within_s=60)
        server = psutil.Process(victim).parent()
        assert server is not None
        assert "multiprocessing.forkserver" in " ".join(server.cmdline())
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: "rank 1 was killed by SIGKILL" in tasks.log(task_id), within_s=60)
        successor = eventually(
            lambda: next(
                (p for w, p in workers(tasks, task_id).items() if w.endswith("1") and p != victim), 0
            ),
            within_s=120,
            every_s=0.1,
        )
        # It had torch before it was born, and needed nobody but the task's own agent to come to life.
        assert psutil.Process(successor).parent() == server
        recovered = tasks.until(task_id, lambda task: task["step"] > begun["step"])
        assert (recovered["status"], recovered["attempts"]) == ("running", 1)

        tasks.server.kill()
        folder = tasks.server.data_dir / "tasks" / task_id
        before = written(folder)
        eventually(lambda: written(folder) > before, within_s=60)  # Training continues.
        tasks.server.start()
        again = tasks.get(task_id)
        assert (again["status"], again["attempts"], again["started_at"]) == (
            "running",
            1,
            begun["started_at"],
        )
        assert again["step"] >= recovered["step"]
        # What it had not yet written down when it was killed is read again.
        eventually(lambda: "rank 1 was killed by SIGKILL" in tasks.log(task_id), within_s=60)
        slow.unlink()

        ended = tasks.ended(task_id)
        assert (ended["status"], ended["progress"], ended["exit_cause"]) == ("completed", 100.0, None)
        log = tasks.log(task_id)
        assert f"{task_id}-rank0 info all {steps} steps are made" in log
        said = {line for line in log.splitlines() if "slowly at" in line}
        assert {f"{task_id}-rank0 info slowly at {n}" for n in range(again["step"])} <= said  # None is lost.
        assert tasks.processes(task_id) == {}
        eventually(lambda: tasks.shared_memory(task_id) == [], within_s=60)
    finally:
        tasks.close()


def written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("run-1/output-*"))


@pytest.mark.timeout(400)
def test_stop_saves_and_leaves_nothing_and_restart_continues_from_there(tasks: Tasks) -> None:
    client = Client(tasks.server.url)
    task_id = tasks.submit(workers=2, steps=1_000_000, **TINY)
    tasks.until(task_id, lambda task: task["step"] > 10)
    # One rank reports the data, and any of them steps.
    data = f"sample-text-{task_id}"
    eventually(
        lambda: data in [each["id"] for each in tasks.server.get("/api/datasets")], within_s=60, what=data
    )
    preview = tasks.server.get(f"/api/datasets/{data}/preview")
    assert all(sample["text"] for sample in preview["samples"]), "what it trains on can be looked at"
    assert len(preview["samples"]) > 0
    pids = list(tasks.processes(task_id))
    assert len(pids) >= 4  # Supervisor, agent, two workers.
    answer = client.stop(task_id, wait_s=STOP_S)
    assert answer == {"task_id": task_id, "status": "stopped", "reason": "stop requested over the API"}
    assert (tasks.processes(task_id), tasks.shared_memory(task_id)) == ({}, [])
    assert not [c for c in psutil.net_connections("tcp") if c.pid in pids]
    assert client.stop(task_id) == answer  # Stopping twice is no error.
    stopped = tasks.get(task_id)
    saved = [c for c in tasks.server.get("/api/checkpoints") if c["job_id"] == task_id]
    assert saved[0]["status"] == "completed"
    assert saved[0]["step"] >= stopped["step"] - 1
    assert Path(saved[0]["path"]).exists()

    assert tasks.server.post(f"/api/tasks/{task_id}/restart", {})[0] == 200
    assert tasks.server.post(f"/api/tasks/{task_id}/restart", {})[0] == 409  # It waits, or runs, already.
    going_on = tasks.until(task_id, lambda task: task["attempts"] == 2 and task["step"] > saved[0]["step"])
    assert f"from the checkpoint at step {saved[0]['step']}" in going_on["reason"]
    assert client.stop(task_id, wait_s=STOP_S)["status"] == "stopped"
    assert (tasks.processes(task_id), tasks.shared_memory(task_id)) == ({}, [])


@pytest.mark.timeout(600)
def test_each_end_has_its_cause(tmp_path: Path) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "ends.py").write_text(
        "import os, sys, signal\n"
        "how = sys.argv[1]\n"
        "print('about to', how, flush=True)\n"
        "if how == 'raise': raise ValueError('the answer is 41')\n"
        "if how == 'crash': os.kill(os.getpid(), signal.SIGSEGV)\n"
        "if how == 'refuse': sys.exit(2)\n"
        "if how == 'eat':\n"
        f"    open('{LITTLE_MEMORY}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "    eaten = [bytearray(10_000_000) for _ in range(1_000)]\n"
        "if how == 'wait': signal.pause()\n"
        "if how == 'linger':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    print('deaf', flush=True)\n"
        "    signal.pause()\n"
    )
    for name, warm in (("ends", "true"), ("ends-cold", "false")):
        (recipes / f"{name}.toml").write_text(
            f"script = 'ends.py'\narguments = ['{{how}}']\nrequired = ['how']\nwarm = {warm}\n"
            "[config.how]\ntype = 'string'\n"
        )
    env = {"STRATA_RECIPES_DIR": str(recipes), "STRATA_TASK_WORKERS": "8", "STRATA_TASK_STOP_TIMEOUT": "2"}
    tasks = Tasks(tmp_path / "data", env)
    limited = limit_memory()
    tasks.server.start()
    try:
        cold = ["linger", "refuse", "well", "eat"] if limited else ["linger", "refuse", "well"]
        ids = {how: tasks.submit("ends", how=how) for how in ("wait", "raise", "crash")}
        ids |= {how: tasks.submit("ends-cold", how=how) for how in cold}
        for how, kind, message in (
            (
                "raise",
                "exception",
                f"rank 0: ValueError: the answer is 41 ({AGAIN.format('error came back')})",
            ),
            (
                "crash",
                "signal",
                f"rank 0 was killed by SIGSEGV ({AGAIN.format('failure came back 2 times')})",
            ),
            ("refuse", "exit", "rank 0 ended with status 2"),
        ):
            failed = tasks.ended(ids[how])
            assert (failed["status"], failed["attempts"]) == ("failed", 1), failed
            assert failed["exit_cause"]["kind"] == kind
            assert failed["exit_cause"]["message"] == message
        assert "ValueError: the answer is 41" in tasks.log(ids["raise"])
        raised = tasks.get(ids["raise"])["exit_cause"]["traceback"]
        assert raised.splitlines()[1].endswith('ends.py", line 4, in <module>'), (
            "nothing before the script's own"
        )
        assert "ValueError: the answer is 41" in raised
        assert tasks.ended(ids["well"])["status"] == "completed"
        if limited:
            starved = tasks.ended(ids["eat"])
            assert starved["exit_cause"]["kind"] == "oom"
            assert "rank 0 was killed by the kernel because memory ran out" in starved["reason"]
        # An agent that is killed takes its workers with it, and the task is tried again.
        eventually(lambda: "about to wait" in tasks.log(ids["wait"]), within_s=120)
        (agent,) = (
            pid
            for pid, line in tasks.processes(ids["wait"]).items()
            if "strata.launch.agent" in line and "supervisor" not in line
        )
        os.kill(agent, signal.SIGKILL)
        retried = tasks.until(ids["wait"], lambda task: task["attempts"] == 2)
        # Why, can only be guessed where the kernel has just killed another.
        assert retried["exit_cause"]["message"].startswith("the torchrun agent was killed by")
        assert retried["exit_cause"]["signal"] == "SIGKILL"
        Client(tasks.server.url).stop(ids["wait"], wait_s=STOP_S)
        # One that does not listen is killed when its time is over.
        eventually(lambda: "deaf" in tasks.log(ids["linger"]), within_s=120)
        Client(tasks.server.url).stop(ids["linger"], wait_s=STOP_S)
        stopped = tasks.get(ids["linger"])
        assert stopped["status"] == "stopped"
        assert "did not exit in time and was killed" in stopped["reason"]
        assert all(tasks.processes(task_id) == {} for task_id in ids.values())
    finally:
        tasks.close()
        if limited:
            LITTLE_MEMORY.rmdir()


def limit_memory() -> bool:
    """A control group of 200 MB, where this system has such and lets us."""
    try:
        LITTLE_MEMORY.mkdir()
        (LITTLE_MEMORY / "memory.limit_in_bytes").write_text("200000000")
    except OSError:
        return False
    return True


def test_what_a_task_said_last_is_on_disk_before_it_has_ended(tmp_path: Path) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "talk.py").write_text("for n in range(100):\n    print('word', n)\n")
    (recipes / "talk.toml").write_text("script = 'talk.py'\n")
    tasks = Tasks(tmp_path / "data", {"STRATA_RECIPES_DIR": str(recipes), "STRATA_TASK_WORKERS": "1"})
    tasks.server.start()
    try:
        for _ in range(2):
            task_id = tasks.submit("talk")
            eventually(lambda: tasks.get(task_id)["status"] == "completed", within_s=120, every_s=0.005)  # noqa: B023
            tasks.server.kill()
            tasks.server.start()
            said = [line.rpartition(" ")[2] for line in tasks.log(task_id).splitlines() if " word " in line]
            assert said == [str(n) for n in range(100)]
    finally:
        tasks.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_coordinator_killed_at_any_time_loses_no_task(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "nap.py").write_text(
        "import time\nfor n in range(40):\n    print('nap', n)\n    time.sleep(0.1)\n"
    )
    (recipes / "nap.toml").write_text("script = 'nap.py'\n")
    (recipes / "sleep.py").write_text("import time\nprint('asleep')\ntime.sleep(600)\n")
    (recipes / "sleep.toml").write_text("script = 'sleep.py'\n")
    tasks = Tasks(tmp_path / "data", {"STRATA_RECIPES_DIR": str(recipes), "STRATA_TASK_WORKERS": "2"})
    tasks.server.start()
    try:
        for _ in range(5):
            tasks.submit("nap")
            time.sleep(chance.uniform(0.0, 3.0))
            tasks.server.kill()
            tasks.server.start()
        for task_id in tasks.ids:
            ended = tasks.ended(task_id, within_s=180)
            assert ended["status"] == "completed", (seed, ended, tasks.log(task_id))
            assert tasks.processes(task_id) == {}, seed
            log = tasks.log(task_id)
            naps = [line for line in log.splitlines() if " nap " in line]
            assert [line.rpartition(" ")[2] for line in naps] == [str(n) for n in range(40)], (seed, log)
        # A coordinator that knows nothing of a run ends it.
        unwanted = tasks.submit("sleep")
        eventually(lambda: "asleep" in tasks.log(unwanted), within_s=60)
        tasks.server.kill()
        for path in tasks.server.data_dir.glob("journal.sqlite*"):
            path.unlink()
        tasks.server.start()
        eventually(lambda: not tasks.processes(unwanted), within_s=60, every_s=0.1)
    finally:
        tasks.close()
