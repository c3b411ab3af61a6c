"""Where a manager keeps checkpoints, from what its caller wrote."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import TypeAlias

from strata.core.jobs.peers import copies_wanted
from strata.stores import open_store, store_from_env
from strata.stores.protocol import Store

Destination: TypeAlias = "str | os.PathLike[str] | Store"


def without_peers(
    path: Destination | Sequence[Destination] | None,
) -> tuple[int, Destination | Sequence[Destination] | None]:
    """How many copies in other machines' memory are wanted (`peer`, `peer:2`), and the destinations. Raises `ValueError`."""
    if path is None:
        return 0, None
    named = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    wanted = [copies_wanted(each) if isinstance(each, str) else None for each in named]
    copies = [each for each in wanted if each is not None]
    if len(copies) > 1:
        raise ValueError(
            "'peer' is listed twice in checkpoints: list it once, with the number of copies, as in 'peer:2'"
        )
    if not copies:
        return 0, path
    return copies[0], [each for each, number in zip(named, wanted, strict=True) if number is None]


def open_stores(path: Destination | Sequence[Destination] | None) -> list[Store]:
    if path is None:
        return [store_from_env()]
    destinations = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    return [open_store(each) if isinstance(each, str | os.PathLike) else each for each in destinations]


def default_job(stores: Sequence[Store]) -> str:
    urls = hashlib.sha256(" ".join(store.url for store in stores).encode()).hexdigest()[:16]
    return f"{urls}-rank{os.environ.get('RANK', '0')}"
