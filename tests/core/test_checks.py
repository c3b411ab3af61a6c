"""What a name, a number or a text may be, and that a refusal of one can always be shown."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core import checks
from strata.core.messages import FileSpan, InvalidArgument, Unknown, shorten
from tests.core.builders import dataset_spec, worker_spec


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "\t",
        "\u00a0",
        "a\nb",
        "a\0",
        "\x7f",
        "a\x85b",
        "a\u2028b",
        "\ud800",
        "x" * 257,
        "x" * 10_000_000,
    ],
    ids=ascii,
)
def test_a_name_is_one_readable_line_of_bounded_length(name: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        checks.name("worker_id", name)
    assert refusal.value.field_name == "worker_id"


@pytest.mark.parametrize("name", ["a", "worker-01", "x" * 256, "Arbeiter ä", "工人", "a/b:c.d"])
def test_an_ordinary_name_is_accepted(name: str) -> None:
    checks.name("worker_id", name)


def test_a_text_may_have_lines_but_no_nul_and_no_end_without_bound() -> None:
    checks.text("reason", "one\ntwo\tthree")
    for text in ("a\0b", "\udfff", "x" * (checks.TEXT_LIMIT + 1)):
        with pytest.raises(InvalidArgument):
            checks.text("reason", text)


@pytest.mark.parametrize(
    "value",
    [-1, 11, 10**5000, -(10**5000), float("nan"), float("inf"), -0.0001],
    ids=["below", "above", "huge", "-huge", "nan", "inf", "just-below"],
)
def test_a_number_outside_its_range_is_refused_briefly(value: float) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        checks.between("count", value, 0, 10)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("value", [0, 10, 0.0, 5])
def test_both_ends_of_a_range_belong_to_it(value: float) -> None:
    checks.between("count", value, 0, 10)


@given(st.text(alphabet=st.characters(), max_size=300) | st.text(alphabet="\ud800\n\x1b\0a", max_size=300))
def test_a_refusal_that_quotes_a_name_is_short_printable_and_valid_unicode(name: str) -> None:
    for error in (Unknown("task", name), InvalidArgument("config", f"'{shorten(name)}' is wrong")):
        text = str(error)
        assert text.isprintable()
        text.encode()
        assert len(text) < 1200


@given(st.text(max_size=100))
def test_a_short_printable_name_is_quoted_as_it_is(name: str) -> None:
    if name.isprintable() and len(name) <= 80:
        assert shorten(name) == name


@pytest.mark.parametrize(
    "fields",
    [
        {"worker_id": ""},
        {"job_id": ""},
        {"hostname": "x" * 1000},
        {"port": 65536},
        {"port": -1},
        {"gpu_count": -1},
        {"gpu_count": 2**31},
        {"memory_bytes": -1},
        {"memory_bytes": 2**63},
        {"metadata": {"k" * 1000: ""}},
        {"metadata": {"k": "v" * 10_000}},
        {"metadata": {"k": "\ud800"}},
        {"metadata": {str(n): "" for n in range(65)}},
    ],
    ids=lambda fields: str(next(iter(fields))),
)
def test_a_worker_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    worker_id = fields.pop("worker_id", "a")
    with pytest.raises(InvalidArgument):
        checks.worker(worker_spec(worker_id, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"dataset_id": ""},
        {"path": ""},
        {"path": "a\nb"},
        {"format": ""},
        {"format": "x" * 65},
        {"total_samples": 0},
        {"total_samples": -5},
        {"total_samples": 2**53 + 1},
        {"shard_size": 0},
        {"shard_size": -1},
        {"seed": -1},
        {"seed": 2**64},
        {"total_samples": 2**53, "shard_size": 1},
        {"files": (FileSpan(path="a\udc80", samples=100),)},
        {"files": (FileSpan(path="a", samples=-1), FileSpan(path="b", samples=101))},
        {"files": (FileSpan(path="a", samples=99),)},
        {"files": (FileSpan(path="a", samples=2**70),)},
    ],
    ids=lambda fields: str(next(iter(fields))),
)
def test_a_dataset_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        checks.dataset(dataset_spec(**fields))


def test_too_many_shards_are_refused_with_the_size_that_would_do() -> None:
    samples = checks.SHARDS_LIMIT * 7
    with pytest.raises(InvalidArgument, match="at least 7"):
        checks.dataset(dataset_spec(samples=samples, shard=6))
    checks.dataset(dataset_spec(samples=samples, shard=7))


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        '"x"',
        "{",
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": -Infinity}',
        '{"a": "\\ud800"}',
        '{"\\ud800": 1}',
        '{"a": %s}' % ("9" * 40),
        '{"a": %s}' % ("9" * 5000),
        nested(33),
        nested(500),
        "[" * 100_000,
        '{"a": "%s"}' % ("x" * 2000),
    ],
    ids=lambda text: text[:20],
)
def test_an_object_that_others_could_not_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        checks.json_object("config", text, limit=1000)


@pytest.mark.parametrize(
    "text",
    ["{}", nested(32), json.dumps({"lr": 1e-3, "layers": [1, 2, {"x": None}], "name": "ä", "on": True})],
)
def test_a_plain_object_is_accepted(text: str) -> None:
    checks.json_object("config", text, limit=1000)
