"""Where this user's caches of data are: `$STRATA_CACHE_DIR`, else `~/.cache/strata`."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    if chosen := os.environ.get("STRATA_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strata"
