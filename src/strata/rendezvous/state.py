"""The shared state of a rendezvous, as JSON on the server and as torch's own object in the process.

Torch hands its state over pickled, and unpickles what it gets back. Here only JSON leaves the process, so that
nobody who can write to the server can run code in an agent, a person can read what is stored, and agents
with different torch versions understand each other. What cannot be read raises `RendezvousStateError`.

A node's heartbeat is a counter on the server and a local time in the process: see `backend`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousStateError

import strata
from strata.torch_compat.rendezvous import Node, pack_state

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedState:
    """What stands on the server. `incarnation` is new with every run, also under the same id."""

    incarnation: str
    round: int
    complete: bool
    closed: bool
    deadline: datetime | None
    participants: Mapping[Node, int]
    wait_list: frozenset[Node]
    redundancy_list: frozenset[Node]
    beats: Mapping[Node, int]

    def differs_in_beats_only(self, other: SharedState) -> bool:
        """Of the same nodes: nothing has happened but that some of them are alive."""
        return replace(self, beats=other.beats) == other and self.beats.keys() == other.beats.keys()

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "format": FORMAT,
                "incarnation": self.incarnation,
                "round": self.round,
                "complete": self.complete,
                "closed": self.closed,
                "deadline": None if self.deadline is None else self.deadline.isoformat(),
                "participants": [[*_parts(node), rank] for node, rank in self.participants.items()],
                "wait_list": [_parts(node) for node in sorted(self.wait_list)],
                "redundancy_list": [_parts(node) for node in sorted(self.redundancy_list)],
                "beats": [[*_parts(node), beat] for node, beat in self.beats.items()],
            }
        ).encode()

    @staticmethod
    def from_json(data: bytes) -> SharedState:
        try:
            raw = json.loads(data)
            if raw["format"] != FORMAT:
                raise ValueError(
                    f"it has format {raw['format']!r}, and Strata {strata.__version__} reads {FORMAT}"
                )
            return SharedState(
                incarnation=str(raw["incarnation"]),
                round=int(raw["round"]),
                complete=bool(raw["complete"]),
                closed=bool(raw["closed"]),
                deadline=None if raw["deadline"] is None else datetime.fromisoformat(raw["deadline"]),
                participants={_node(item[:3]): int(item[3]) for item in raw["participants"]},
                wait_list=frozenset(_node(item) for item in raw["wait_list"]),
                redundancy_list=frozenset(_node(item) for item in raw["redundancy_list"]),
                beats={_node(item[:3]): int(item[3]) for item in raw["beats"]},
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise RendezvousStateError(
                "Stale state detected: the state under this rendezvous id was not written by this version of Strata "
                f"({type(error).__name__}: {error}). Use another --rdzv-id, or remove it: etcdctl del --prefix "
                "/torch/elastic/ID"
            ) from error

    def to_torch(self, last_heartbeats: Mapping[Node, datetime]) -> bytes:
        """As torch unpickles it."""
        return pack_state(
            round=self.round,
            complete=self.complete,
            closed=self.closed,
            deadline=self.deadline,
            participants=self.participants,
            wait_list=self.wait_list,
            redundancy_list=self.redundancy_list,
            last_heartbeats=last_heartbeats,
        )


def _parts(node: Node) -> list[str | int]:
    return [node.addr, node.pid, node.local_id]


def _node(parts: list[Any]) -> Node:
    addr, pid, local_id = parts
    return Node(str(addr), int(pid), int(local_id))
