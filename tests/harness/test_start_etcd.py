"""The script starts one etcd, stops only its own, and says what is the case."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rendezvous.etcd_server import EtcdServer, free_port
from tests.support import eventually
from tests.support_programs import program

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytestmark = pytest.mark.etcd


class Script:
    def __init__(self, folder: Path) -> None:
        self.env = {
            **os.environ,
            "ETCD_PORT": str(free_port()),
            "ETCD_PEER_PORT": str(free_port()),
            "ETCD_DATA_DIR": str(folder / "etcd"),
            "ETCD_START_TIMEOUT_S": "100",
        }

    def __call__(self, *words: str, **env: str) -> tuple[int, str]:
        done = subprocess.run(
            [str(SCRIPTS / "start_etcd.sh"), *words],
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    program("etcd")
    script = Script(tmp_path)
    yield script
    script("clean")


def test_start_status_restart_stop_clean(script: Script, tmp_path: Path) -> None:
    assert script("status") == (3, "etcd is not running\n")
    code, said = script("start")
    assert (code, "is running at 127.0.0.1" in said) == (0, True)
    assert "already running" in script("start")[1]
    # An etcd has a few seconds to answer, and says itself that it is not well when its disk is slow.
    eventually(lambda: script("status")[0] == 0, within_s=60, what="it is said to be healthy")
    assert "embed" in script("logs")[1]
    key = [program("etcdctl"), f"--endpoints=127.0.0.1:{script.env['ETCD_PORT']}"]
    key += ["--command-timeout=60s", "--dial-timeout=60s"]
    env = {**os.environ, "ETCDCTL_API": "3"}
    subprocess.run([*key, "put", "kept", "yes"], env=env, check=True, capture_output=True)
    assert script("restart")[0] == 0
    assert b"yes" in subprocess.run([*key, "get", "kept"], env=env, check=True, capture_output=True).stdout
    assert script("stop") == (0, "etcd is stopped\n")
    assert script("stop") == (0, "etcd is not running\n")
    assert script("clean")[0] == 0
    assert not (tmp_path / "etcd").exists()


def test_it_neither_hides_nor_stops_an_etcd_that_it_did_not_start(script: Script, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = EtcdServer(tmp_path / "other")
    other.start()
    try:
        port = {"ETCD_PORT": str(other.port)}

        def is_left_alone() -> bool:
            code, said = script("start", **port)
            return code == 1 and "did not start" in said

        # Whether another is there is known by its health, which it may not have at every moment on a busy machine.
        eventually(is_left_alone, within_s=60, what="it is seen that another answers there")
        eventually(lambda: script("status", **port)[0] == 0, within_s=60, what="it is said to be healthy")
        assert script("stop", **port) == (0, "etcd is not running\n")
        eventually(other.healthy, within_s=60, what="it is not stopped")
    finally:
        other.stop()


def test_a_reused_process_id_is_not_killed(script: Script, tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    (tmp_path / "etcd" / "etcd.pid").write_text(f"{os.getpid()} 1\n")  # ours, but started at another time
    assert script("stop") == (0, "etcd is not running\n")


def test_without_etcd_or_docker_it_says_what_to_install(script: Script) -> None:
    code, said = script("start", ETCD_BIN="no-such-etcd", DOCKER_HOST="unix:///nowhere")
    assert code == 1
    assert "apt-get install etcd-server" in said
    assert "--rdzv-backend=strata" in said


def test_a_start_that_cannot_work_fails_with_the_servers_own_words(script: Script, tmp_path: Path) -> None:
    code, said = script("start", ETCD_BIN="/bin/false")
    assert code == 1
    assert "ended while starting" in said
    assert not (tmp_path / "etcd" / "etcd.pid").exists()


def test_unknown_words_are_refused_with_usage(script: Script) -> None:
    code, said = script("launch")
    assert (code, "start|stop|restart|status|logs" in said) == (2, True)


def test_launcher_prints_seconds_and_a_clean_store() -> None:
    command = [str(SCRIPTS / "launch_training.sh"), "--dry-run", "--backend", "strata", "--nnodes", "1:4"]
    said = subprocess.run(
        [*command, "--", "training.lr=1e-3"], capture_output=True, text=True, check=True
    ).stdout
    for part in (
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        "--rdzv-backend=strata",
        "--rdzv-endpoint=localhost:50051",
        "keep_alive_interval=1",
        "last_call_timeout=1",
        "-m elastic_harness.train --config examples/configs/small.yaml training.lr=1e-3",
    ):
        assert part in said
    wrong = subprocess.run([*command, "--backend", "zookeeper"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, "valid options: c10d, strata, etcd, etcd-v2" in wrong.stderr) == (2, True)


def test_launcher_takes_the_common_variables_and_its_flags_win() -> None:
    given = {
        "NNODES": "3",
        "MIN_NODES": "2",
        "MAX_NODES": "4",
        "NPROC_PER_NODE": "8",
        "RDZV_ENDPOINT": "head:2379",
        "RDZV_ID": "mine",
        "CONFIG_FILE": "my.yaml",
    }
    command = [str(SCRIPTS / "launch_training.sh"), "--dry-run", "--id", "flag"]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **given}
    ).stdout
    for part in (
        "--nnodes=2:4",
        "--nproc-per-node=8",
        "--rdzv-endpoint=head:2379",
        "--rdzv-id=flag",
        "--config my.yaml",
    ):
        assert part in said
