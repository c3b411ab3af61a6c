"""Tasks from the command line and from Python: submitted from a file, followed, run with a coordinator of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import strata
from tests.cli.running import strata as run_cli
from tests.tasks.conftest import Tasks


def test_data_is_prepared_by_tasks_submitted_from_a_file(tasks: Tasks, tmp_path: Path) -> None:
    text = tmp_path / "news.jsonl"
    text.write_text("".join(json.dumps({"text": f"line {n} of the news"}) + "\n" for n in range(500)))
    body = {"dataset_id": "news", "path": str(text), "format": "jsonl", "shard_size": 64}
    assert tasks.server.post("/api/datasets", body)[0] == 201
    task_file = tmp_path / "task.yaml"
    task_file.write_text("name: index the news\ntype: indexing\ndataset_id: news\nconfig: {on_bad: skip}\n")
    api = ("--api", tasks.server.url)

    ran = run_cli("submit", str(task_file), "on_bad=raise", "--json", *api)
    assert (ran.code, ran.err) == (0, "")
    indexing = json.loads(ran.out)["task_id"]
    ran = run_cli("submit", "--type", "sharding", "--dataset", "news", "--follow", *api)
    assert ran.code == 0, ran.out
    assert "8 shards" in ran.out
    client = strata.Client(tasks.server.url)
    indexed = client.wait(indexing, timeout_s=120)
    assert (indexed["status"], indexed["progress"], indexed["config"]) == (
        "completed",
        100.0,
        {"on_bad": "raise"},
    )
    folder = tasks.server.data_dir / "tasks"
    assert (folder / indexing / "news.index").exists()
    sharding = next(task["id"] for task in client.tasks() if task["type"] == "sharding")
    shards = json.loads((folder / sharding / "shards.json").read_text())["shards"]
    assert [(shard["start"], shard["stop"]) for shard in shards][-1] == (448, 500)
    assert any("tokens" in entry["message"] for entry in client.logs(indexing))

    assert run_cli("recipes", *api).out.count("training") >= 1
    for words, code, message in (
        (("stop", "ghost"), 1, "task 'ghost' is not known here"),
        (("restart", indexing), 1, "completed"),
        (("submit", "--type", "shardng"), 1, "did you mean 'sharding'"),
        (("submit", "learning_rat=1"), 1, "did you mean 'learning_rate'"),
        (("submit", "nothing.yaml"), 2, "There is no file"),
        (("submit", "steps=1", "half"), 2, "is not a setting"),
    ):
        ran = run_cli(*words, *api)
        assert (ran.code, message.lower() in ran.err.lower()) == (code, True), ran
        assert "Traceback" not in ran.err
    assert len(client.tasks()) == 2


def test_a_script_runs_with_a_coordinator_of_its_own_and_nothing_is_left(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:], os.getcwd())\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "strata.cli.main", "run", "--workers", "2", "job.py", "--lr", "two words"],
        cwd=tmp_path,
        env={**os.environ, "STRATA_TOKEN": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2 ['--lr', 'two words'] {tmp_path}" in ran.stdout
    assert "completed after" in ran.stdout
    assert not (tmp_path / ".strata" / "serving.json").exists()
