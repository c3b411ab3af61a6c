"""Torch's dynamic rendezvous: its handler with public names, its shared state field by field, and how often it polls."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Set
from datetime import datetime, timedelta

from strata.torch_compat import UnsupportedTorch, require

require("rendezvous")

import torch  # noqa: E402
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic  # noqa: E402
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry  # noqa: E402

STATE_FIELDS = {
    "round",
    "complete",
    "deadline",
    "closed",
    "participants",
    "wait_list",
    "redundancy_list",
    "last_heartbeats",
}
OFTEN_S, SELDOM_S = 0.1, 1.0
"""Between two polls of a node that waits for others: when there are few, and at most."""
POLLS_PER_S = 200
"""Of all nodes together, where they are too many for each to poll that often."""


def share_s(state: State) -> float:
    """How long each of the nodes has to leave between two polls, for all of them to make no more than `POLLS_PER_S`."""
    return min((len(state.participants) + len(state.wait_list)) / POLLS_PER_S, SELDOM_S)


Node = dynamic._NodeDesc
State = dynamic._RendezvousState

_unknown = set(vars(State())) ^ STATE_FIELDS
if _unknown:
    raise UnsupportedTorch(
        version=torch.__version__,
        missing=tuple(
            f"a rendezvous state with exactly the known fields, not {name}" for name in sorted(_unknown)
        ),
    )


def pack_state(
    *,
    round: int,
    complete: bool,
    closed: bool,
    deadline: datetime | None,
    participants: Mapping[Node, int],
    wait_list: Set[Node],
    redundancy_list: Set[Node],
    last_heartbeats: Mapping[Node, datetime],
) -> bytes:
    """As torch unpickles it."""
    state = State()
    state.round = round
    state.complete = complete
    state.closed = closed
    state.deadline = deadline
    state.participants = dict(participants)
    state.wait_list = set(wait_list)
    state.redundancy_list = set(redundancy_list)
    state.last_heartbeats = dict(last_heartbeats)
    return pickle.dumps(state)


def unpack_state(data: bytes) -> State:
    """What torch has just pickled in this very process; bytes from anywhere else must never come here."""
    state = pickle.loads(data)  # noqa: S301
    assert isinstance(state, State)
    return state


class FastPolling(dynamic._DistributedRendezvousOpExecutor):
    """Polls the shared state while it waits for others. Torch's own polls once a second, which is long enough to miss a round
    and a large part of the time that a recovery takes."""

    _state_holder: dynamic._BackendRendezvousStateHolder

    def __init__(self, handler: DynamicHandler) -> None:
        super().__init__(handler._this_node, handler._state_holder, handler.settings)
        self._handler = handler

    def run(
        self,
        state_handler: Callable[[dynamic._RendezvousContext, float], dynamic._Action],
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        renewed_s = 0.0

        def polling(context: dynamic._RendezvousContext, until: float) -> dynamic._Action:
            while (action := decide(context, until)) == dynamic._Action.SYNC:
                least_s = share_s(context.state)
                self._handler.wait_for_others(least_s, max(least_s, OFTEN_S))
                self._handler.expire_state()
                self._state_holder.sync()
                self._state = self._state_holder.state
                context = dynamic._RendezvousContext(self._node, self._state, self._settings)
            return action

        def decide(context: dynamic._RendezvousContext, until: float) -> dynamic._Action:
            nonlocal renewed_s
            state = context.state
            self._handler.shorten_last_call(state)
            if self._node in state.redundancy_list and not state.closed:
                self._handler.standing_by()
            action = state_handler(context, max(until, renewed_s))
            if action == dynamic._Action.REMOVE_FROM_REDUNDANCY_LIST:
                # Torch leaves the list by one write and joins by the next. Meanwhile others would not know that it comes.
                state.redundancy_list.remove(self._node)
                if update_deadline is not None:
                    renewed_s = update_deadline(self._settings.timeout.join)
                return (
                    dynamic._Action.ADD_TO_WAIT_LIST
                    if state.complete
                    else dynamic._Action.ADD_TO_PARTICIPANTS
                )
            return action

        super().run(polling, deadline, update_deadline)


class DynamicHandler(dynamic.DynamicRendezvousHandler):
    """Torch's handler, polling fast. What may be overridden: `world`, this node's rank, and how many there are;
    `wait_for_others`, `shorten_last_call` and `standing_by`."""

    _state_holder: dynamic._BackendRendezvousStateHolder

    def poll_fast(self) -> None:
        # Torch looks through its whole stack, source files included, for the name of each event, which nothing reads.
        dynamic.get_method_name = lambda depth=2: "rendezvous"
        self._op_executor = FastPolling(self)

    def wait_for_others(self, least_s: float, most_s: float) -> None:
        """Until the shared state may have changed: no less and no more than this."""
        time.sleep(most_s)

    def shorten_last_call(self, state: State) -> None:
        """May set the deadline of a round that no node is missing from to an earlier one. `state` is this node's copy."""

    def standing_by(self) -> None:
        """Called repeatedly while the world has all the nodes that it may have, and this one waits for a place in it."""

    def world(self) -> tuple[int, int]:
        return super()._get_world()

    @property
    def this_node(self) -> Node:
        return self._this_node

    @property
    def last_state(self) -> State:
        """As this node last read it."""
        return self._state_holder.state

    def expire_state(self) -> None:
        """The next one to be read is not that of a moment ago."""
        self._state_holder._last_sync_time = -1

    def sync_state(self) -> State:
        with self._heartbeat_lock:
            self._state_holder.sync()
            return self._state_holder.state

    def _get_world(self) -> tuple[int, int]:
        return self.world()


def replace_backend(name: str, create: Callable[..., object]) -> None:
    """Under a name that torch has given to a back end of its own, which it would not let other code take."""
    rendezvous_handler_registry._registry[name] = create  # type: ignore[assignment]
