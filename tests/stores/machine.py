"""Any store, step by step beside a dictionary."""

from __future__ import annotations

import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from strata.stores import AlreadyExists, NotFound, Store, Truncated

KEYS = st.sampled_from(["k", "k-1", "k/", "n/a", "n/a-b", "n/a.b/c", "n/é", "n0"]).map(
    lambda key: key.rstrip("/")
)
VALUES = st.binary(max_size=64) | st.integers(0, 3).map(lambda pages: os.urandom(4096 * pages))


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = self.open()
        self.model: dict[str, bytes] = {}

    def open(self) -> Store:
        raise NotImplementedError

    @rule(key=KEYS, value=VALUES)
    def put(self, key: str, value: bytes) -> None:
        self.store.put(key, value)
        self.model[key] = value

    @rule(key=KEYS, value=VALUES)
    def put_if_absent(self, key: str, value: bytes) -> None:
        if key in self.model:
            with pytest.raises(AlreadyExists):
                self.store.put(key, value, if_absent=True)
        else:
            self.store.put(key, value, if_absent=True)
            self.model[key] = value

    @rule(key=KEYS, chunks=st.lists(VALUES, max_size=3), commit=st.booleans())
    def stream(self, key: str, chunks: list[bytes], commit: bool) -> None:
        with self.store.open_write(key) as writer:
            for chunk in chunks:
                writer.write(chunk)
            if commit:
                writer.commit()
                self.model[key] = b"".join(chunks)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.store.delete(key)
        self.model.pop(key, None)

    @rule(key=KEYS, offset=st.integers(0, 100), length=st.none() | st.integers(0, 100))
    def read(self, key: str, offset: int, length: int | None) -> None:
        try:
            value = self.store.read(key, offset=offset, length=length)
        except NotFound:
            assert key not in self.model
        except Truncated:
            assert len(self.model[key]) < offset + (length or 0)
        else:
            end = len(self.model[key]) if length is None else offset + length
            assert value == self.model[key][offset:end]
            assert len(value) == end - offset

    @rule(prefix=st.sampled_from(["", "k", "k-", "n/", "n/a", "n/a.b/", "x"]))
    def list_prefix(self, prefix: str) -> None:
        listed = [(blob.key, blob.size_bytes) for blob in self.store.list(prefix)]
        assert listed == [(k, len(v)) for k, v in sorted(self.model.items()) if k.startswith(prefix)]

    @rule(key=KEYS)
    def stat(self, key: str) -> None:
        found = self.store.stat(key)
        assert (found.size_bytes if found else None) == (len(self.model[key]) if key in self.model else None)

    @rule()
    def reopen(self) -> None:
        self.store = self.open()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert [blob.key for blob in self.store.list()] == sorted(self.model)

    def teardown(self) -> None:
        for blob in self.store.list():
            self.store.delete(blob.key)
