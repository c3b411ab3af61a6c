"""Checks of this machine alone: software, GPUs, shared memory, limits."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata

from strata.diagnostics import health as health_checks
from strata.diagnostics.report import CheckResult, Targets
from strata.torch_compat import OLDEST

GIB = 1 << 30
OPTIONAL_PACKAGES = ("obstore", "omegaconf", "tokenizers", "pyarrow", "nvidia-ml-py")


def versions(_: Targets) -> Iterator[CheckResult]:
    present = {name: _version(name) for name in ("strata-runtime", "torch", "grpcio", *OPTIONAL_PACKAGES)}
    found = ", ".join(
        [
            f"Python {platform.python_version()}",
            *(f"{name} {version}" for name, version in present.items() if version),
        ]
    )
    torch = present["torch"]
    if torch is None:
        yield CheckResult(
            name="versions",
            verdict="fail",
            found=f"{found}; torch is missing",
            fix="Install it: pip install 'strata-runtime[torch]'",
        )
    elif _numbers(torch) < _numbers(OLDEST):
        yield CheckResult(
            name="versions",
            verdict="fail",
            found=found,
            fix=f"Upgrade: pip install --upgrade 'torch>={OLDEST}'",
        )
    else:
        yield CheckResult(name="versions", verdict="ok", found=found)
    missing = [name for name in OPTIONAL_PACKAGES if present[name] is None]
    if missing:
        yield CheckResult(
            name="optional packages",
            verdict="skip",
            found=f"not installed: {', '.join(missing)}",
            fix="All of them: pip install 'strata-runtime[all]'",
        )


def gpu(_: Targets) -> Iterator[CheckResult]:
    driver = shutil.which("nvidia-smi")
    if driver is None:
        yield CheckResult(
            name="gpu",
            verdict="skip",
            found="no NVIDIA driver (nvidia-smi): training runs on the CPU, with gloo",
        )
        return
    query = [driver, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        yield CheckResult(
            name="gpu",
            verdict="fail",
            found="nvidia-smi did not answer within 10 s",
            fix="The driver does not respond; see dmesg, and restart the machine or reload the driver.",
        )
        return
    lines = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    if answer.returncode or not lines:
        yield CheckResult(
            name="gpu",
            verdict="fail",
            found=f"nvidia-smi failed: {(answer.stderr or answer.stdout).strip() or 'no GPU listed'}",
            fix="Reinstall the driver or restart the machine; in a container start it with --gpus all.",
        )
        return
    import torch

    if not torch.cuda.is_available():
        yield CheckResult(
            name="gpu",
            verdict="fail",
            found=f"{len(lines)} × {lines[0]}, but this torch ({torch.__version__}) cannot use it",
            fix="Install a CUDA build of torch that matches the driver.",
        )
        return
    nccl = (
        ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        if torch.distributed.is_nccl_available()
        else ""
    )
    yield CheckResult(
        name="gpu",
        verdict="ok" if nccl else "warn",
        found=f"{len(lines)} × {lines[0]}, CUDA {torch.version.cuda}, "
        + (f"NCCL {nccl}" if nccl else "no NCCL"),
        fix=""
        if nccl
        else "Use a torch build with NCCL for several GPUs. All nodes need the same NCCL version.",
    )


FIXES = {
    "memory": "Check what uses this machine's memory: ps aux --sort=-rss",
    "shared memory": "Memory snapshots are kept there: ls -la /dev/shm; in a container, make it larger: --shm-size=8g",
    "clock": "Set the clock: timedatectl set-ntp true",
    "processor": "Do not train here: the processor or its memory is faulty.",
    "disk": "Check the disk: dmesg, and df -h",
    "loopback": "Sockets on 127.0.0.1 must work: check the firewall, and the limit of open files.",
    "gpu": "Do not train here: see dmesg and nvidia-smi -q; reset the device or restart the machine.",
    "nvml": "The device must be reset or replaced: nvidia-smi -q -d ECC,ROW_REMAPPER",
}


def health(_: Targets) -> Iterator[CheckResult]:
    """What an agent examines before it joins (`health`), in a process of its own."""
    found = health_checks.examine_in_subprocess()
    names = [*FIXES, *health_checks.user_checks()]
    for name in [*names, *(name for name in found.failed if name not in names)]:
        if (why := found.failed.get(name)) is not None:
            yield CheckResult(name=name, verdict="fail", found=why, fix=FIXES.get(name, ""))
    fit = [name for name in names if name not in found.failed]
    shown = ", ".join(f"{name} {value:.3g}" for name, value in sorted(found.measured.items()))
    if fit:
        yield CheckResult(
            name="health", verdict="ok", found=f"{', '.join(fit)} ({found.seconds:.1f} s): {shown}"
        )


def shared_memory(_: Targets) -> Iterator[CheckResult]:
    """Whether it is large enough; whether there is any space at all is examined with the rest of the machine."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    small = total < GIB
    yield CheckResult(
        name="shared memory",
        verdict="warn" if small or free < total / 10 else "ok",
        found=f"/dev/shm: {free / GIB:.1f} of {total / GIB:.1f} GiB free",
        fix="Two snapshots of the model and optimizer must fit; in a container: --shm-size=8g"
        if small
        else ("Check what fills /dev/shm: ls -la /dev/shm" if free < total / 10 else ""),
    )


def limits(_: Targets) -> Iterator[CheckResult]:
    files, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = resource.RLIM_INFINITY
    few = files != unlimited and files < 4096
    text = "unlimited" if locked == unlimited else f"{locked / (1 << 20):.0f} MiB"
    yield CheckResult(
        name="limits",
        verdict="warn" if few else "ok",
        found=f"open files {'unlimited' if files == unlimited else files}, locked memory {text}",
        fix="Data loaders and NCCL open many files: ulimit -n 65536" if few else "",
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
