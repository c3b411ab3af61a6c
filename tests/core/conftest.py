"""Settings of the core's property tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("strata", deadline=None)  # A busy machine is not a failure.
settings.load_profile("strata")
