"""An agent's stream to the coordinator: while it is open the agent is there, and through it comes who is not (`Presence`).

A background thread holds the stream and opens it again when it ends. What ends with the coordinator says nothing about other
agents: what was last known stays, until the first notice of the next stream replaces it. A coordinator that is older than
these streams is asked once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Set
from typing import Any

import grpc

from strata.backoff import Backoff
from strata.rpc import coordinator_pb2 as pb

logger = logging.getLogger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 0.02, 1.0
GOODBYE_S = 2.0
"""How long the coordinator may take to end the stream after a goodbye."""


class AgentPresence:
    """`open_stream` calls the method `Presence` with an iterator of messages. `key` is where the agents' shared state is kept."""

    def __init__(
        self,
        open_stream: Callable[[Iterator[pb.AgentMessage]], Any],
        *,
        key: str,
        node: str,
        run_id: str,
        host: str = "",
        on_leave: Callable[[str, float | None], None] = lambda reason, within_s: None,
        on_notice: Callable[[], None] = lambda: None,
        on_end: Callable[[grpc.RpcError | None], bool] = lambda error: False,
    ) -> None:
        """`on_end` is called when a stream has ended, with its error, and says whether the next is to be opened at once: another
        coordinator's."""
        self._open_stream = open_stream
        self._key = key
        self._node = node
        self._run_id = run_id
        self._host = host
        self._on_leave = on_leave
        self._on_notice = on_notice
        self._on_end = on_end
        self._news = threading.Condition()
        self._notice: pb.PresenceNotice | None = None
        self._lost: frozenset[str] = frozenset()
        self._closing = threading.Event()
        self._to_send: queue.SimpleQueue[pb.AgentMessage | None] = queue.SimpleQueue()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name=f"presence of {node}", daemon=True)
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        return self._notice is not None

    @property
    def lost(self) -> frozenset[str]:
        return self._lost

    def has_changed(self, since: str | None) -> bool:
        notice = self._notice
        return notice is not None and notice.version > int(since or 0)

    def wait(self, since: str | None, lost: Set[str], timeout_s: float) -> None:
        with self._news:
            self._news.wait_for(lambda: self.has_changed(since) or self._lost != lost, timeout_s)

    def close(self) -> None:
        self._closing.set()
        self._to_send.put(pb.AgentMessage(goodbye=pb.Goodbye(reason="the agent leaves")))
        if self.is_connected:
            self._thread.join(GOODBYE_S)
        if self._call is not None:
            self._call.cancel()
        self._thread.join(GOODBYE_S)

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = Backoff(first_s=FIRST_RETRY_S, longest_s=LONGEST_RETRY_S)
        while not self._closing.is_set():
            opened_s = time.monotonic()
            failure: grpc.RpcError | None = None
            try:
                self._to_send = queue.SimpleQueue()
                hello = pb.AgentHello(key=self._key, node=self._node, host=self._host)
                self._to_send.put(pb.AgentMessage(hello=hello))
                self._call = self._open_stream(iter(self._to_send.get, None))
                for notice in self._call:
                    self._on_notice()
                    self._take(notice)
            except grpc.RpcError as error:
                failure = error
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    logger.info(
                        "the coordinator is an earlier version: lost nodes are detected by keep-alives only"
                    )
                    return
            finally:
                self._to_send.put(None)  # Its reader, a thread of gRPC's, ends.
                with self._news:
                    self._notice = None
            if time.monotonic() - opened_s > LONGEST_RETRY_S:
                backoff.worked()
            if self._on_end(failure):
                continue
            self._closing.wait(backoff.pause_s() or 0.0)

    def _take(self, notice: pb.PresenceNotice) -> None:
        lost = frozenset(notice.lost) - {self._node}
        for node in sorted(lost - self._lost):
            logger.warning("node %s of '%s' is lost: its connection dropped", node, self._run_id)
        with self._news:
            self._notice, self._lost = notice, lost
            self._news.notify_all()
        if notice.leave and not self._closing.is_set():
            self._on_leave(notice.leave, notice.within_s if notice.HasField("within_s") else None)
