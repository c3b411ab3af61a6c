"""Object stores read the version that was looked at, and say when it is no longer there."""

from __future__ import annotations

import pytest

from strata.stores import NotFound, Replaced, open_store
from strata.stores.protocol import VersionReader
from tests.support_seaweed import Seaweed

pytestmark = pytest.mark.s3


@pytest.mark.parametrize("part_bytes", [16 << 20, 5])
def test_a_version_is_read_until_it_is_replaced_or_deleted(s3_server: Seaweed, part_bytes: int) -> None:
    place = f"s3://versions/{part_bytes}"
    writing = open_store(place, **s3_server.options())
    store = open_store(place, **s3_server.options(part_bytes=part_bytes))
    assert isinstance(store, VersionReader)
    writing.put("a", b"0123456789abcdef")
    found = store.stat("a")
    assert found is not None
    assert found.version
    assert [blob.version for blob in store.list()] == [found.version]
    assert bytes(store.read_version("a", found.version, offset=2, length=12)) == b"23456789abcd"
    writing.put("a", b"0123456789ABCDEF")
    with pytest.raises(Replaced, match=r"'a'.*was replaced"):
        store.read_version("a", found.version, offset=2, length=12)
    store.delete("a")
    with pytest.raises(NotFound):
        store.read_version("a", found.version, offset=2, length=12)
