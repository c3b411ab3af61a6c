"""Variables that change nothing are named, and the table of those that do is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strata.environment import KNOWN, OTHER_NAMES, OURS, unread

SRC = Path(__file__).parent.parent / "src"


def test_the_table_has_every_variable_that_the_sources_name() -> None:
    named = re.compile(rf"[\"']((?:{'|'.join(OURS)})[A-Z0-9_]+)[\"']")
    found = {
        name
        for path in SRC.rglob("*.py")
        if "_pb2" not in path.name and path.name != "environment.py"
        for name in named.findall(path.read_text())
    }
    assert found <= KNOWN


def test_the_table_has_no_variable_that_nothing_reads() -> None:
    text = "".join(
        path.read_text() for path in SRC.rglob("*.py") if path != SRC / "strata" / "environment.py"
    )
    assert [name for name in sorted(KNOWN) if name not in text] == []
    assert set(OTHER_NAMES.values()) <= KNOWN


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("STRATA_TOKENS", " (did you mean STRATA_TOKEN?)"),
        ("RDZV_ENDPOINTS", " (did you mean RDZV_ENDPOINT?)"),
        ("RUST_LOG", " (did you mean STRATA_LOG?)"),
        ("CHECKPOINT_PATH", " (did you mean CHECKPOINT_DIR?)"),
        ("STRATA_ZZZZZZZZZZZZ", ""),
        ("STORAGE_BACKND", " (did you mean STORAGE_BACKEND?)"),
        ("LOGFORMAT", " (did you mean LOG_FORMAT?)"),
        ("WORKERID", " (did you mean WORKER_ID?)"),
    ],
)
def test_a_variable_that_changes_nothing_is_named_with_the_nearest(name: str, meant: str) -> None:
    assert unread({name: "x"}) == [f"the environment variable {name} changes nothing{meant}"]


def test_variables_of_others_and_of_kubernetes_are_left_alone() -> None:
    others = ["PATH", "NCCL_DEBUG", "STRATA_TOKEN", "NNODES", "ETCD_NAME", "NODE_ID", "WORKER", "LOGNAME"]
    links = {
        "STRATA_SERVICE_HOST": "10.0.0.7",
        "STRATA_SERVICE_PORT": "50051",
        "COORDINATOR_PORT": "tcp://10.0.0.7:50051",
        "COORDINATOR_PORT_50051_TCP_ADDR": "10.0.0.7",
    }
    assert unread(dict.fromkeys(others, "x") | links) == []
    assert unread({"STRATA_HTP_PORT": "4000"}) == [
        "the environment variable STRATA_HTP_PORT changes nothing (did you mean STRATA_HTTP_PORT?)"
    ]
