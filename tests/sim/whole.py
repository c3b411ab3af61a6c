"""The whole, in one world: coordinators with leases over one store, machines with agents, workers, and what they save.

One clock, one seed. Two or three coordinators (`replicas`) lead in turn; workers (`worker`) train a data set that the coordinator
shares out, some over their agents' streams and some by themselves (`machines`). Between every two parties each direction may be cut
by itself; messages are late, lost, doubled and out of order; coordinators are killed, paused and have clocks that run unequally and
are set; the store loses its majority, or is full; workers, agents and machines are killed, frozen and replaced.

What holds in each of the other simulations holds here, after every event; and when the faults are over, training reaches its end
with every sample exactly once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import partial

from strata.core.cluster import Cluster, Limits
from strata.core.messages import Instant, RegisterDataset
from tests.sim.coordinator import Reachable, Request
from tests.sim.leadership import Links, Store
from tests.sim.machines import Agent, MachineProcess, MachineScenario
from tests.sim.oracle import must
from tests.sim.replicas import Front, Immediate, Log, Replica, ReplicaAgent, Roads
from tests.sim.scenario import FAULTS_END_S, LIMIT_S, SimulationFailed
from tests.sim.world import Action, Network

MACHINES = ("m0", "m1")


@dataclass(frozen=True, kw_only=True)
class WholeResult:
    seed: int
    ended_s: float
    counts: Counter[str]
    fingerprint: str


class WholeScenario(MachineScenario):
    options = "--whole "

    def __init__(self, seed: int, *, tells: bool = True) -> None:
        self.counts: Counter[str] = Counter()
        self.store_is_full = False
        self.part_bytes = 2_000
        self._tells = tells
        super().__init__(seed)

    def _coordinate(self, limits: Limits) -> None:
        world = self.world
        world.tells = self._tells
        self.roads = Roads(world)
        self.network = self.roads
        self.log = Log(world, limits, self.oracle)
        self.store = Store(world, self.log)
        self.links = Links(world, self.store)
        self._immediate = Immediate(world)
        self.replicas: dict[str, Replica] = {}
        for name in "abc"[: world.random.randint(2, 3)]:
            self.replicas[name] = Replica(name, self)

    # --- the cast -------------------------------------------------------------------------------------------

    def reach(self, process: MachineProcess) -> tuple[Network, Reachable]:
        return self._immediate, Front(self, process.machine)

    def _new_agent(self, machine: str) -> Agent:
        return ReplicaAgent(self, machine)

    def _watch_crashes(self) -> None:
        pass

    def fell(self, replica: Replica) -> None:
        """Its process has ended, or starts again: its streams are closed."""
        for agent in self.agents.values():
            assert isinstance(agent, ReplicaAgent)
            agent.coordinator_fell(replica)

    def _register_dataset(self) -> None:
        """Until it is answered; the faults do not wait for it, and neither do the workers."""
        front = Front(self, "m0")
        registered = False

        def answered(_: object) -> None:
            nonlocal registered
            registered = True

        request = Request(worker="m0", what=RegisterDataset(spec=self._spec), answer=answered)

        def ask() -> None:
            if not registered:
                front.receive(request)
                self.world.after(1.5, ask)

        ask()

    # --- the run --------------------------------------------------------------------------------------------

    def simulate(self) -> WholeResult:
        result = self.run()
        counts = self.counts
        counts.update(self.log.counts)
        for name in ("releases", "breaks", "stale", "storage_refusals", "forgotten", "incidents"):
            counts[name] += getattr(self.oracle, name)
        counts["stream cuts"] += self.cuts
        counts["agents killed"] += self.agents_killed
        counts["incarnations"] += result.incarnations
        counts["events"] += self.world.events
        counts = Counter({name: count for name, count in counts.items() if count})
        facts = repr((sorted(counts.items()), self.world.now_s)).encode()
        return WholeResult(
            seed=self.world.seed,
            ended_s=self.world.now_s,
            counts=counts,
            fingerprint=hashlib.sha256(facts).hexdigest(),
        )

    # --- what goes wrong ------------------------------------------------------------------------------------

    def _faults_begin(self) -> None:
        super()._faults_begin()
        self.links.loss, self.links.doubling = self.network.loss / 2, self.network.doubling

    def _fault(self) -> None:
        whole: list[Action] = [self._pause_leader, self._pause_leader, self._cut_store, self._lose_majority]
        whole += [self._cut_road, self._cut_road, self._cut_road]
        if self.world.chance(0.45):
            self.world.random.choice(whole)()
        else:
            super()._fault()

    def _someone(self) -> Replica:
        """Rather the one who leads."""
        leading = [replica for replica in self.replicas.values() if replica.leads()]
        if leading and self.world.chance(0.7):
            return leading[0]
        return self.world.random.choice(list(self.replicas.values()))

    def _crash_coordinator(self) -> None:
        one = self._someone()
        self.crashes += 1
        self.counts["coordinators killed"] += 1
        one.crash()
        self.world.after(self.world.between(0.1, 4.0), one.start)

    def _pause_leader(self) -> None:
        one = self._someone()
        self.counts["coordinators paused"] += 1
        one.pause()
        self.world.after(self.world.between(0.1, 7.0), one.wake)

    def _cut_store(self) -> None:
        one, links = self._someone(), self.links
        ways = self.world.random.choice([[links.cut_to], [links.cut_from], [links.cut_to, links.cut_from]])
        self.counts["cut off from the store"] += 1
        self.world.tell(f"{one.name} is cut off from the store, {len(ways)} of two directions")
        for way in ways:
            way.add(one.name)
            self.world.after(self.world.between(0.3, 6.0), partial(way.discard, one.name))

    def _lose_majority(self) -> None:
        self.counts["majorities lost"] += 1
        self.store.lose_majority(self.world.between(0.3, 6.0))

    def _cut_road(self) -> None:
        """Between a machine and a coordinator, one way or both."""
        machine = self.world.random.choice(list(self.machine_names()))
        one = self._someone().name
        ways = [(machine, one), (one, machine)]
        if self.world.chance(0.7):
            ways = [self.world.random.choice(ways)]
            self.counts["one-way cuts"] += 1
        self.world.tell(f"cut: {', '.join(f'{source} to {target}' for source, target in ways)}")
        for way in ways:
            self.roads.cut.add(way)
            self.world.after(self.world.between(0.5, 6.0), partial(self.roads.cut.discard, way))

    def machine_names(self) -> tuple[str, ...]:
        return MACHINES

    def _fill_disk(self) -> None:
        self.world.tell("the store is full")
        self.counts["full"] += 1
        self.store_is_full = True
        self.world.after(self.world.between(0.2, 4.0), self._free_disk)

    def _free_disk(self) -> None:
        self.store_is_full = False
        for replica in self.replicas.values():
            replica.space_again()

    def _set_wall_clock(self) -> None:
        jump_s = self.world.random.choice([-1e6, -3600.0, 100.0, 1e6])
        one = self._someone()
        self.counts["clocks set"] += 1
        self.world.tell(f"the wall clock of {one.name} jumps by {jump_s:g} s")
        one.wall_jump_s += jump_s

    def _cut_off_worker(self) -> None:
        self._cut_road()

    def _coordinators_recover(self) -> None:
        self.links.loss = self.links.doubling = 0.0
        self.links.cut_to.clear()
        self.links.cut_from.clear()
        self.roads.cut.clear()
        self._free_disk()
        for replica in self.replicas.values():
            replica.wake()
            replica.start()

    # --- the end --------------------------------------------------------------------------------------------

    def _final(self) -> Cluster:
        cluster = self.log.new_cluster()
        for event in self.log.committed:
            cluster.apply(event, Instant(mono_s=0.0, wall_s=0.0))
        return cluster


def simulate(seed: int) -> WholeResult:
    """Without its story, which is told when it fails."""
    try:
        return WholeScenario(seed, tells=False).simulate()
    except SimulationFailed as failure:
        again = WholeScenario(seed)
        again.simulate()
        raise AssertionError(f"seed {seed} is not the same twice") from failure


__all__ = ["FAULTS_END_S", "LIMIT_S", "WholeResult", "WholeScenario", "must", "simulate"]
