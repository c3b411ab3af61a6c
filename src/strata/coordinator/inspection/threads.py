"""Work that may take long, on threads that can be left behind: never on the event loop, and never in the way of a
coordinator that stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, cast

T = TypeVar("T")


def begin(work: Callable[..., T], *arguments: object, name: str) -> asyncio.Future[T]:
    """Run `work` on a thread of its own; the future has what it returned or raised, on this loop."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def end(result: T | None, error: Exception | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(cast(T, result))

    def run() -> None:
        result, failure = None, None
        try:
            result = work(*arguments)
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # The loop has ended: nobody waits any more.
            loop.call_soon_threadsafe(end, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return ended
