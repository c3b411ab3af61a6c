"""The batch script for Slurm: what bash and shellcheck think of it, what it asks for, and what it does with signals.

Slurm itself stands in as small programs: `srun` runs an agent that only listens to signals, `scancel` sends it one,
`scontrol` writes down what it was told. `test_slurm_cluster.py` has the real ones.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strata.config import ConfigError
from strata.launch.slurm import SlurmOptions, sbatch_script
from strata.launch.torchrun import TorchrunSpec
from tests.cli.running import strata
from tests.support import eventually
from tests.support_programs import program

EXAMPLE = Path(__file__).parent.parent.parent / "deploy" / "slurm" / "train.sh"
HOSTILE = "a'b\"c $(touch pwned) `touch pwned` ; touch pwned \\ \n#SBATCH --nodes=99"


def spec(*arguments: str, run_id: str = "run-7") -> TorchrunSpec:
    return TorchrunSpec(
        run_id=run_id,
        arguments=arguments or ("train.py",),
        rdzv_endpoint="head:50051",
        environment={"COORDINATOR_ADDR": "head:50051", "STRATA_JOB_ID": run_id},
    )


def directives(script: str) -> dict[str, str]:
    """As sbatch reads them: up to the first line that is no comment."""
    found = {}
    for line in script.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("#SBATCH --"):
            key, _, value = line.removeprefix("#SBATCH --").partition("=")
            found[key] = value
    return found


def assert_clean(script: str) -> None:
    shellcheck = [program("shellcheck"), "--shell=bash", "--severity=warning", "-"]
    for command in ([program("bash"), "-n"], shellcheck):
        done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "options",
    [
        SlurmOptions(),
        SlurmOptions(
            nodes=4,
            min_nodes=2,
            workers_per_node=8,
            gpus_per_node=8,
            cpus_per_node=64,
            memory="512G",
            time="1-12:00:00",
            partition="gpu",
            account="team-a",
            setup="my env/bin/activate",
            environment={"NCCL_DEBUG": "a b; $(c)"},
        ),
    ],
    ids=["least", "most"],
)
def test_the_script_is_clean_whatever_is_asked_for(options: SlurmOptions) -> None:
    assert_clean(sbatch_script(spec("train.py", HOSTILE), options))


def test_what_was_asked_for_reaches_slurm_and_torchrun() -> None:
    script = sbatch_script(
        spec(),
        SlurmOptions(nodes=4, min_nodes=2, workers_per_node=8, gpus_per_node=8, time="60", partition="gpu"),
    )
    asked = directives(script)
    expected = {"job-name": "run-7", "nodes": "4", "ntasks-per-node": "1", "gpus-per-node": "8", "time": "60"}
    assert expected.items() <= asked.items()
    assert {"requeue", "no-kill"} <= set(asked)
    assert asked["signal"] == "B:USR1@120"
    words = shlex.split(script.replace("\\\n", " "), comments=True)
    assert {"--nnodes=2:4", "--nproc-per-node=8", "--rdzv-backend=strata", "--rdzv-id=run-7"} <= set(words)
    assert "--rdzv-endpoint=head:50051" in words
    assert not any(word.startswith("--local-addr") for word in words)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words


def test_everything_wrong_is_said_at_once() -> None:
    bad = SlurmOptions(nodes=1, min_nodes=3, workers_per_node=0, time="soon", partition="a b", warning_s=1)
    with pytest.raises(ConfigError) as caught:
        sbatch_script(spec(run_id="two words"), bad)
    assert len(caught.value.problems) == 6


def test_the_example_is_what_the_command_writes(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: {}\n")
    ran = strata(
        *("slurm", str(config), "--name", "example", "--nodes", "4", "--workers", "8", "--gpus", "8"),
        *("--time", "12:00:00", "--coordinator", "coordinator.example.org:50051"),
    )
    assert ran.code == 0, ran.err
    assert ran.out.replace(str(config), "/shared/run-7/config.yaml") == EXAMPLE.read_text()


def test_a_bad_call_is_a_sentence(tmp_path: Path) -> None:
    ran = strata("slurm", str(tmp_path / "nowhere.yaml"), "--coordinator", "http://:x")
    assert ran.code == 2
    assert "there is no file" in ran.err
    assert "is not a coordinator address" in ran.err
    assert "Traceback" not in ran.err


# --- signals ------------------------------------------------------------------------------------------------

SRUN = """#!/bin/bash
echo $$ > step
eval "exec $AGENT"
"""
SCANCEL = """#!/bin/bash
[[ $* == "--signal=TERM 42.0" ]] && kill -TERM "$(cat step)"
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$RECORD"
"""
AGENT = """
import pathlib, signal, sys
def leave(*_):
    print("saved", flush=True)
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, leave)
pathlib.Path("ready").touch()
while True:
    signal.pause()
"""


class Batch:
    """The script as Slurm's batch step runs it, with an agent that leaves with `status` when told to."""

    def __init__(self, folder: Path, status: int) -> None:
        self.record = folder / "record"
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        variables = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "42",
            "RECORD": str(self.record),
            "AGENT": shlex.join([sys.executable, "-c", AGENT, str(status)]),
        }
        self.process = subprocess.Popen(
            [program("bash"), "-c", sbatch_script(spec(), SlurmOptions())],
            cwd=folder,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            text=True,
        )
        eventually((folder / "ready").exists, within_s=30, what="the agent runs")

    def end(self) -> tuple[int, str, str]:
        output, _ = self.process.communicate(timeout=30)
        return self.process.returncode, output, self.record.read_text() if self.record.exists() else ""


def test_before_the_time_limit_workers_leave_and_the_job_queues_up_again(tmp_path: Path) -> None:
    batch = Batch(tmp_path, status=1)
    batch.process.send_signal(signal.SIGUSR1)
    status, output, told = batch.end()
    assert "saved" in output
    assert status == 1
    assert told == "requeue 42\n"


def test_a_job_that_completes_while_it_is_warned_does_not_come_back(tmp_path: Path) -> None:
    batch = Batch(tmp_path, status=0)
    batch.process.send_signal(signal.SIGUSR1)
    status, output, told = batch.end()
    assert "saved" in output
    assert (status, told) == (0, "")
