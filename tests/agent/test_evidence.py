"""What NVML says of failing devices, as the agent takes it. There is no failing GPU to be had: the library is played here, and its
names and arguments are those of the real one."""

from __future__ import annotations

import inspect
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from strata.core.faults.failures import Failure, classify
from strata.devices import DeviceWatch

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
