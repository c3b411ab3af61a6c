"""The coordinator's state without what changes by itself: equal before and after whatever must change nothing."""

from __future__ import annotations

import time
from typing import Any

from tests.support import Coordinator

PAGE_AGE_S = 0.3
"""Listings may be this old where only soft state changed."""


def state(coordinator: Coordinator) -> dict[str, Any]:
    time.sleep(PAGE_AGE_S)
    found: dict[str, Any] = coordinator.get("/api/dashboard")
    for key in ("uptime", "server_time", "storage"):
        del found["coordinator"][key]
    for worker in found["workers"]:
        del worker["last_heartbeat"]
    del found["metrics"], found["logs"]
    return found
