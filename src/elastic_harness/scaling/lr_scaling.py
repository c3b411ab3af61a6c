"""Learning rate and gradient accumulation, where earlier versions had them. Everything lives in `elastic_harness.scaling`."""

from __future__ import annotations

from elastic_harness.scaling import *  # noqa: F403
