"""Torch's dynamic rendezvous over a compare-and-swap server, with times in seconds and errors in words.

Guarantees beyond torch's own handler: an outage of the server does not disturb a running job and is waited for
by one that is joining; a member that is lost before all know their ranks is not waited for, and neither is one of the round
before whose connection dropped; one that finds the world complete stands by, for as long as that is so, and is waited for when a member
is lost; time-outs and closed runs say who was there, and what to do; the workers of each round meet at a store of its own, which the
agent of rank 0 holds (`worker_store`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from strata.agent.trace import forget_rendezvous, note_rendezvous
from strata.agent.warm import warm_up
from strata.rendezvous import FAST_RECOVERY, TORCHRUN_ENVIRONMENT
from strata.rendezvous.backend import CasRendezvousBackend
from strata.rendezvous.cas import CasClient, CasStore, CasValue
from strata.rendezvous.worker_store import announce_round_stores, interface_of, network_address, serve
from strata.torch_compat.elastic import wrap_rendezvous
from strata.torch_compat.rendezvous import DynamicHandler, Node, State, share_s
from strata.torch_compat.stores import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 0.5
ALREADY = datetime.fromtimestamp(0, UTC)


class RoundLost(Exception):
    """The round that this node has joined was lost: a member of it is lost, or was taken for lost."""


class CasRendezvousHandler(DynamicHandler):
    """Made by `create_cas_handler`."""

    backend: CasRendezvousBackend
    coordinator: str = ""
    """HOST:PORT, where the server is a coordinator."""
    _server_lost = False
    _is_agreeing = False
    _round = 0
    _members: frozenset[Node] = frozenset()
    _workers_store: Store | None = None
    _next_look_s = 0.0
    _stands_by = False
    admit: Callable[[], None] = staticmethod(lambda: None)
    """Called before each round; raises what ends this machine's part in the run."""
    on_stand_by: Callable[[], None] | None = None
    """Called repeatedly while this node stands by."""

    @property
    def use_agent_store(self) -> bool:
        """Workers meet at the store of the agent of rank 0: it is there before the first of them and new in each round."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        began_s = time.monotonic()
        deadline_s = began_s + self.settings.timeout.join.total_seconds()
        while True:
            try:
                self._workers_store = None
                self.admit()
                met = super().next_rendezvous()
                if met.rank == 0 and met.bootstrap_store_info is not None:
                    self._workers_store = self._serve(met.bootstrap_store_info)
                note_rendezvous(self.settings.run_id, began_s, time.monotonic())
                if self._stands_by:
                    self._stands_by = False
                    logger.warning("this machine joins '%s' as rank %d", self.settings.run_id, met.rank)
                return met
            except RoundLost as lost:
                logger.warning("%s; joining again", lost)
            except RendezvousGracefulExitError:
                logger.warning(
                    "the run '%s' has ended: this machine was on standby and not needed", self.settings.run_id
                )
                raise
            except RendezvousTimeoutError as error:
                raise RendezvousTimeoutError(self._timeout_text()) from error
            except RendezvousClosedError as error:
                raise RendezvousClosedError(
                    f"The rendezvous '{self.settings.run_id}' is closed: its run has ended, and some of its members are "
                    "still alive. Wait for them to end, or start with another --rdzv-id."
                ) from error
            except RendezvousConnectionError as error:
                if time.monotonic() > deadline_s:
                    raise
                self._note_lost(error)
                time.sleep(RETRY_S)

    def _serve(self, place: RendezvousStoreInfo) -> Store:
        alone = len({node.addr for node in self._members}) == 1
        bind = interface_of(place.master_addr, alone=alone)
        return serve(place.master_addr, place.master_port, bind=bind)[0]

    def num_nodes_waiting(self) -> int:
        """How many need another round: those who wait for one, and members of this one whose connection dropped. Answered from
        memory where news arrive by themselves. Zero while the server is away: a running job continues without it."""
        if self.backend.presence.is_connected and not self.backend.has_news:
            return self._count_waiting()
        return self._tolerating_outage(self._look_who_waits, meanwhile=0)

    def _look_who_waits(self) -> int:
        self._refresh()
        super().num_nodes_waiting()
        return self._count_waiting()

    def _count_waiting(self) -> int:
        lost = sum(1 for node in self._members if self.backend.is_lost(node))
        return len(self.last_state.wait_list) + lost

    def _refresh(self) -> None:
        """Where there is news, look at what is stored now; not more often than all nodes together may."""
        if self.backend.has_news and time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + share_s(self.last_state)
            self.expire_state()

    def wait_for_others(self, least_s: float, most_s: float) -> None:
        if not self.backend.presence.is_connected:
            super().wait_for_others(least_s, most_s)
            return
        time.sleep(least_s)
        self.backend.wait_for_news(most_s - least_s)

    @property
    def max_machines(self) -> int:
        return int(self.settings.max_nodes)

    def announce_recoverable(self) -> bool:
        return self.backend.announce_recoverable()

    def is_recoverable(self) -> bool:
        return self.backend.is_recoverable()

    def shared_value(self, name: str) -> CasValue:
        """A value that all agents of this run share. May be used from any thread."""
        return self.backend.shared_value(name)

    def own_address(self) -> tuple[str, str]:
        """What others reach this machine by, and where to listen for them; nowhere in particular where that name is not an address of
        a network."""
        address = str(self.this_node.addr)
        return address, network_address(address)

    def standing_by(self) -> None:
        if not self._stands_by:
            self._stands_by = True
            logger.warning(
                "'%s' has its %d machines: this one is on standby until one of them is lost",
                *(self.settings.run_id, self.settings.max_nodes),
            )
        if self.on_stand_by is not None:
            self.on_stand_by()

    def shorten_last_call(self, state: State) -> None:
        """A round that follows this node's last one waits for no other node once all that are left of that one have joined, and all
        that had waited or stood by. A first round does: machines start seconds apart."""
        if not self._members or state.complete or state.deadline is None or state.wait_list:
            return
        if any(not self.backend.is_lost(node) for node in state.redundancy_list):
            return
        left = {node for node in self._members if not self.backend.is_lost(node)}
        if state.round == self._round + 1 and left <= state.participants.keys():
            state.deadline = ALREADY

    def is_closed(self) -> bool:
        return self._tolerating_outage(super().is_closed, meanwhile=False)

    def shutdown(self) -> bool:
        self.backend.presence.close()
        closed = super().shutdown()
        self._workers_store = None
        forget_rendezvous(self.settings.run_id)
        try:
            self.backend.leave(self.this_node)
        except RendezvousError as error:
            logger.warning(
                "left the rendezvous '%s' without notifying the others: %s", self.settings.run_id, error
            )
        return closed

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """From a round's beginning until its agents know their workers' ranks. Each waits for what the others say in
        the store; meanwhile a wait for one that is lost ends with `RoundLost`."""
        self._is_agreeing = True
        try:
            yield
        finally:
            self._is_agreeing = False

    def check_round(self) -> None:
        """Raise `RoundLost` if ranks are being agreed on, and not all who met are still there."""
        if self._is_agreeing:
            there = self._tolerating_outage(self._look_around, meanwhile=(self._round, self._members))
            if there[0] != self._round or not self._members <= there[1]:
                raise RoundLost(f"Round {self._round} of '{self.settings.run_id}' was lost")

    def _look_around(self) -> tuple[int, frozenset[Node]]:
        self._refresh()
        state = self.sync_state()
        return state.round, frozenset(state.participants)

    def world(self) -> tuple[int, int]:
        """This node's rank and how many there are, the same number for all who have joined. Torch leaves out whom it has
        silent for a while, each node by its own clock, so that their worlds may differ."""
        known = self.backend.known
        if known is None or not known.complete or self.this_node not in known.participants:
            raise RoundLost(f"A round of '{self.settings.run_id}' continued without this node")
        self._round, self._members = known.round, frozenset(known.participants)
        return known.participants[self.this_node], len(known.participants)

    def _tolerating_outage(self, ask: Callable[[], T], *, meanwhile: T) -> T:
        try:
            answer = ask()
        except RendezvousConnectionError as error:
            self._note_lost(error)
            return meanwhile
        if self._server_lost:
            self._server_lost = False
            logger.warning("the rendezvous server of '%s' is back", self.settings.run_id)
        return answer

    def _note_lost(self, error: Exception) -> None:
        if not self._server_lost:  # Once per outage: the agent asks ten times a second.
            self._server_lost = True
            logger.warning(
                "the rendezvous server of '%s' is unreachable, continuing without it: %s",
                self.settings.run_id,
                error,
            )

    def _timeout_text(self) -> str:
        settings, state = self.settings, self.last_state
        present = sorted(
            {str(node) for node in (*state.participants, *state.wait_list)} - {str(self.this_node)}
        )
        others = f"besides this node, {', '.join(present)} joined" if present else "no other node joined"
        return (
            f"Timed out waiting for rendezvous '{settings.run_id}' after {settings.timeout.join.total_seconds():g} s: "
            f"{settings.min_nodes} nodes are needed, {others}. All nodes must use the same --rdzv-id and endpoint; "
            f"fewer nodes are allowed with --nnodes=MIN:MAX, more time with --rdzv-conf=timeout=SECONDS."
        )


def _meet(meet: Callable[[], None], handler: object) -> None:
    """In the agent, in place of torch's way, which waits five minutes for the rank of a member that is lost."""
    if not isinstance(handler, CasRendezvousHandler):
        meet()
        return
    while True:
        try:
            with handler.agreeing():
                meet()
            return
        except RoundLost as lost:
            logger.warning("%s before all ranks were known; joining again", lost)


def create_cas_handler(
    client: CasClient, params: RendezvousParameters, *, unreachable: Callable[[Exception], str]
) -> CasRendezvousHandler:
    """The handler for `params.backend` over `client`. Raises `RendezvousConnectionError` if it is unreachable;
    `unreachable` puts that into words."""
    for name, value in TORCHRUN_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    announce_round_stores(params.run_id)
    warm_up(params.run_id)
    wrap_rendezvous(_meet)

    def seconds(key: str) -> float:
        value = float(params.get(key, FAST_RECOVERY[key]))
        if value <= 0:
            raise ValueError(f"The rendezvous option '{key}' must be positive, not {value:g}.")
        return value

    interval_s, attempts = seconds("keep_alive_interval"), int(seconds("keep_alive_max_attempt"))
    backend = CasRendezvousBackend(
        name=params.backend,
        client=client,
        run_id=params.run_id,
        window_s=interval_s * attempts,
        unreachable=unreachable,
    )
    try:
        client.get(backend.state_key)
    except ConnectionError as error:
        raise RendezvousConnectionError(unreachable(error)) from error
    # torchrun always passes `timeout`, with 900 s unless set; torch's own name for it comes first.
    join_s = float(params.get("join_timeout") or params.get("timeout") or 600)
    store = CasStore(client, lambda: backend.store_root)
    handler: CasRendezvousHandler = CasRendezvousHandler.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(
            join=timedelta(seconds=join_s),
            last_call=timedelta(seconds=seconds("last_call_timeout")),
            close=timedelta(seconds=seconds("close_timeout")),
        ),
        keep_alive_interval=interval_s,  # type: ignore[arg-type]  # torch only makes a timedelta of it
        keep_alive_max_attempt=attempts,
    )
    handler.backend = backend
    handler.poll_fast()
    store.while_waiting = handler.check_round
    return handler
