"""This machine's GPUs, as the kernel and the driver report them: faults, and which one a worker has. With the kernel's log.

Whatever cannot be read here (no permission, no driver) is simply not reported. Needs no torch.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from typing import Any

from strata.core.faults.failures import LINES_KEPT
from strata.core.text import counted

KERNEL_LOG = "/dev/kmsg"
DRIVER = "/proc/driver/nvidia/version"
"""It is there where NVIDIA's driver is."""
XIDS_KEPT = 20
_XID = re.compile(r"NVRM: Xid|NVRM: GPU .* fallen off|uncorrectable ECC", re.IGNORECASE)
_RECORD_BYTES = 8192


def device_faults(since_mono_s: float, *, path: str = KERNEL_LOG) -> tuple[str, ...]:
    """The kernel's newest lines about GPUs that failed, since then."""
    return tuple(deque(kernel_lines(_XID, since_mono_s, path=path) or (), maxlen=LINES_KEPT))


def kernel_lines(
    pattern: re.Pattern[str], since_mono_s: float, *, path: str = KERNEL_LOG
) -> list[str] | None:
    """Lines of the kernel's log since then in which the pattern is found; None where the log cannot be read."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found = []
    try:
        for record in _records(log):
            for line in record.splitlines():
                facts, _, text = line.partition(";")
                if pattern.search(text) and int(facts.split(",")[2]) / 1e6 >= since_mono_s:
                    found.append(text)
    except (ValueError, IndexError):
        pass  # Not a record of the kernel's.
    finally:
        os.close(log)
    return found


def _records(log: int) -> Iterator[str]:
    """Each read is one: `6,339,5140900,-;text`."""
    with suppress(OSError):  # There is none left.
        while True:
            # One that was overwritten meanwhile raises; the next read is of the oldest that is left.
            with suppress(BrokenPipeError):
                record = os.read(log, _RECORD_BYTES)
                if not record:
                    return
                yield record.decode(errors="replace")


class DeviceWatch:
    """What NVML says of this machine's GPUs since it was made: critical Xids, and uncorrectable ECC errors that are new.

    Where the kernel's log cannot be read, as in most containers, this still can. `nvml` is the library; None: whichever is there.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._devices: list[Any] = []
        self._events: Any = None
        self._errors: dict[int, int] = {}
        if not os.path.exists(DRIVER) and nvml is None:
            return
        with suppress(Exception):  # No package, no driver, no permission: then there is no such evidence.
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._devices = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            self._errors = {index: self._uncorrected(index) for index in range(count)}
            self._events = self._nvml.nvmlEventSetCreate()
            for device in self._devices:
                with suppress(Exception):  # Not every device reports events.
                    self._nvml.nvmlDeviceRegisterEvents(
                        device, self._nvml.nvmlEventTypeXidCriticalError, self._events
                    )

    def take(self) -> dict[int, list[str]]:
        """By number of the device, what is new since the last time."""
        found: dict[int, list[str]] = {}
        for index in range(len(self._devices)):
            errors = self._uncorrected(index)
            if errors > self._errors.get(index, errors):
                new = errors - self._errors[index]
                found.setdefault(index, []).append(
                    f"GPU {index}: {counted(new, 'uncorrectable ECC error')} (NVML)"
                )
            self._errors[index] = errors
        for _ in range(XIDS_KEPT if self._events is not None else 0):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                index = self._nvml.nvmlDeviceGetIndex(event.device)
            except Exception:  # There is no other one.
                break
            found.setdefault(index, []).append(f"GPU {index}: Xid {event.eventData} (NVML)")
        return found

    def _uncorrected(self, index: int) -> int:
        """Since the driver was loaded; 0 where the device does not count them."""
        with suppress(Exception):
            return int(
                self._nvml.nvmlDeviceGetTotalEccErrors(
                    self._devices[index],
                    self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                    self._nvml.NVML_VOLATILE_ECC,
                )
            )
        return 0


def device_of(local_rank: int, *, driver: str = DRIVER) -> str:
    """Which of the machine's GPUs a worker has, if each worker has one of its own; else empty."""
    if not os.path.exists(driver):
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        try:
            count = len(os.listdir(os.path.join(os.path.dirname(driver), "gpus")))
        except OSError:  # How many there are is not known.
            return str(local_rank)
        return str(local_rank) if local_rank < count else ""
    # CUDA takes what comes before the first name of none.
    names = [*takewhile(lambda name: name not in ("", "-1"), map(str.strip, visible.split(",")))]
    return names[local_rank] if local_rank < len(names) else ""
