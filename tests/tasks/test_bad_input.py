"""Requests that cannot be right: each is refused with a code and the next step, and nothing is started or written down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import Coordinator

GOOD: dict[str, Any] = {"name": "t", "type": "training", "worker_count": 1}
BAD: dict[str, tuple[int, str, dict[str, Any] | bytes]] = {
    "unknown recipe": (404, "not_found", {**GOOD, "type": "trainig"}),
    "a shell command": (404, "not_found", {**GOOD, "type": "bash -c 'rm -rf /'"}),
    "unknown dataset": (404, "not_found", {**GOOD, "dataset_id": "nothing"}),
    "unknown key": (422, "invalid_argument", {**GOOD, "config": {"learning_rat": 0.1}}),
    "unknown field": (422, "invalid_argument", {**GOOD, "command": "rm"}),
    "wrong type in config": (422, "invalid_argument", {**GOOD, "config": {"batch_size": "many"}}),
    "config that is a list": (422, "invalid_argument", {**GOOD, "config": [1]}),
    "config that is text": (422, "invalid_argument", {**GOOD, "config": "fast"}),
    "no workers": (422, "invalid_argument", {**GOOD, "worker_count": 0}),
    "too many workers": (422, "invalid_argument", {**GOOD, "worker_count": 2**32 - 1}),
    "half a worker": (422, "invalid_argument", {**GOOD, "worker_count": 1.5}),
    "negative GPUs": (422, "invalid_argument", {**GOOD, "gpus_per_worker": -1}),
    "endless retries": (422, "invalid_argument", {**GOOD, "max_retries": 2**32 - 1}),
    "a dataset is needed": (422, "invalid_argument", {**GOOD, "type": "indexing"}),
    "no JSON": (400, "malformed", b"{"),
    "ten megabytes": (413, "too_large", {**GOOD, "config": {"learning_rate": "x" * 10_000_000}}),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    folder = Path(tmp_path_factory.mktemp("tasks"))
    started = Coordinator(folder / "data", env={"STRATA_LAUNCHER": "local"}).start()
    yield started
    assert started.stop() == 0
    assert "Traceback" not in "".join(started.output)


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_and_nothing_is_started(server: Coordinator, name: str) -> None:
    status, code, body = BAD[name]
    got, answer = server.post("/api/tasks", body if isinstance(body, bytes) else json.dumps(body).encode())
    assert (got, answer["code"]) == (status, code), answer
    assert answer["message"]
    assert answer["hint"]
    assert server.get("/api/tasks") == []
    assert not (server.data_dir / "tasks").exists()


def test_every_problem_of_a_config_is_reported_by_its_key(server: Coordinator) -> None:
    _, answer = server.post("/api/tasks", {**GOOD, "config": {"learning_rat": 1, "model": {"n_head": "two"}}})
    assert {detail["field"]: detail["message"] for detail in answer["details"]} == {
        "config.learning_rat": "is not a known key; did you mean 'learning_rate'?",
        "config.model.n_head": "must be a whole number, not 'two'",
    }


def test_an_unknown_task_is_not_found(server: Coordinator) -> None:
    for verb in ("stop", "restart"):
        status, answer = server.post(f"/api/tasks/ghost/{verb}", {})
        assert (status, answer["code"]) == (404, "not_found")


def test_recipes_are_shown_with_their_schema(server: Coordinator) -> None:
    found = {recipe["name"]: recipe for recipe in server.get("/api/recipes")}
    assert {"training", "indexing", "sharding"} <= found.keys()
    schema = found["training"]["schema"]
    assert schema["type"] == "object"
    assert schema["properties"]["learning_rate"]["type"] == "number"
    assert not schema["additionalProperties"]
    assert found["indexing"]["needs_dataset"]
