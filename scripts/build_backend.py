"""How the package is made: as setuptools does, with the dashboard built first, and the same bytes from the same sources.

Where there is no Node, it is asked for from PyPI. Where that does not help either, the package is made without the
dashboard and says what is missing; with CI=true that is a failure. A source distribution carries the built dashboard, so
that installing from it needs no Node. Times, owners, permissions and order in an archive do not depend on the machine:
every file has the time SOURCE_DATE_EPOCH, or a fixed one.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import build_dashboard
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # The hooks that stay as they are.

DEFAULT_EPOCH = 1_580_601_600
"""2 February 2020, as other build back ends have it. Zip files know no time before 1980."""


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_sdist(config_settings), *_node()]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_node()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_node()]


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    _build_dashboard()
    # Files of an earlier build have other names, and setuptools would ship what it finds there.
    shutil.rmtree(build_dashboard.ROOT / "build" / "lib" / "strata" / "dashboard", ignore_errors=True)
    name = str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))
    normalize_wheel(Path(wheel_directory) / name)
    return name


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    _build_dashboard()
    name = str(build_meta.build_sdist(sdist_directory, config_settings))
    normalize_sdist(Path(sdist_directory) / name)
    return name


def build_editable(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    _build_dashboard()
    return str(build_meta.build_editable(wheel_directory, config_settings, metadata_directory))


def normalize_wheel(path: Path) -> None:
    """The same files in the same order, with nothing in it that another machine would have written differently."""
    with _replacing(path) as new, zipfile.ZipFile(path) as old, zipfile.ZipFile(new, "w") as wheel:
        date = time.gmtime(_epoch())[:6]
        # What describes the wheel comes last, as the format recommends, and its record at the very end.
        for info in sorted(old.infolist(), key=_place):
            entry = zipfile.ZipInfo(info.filename, date_time=date)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix: permissions are meant.
            entry.external_attr = _permissions(info.external_attr >> 16) << 16
            wheel.writestr(entry, old.read(info))


def normalize_sdist(path: Path) -> None:
    with (
        _replacing(path) as new,
        tarfile.open(path) as old,
        open(new, "wb") as file,
        gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=_epoch()) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as sdist,
    ):
        for info in sorted((member for member in old if member.isfile()), key=lambda member: member.name):
            content = old.extractfile(info)
            assert content is not None, "a file has content"
            entry = tarfile.TarInfo(info.name)
            entry.size, entry.mtime, entry.mode = info.size, _epoch(), _permissions(info.mode)
            sdist.addfile(entry, io.BytesIO(content.read()))


def _place(info: zipfile.ZipInfo) -> tuple[bool, bool, str]:
    name = info.filename
    return ".dist-info/" in name, name.endswith(".dist-info/RECORD"), name


def _permissions(mode: int) -> int:
    return 0o100755 if mode & 0o100 else 0o100644


def _epoch() -> int:
    return int(os.environ.get("SOURCE_DATE_EPOCH", DEFAULT_EPOCH))


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    new = path.with_name(f".{path.name}.new")
    yield new
    new.replace(path)


def _node() -> list[str]:
    needed = not build_dashboard.is_current() and build_dashboard.find_node() is None
    return [build_dashboard.NODE_PACKAGE] if needed else []


def _build_dashboard() -> None:
    try:
        build_dashboard.build()
    except build_dashboard.CannotBuild as error:
        if os.environ.get("CI") == "true":
            raise
        print(f"warning: the dashboard is left out. {error}", file=sys.stderr)
