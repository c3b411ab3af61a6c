"""The command line. Not on Linux it ends here, with a sentence: what it consists of cannot even be imported everywhere."""

from __future__ import annotations

import sys

from strata.errors import UnsupportedPlatform, require_linux

try:
    require_linux()
except UnsupportedPlatform as error:
    sys.exit(f"error: {error.message}\nwhat to do: {error.hint}")
