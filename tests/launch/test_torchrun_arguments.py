"""`strata torchrun`: torchrun's flags with other defaults; the user's win."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strata.launch.arguments import MAX_RESTARTS, parse
from strata.launch.torchrun import TorchrunSpec
from tests.support import eventually


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTHON_EXEC"):
        monkeypatch.setenv(name, "")  # So that it is as before afterwards.
        monkeypatch.delenv(name)


def test_without_flags_one_machine_needs_no_coordinator() -> None:
    args = parse(["train.py", "--lr", "1"])
    assert (args.rdzv_backend, args.rdzv_endpoint, args.start_method) == ("strata", "", "forkserver")
    assert (args.max_restarts, args.monitor_interval, args.nproc_per_node) == (MAX_RESTARTS, 0.1, "1")
    assert "last_call_timeout=1" in args.rdzv_conf
    assert args.rdzv_id != parse(["train.py"]).rdzv_id
    assert (args.training_script, args.training_script_args) == ("train.py", ["--lr", "1"])
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "OMP_NUM_THREADS" not in os.environ


def test_flags_of_the_user_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MONITOR_INTERVAL", "7")
    args = parse(
        [
            *(
                "--max-restarts=3",
                "--rdzv-id=mine",
                "--rdzv-conf=last_call_timeout=9",
                "--start-method=spawn",
            ),
            *("--nproc-per-node=2", "train.py"),
        ]
    )
    assert (args.max_restarts, args.rdzv_id, args.start_method, args.monitor_interval) == (
        3,
        "mine",
        "spawn",
        7.0,
    )
    assert args.rdzv_conf.endswith(",last_call_timeout=9")
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_spares_are_ours_and_what_stands_behind_the_script_is_the_scripts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = parse(["--spares=2", "train.py", "--spares", "7"])
    assert (args.spares, args.training_script_args) == (2, ["--spares", "7"])
    assert parse(["train.py"]).spares == 0
    for words in (["--spares=-1", "train.py"], ["--spares=1", "--virtual-local-rank", "train.py"]):
        with pytest.raises(SystemExit):
            parse(words)
        assert "--spares" in capsys.readouterr().err
    assert "--spares=3" in TorchrunSpec(run_id="r", arguments=["train.py"], spares=3).command()
    assert not any(
        word.startswith("--spares") for word in TorchrunSpec(run_id="r", arguments=["train.py"]).command()
    )


def test_an_endpoint_is_the_coordinators_unless_a_back_end_is_named() -> None:
    args = parse(["--nnodes=1:4", "--rdzv-endpoint=head:50051", "train.py"])
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("strata", "head:50051")
    args = parse(["--nnodes=2", "--rdzv-endpoint=head:2379", "--rdzv-backend=etcd", "train.py"])
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("etcd", "head:2379")
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_master_is_where_the_workers_of_one_machine_meet_and_of_several_a_static_rendezvous() -> None:
    args = parse(["--master-addr=127.0.0.2", "--master-port=29555", "train.py"])
    assert args.rdzv_backend == "strata"
    assert "master_addr=127.0.0.2,master_port=29555" in args.rdzv_conf
    args = parse(["--nnodes=2", "--node-rank=1", "--master-addr=head", "--master-port=29555", "train.py"])
    assert (args.rdzv_backend, args.master_addr, args.master_port) == ("static", "head", 29555)


def test_standalone_is_this_machine_whatever_else_is_said() -> None:
    args = parse(["--standalone", "--rdzv-backend=etcd", "--rdzv-endpoint=head:2379", "train.py"])
    assert (args.rdzv_backend, args.rdzv_endpoint, args.standalone) == ("strata", "", False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nnodes=2", "train.py"], "strata serve"),
        (["--nnodes=1:4", "--rdzv-backend=strata", "train.py"], "--rdzv-endpoint=HOST:50051"),
        (["--nnodes=two", "train.py"], "two"),
        (["--nproc-per-node=most", "train.py"], "most"),
        (["--no-such-flag", "train.py"], "--no-such-flag"),
        ([], "training_script"),
    ],
)
def test_a_call_that_cannot_work_says_what_is_needed(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def torchrun(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "strata.cli.main", "torchrun", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


SHOW = """
import os, sys
import beside
# In one piece: with --no-python nothing keeps the lines of two ranks apart.
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
sys.stdout.write(f"rank {rank} of {world} {sys.argv[1:]} {__name__} {beside.there}\\n")
"""


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc-per-node=2", "folder/train.py"],
        ["--standalone", "--nproc-per-node=2", "--run-path", "folder/train.py"],
        ["--start-method=spawn", "--nproc-per-node=2", "folder/train.py"],
        ["--nproc-per-node=2", "-m", "package.train"],
        ["--nproc-per-node=2", "--no-python", sys.executable, "folder/train.py"],
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_a_program_runs_as_python_would_run_it(tmp_path: Path, words: list[str]) -> None:
    for folder in ("folder", "package"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(SHOW)
    (tmp_path / "folder" / "beside.py").write_text("there = 'yes'")
    if "-m" in words:
        (tmp_path / "beside.py").write_text("there = 'yes'")
    ran = torchrun(*words, "--lr", "two words", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == [
        f"rank {rank} of 2 ['--lr', 'two words'] __main__ yes" for rank in (0, 1)
    ]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_typo_ends_the_run_with_the_scripts_own_words(tmp_path: Path, method: str) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nprint('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\nprnt('typo')\n"
    )
    ran = torchrun("--nproc-per-node=2", f"--start-method={method}", "train.py", cwd=tmp_path)
    assert ran.returncode == 1
    # One that fails is enough: the other may not have got as far.
    assert set(ran.stdout.splitlines()) == {"attempt 0", "attempt 1"}
    *_, reason, one, two, three, _, last = ran.stderr.splitlines()
    assert reason.startswith("strata torchrun: not started again: the same error came back")
    assert one == "Traceback (most recent call last):"
    assert two.endswith('train.py", line 3, in <module>')
    assert three == "    prnt('typo')"
    assert last == "NameError: name 'prnt' is not defined"


def test_the_status_of_the_script_is_the_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nsys.exit(7)\n")
    ran = torchrun("--max-restarts=0", "train.py", cwd=tmp_path)
    assert ran.returncode == 7
    assert "Traceback" not in ran.stderr


WAIT = """
import os, signal, time
def leave(number, frame):
    print("saving", os.getpid(), flush=True)
    time.sleep(0.5 if os.environ["HOW"] == "once" else 600)
    print("saved", flush=True)
    raise SystemExit(0)
signal.signal(signal.SIGINT, leave)
print("waiting", os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["once", "twice"])
def test_ctrl_c_reaches_each_worker_once_and_a_second_one_ends_at_once(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(WAIT)
    output = tmp_path / "output"
    with open(output, "wb") as file:
        run = subprocess.Popen(
            [sys.executable, "-m", "strata.cli.main", "torchrun", "--nproc-per-node=2", "train.py"],
            cwd=tmp_path,
            env={**os.environ, "HOW": how},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        eventually(lambda: output.read_text().count("waiting") == 2, within_s=120, what="the workers")
        os.killpg(run.pid, signal.SIGINT)  # As a terminal does: everybody in the group.
        eventually(lambda: output.read_text().count("saving") >= 2, within_s=60, what="the signal")
        if how == "twice":
            os.killpg(run.pid, signal.SIGINT)
        assert run.wait(60) == 130
    finally:
        run.kill()
    text = output.read_text()
    assert text.count("saving") == 2
    assert text.count("saved") == (2 if how == "once" else 0)
    pids = [int(line.split()[1]) for line in text.splitlines() if line.startswith("waiting")]
    eventually(lambda: not any(map(_lives, pids)), within_s=30, what="the workers to end")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_common_variables_count_as_flags_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "NNODES": "1:4",
        "NPROC_PER_NODE": "2",
        "RDZV_BACKEND": "etcd",
        "RDZV_ENDPOINT": "head:2379",
        "RDZV_ID": "mine",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    args = parse(["train.py"])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("1:4", "2", "etcd")
    assert (args.rdzv_endpoint, args.rdzv_id) == ("head:2379", "mine")
    args = parse(["--nnodes=1", "--rdzv-backend=strata", "--rdzv-endpoint=", "--rdzv-id=other", "train.py"])
    assert (args.nnodes, args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id) == ("1", "strata", "", "other")
    monkeypatch.setenv("PET_RDZV_ID", "torchs")
    assert parse(["train.py"]).rdzv_id == "torchs"
    monkeypatch.setenv("MAX_NODES", "8")
    monkeypatch.setenv("NNODES", "2")
    assert parse(["train.py"]).nnodes == "2:8"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: training_script"),
        (["nowhere.py"], "error: there is no script nowhere.py"),
        (["--nnodes=x", "nowhere.py"], "--nnodes=x: give a number of machines, or a range, such as 1:4"),
        (["--nproc-per-node=0", "nowhere.py"], "--nproc-per-node=0: give at least one worker"),
    ],
)
def test_a_call_that_cannot_work_is_answered_in_a_sentence(words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "strata.launch.agent", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_agent_of_our_own_names_its_rendezvous_whatever_the_variables_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NNODES", "3")
    monkeypatch.setenv("RDZV_ENDPOINT", "head:2379")
    spec = TorchrunSpec(run_id="job", arguments=["train.py"], rdzv_endpoint="")
    args = parse(spec.command()[3:])
    assert (args.nnodes, args.rdzv_endpoint) == ("1", "")


def test_lines_of_workers_that_print_at_once_are_not_mixed(tmp_path: Path) -> None:
    """In pieces, as `print` with several arguments writes where nothing is buffered."""
    (tmp_path / "train.py").write_text(
        "for _ in range(2000):\n    print('one', 'two', 'three', flush=True)\n"
    )
    for start in ("--start-method=spawn", "--start-method=forkserver"):
        ran = torchrun(start, "--nproc-per-node=2", "train.py", cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert set(ran.stdout.splitlines()) == {"one two three"}
