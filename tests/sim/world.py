"""Simulated time: one queue of things to come, one source of chance, and the story of what happened.

Everything that happens in a simulation is an action at a moment, in an order that the seed decides and nothing
else does. No thread, no real clock, no real sleep.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

Action = Callable[[], None]


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now_s = 0.0
        self.story: list[str] = []
        self.tells = True
        """Whether anybody listens: a long search does without, and tells the one that it has found."""
        self._queue: list[tuple[float, int, Action]] = []
        self._count = 0

    @property
    def events(self) -> int:
        """How many things there have been to come."""
        return self._count

    def after(self, delay_s: float, action: Action) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, action))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def between(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    def tell(self, text: str) -> None:
        if self.tells:
            self.story.append(f"{self.now_s:8.3f}  {text}")

    def run(self, *, until: Callable[[], bool], limit_s: float) -> bool:
        """Whether `until` came true before the clock reached the limit."""
        while self._queue and not until():
            at_s, _, action = heapq.heappop(self._queue)
            if at_s > limit_s:
                return False
            self.now_s = at_s
            action()
        return until()


class Network:
    """Messages that are late, lost, doubled and out of order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.loss = 0.0
        self.doubling = 0.0
        self.cut_off: set[str] = set()
        """Workers that can neither speak nor hear."""

    def send(self, worker: str, deliver: Action) -> None:
        world = self._world
        for _ in range(2 if world.chance(self.doubling) else 1):
            if not world.chance(self.loss):
                slow = world.chance(0.02)
                world.after(
                    world.between(0.5, 4.0) if slow else world.between(0.001, 0.03),
                    self._way(worker, deliver),
                )

    def _way(self, worker: str, deliver: Action) -> Action:
        def arrive() -> None:
            if worker not in self.cut_off:
                deliver()

        return arrive
