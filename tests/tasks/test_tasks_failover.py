"""A task on the machine of a leader that is lost: training continues, the next leader sees it, and its end is recorded once. What it
prints is in the archive of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rendezvous.etcd_server import EtcdServer
from tests.support import eventually
from tests.tasks.conftest import Tasks


@pytest.mark.slow  # Its short siblings are in test_runner.py.
@pytest.mark.timeout(300)
def test_task_outlives_the_leader_that_started_it_and_its_end_reaches_the_next_one(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    recipes, etcd_dir = tmp_path / "recipes", tmp_path / "etcd"
    recipes.mkdir()
    etcd_dir.mkdir()
    (recipes / "held.toml").write_text(
        f"script = '{Path(__file__).with_name('held.py')}'\n"
        f"arguments = ['--steps', '{{steps}}', '--slow', '{slow}']\n[config.steps]\ntype = 'integer'\n"
    )
    etcd = EtcdServer(etcd_dir)
    etcd.start()
    env = {
        "STRATA_RECIPES_DIR": str(recipes),
        "STRATA_JOURNAL": f"etcd://{etcd.endpoint}",
        "STRATA_ARCHIVE": str(tmp_path / "archive"),
    }
    old, new = (Tasks(tmp_path / name, env) for name in "ab")
    try:
        old.server.start()
        eventually(lambda: old.server.get("/api/status")["role"] == "leader", within_s=30)
        new.server.start()
        # Whoever starts a task tells it where all coordinators are.
        eventually(lambda: old.server.get("/api/status")["others"] == [new.server.address], within_s=30)
        task_id = old.submit("held", steps=400)
        begun = old.until(task_id, lambda task: task["step"] > 0)
        eventually(lambda: "slowly at 2" in new.log(task_id), within_s=30)  # A standby has what it prints.
        old.server.kill()
        eventually(lambda: new.server.get("/api/status")["role"] == "leader", within_s=30)
        seen = new.until(task_id, lambda task: task["step"] > begun["step"] + 2)
        assert (seen["status"], seen["attempts"], seen["started_at"]) == ("running", 1, begun["started_at"])
        new.until(task_id, lambda task: "whose coordinator is unreachable" in task["reason"])
        old.server.start()
        assert old.server.get("/api/status")["role"] == "standby"
        new.until(task_id, lambda task: "supervised by a standby" in task["reason"])
        slow.unlink()
        ended = new.ended(task_id)
        assert (ended["status"], ended["attempts"], ended["exit_cause"]) == ("completed", 1, None)
        # What it printed is where it ran, and through the archive at the one that leads: each line once.
        eventually(lambda: "all 400 steps are made" in old.log(task_id), within_s=30)
        eventually(lambda: "all 400 steps are made" in new.log(task_id), within_s=30)
        for each in (old, new):
            steps = [int(line.split()[-1]) for line in each.log(task_id).splitlines() if "slowly at" in line]
            assert steps == list(range(steps[0], steps[0] + len(steps)))
        assert old.processes(task_id) == {}
    finally:
        slow.unlink(missing_ok=True)
        for each in (old, new):
            each.close()
        etcd.stop()
    for each in (old, new):
        assert "Traceback" not in "".join(each.server.output), "".join(each.server.output)
