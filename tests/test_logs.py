"""STRATA_LOG: one level for all, or a level for each component."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from strata.config import ConfigError
from strata.logs import formatter, parse_levels


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("", {}),
        ("debug", {"": logging.DEBUG}),
        ("WARN", {"": logging.WARNING}),
        (
            "coordinator=debug,storage=debug,checkpoint=info",
            {"coordinator": logging.DEBUG, "storage": logging.DEBUG, "checkpoint": logging.INFO},
        ),
        (" error , coordinator.grpc = debug ,", {"": logging.ERROR, "coordinator.grpc": logging.DEBUG}),
    ],
)
def test_levels_by_component(text: str, levels: dict[str, int]) -> None:
    assert parse_levels(text) == levels


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_levels("loud,coordinator=quiet,storage=info,=")
    assert len(caught.value.problems) == 3
    assert "'loud'" in caught.value.problems[0]
    assert "debug, info" in caught.value.problems[0]


def test_levels_take_effect() -> None:
    script = (
        "import logging; from strata import logs; logs.configure()\n"
        "logging.getLogger('strata.coordinator.engine').debug('shown')\n"
        "logging.getLogger('strata.stores').info('hidden')\n"
        "logging.getLogger('strata.stores').error('shown too')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "STRATA_LOG": "error,coordinator=debug"},
    )
    lines = done.stderr.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["shown", "shown too"]
    assert "DEBUG" in lines[0]
    assert "strata.coordinator.engine" in lines[0]


def test_storage_is_a_component_people_know() -> None:
    """The documents speak of `storage`; the package is called `stores`."""
    script = (
        "import logging; from strata import logs; logs.configure()\n"
        "logging.getLogger('strata.stores.local').debug('shown')\n"
    )
    env = {**os.environ, "STRATA_LOG": "storage=debug"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=env)
    assert "shown" in done.stderr


def test_lines_are_json_objects_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_FORMAT", "json")
    plain = logging.Formatter("%(message)s")
    record = logging.LogRecord("strata.stores", logging.WARNING, __file__, 1, "step %d\nlate", (3,), None)
    line = formatter(plain).format(record)
    assert "\n" not in line
    assert json.loads(line) == {
        "timestamp": record.created,
        "level": "warn",
        "message": "step 3\nlate",
        "source": "strata.stores",
    }
    monkeypatch.setenv("LOG_FORMAT", "text")
    assert formatter(plain) is plain
    monkeypatch.setenv("LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="LOG_FORMAT must be text or json, not 'xml'"):
        formatter(plain)
