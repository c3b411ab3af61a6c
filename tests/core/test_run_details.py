"""How a run was started, as it leaves the process that trains: bounded, plain, and without secrets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.messages import InvalidArgument
from strata.core.telemetry.run_details import (
    DETAILS_LIMIT_BYTES,
    KEYS_LIMIT,
    RunDetails,
    check_tags,
    packed,
    unpacked,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)


def test_what_was_packed_is_unpacked() -> None:
    details = RunDetails(
        command="train.py --lr 3e-4",
        commit="0123abc",
        branch="main",
        versions={"python": "3.12"},
        world_size=8,
        config={"lr": 3e-4, "layers": [1, 2], "model": {"width": 128, "bias": None}},
    )
    assert unpacked(packed(details)) == details
    assert unpacked(b"") is None


def test_secrets_are_redacted_by_name_and_by_themselves() -> None:
    secrets = {
        "api_key": "0123456789abcdef",
        "optimizer": {"password": "hunter22"},
        "bucket": "s3://user:pass@host/runs",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    }
    body = packed(RunDetails(command="train.py --password=hunter22", config=secrets))
    for secret in ("0123456789abcdef", "hunter22", "user:pass", "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"):
        assert secret.encode() not in body
    found = unpacked(body)
    assert found is not None
    assert found.config["api_key"] == "[redacted]"
    innocent = {"tokens_per_batch": 1024, "max_tokens": 5, "key_frames": 3, "tokenizer": "gpt2"}
    kept = unpacked(packed(RunDetails(config=innocent)))
    assert kept is not None
    assert kept.config == innocent


@given(config=st.dictionaries(st.text(max_size=10), JSON, max_size=6))
def test_any_configuration_is_taken_and_is_json(config: dict[str, Any]) -> None:
    body = packed(RunDetails(config=config))
    assert len(body) <= DETAILS_LIMIT_BYTES
    json.loads(body)
    assert unpacked(body) is not None


def test_a_configuration_that_is_too_large_is_left_out_and_says_so() -> None:
    large = {f"key {n}": "x" * 1_000 for n in range(200)}
    found = unpacked(packed(RunDetails(command="train.py", config=large, options={"save_every": 5})))
    assert found is not None
    assert "too large" in found.config["…"]
    assert (found.command, found.options) == ("train.py", {"save_every": 5})
    many = unpacked(packed(RunDetails(config={f"k{n}": n for n in range(KEYS_LIMIT + 5)})))
    assert many is not None
    assert many.config["…"] == "5 more"


@pytest.mark.parametrize("body", [b"[]", b"not json", b"[" * 5_000, b"x" * (DETAILS_LIMIT_BYTES + 1)])
def test_details_that_are_none_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgument):
        unpacked(body)


def test_tags_are_names_each_once() -> None:
    assert check_tags(["b", " a ", "b"]) == ["b", "a"]
    for bad in ([""], ["x" * 65], [f"t{n}" for n in range(21)], ["a\x07"]):
        with pytest.raises(InvalidArgument):
            check_tags(bad)
