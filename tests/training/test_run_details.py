"""What a process finds out about how it was started."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from strata.core.telemetry.logtext import REDACTED
from strata.training.metrics.run_details import checked_out, gathered, without_secrets


def test_the_commit_and_branch_of_a_checkout_are_read_from_its_files(
    tmp_path: Path, program: Callable[[str], str]
) -> None:
    def git(*arguments: str, at: Path = tmp_path) -> str:
        command = [program("git"), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=at, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--initial-branch=main")
    (tmp_path / "inside").mkdir()
    assert checked_out(tmp_path / "inside") == ("", "main"), "no commit yet"
    git("commit", "--allow-empty", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert checked_out(tmp_path / "inside") == (commit, "main")
    git("pack-refs", "--all")
    assert checked_out(tmp_path) == (commit, "main")
    git("worktree", "add", "-b", "side", str(tmp_path / "tree"))
    assert checked_out(tmp_path / "tree") == (commit, "side")
    git("checkout", "--detach", at=tmp_path / "tree")
    assert checked_out(tmp_path / "tree") == (commit, "")


def test_a_secret_argument_is_not_in_the_command() -> None:
    shown = without_secrets(["train.py", "--api-key", "0123456789", "--lr", "0.1", "--password=hunter22"])
    assert shown == ["train.py", "--api-key", REDACTED, "--lr", "0.1", f"--password={REDACTED}"]


def test_it_says_versions_and_configuration() -> None:
    found = gathered(world_size=2, config={"lr": 0.1}, options={"save_every": 5})
    assert set(found.versions) == {"python", "torch", "strata"}
    assert (found.world_size, found.config, found.options) == (2, {"lr": 0.1}, {"save_every": 5})
    assert found.host
