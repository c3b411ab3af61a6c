"""Joining and leaving the other processes, where earlier versions had it. Everything lives in `elastic_harness.agent`."""

from __future__ import annotations

from elastic_harness.agent import *  # noqa: F403
