"""Small file systems of their own, to be filled to the last byte."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support_programs import program, require_root


@contextlib.contextmanager
def small_tmpfs(folder: Path, *, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of this size. Where mounting is not allowed the test is skipped, but never in CI."""
    require_root("a file system is mounted")
    with _mounted(["-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs"], folder) as at:
        yield at


@contextlib.contextmanager
def small_ext4(folder: Path, *, size_bytes: int) -> Iterator[Path]:
    """An ext4 in a file: a real disk file system, with direct I/O. Skipped where there are no loop devices."""
    require_root("a file system is mounted")
    image = folder.with_name(f"{folder.name}.img")
    with open(image, "wb") as file:
        file.truncate(size_bytes)
    make = [program("mkfs.ext4"), "-q", "-F", "-m", "0", str(image)]
    subprocess.run(make, check=True, capture_output=True)
    with _mounted(["-o", "loop", str(image)], folder, or_skip=True) as at:
        yield at


def remount(at: Path, option: str) -> None:
    subprocess.run([program("mount"), "-o", f"remount,{option}", str(at)], check=True, capture_output=True)


@contextlib.contextmanager
def _mounted(arguments: list[str], folder: Path, *, or_skip: bool = False) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    done = subprocess.run([program("mount"), *arguments, str(folder)], capture_output=True, text=True)
    if done.returncode:
        what = f"mounting is not possible here: {done.stderr}"
        if or_skip or os.environ.get("CI") != "true":
            pytest.skip(what)  # Root in a container may not be allowed to.
        pytest.fail(what)
    try:
        yield folder
    finally:
        done = subprocess.run([program("umount"), str(folder)], capture_output=True, text=True)
        if done.returncode:
            subprocess.run([program("umount"), "-l", str(folder)], check=True, capture_output=True)
            pytest.fail(f"something still holds a file open: {done.stderr}")
