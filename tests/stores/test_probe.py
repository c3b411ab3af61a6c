"""A probe names what a store does not let us do, and leaves no trace."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from strata.stores import open_store
from strata.stores.local import LocalStore
from strata.stores.probe import probe
from strata.stores.protocol import Buffer
from tests.support_seaweed import READER_KEY, WRITER_KEY, Seaweed


def test_a_good_store_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "values")
    checks = probe(store)
    assert [check.name for check in checks] == ["list", "write", "read", "write exclusively", "delete"]
    assert all(check.ok for check in checks)
    assert list(store.list()) == []


@pytest.mark.s3
def test_each_missing_permission_is_named(s3_server: Seaweed) -> None:
    url = f"s3://probes/{uuid.uuid4().hex[:8]}"
    owner = open_store(url, **s3_server.options())
    owner.put("k", b"the bucket exists now")
    assert all(check.ok for check in probe(owner))
    assert [blob.key for blob in owner.list()] == ["k"]
    problems = {
        check.name: check.problem for check in probe(open_store(url, **s3_server.options(READER_KEY)))
    }
    assert problems["list"] == ""
    assert "s3:PutObject" in problems["write"]
    problems = {
        check.name: check.problem for check in probe(open_store(url, **s3_server.options(WRITER_KEY)))
    }
    assert "s3:ListBucket" in problems["list"]
    assert "s3:GetObject" in problems["read"]
    assert problems["write"] == problems["delete"] == ""


def test_a_server_without_conditional_writes_is_found_out(tmp_path: Path) -> None:
    class Careless(LocalStore):
        def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
            super().put(key, data)

    problems = {check.name: check.problem for check in probe(Careless(tmp_path))}
    assert "If-None-Match" in problems["write exclusively"]
    assert problems["delete"] == ""
