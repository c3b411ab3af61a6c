"""Small file systems of their own, to be filled to the last byte."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_tmpfs(folder: Path, *, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of this size. Where mounting is not allowed the test is skipped, but never in CI."""
    with _mounted(
        ["-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs"], folder, required="CI" in os.environ
    ) as at:
        yield at


@contextlib.contextmanager
def small_ext4(folder: Path, *, size_bytes: int) -> Iterator[Path]:
    """An ext4 in a file: a real disk file system, with direct I/O. Skipped where there are no loop devices."""
    image = folder.with_name(f"{folder.name}.img")
    with open(image, "wb") as file:
        file.truncate(size_bytes)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no ext4 can be made here: {error}")
    with _mounted(["-o", "loop", str(image)], folder, required=False) as at:
        yield at


def remount(at: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(at)], check=True, capture_output=True)


@contextlib.contextmanager
def _mounted(arguments: list[str], folder: Path, *, required: bool) -> Iterator[Path]:
    folder.mkdir()
    try:
        subprocess.run(["mount", *arguments, str(folder)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        if required:
            pytest.fail(f"CI must be able to mount small file systems: {said}")
        pytest.skip(f"mounting is not possible here (are you root?): {said}")
    try:
        yield folder
    finally:
        done = subprocess.run(["umount", str(folder)], capture_output=True, text=True)
        if done.returncode:
            subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)
            pytest.fail(f"something still holds a file open: {done.stderr}")
