"""What the kernel and NVML say of workers and devices, as the agent takes it. There is no failing GPU to be had: the library is played
here, and its names and arguments are those of the real one."""

from __future__ import annotations

import inspect
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strata.agent.evidence import OomKills, processes_killed
from strata.core.faults.failures import Failure, classify
from strata.devices import DeviceWatch, device_faults, device_of

nvml = pytest.importorskip("pynvml")


class Library:
    """Two GPUs; the second counts no ECC errors and reports no events."""

    nvmlEventTypeXidCriticalError = nvml.nvmlEventTypeXidCriticalError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    NVML_VOLATILE_ECC = nvml.NVML_VOLATILE_ECC

    def __init__(self) -> None:
        self.errors = 3
        self.xids: deque[int] = deque()
        self.registered: list[int] = []

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return 100 + index

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle - 100

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceRegisterEvents(self, handle: int, eventTypes: int, eventSet: str) -> None:
        assert (eventTypes, eventSet) == (self.nvmlEventTypeXidCriticalError, "set")
        if handle != 100:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, eventSet: str, timeoutms: int) -> Any:
        assert timeoutms == 0, "nobody waits for a device"
        if not self.xids:
            raise nvml.NVMLError(nvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(device=100, eventData=self.xids.popleft())

    def nvmlDeviceGetTotalEccErrors(self, handle: int, errorType: int, counterType: int) -> int:
        assert (errorType, counterType) == (self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC)
        if handle != 100:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        return self.errors


def test_the_library_is_played_as_it_is() -> None:
    played = [name for name in vars(Library) if name.startswith("nvml") and callable(getattr(Library, name))]
    assert len(played) == 8
    for name in played:
        mine = list(inspect.signature(getattr(Library, name)).parameters)[1:]
        assert len(mine) == len(inspect.signature(getattr(nvml, name)).parameters), name
    assert {"device", "eventData"} <= {name for name, *_ in nvml.c_nvmlEventData_t._fields_}


def test_what_is_new_is_said_once_and_makes_the_failure_one_of_the_gpu() -> None:
    library = Library()
    watch = DeviceWatch(library)
    assert library.registered == [100]
    assert watch.take() == {}, "errors of before say nothing about this run"
    library.errors += 2
    library.xids.extend((79, 48))
    faults = watch.take()
    assert faults == {
        0: ["GPU 0: 2 uncorrectable ECC errors (NVML)", "GPU 0: Xid 79 (NVML)", "GPU 0: Xid 48 (NVML)"]
    }
    assert watch.take() == {}
    assert classify(Failure(exit_code=-9, device_faults=tuple(faults[0]))) == "gpu"


def test_a_machine_without_a_driver_has_no_such_evidence() -> None:
    class Broken:
        def nvmlInit(self) -> None:
            raise nvml.NVMLError(nvml.NVML_ERROR_DRIVER_NOT_LOADED)

    assert DeviceWatch(Broken()).take() == {}


def test_the_kernels_log_is_read_from_a_time_on(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    now_us = int(time.monotonic() * 1e6)
    log.write_text(
        "6,1,100,-;NVRM: Xid (PCI:0000:18:00): 79, of an earlier attempt\n"
        f"6,2,{now_us},-;NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus\n"
        " SUBSYSTEM=pci\n"
        f"3,3,{now_us},-;Memory cgroup out of memory: Killed process 8027 (python) total-vm:1320796kB\n"
        f"3,4,{now_us},-;Out of memory: Killed process 9 (python) total-vm:1320796kB\n"
    )
    assert device_faults(1.0, path=str(log)) == (
        "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus",
    )
    if (killed := processes_killed(path=str(log))) is not None:  # In a container the numbers are others.
        assert killed == {8027, 9}
    assert device_faults(1.0, path=str(tmp_path / "none")) == ()
    assert processes_killed(path=str(tmp_path / "none")) is None


def test_counters_say_of_as_many_processes_as_were_killed_that_memory_ran_out() -> None:
    count = 5
    kills = OomKills(lambda: count)
    assert not kills.take(11)
    count += 2
    assert [kills.take(pid) for pid in (11, 12, 13)] == [True, True, False]


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, ["0", "1", ""]),
        ("", ["", "", ""]),
        ("-1", ["", "", ""]),
        ("3,GPU-5d6f", ["3", "GPU-5d6f", ""]),
        ("1,-1,0", ["1", "", ""]),
    ],
)
def test_a_worker_has_a_device_of_its_own_or_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, devices: list[str]
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    driver = tmp_path / "version"
    assert device_of(0, driver=str(driver)) == "", "there is no driver"
    driver.touch()
    for name in ("0000:18:00.0", "0000:2a:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert [device_of(rank, driver=str(driver)) for rank in range(3)] == devices
