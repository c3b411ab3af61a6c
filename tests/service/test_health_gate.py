"""A machine that is not fit to train does not join: it is quarantined with the reason, and another takes its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from strata.agent.health_gate import is_suspicious, mode
from strata.core.faults.failures import Failure, WorkerError
from strata.core.messages import ReportHealth
from strata.diagnostics import health
from strata.rpc.cas import CoordinatorCasClient
from tests.support import Coordinator, as_machine, may_name_machines
from tests.training.test_drain import STEPS, Machines
from tests.training.test_recoverable_faults import assert_trained_once

ROOT = Path(__file__).parents[2]

PROGRAM = "import socket; print('TRAINED ON', socket.gethostname(), flush=True)"
PLUGIN = """
def check():
    import os, socket
    warm = os.environ.get('COOLING_FAILED', '')
    if socket.gethostname() == 'bad' and (not warm or os.path.exists(warm)):
        raise RuntimeError('the cooling water is warm')
    return {'water_celsius': 21.5}
"""
BUS_ERROR = """
import os, signal
fails = folder / 'fails'
if os.environ['MACHINE'] == 'bad' and fails.exists():
    fails.unlink()
    os.kill(os.getpid(), signal.SIGBUS)
"""


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path / "coordinator").start()
    yield server
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.output)


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    """A package with a check of its own, as pip would install it."""
    folder = tmp_path / "plugin"
    (folder / "cooling-1.dist-info").mkdir(parents=True)
    (folder / "cooling.py").write_text(PLUGIN)
    (folder / "cooling-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: cooling\nVersion: 1\n"
    )
    (folder / "cooling-1.dist-info" / "entry_points.txt").write_text(
        f"[{health.GROUP}]\ncooling = cooling:check\n"
    )
    return str(folder)


def agent(
    folder: Path, coordinator: Coordinator, name: str, plugin: str, *flags: str, nnodes: str = "1"
) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "strata.launch.agent",
        f"--nnodes={nnodes}",
        "--nproc-per-node=1",
        *flags,
    ]
    command += [f"--rdzv-endpoint={coordinator.address}", f"--rdzv-id=of-{name}", "--local-addr=127.0.0.1"]
    return subprocess.Popen(
        [*command, str(folder / "program.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": plugin, "STRATA_TOKEN": "", "STRATA_MEMORY_ROOT": str(folder)},
        preexec_fn=as_machine(name),
    )


@pytest.mark.timeout(300)
def test_a_machine_that_is_not_fit_is_quarantined_and_one_that_is_trains(
    coordinator: Coordinator, tmp_path: Path, plugin: str
) -> None:
    if not may_name_machines():
        pytest.skip("this user may not name machines")
    bad, good = (agent(tmp_path, coordinator, name, plugin) for name in ("bad", "good"))
    said = bad.communicate(timeout=240)[0]
    assert bad.returncode == 1, said
    assert "The machine 'bad' is not fit to train: cooling: RuntimeError: the cooling water is warm" in said
    assert "strata quarantine clear bad" in said
    assert "TRAINED" not in said
    said = good.communicate(timeout=240)[0]
    assert good.returncode == 0, said
    assert "TRAINED ON good" in said
    (held,) = coordinator.get("/api/quarantine")
    assert (held["host"], held["by"]) == ("bad", "its health checks")
    found = {one["host"]: one for one in coordinator.get("/api/machines")}
    assert found["good"]["failed"] == {}
    assert found["good"]["measured"]["cooling.water_celsius"] == 21.5
    assert found["good"]["measured"]["free_memory_gib"] > 0
    assert found["good"]["measured"].get("disk_mb_s", 1.0) > 0  # A busy disk may not have answered in time.
    assert found["good"]["reason"] == "before joining"
    coordinator.kill()
    coordinator.start()
    assert [one["host"] for one in coordinator.get("/api/quarantine")] == ["bad"]
    assert len(coordinator.get("/api/machines")) == 2


@pytest.mark.timeout(600)
def test_spare_takes_the_place_of_a_machine_that_is_found_unfit_after_a_suspicious_failure(
    coordinator: Coordinator, tmp_path: Path, plugin: str
) -> None:
    if not may_name_machines():
        pytest.skip("this user may not name machines")
    with ExitStack() as stack:
        machines = Machines(stack, coordinator, tmp_path, nnodes="2", each_step=BUS_ERROR)
        warm = machines.folder / "warm"
        gate = {"COOLING_FAILED": str(warm), "PYTHONPATH": f"{plugin}{os.pathsep}{ROOT}"}
        good, bad = machines.start("good", **gate), machines.start("bad", **gate)
        good.await_line(lambda line: line.get("world") == 2, count=2)
        spare = machines.start("spare", **gate)
        good.await_line(lambda line: "wait" in line)  # It stands by, at the entrance of its function.
        warm.touch()
        (machines.folder / "fails").touch()
        assert bad.process.wait(120) == 128 + signal.SIGTERM, good.output()
        good.await_line(lambda line: line.get("world") == 2 and line["machine"] == "spare")
        machines.slow.unlink()
        good.finish()
        spare.finish()
        (held,) = coordinator.get("/api/quarantine")
        assert (held["host"], held["by"]) == ("bad", "its health checks")
        assert "cooling: RuntimeError: the cooling water is warm" in held["reason"]
        found = {one["host"]: one for one in coordinator.get("/api/machines")}
        assert found["bad"]["reason"].startswith("after a failure: "), found["bad"]
        assert "SIGBUS" in found["bad"]["reason"]
        assert found["spare"]["failed"] == {}
    assert len(machines.processes(good, "good")) == 1, "it has stayed"
    assert_trained_once(good, STEPS)


def test_the_coordinator_says_why_a_slow_machine_is_not_to_join(coordinator: Coordinator) -> None:
    client = CoordinatorCasClient(coordinator.address, timeout_s=30)

    def report(host: str, pcie_gb_s: float, *, clock_s: float | None = None) -> str:
        return client.report_health(
            ReportHealth(
                host=host,
                kind="NVIDIA H200",
                measured={"pcie_gb_s": pcie_gb_s},
                failed={},
                clock_s=time.time() if clock_s is None else clock_s,
                seconds=1.0,
                reason="before joining",
            )
        )

    try:
        assert [report(f"m{number}", 50.0) for number in range(3)] == ["", "", ""]
        assert "12, the median of 3 other machines is 50" in report("slow", 12.0)
        assert "clock" in report("late", 50.0, clock_s=time.time() - 7200)
    finally:
        client.close()
    assert {one["host"] for one in coordinator.get("/api/quarantine")} == {"slow", "late"}


# --- the checks themselves --------------------------------------------------------------------------------------------


def test_this_machine_is_examined_and_says_what_it_measured() -> None:
    found = health.examine_in_subprocess()
    assert not {"memory", "clock", "processor", "loopback"} & found.failed.keys(), found
    assert found.measured["free_memory_gib"] > 0
    again = health.Findings.from_json(found.to_json())
    assert again == found


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = health.whole_numbers

    def wrong(size: int) -> object:
        left, other, product = right(size)
        product[3, 4] += 1
        return left, other, product

    monkeypatch.setattr(health, "whole_numbers", wrong)
    with pytest.raises(health.Unfit, match="multiplies matrices incorrectly"):
        health.check_processor(health.Findings())


def test_whole_numbers_are_multiplied_exactly() -> None:
    left, right, product = health.whole_numbers(64)
    assert bool((left @ right == product).all())
    assert int(product.abs().max()) > 0


def test_shared_memory_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LEAST_SHARED_BYTES", 1 << 60)
    with pytest.raises(health.Unfit, match="MiB are free in"):
        health.check_shared_memory(health.Findings())


class Nvml:
    """As the driver's library answers on a machine with one GPU."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0

    def __init__(
        self, *, errors: int = 0, remapped: tuple[int, int, bool, bool] = (0, 0, False, False)
    ) -> None:
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetCount = lambda: 1
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        self.nvmlDeviceGetTotalEccErrors = lambda *_: errors
        self.nvmlDeviceGetRemappedRows = lambda _: remapped


@pytest.mark.parametrize(
    ("nvml", "said"),
    [
        (Nvml(errors=2), "GPU 0 has 2 uncorrectable ECC errors"),
        (Nvml(remapped=(1, 0, False, True)), "could not remap a bad row"),
        (Nvml(remapped=(1, 0, True, False)), "needs a reset"),
    ],
)
def test_what_nvml_says_of_a_failing_device(nvml: Nvml, said: str) -> None:
    with pytest.raises(health.Unfit, match=said):
        health.check_nvml(health.Findings(), nvml)
    health.check_nvml(health.Findings(), Nvml())


def test_only_xids_of_the_device_itself_count() -> None:
    lines = [
        "NVRM: Xid (PCI:0000:3b:00): 13, pid=99, a program's mistake",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=812, GPU has fallen off the bus.",
    ]
    assert health.fatal_xids(0.0, lines=iter(lines)) == [lines[1]]


def test_a_device_that_hangs_is_a_fault_and_a_busy_disk_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def hangs(*_: object) -> None:
        done.wait(60)

    monkeypatch.setattr(health, "HANG_S", 0.3)
    monkeypatch.setattr(health, "check_gpus", hangs)
    monkeypatch.setattr(health, "check_disk", hangs)
    found = health.examine(limit_s=0.2)
    done.set()
    assert found.failed["gpu"] == "it did not answer within 0.3 s"
    assert "disk" not in found.failed


@pytest.mark.parametrize(
    ("failure", "suspicious"),
    [
        (Failure(exit_code=-7), True),
        (Failure(exit_code=-9), False),
        (
            Failure(
                exit_code=1, error=WorkerError(type="RuntimeError", message="CUDA error: uncorrectable ECC")
            ),
            True,
        ),
        (Failure(exit_code=1, error=WorkerError(type="KeyError", message="lr")), False),
    ],
)
def test_after_which_failures_a_machine_is_examined_again(failure: Failure, suspicious: bool) -> None:
    assert is_suspicious(failure) is suspicious


def test_a_setting_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_HEALTH", "maybe")
    with pytest.raises(ValueError, match="write auto, on or off"):
        mode()
