"""Whether this machine is fit to train, in three seconds: its GPUs compute right, its memory keeps what it was given, nothing is full.

Each check says what it measured and, where that alone is a fault, why. Rates are not judged here: they are compared with those of the
other machines (`strata.core.fleet.health`). Checks run side by side, each for a fraction of a second. What a busy machine has not
answered when the time is over is not known; of a device it is a fault by itself (`HANG_S`), because one that hangs does not say so.

`examine` runs them here, which opens the devices: an agent calls `examine_in_subprocess`, in a process of their own, so that
nothing of it stays. Others' checks are entry points of the group `strata.health_checks`: functions without arguments that
return nothing, or numbers by name, and raise `Unfit`, or anything else, with what is wrong.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from strata.devices import DRIVER, device_faults

GROUP = "strata.health_checks"
"""Of entry points."""
LIMIT_S = 3.0
"""For all checks together, from when the devices are open."""
HANG_S = 15.0
"""A device, or a third party's check, that has not answered after so long does not."""
START_LIMIT_S = 120.0
"""For a process that has to import torch and open them; several GPUs take seconds."""
MEASURE_S = 0.15
"""So long one rate is measured."""
GIB = float(1 << 30)
LEAST_MEMORY_BYTES = 256 << 20
LEAST_SHARED_BYTES = 32 << 20
OLDEST_CLOCK_S = 1_700_000_000.0
MATMUL, CPU_MATMUL = 2048, 256
PATTERN_BYTES, CPU_PATTERN_BYTES = 512 << 20, 16 << 20
PCIE_BYTES = 64 << 20
DISK_BYTES = 8 << 20
FATAL_XIDS = frozenset({48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})
"""Of the device itself; most others are what a program did."""
XID_WITHIN_S = 3600.0
UNHURRIED = frozenset({"memory", "shared memory", "clock", "processor", "disk", "loopback"})
"""What takes long on a machine that does other things too."""
PATTERNS = (0x5555555555555555, -0x5555555555555556)


class Unfit(Exception):
    """What is wrong with this machine."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """What was found. Filled by several threads, each under names of its own."""

    kind: str = "cpu"
    """The name of its GPUs; machines are compared with those of the same kind."""
    measured: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def slower(self, name: str, value: float) -> None:
        """Of several devices the slowest counts."""
        self.measured[name] = min(value, self.measured.get(name, value))

    def to_json(self) -> str:
        return json.dumps(
            {
                "kind": self.kind,
                "measured": self.measured,
                "failed": self.failed,
                "seconds": self.seconds,
            }
        )

    @staticmethod
    def from_json(text: str) -> Findings:
        return Findings(**json.loads(text))


Check = Callable[[Findings], None]


def examine(*, folder: str | os.PathLike[str] | None = None, limit_s: float = LIMIT_S) -> Findings:
    """All checks, here. `folder` is where the disk is measured; by default the one for temporary files."""
    found = Findings()
    with suppress(Exception):
        _open_devices(found)
    began_s = time.monotonic()
    checks: dict[str, Check] = {
        "memory": check_memory,
        "shared memory": check_shared_memory,
        "clock": check_clock,
        "processor": check_processor,
        "disk": lambda found: check_disk(found, Path(folder or tempfile.gettempdir())),
        "loopback": check_loopback,
        "gpu": check_gpus,
        "nvml": check_nvml,
        **user_checks(),
    }
    threads = {
        name: threading.Thread(target=_run, args=(name, check, found), name=f"check {name}", daemon=True)
        for name, check in checks.items()
    }
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        wait_s = limit_s if name in UNHURRIED else HANG_S
        thread.join(max(0.0, began_s + wait_s - time.monotonic()))
        if thread.is_alive() and name not in UNHURRIED:
            found.failed.setdefault(name, f"it did not answer within {HANG_S:g} s")
    found.seconds = time.monotonic() - began_s
    return Findings(
        kind=found.kind, measured=dict(found.measured), failed=dict(found.failed), seconds=found.seconds
    )


def _run(name: str, check: Check, found: Findings) -> None:
    try:
        check(found)
    except Unfit as unfit:
        found.failed[name] = str(unfit)
    except Exception as error:
        found.failed[name] = f"{type(error).__name__}: {error}"


def examine_in_subprocess(*, folder: str | None = None, limit_s: float = LIMIT_S) -> Findings:
    """In a process of its own, from the fork server where that runs: nothing of it stays, and one that hangs is ended."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    began_s = time.monotonic()
    process = context.Process(target=_examine_into, args=(sender, folder, limit_s), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(START_LIMIT_S + HANG_S):
            return Findings.from_json(receiver.recv())
        why = f"its checks did not answer within {START_LIMIT_S + HANG_S:g} s"
    except EOFError:
        process.join(1.0)
        why = f"the process that checked it ended with status {process.exitcode}"
    finally:
        receiver.close()
        if process.is_alive():
            process.kill()
        process.join()
    return Findings(failed={"checks": why}, seconds=time.monotonic() - began_s)


def _examine_into(sender: Any, folder: str | None, limit_s: float) -> None:
    sender.send(examine(folder=folder, limit_s=limit_s).to_json())
    sender.close()
    os._exit(0)  # A thread that hangs in a driver would hold up the end.


def user_checks() -> dict[str, Check]:
    found: dict[str, Check] = {}
    for point in metadata.entry_points(group=GROUP):
        found[point.name] = _user_check(point)
    return found


def _user_check(point: metadata.EntryPoint) -> Check:
    def check(found: Findings) -> None:
        answer = point.load()()
        if isinstance(answer, Mapping):
            for name, value in answer.items():
                found.measured[f"{point.name}.{name}"] = float(value)

    return check


# --- the machine ------------------------------------------------------------------------------------------------


def check_memory(found: Findings) -> None:
    free_bytes = _free_memory_bytes()
    if free_bytes is None:
        return
    found.measured["free_memory_gib"] = free_bytes / GIB
    if free_bytes < LEAST_MEMORY_BYTES:
        raise Unfit(f"only {free_bytes / (1 << 20):.0f} MiB of memory are free")


def _free_memory_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def check_shared_memory(found: Findings) -> None:
    from strata.shared_memory import memory_root

    root = memory_root()
    try:
        stat = os.statvfs(root if root.exists() else root.parent)
    except OSError as error:
        raise Unfit(f"{root} cannot be used: {error.strerror}") from None
    free_bytes = stat.f_bavail * stat.f_frsize
    found.measured["free_shared_gib"] = free_bytes / GIB
    if free_bytes < LEAST_SHARED_BYTES:
        raise Unfit(f"only {free_bytes / (1 << 20):.0f} MiB are free in {root}")


def check_clock(found: Findings) -> None:
    """How far it is off the coordinator's, that one sees."""
    if time.time() < OLDEST_CLOCK_S:
        raise Unfit(f"the clock shows {time.strftime('%Y-%m-%d', time.gmtime())}")
    drifts_s = [_drift_s() for _ in range(3)]
    if min(drifts_s) > 1.0:  # Once, this thread may have stood still between its looks at the two clocks.
        raise Unfit(f"the clock jumped by {min(drifts_s):.1f} s and more during the check")


def _drift_s() -> float:
    """How differently the wall clock and the monotonic one have moved in a moment."""
    wall_s, mono_s = time.time(), time.monotonic()
    time.sleep(0.02)
    return abs((time.time() - wall_s) - (time.monotonic() - mono_s))


def check_disk(found: Findings, folder: Path) -> None:
    block = os.urandom(1 << 20) * (DISK_BYTES >> 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        began_s = time.monotonic()
        written = 0
        while written < DISK_BYTES * 4 and time.monotonic() - began_s < MEASURE_S:
            written += file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.monotonic() - began_s
        file.seek(0)
        if file.read(DISK_BYTES) != block:
            raise Unfit(f"data read from {folder} differs from what was written")
    found.measured["disk_mb_s"] = written / seconds / 1e6


def check_processor(found: Findings) -> None:
    """It multiplies whole numbers right, and memory keeps patterns."""
    import torch

    left, right, expected = whole_numbers(CPU_MATMUL)
    if not torch.equal(left.double() @ right.double(), expected.double()):
        raise Unfit("the processor multiplies matrices incorrectly")
    words = torch.empty(CPU_PATTERN_BYTES // 8, dtype=torch.int64)
    began_s = time.monotonic()
    for pattern in PATTERNS:
        words.fill_(pattern)
        if not bool((words == pattern).all()):
            raise Unfit("memory does not keep what is written to it")
    seconds = time.monotonic() - began_s
    found.measured["memory_gb_s"] = 2 * len(PATTERNS) * CPU_PATTERN_BYTES / seconds / 1e9


def whole_numbers(size: int) -> tuple[Any, Any, Any]:
    """Two matrices of small whole numbers and their product, exact in every format from bfloat16 inputs on. Made by arithmetic, so
    that they are the same everywhere."""
    import torch

    numbers = torch.arange(size * size, dtype=torch.int64)
    left = ((numbers * 2654435761) % 7 - 3).view(size, size)
    right = ((numbers * 40503 + 11) % 5 - 2).view(size, size)
    return left, right, (left.float() @ right.float()).long()


def check_loopback(found: Findings) -> None:
    """A collective of two ranks over loopback: sockets, ports and gloo work."""
    from strata.torch_compat.groups import sum_over_loopback

    ranks, count = 2, 1 << 18
    began_s = time.monotonic()
    sums = sum_over_loopback(ranks, count, timeout_s=HANG_S)
    seconds = time.monotonic() - began_s
    if any(value != sum(range(1, ranks + 1)) for value in sums):
        raise Unfit(f"a sum of {ranks} ranks over loopback is wrong: {sums}")
    found.measured["loopback_mb_s"] = count * 4 * ranks / seconds / 1e6


# --- GPUs -----------------------------------------------------------------------------------------------------------


def _open_devices(found: Findings) -> None:
    """Importing torch and opening its devices takes seconds, and is needed for training as well."""
    import torch

    if not os.path.exists(DRIVER):
        return
    cuda: Any = torch.cuda
    if not cuda.is_available():
        return
    found.kind = str(cuda.get_device_name(0))
    for index in range(cuda.device_count()):
        torch.zeros(1, device=f"cuda:{index}").add_(1)
        cuda.synchronize(index)


def check_gpus(found: Findings) -> None:
    if not os.path.exists(DRIVER):
        return
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_available() or not cuda.device_count():
        if os.environ.get("CUDA_VISIBLE_DEVICES", None) == "":
            return  # None is to be visible.
        raise Unfit("a driver is present, but torch sees no GPU")
    found.measured["gpus"] = float(cuda.device_count())
    errors: dict[int, str] = {}

    def one(index: int) -> None:
        try:
            check_gpu(found, index)
        except Exception as error:
            errors[index] = f"GPU {index}: {error}"

    threads = [
        threading.Thread(target=one, args=(index,), daemon=True) for index in range(cuda.device_count())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise Unfit("; ".join(errors[index] for index in sorted(errors)))
    if cuda.device_count() > 1:
        _sum_over_gpus()


def check_gpu(found: Findings, index: int) -> None:
    """One device: a matmul whose product is known, patterns in its memory, and the rate of copies from and to the host."""
    import torch

    cuda: Any = torch.cuda
    device = torch.device("cuda", index)
    with cuda.device(device):
        stream = cuda.Stream(device)
        with cuda.stream(stream):
            _check_matmul(found, device)
            _check_device_memory(device)
            _measure_pcie(found, device)
        stream.synchronize()


def _check_matmul(found: Findings, device: Any) -> None:
    import torch

    cuda: Any = torch.cuda
    left, right, expected = whole_numbers(MATMUL)
    reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        for dtype in (torch.float32, torch.bfloat16):
            a, b = left.to(device, dtype), right.to(device, dtype)
            wanted = expected.to(device, torch.float32).to(dtype)
            product = a @ b
            if not bool(torch.equal(product, wanted)):
                wrong = int((product != wanted).sum())
                raise Unfit(f"a matmul in {dtype} is wrong in {wrong:,} of {wanted.numel():,} elements")
        began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        began.record()
        for _ in range(20):
            product = a @ b
        ended.record()
        ended.synchronize()
        if not bool(torch.equal(product, wanted)):
            raise Unfit("a matmul is correct at first, and wrong when repeated")
        found.slower("matmul_tflops", 20 * 2 * MATMUL**3 / (began.elapsed_time(ended) / 1e3) / 1e12)
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced


def _check_device_memory(device: Any) -> None:
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(device)
    words = torch.empty(int(min(PATTERN_BYTES, free_bytes // 8)) // 8, dtype=torch.int64, device=device)
    for pattern in PATTERNS:
        words.fill_(pattern)
        if not bool((words == pattern).all()):
            raise Unfit("its memory does not keep what is written to it")
    # Each word its own place: what lies at a wrong address is found too.
    torch.arange(words.numel(), out=words)
    if int((words[1:] - words[:-1] != 1).sum()):
        raise Unfit("its memory has words at wrong addresses")


def _measure_pcie(found: Findings, device: Any) -> None:
    import torch

    cuda: Any = torch.cuda
    host = torch.arange(PCIE_BYTES // 8, dtype=torch.int64).pin_memory()
    there = torch.empty_like(host, device=device)
    back = torch.empty_like(host).pin_memory()
    there.copy_(host, non_blocking=True)
    times: list[float] = []
    for target, source in ((there, host), (back, there)):
        began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        began.record()
        target.copy_(source, non_blocking=True)
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    if not torch.equal(host, back):
        raise Unfit("data copied to it and back differs")
    found.slower("pcie_gb_s", PCIE_BYTES / max(times) / 1e9)


def _sum_over_gpus() -> None:
    """NCCL between the GPUs of this machine."""
    import torch

    cuda: Any = torch.cuda
    tensors = [
        torch.full((1 << 16,), index + 1.0, device=f"cuda:{index}") for index in range(cuda.device_count())
    ]
    from torch.cuda import nccl

    nccl.all_reduce(tensors)  # type: ignore[no-untyped-call]
    expected = sum(index + 1.0 for index in range(len(tensors)))
    for index, tensor in enumerate(tensors):
        if not bool((tensor == expected).all()):
            raise Unfit(f"GPU {index}: a sum over the GPUs of this machine is wrong")


def check_nvml(found: Findings, nvml: Any = None) -> None:
    """ECC errors, rows that could not be remapped, and what the kernel has logged of devices that failed."""
    if nvml is None:
        if not os.path.exists(DRIVER):
            return
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
    try:
        nvml.nvmlInit()
    except Exception as error:
        raise Unfit(f"the driver does not answer: {error}") from None
    wrong: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        with suppress(Exception):  # Not every device counts them.
            errors = int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
            if errors:
                wrong.append(f"GPU {index} has {errors} uncorrectable ECC errors since the driver was loaded")
        with suppress(Exception):
            _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(device)
            if has_failed:
                wrong.append(f"GPU {index} could not remap a bad row of its memory")
            elif is_pending:
                wrong.append(f"GPU {index} needs a reset to remap a bad row of its memory")
    wrong += fatal_xids(time.monotonic() - XID_WITHIN_S)
    if wrong:
        raise Unfit("; ".join(wrong))


def fatal_xids(since_mono_s: float, *, lines: Iterator[str] | None = None) -> list[str]:
    """What the kernel has logged of devices, as far as it is the device's fault."""
    import re

    said = device_faults(since_mono_s) if lines is None else tuple(lines)
    found = []
    for line in said:
        number = re.search(r"Xid.*?: (\d+)", line)
        if number is not None and int(number[1]) in FATAL_XIDS:
            found.append(line.strip())
    return found[-3:]
