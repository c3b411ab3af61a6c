"""How the package is made: as setuptools does, with the dashboard built first.

Where there is no Node, it is asked for from PyPI. Where that does not help either, the package is made without the
dashboard and says what is missing; with CI=true that is a failure.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import build_dashboard
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # The hooks that stay as they are.


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
    return str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    _build_dashboard()
    return str(build_meta.build_editable(wheel_directory, config_settings, metadata_directory))


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
