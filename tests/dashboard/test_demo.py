"""Demo mode says what a coordinator would: its events are those of the core, and so are their sentences."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import orjson

from strata.core.messages import Event
from strata.core.stream_events import kind_of, publish
from tests.dashboard.browser import build_dashboard

PLAYED_S = 900  # What the page shows of the past: every act of the script, and steps beyond 1,000.
PLAY = f"""
import {{ runnerImport }} from "vite";
const {{ module }} = await runnerImport("./src/demo/simulation.ts");
process.stdout.write(JSON.stringify(new module.Simulation({{ startedAt: 1.7e9 }}).advance(1.7e9 + {PLAYED_S})));
"""
TYPES = {kind_of(event): event for event in get_args(Event)}


def test_the_demos_events_are_published_by_the_core_as_they_are(program: Callable[[str], str]) -> None:
    node = program("node")
    build_dashboard.install_modules(Path(node).parent, build_dashboard.SOURCES)
    played = subprocess.run(
        [node, "--input-type=module", "--eval", PLAY],
        cwd=build_dashboard.SOURCES,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert played.returncode == 0, played.stderr
    events = [each for each in json.loads(played.stdout) if each["kind"] in TYPES]
    source = (build_dashboard.SOURCES / "src" / "demo" / "simulation.ts").read_text()
    assert {each["kind"] for each in events} == set(re.findall(r'"(\w+)"', source)) & TYPES.keys()
    for each in events:
        published = publish(event_of(each["kind"], each["data"]))
        assert published is not None
        assert each["data"] == json.loads(orjson.dumps(published.data))


def event_of(kind: str, data: dict[str, Any]) -> Event:
    """The event that was published so. What it has lost on the way has no part in what is said of it."""
    lost: dict[str, Callable[[], dict[str, Any]]] = {
        "shards_moved": lambda: {
            "base_epoch": -1,
            "workers": names(data["workers"]),
            "moved": {worker: list(range(shards)) for worker, shards in data["moved"].items()},
        },
        "barrier_released": lambda: {"arrived": names(data["arrived"]), "call_ids": []},
        "barrier_broken": lambda: {"arrived": names(data["arrived"]), "call_ids": []},
        "checkpoint_completed": lambda: {"data_json": ""},
        "incident_reported": lambda: {
            "first": {name: data[name] for name in ("rank", "host", "pid", "gpu")},
            "failures": [{}] * data["failures"],
        },
    }
    event: Event = msgspec.convert(data | lost.get(kind, dict)(), TYPES[kind])
    return event


def names(number: int) -> list[str]:
    return [f"worker-{each}" for each in range(number)]
