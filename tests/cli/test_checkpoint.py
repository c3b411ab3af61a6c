"""`strata checkpoint`: what people and programs read of it, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from strata.checkpoint import CheckpointManager, Memory
from strata.checkpoint.catalog.naming import step_stem
from strata.cli.checkpoint import app
from tests.checkpoint.states import small_state
from tests.support_seaweed import Seaweed, seaweed


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def run_json(*words: object) -> tuple[int, Any]:
    code, output = run(*words, "--json")
    return code, json.loads(output)


def fill(place: Any, *steps: int) -> None:
    with CheckpointManager(
        place, memory=Memory(job=f"test-{uuid.uuid4().hex}"), keep_count=10, stem=step_stem
    ) as manager:
        for step in steps:
            manager.save(small_state(step), step=step).result(60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "checkpoints"
    fill(place, 10, 20)
    return place


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_ls_lists_checkpoints_newest_first_and_plain_files(folder: Path) -> None:
    torch.save(small_state(5), folder / "[bold]old.pt")
    code, output = run("ls", folder)
    assert code == 0
    lines = output.splitlines()
    assert "checkpoint_step_00000020.pt" in lines[1]
    assert "[bold]old.pt" in lines[3]  # Names are data, never markup.
    code, found = run_json("ls", folder)
    assert code == 0
    assert [(row["step"], row["format"]) for row in found["checkpoints"]] == [
        (20, "image"),
        (10, "image"),
        (None, "file"),
    ]
    newest = found["checkpoints"][0]
    assert newest["path"] == str(folder / "checkpoint_step_00000020.pt")
    assert newest["size_bytes"] == (folder / "checkpoint_step_00000020.pt").stat().st_size
    assert newest["tier"] == "NVME"
    assert found["checkpoints"][2]["id"] == "[bold]old.pt"
    assert found["problems"] == []


def test_ls_reports_manifests_it_cannot_read(folder: Path) -> None:
    (folder / "checkpoint_step_00000020.manifest.json").write_text("{}")
    code, found = run_json("ls", folder)
    assert code == 0
    assert [row["step"] for row in found["checkpoints"]] == [10]
    assert "checkpoint_step_00000020" in found["problems"][0]


def test_ls_of_an_empty_folder_is_empty_and_of_none_a_mistake(tmp_path: Path) -> None:
    assert run_json("ls", tmp_path) == (0, {"checkpoints": [], "problems": []})
    assert "There are no checkpoints" in run("ls", tmp_path)[1]
    code, answer = run_json("ls", tmp_path / "nothing")
    assert code == 2
    assert "does not exist" in answer["error"]


def test_verify_says_intact_or_which_tensor_is_damaged(folder: Path) -> None:
    code, output = run("verify", folder)
    assert code == 0
    assert output.count("intact: ") == 2
    damage(folder / "checkpoint_step_00000010.pt")
    code, output = run("verify", folder)
    assert code == 1
    assert "DAMAGED" in output
    assert "model.layer" in output.replace("\n", "")
    code, found = run_json("verify", folder)
    assert code == 1
    assert found["is_intact"] is found["is_whole"] is False  # The second is its deprecated name.
    bad = next(each for each in found["checkpoints"] if not each["is_intact"])
    assert bad["step"] == 10
    tensors = bad["damages"][0]["tensors"]
    assert {"name", "start_bytes", "end_bytes"} == set(tensors[0])
    assert run("verify", folder, "--step", 20)[0] == 0
    assert run("verify", folder, "--id", bad["name"])[0] == 1
    assert run("verify", folder / "checkpoint_step_00000010.pt")[0] == 1
    assert run("verify", folder / "checkpoint_step_00000020.pt")[0] == 0


@pytest.mark.parametrize("words", [["--step", "99"], ["--id", "nothing"], ["--step", "-1"]])
def test_asking_for_what_is_not_there_is_a_mistake(folder: Path, words: list[str]) -> None:
    assert run("verify", folder, *words)[0] == 2


def test_export_writes_what_other_tools_read(folder: Path, tmp_path: Path) -> None:
    code, made = run_json("export", folder, tmp_path / "model.safetensors", "--key", "model", "--step", 10)
    assert code == 0
    assert made["tensors"] == 4
    assert load_file(tmp_path / "model.safetensors")["layer2.weight"][0] == 1002
    assert run("export", folder, tmp_path / "copy.pt")[0] == 0
    assert torch.load(tmp_path / "copy.pt", weights_only=True)["step"] == 20
    assert run("export", folder, tmp_path / "dcp", "--format", "dcp")[0] == 0
    assert (tmp_path / "dcp" / ".metadata").exists()


def test_export_of_a_part_by_its_short_name(tmp_path: Path) -> None:
    place, target = tmp_path / "job", tmp_path / "model.safetensors"
    with CheckpointManager(place, memory=Memory(job=f"test-{uuid.uuid4().hex}")) as manager:
        state = {"model_state_dict": {"weight": torch.ones(3)}, "optimizer_state_dict": {"m": torch.zeros(3)}}
        manager.save(state, step=1).result(60)
    code, output = run("export", place, target, "--key", "model")
    assert code == 0, output
    assert list(load_file(target)) == ["weight"]


def test_import_says_how_it_has_understood_the_file(tmp_path: Path) -> None:
    model = {"module.weight": torch.ones(3, 2), "module.bias": torch.zeros(3)}
    torch.save({"state_dict": model, "global_step": 1200, "hparams": {"x": 1}}, tmp_path / "last.ckpt")
    code, output = run("import", tmp_path / "last.ckpt", tmp_path / "run", "--memory", "64MiB")
    assert code == 0, output
    words = " ".join(output.split())
    assert "(pt) as step 1,200" in words
    assert "The model is taken from 'state_dict'." in words
    assert "The prefix 'module.' of names is dropped." in words
    assert "It has no optimizer: training starts with a fresh one." in words
    assert "left out: hparams" in words
    code, output = run("import", tmp_path / "last.ckpt", tmp_path / "run")
    assert code == 1
    assert "has checkpoints already" in output
    code, made = run_json("import", tmp_path / "last.ckpt", tmp_path / "other", "--step", 7)
    assert (code, made["step"], made["tensors"], made["has_optimizer"]) == (0, 7, 2, False)
    code, problem = run_json("import", tmp_path / "last.ckpt", tmp_path / "other")
    assert (code, problem["code"]) == (1, "destination_taken")


def test_a_model_goes_out_in_shards_of_the_size_asked_for(tmp_path: Path) -> None:
    torch.save({f"layer{n}": torch.ones(1000) for n in range(6)}, tmp_path / "model.pt")
    assert run("import", tmp_path / "model.pt", tmp_path / "run")[0] == 0
    code, made = run_json(
        "export", tmp_path / "run", tmp_path / "hf", "-f", "hf", "--max-shard-size", "8.5KB"
    )
    assert (code, made["tensors"], made["format"]) == (0, 6, "hf")
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    for option in ("--max-shard-size", "--memory"):
        code, output = run("export", tmp_path / "run", tmp_path / "x", "-f", "hf", option, "a lot")
        assert code == 2
        assert "is not a size" in output
    assert not (tmp_path / "x").exists()


def test_rm_takes_steps_and_ids_as_options_too(folder: Path) -> None:
    fill(folder, 30, 40)
    _, found = run_json("ls", folder)
    by_step = {row["step"]: row["id"] for row in found["checkpoints"]}
    code, output = run("rm", folder, "--step", 10, "--step", 20, "--id", by_step[30])
    assert code == 0, output
    _, found = run_json("ls", folder)
    assert [row["step"] for row in found["checkpoints"]] == [40]
    code, output = run("rm", folder)
    assert code == 2
    assert "--step 400" in output


def test_export_refuses_with_a_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there.pt").write_text("mine")
    code, output = run("export", folder, tmp_path / "there.pt")
    assert code == 2
    assert "already exists" in output
    assert (tmp_path / "there.pt").read_text() == "mine"
    assert run("export", folder, tmp_path / "there.pt", "--force")[0] == 0
    assert run("export", folder, tmp_path / "x.tar")[0] == 2
    assert run("export", folder, tmp_path / "x.pt", "--step", 99)[0] == 2
    assert run("export", tmp_path / "nothing", tmp_path / "x.pt")[0] == 2
    damage(folder / "checkpoint_step_00000020.pt")
    assert run("export", folder, tmp_path / "x.pt")[0] == 1
    assert not (tmp_path / "x.pt").exists()


def test_rm_removes_but_not_the_last_good_one(folder: Path) -> None:
    code, answer = run_json("rm", folder, "checkpoint_step_00000010.pt")
    assert code == 0
    assert [each["step"] for each in answer["removed"]] == [10]
    code, answer = run_json("rm", folder, 20)
    assert code == 1
    assert answer["code"] == "last_good"
    assert "--force" in answer["hint"]
    assert (folder / "checkpoint_step_00000020.pt").exists()
    assert run("rm", folder, 20, "--force")[0] == 0
    assert not [path for path in folder.iterdir() if path.is_file()]
    assert run("rm", folder, 20)[0] == 2


@pytest.mark.parametrize(
    "words", [["ls"], ["verify"], ["export", "x"], ["rm", "/tmp"], ["nothing"], ["ls", "ftp://x/y"]]
)
def test_calls_that_make_no_sense_end_with_status_2(words: list[str]) -> None:
    assert run(*words)[0] == 2


def test_a_folder_that_may_not_be_read_is_a_sentence(folder: Path) -> None:
    script = (
        "import os, sys; from strata.cli.checkpoint import app; warm = sys.argv[1];"
        "app(['ls', warm], standalone_mode=False); os.setuid(65534); app(['ls', sys.argv[2]])"
    )
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    folder.chmod(0o700)
    (folder.parent / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script, folder.parent / "empty", folder],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.mark.s3
def test_all_of_it_works_on_a_bucket(server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    place = "s3://shelf/run"
    fill(place, 1, 2)
    code, found = run_json("ls", place)
    assert code == 0
    assert [row["step"] for row in found["checkpoints"]] == [2, 1]
    assert found["checkpoints"][0]["tier"] == "S3"
    assert run("verify", place)[0] == 0
    assert run("export", place, f"{place}/exports/model.safetensors")[0] == 0
    assert run("export", f"{place}/checkpoint_step_00000001.pt", f"{place}/exports/one.pt")[0] == 0
    assert run("rm", place, 1)[0] == 0
    assert [row["step"] for row in run_json("ls", place)[1]["checkpoints"]] == [2, None]
    code, answer = run_json("ls", "s3://no-such-bucket/run")
    assert code == 2
    assert answer["hint"]


def test_where_lists_copies_and_says_what_would_be_lost(folder: Path) -> None:
    code, found = run_json("where", 20, folder)
    assert code == 0
    assert [(each["kind"], each["verified"]) for each in found["copies"]] == [("disk", None)]
    assert found["safe_in"] == ["process"]
    assert [each["steps"] for each in found["losses"]] == [0, None, None]
    code, output = run("where", 20, folder, "--verify")
    assert code == 0
    assert "step 20 survives the loss of a process" in output
    assert "Site lost:     everything, no bucket copy" in output
    assert " verified" in output


def test_where_of_a_damaged_copy_is_safe_nowhere(folder: Path) -> None:
    damage(folder / "checkpoint_step_00000020.pt")
    _, found = run_json("where", 20, folder, "--verify")
    assert [each["verified"] for each in found["copies"]] == [False]
    assert found["safe_in"] == []
    assert found["losses"][0]["from_step"] == 10


def test_where_of_a_step_without_copies_and_of_no_destination(folder: Path, tmp_path: Path) -> None:
    code, output = run("where", 30, folder)
    assert code == 1
    assert "No copy of step 30 was found." in output
    assert run("where", 30, tmp_path / "nowhere")[0] != 0
    code, output = run_json("where", 30, "--api", "http://127.0.0.1:9")
    assert code == 2
    assert output["hint"]
