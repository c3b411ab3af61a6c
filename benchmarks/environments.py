"""Environments of their own for projects we are measured beside, made once and kept in the cache directory."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from strata.data.streaming.block_cache import cache_dir


def environment(name: str, requirements: Sequence[str], *, with_dependencies: bool = False) -> Path:
    """The Python of an environment with `requirements`, which sees this one's torch and NumPy behind its own packages."""
    folder = cache_dir() / "bench" / name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (site / "host.pth").write_text(sysconfig.get_path("purelib") + "\n")
        options = [] if with_dependencies else ["--no-deps"]
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", *options, *requirements],
            check=True,
            stdout=sys.stderr,
        )
        (folder / "ready").touch()
    return python
