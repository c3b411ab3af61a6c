"""Fixtures for tests that talk to a real coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.service.fleet import Fleet
from tests.support import Coordinator


@pytest.fixture
def fleets() -> Iterator[Callable[..., Fleet]]:
    """Makes worker processes, `fleets(address, job=...)`, and ends them."""
    with ExitStack() as stack:

        def make(address: str, *, job: str = "") -> Fleet:
            return stack.enter_context(Fleet(address, env={"STRATA_JOB_ID": job}))

        yield make


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """One coordinator for tests of a module that do not get in each other's way: nobody who only registers is failed
    for silence in the middle of another test. A module's COORDINATOR_ENV says what else it is told."""
    env = {"STRATA_HEARTBEAT_TIMEOUT": "600", **getattr(request.module, "COORDINATOR_ENV", {})}
    server = Coordinator(Path(tmp_path_factory.mktemp("shared")) / "coordinator", env=env).start()
    yield server
    code = server.stop()
    output = "".join(server.output)
    assert code == 0, output
    assert "Traceback" not in output, output
