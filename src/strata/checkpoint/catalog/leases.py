"""Telling other processes that a checkpoint is being read, so that their retention leaves it alone.

A lease is a small object in the store, put before reading and removed after. It counts while its holder lives, or, where
that cannot be known because the holder is on another machine, for an hour. A reader that may not write to the store
reads without one.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

from strata.checkpoint.catalog.manifest import CheckpointId
from strata.processes import Process, this_process
from strata.stores.protocol import Store, StoreError

PREFIX = "leases/"
_LASTS_S = 3600.0
_numbers = itertools.count()


@contextlib.contextmanager
def reading(store: Store, checkpoint_id: CheckpointId) -> Iterator[None]:
    key = f"{PREFIX}{checkpoint_id}/{this_process().token}.{next(_numbers)}"
    try:
        store.put(key, b"reading\n")
    except StoreError:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(StoreError):
            store.delete(key)


def being_read(store: Store) -> set[CheckpointId]:
    """What is being read now; leases of the dead are removed on the way."""
    found = set()
    for blob in list(store.list(PREFIX)):
        checkpoint_id, _, holder = blob.key.removeprefix(PREFIX).partition("/")
        try:
            is_over = (
                Process.parse(holder.partition(".")[0]).has_ended()
                or time.time() - blob.modified_s > _LASTS_S
            )
        except ValueError:
            is_over = True
        if is_over:
            store.delete(blob.key)
        else:
            found.add(CheckpointId(checkpoint_id))
    return found
