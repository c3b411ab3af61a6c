"""The object store keeps every promise of a store, on a real S3 server."""

from __future__ import annotations

import uuid

import pytest

from tests.stores.conformance import Place, StoreConformance
from tests.support_seaweed import Seaweed

pytestmark = pytest.mark.s3


class TestObjectStoreOnS3(StoreConformance):
    large_bytes = 12 << 20
    kill_rounds = 5
    threads_in_race = 4
    processes_in_race = 3
    machine_examples = 12

    @pytest.fixture
    def place(self, s3_server: Seaweed) -> Place:
        self.server = s3_server
        options = s3_server.options(part_bytes=5 << 20)
        return Place(url=f"s3://conformance/{uuid.uuid4().hex[:12]}", options=options)

    def leftovers(self, place: Place) -> list[str]:
        return self.server.unfinished_uploads("conformance")

    def leftovers_of_the_dead(self, place: Place) -> list[str]:
        return []  # A killed upload stays on the server, unseen, until a lifecycle rule of the bucket ends it.
