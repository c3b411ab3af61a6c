"""The object store keeps every promise of a store, on a real S3 server.

Any other place can be held to the same suite: `STRATA_CONFORMANCE_URL=az://container` and, as JSON,
`STRATA_CONFORMANCE_OPTIONS='{"account_name": …}'`. Azure's emulator has passed it that way.
"""

from __future__ import annotations

import json
import os
import uuid

import pytest

from strata.stores import open_store
from tests.stores.conformance import StoreConformance
from tests.stores.suite import Place
from tests.support_seaweed import Seaweed


@pytest.mark.s3
class TestObjectStoreOnS3(StoreConformance):
    large_bytes = 12 << 20
    kill_rounds = 5
    threads_in_race = 4
    processes_in_race = 3
    machine_examples = 12

    @pytest.fixture
    def place(self, s3_server: Seaweed) -> Place:
        options = s3_server.options(part_bytes=5 << 20)
        open_store("s3://conformance/made", **options).put("k", b"the bucket exists now")
        return Place(url=f"s3://conformance/{uuid.uuid4().hex[:12]}", options=options)


if "STRATA_CONFORMANCE_URL" in os.environ:

    class TestObjectStoreElsewhere(TestObjectStoreOnS3):
        @pytest.fixture
        def place(self) -> Place:
            options = json.loads(os.environ.get("STRATA_CONFORMANCE_OPTIONS", "{}"))
            url = f"{os.environ['STRATA_CONFORMANCE_URL'].rstrip('/')}/{uuid.uuid4().hex[:12]}"
            return Place(url=url, options={"part_bytes": 5 << 20, **options})
