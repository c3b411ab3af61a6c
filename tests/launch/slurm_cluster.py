"""Slurm as three nodes on this machine: munged, slurmctld and three slurmd, on loopback, all stopped at the end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support import eventually
from tests.support_programs import program, require_root

NODES = ("n1", "n2", "n3")


class Slurm:
    def __init__(self, folder: Path) -> None:
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, name: str, *arguments: str, cwd: Path | None = None, **env: str) -> str:
        command = [program(name), *arguments]
        done = subprocess.run(
            command, env={**self.environment, **env}, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        words = self.run("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    require_root("a Slurm cluster is started")
    for name in ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo"):
        program(name)
    folder.mkdir(parents=True)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    ports = _free_ports(1 + len(NODES))
    (folder / "slurm.conf").write_text(_configuration(folder, ports[0], ports[1:]))
    cluster = Slurm(folder)
    with contextlib.ExitStack() as running:
        running.callback(_end_left, cluster)  # The last to be done, also where a test is broken off.

        def start(name: str, *arguments: str) -> None:
            output = running.enter_context(open(folder / f"{name}.out", "ab"))
            command = [program(name), *arguments]
            process = subprocess.Popen(command, env=cluster.environment, stdout=output, stderr=output)
            running.callback(_end, process)

        files = (f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed"))
        start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        eventually((folder / "munge.socket").exists, within_s=20, what="munged listens")
        start("slurmctld", "-D")
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        eventually(lambda: _idle(cluster) == len(NODES), within_s=60, what="the nodes are idle", every_s=0.5)
        yield cluster


def _idle(cluster: Slurm) -> int:
    try:
        return cluster.run("sinfo", "--noheader", "--Node", "--format=%t").split().count("idle")
    except AssertionError:
        return 0


def _end_left(cluster: Slurm) -> None:
    """What jobs started outlives the daemons: programs, known by their environment, and those who look after them,
    who write to the cluster's log."""
    configuration = cluster.environment["SLURM_CONF"]
    folder = os.path.dirname(configuration)

    def left() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and (
                    process.environ().get("SLURM_CONF") == configuration
                    or any(file.path.startswith(folder) for file in process.open_files())
                ):
                    found.append(process)
        return found

    def none_left() -> bool:
        for process in left():
            with contextlib.suppress(psutil.Error):
                process.kill()
        return not left()

    eventually(none_left, within_s=20, what="nothing of the cluster is left")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    """In a row: Slurm writes them as a range."""
    for first in range(21_000, 30_000, count):
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return list(range(first, first + count))
    raise AssertionError("no free ports")


def _configuration(folder: Path, port: int, node_ports: list[int]) -> str:
    host = socket.gethostname().split(".")[0]
    return f"""
ClusterName=strata
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
NodeName=n[1-3] NodeHostName={host} NodeAddr=127.0.0.1 Port=[{node_ports[0]}-{node_ports[-1]}] CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
