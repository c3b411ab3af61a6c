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
from dataclasses import dataclass, replace
from functools import partial

from strata.core.cluster import Cluster, Limits
from strata.core.messages import Instant, RegisterDataset
from tests.sim.coordinator import Reachable, Request
from tests.sim.elastic import ElasticJob, ElasticProcess
from tests.sim.leadership import Links, Store
from tests.sim.machines import Agent, MachineProcess, MachineScenario
from tests.sim.replicas import Front, Immediate, Log, Replica, ReplicaAgent, Roads
from tests.sim.scenario import SimulationFailed
from tests.sim.worker import Fabric, Process
from tests.sim.world import Action, Network


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
        self.restores: Counter[tuple[int, str]] = Counter()
        """By life and source."""
        self.store_is_full = False
        self.part_bytes = 300 if seed % 5 == 0 else 2_000
        """Some batches are several records."""
        self._tells = tells
        self._next_look_s = 0.0
        super().__init__(seed)
        world = self.world
        cast = world.random.choice(["both", "elastic", "elastic", "planned"])
        self.job = ElasticJob(self, seed) if cast != "planned" else None
        self._ranks: list[str] = []
        self.places: dict[str, str] = {}
        """By name: the machine of whoever had it last."""
        self.elastic_fabric = Fabric()
        if self.job is not None:
            self._names = [] if cast == "elastic" else self._names[:2]
            self.plan = replace(self.plan, total=min(self.plan.total, 24))
            self._spec = replace(self._spec, total_samples=self.plan.total)
            self._ranks = [f"r{number}" for number in range(world.random.choice([1, 2, 2, 3, 3, 4]))]
            self._names += self._ranks
            self.elastic_fabric.processes = 10_000
            fabric, job = self.fabric, self.job
            self.oracle.existing = lambda: {str(s.checkpoint_id) for s in fabric.saved} | job.existing()
            self.oracle.may_exist = lambda: {str(s.checkpoint_id) for s in fabric.saved} | job.ever_durable

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

    def gave_way(self, process: MachineProcess) -> None:
        """Where nobody has taken its place but one that is dead (its registration was on its way for long), whoever started it
        starts it again."""
        name = str(process.worker_id)
        if self.processes.get(name) is process:
            del self.processes[name]
            self.world.after(self.world.between(0.5, 2.0), partial(self._start, name))

    def fabric_of(self, process: MachineProcess) -> Fabric:
        return self.elastic_fabric if isinstance(process, ElasticProcess) else self.fabric

    def _new_agent(self, machine: str) -> Agent:
        return ReplicaAgent(self, machine)

    def machine_names(self) -> tuple[str, ...]:
        return (
            super().machine_names()
            if self.job is None
            else tuple(machine.name for machine in self.job.machines)
        )

    def _start(self, name: str) -> None:
        process = self.processes.get(name)
        if process is None or not (process.alive or process.finished):
            machines = self.machine_names()
            machine = self.places[name] = machines[sum(name.encode()) % len(machines)]
            if self.job is not None and name in self._ranks:
                self.processes[name] = ElasticProcess(self.job, name, machine)
            else:
                self.processes[name] = self._new_process(name, machine)

    def _begin(self) -> None:
        if self.job is not None:
            self.job.tick()
        super()._begin()

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

    def _is_over(self) -> bool:
        """Looked at now and then: it asks everybody."""
        if self.world.now_s < self._next_look_s:
            return False
        if super()._is_over():
            return True
        self._next_look_s = self.world.now_s + 0.1
        return False

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
        counts.update(f"restored from {source}" for _, source in self.restores)
        if self.job is not None:
            counts["lives"] += len(self.job.lives)
            for name in (
                "zombies",
                "stale",
                "resumed",
                "anew",
                "stopped",
                "rescued",
                "copies",
                "damages",
                "older",
                "removed",
            ):
                counts[f"job: {name}"] += self.job.counts[name]
            counts["job: finished by agents"] += self.job.counts["finished by agent"]
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
        if self.job is not None and self.world.chance(0.25):
            if self.world.chance(0.3):
                self._lose_machine(self.job)
            else:
                self.job.disturb()
        elif self.world.chance(0.45):
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
        """Between a machine and a coordinator, a destination or another machine, one way or both."""
        machine = self.world.random.choice(list(self.machine_names()))
        others = [name for name in self.machine_names() if name != machine]
        if self.job is not None:
            others += [destination.name for destination in self.job.destinations]
        one = self.world.random.choice(others) if others and self.world.chance(0.3) else self._someone().name
        ways = [(machine, one), (one, machine)]
        if self.world.chance(0.7):
            ways = [self.world.random.choice(ways)]
            self.counts["one-way cuts"] += 1
        self.world.tell(f"cut: {', '.join(f'{source} to {target}' for source, target in ways)}")
        for way in ways:
            self.roads.cut.add(way)
            self.world.after(self.world.between(0.5, 6.0), partial(self.roads.cut.discard, way))

    def _lose_machine(self, job: ElasticJob) -> None:
        """With its memory, its agent and its processes."""
        lost = self.world.random.choice(job.machines)
        self.counts["machines lost"] += 1
        job.lose_machine(lost)
        agent = self.agents.pop(lost.name, None)
        if agent is not None:
            agent.kill()
        for name, process in list(self.processes.items()):
            if isinstance(process, MachineProcess) and process.machine == lost.name and process.alive:
                process.kill()
                self.world.after(self.world.between(0.05, 4.0), partial(self._start, name))
        for zombie in self.zombies:
            if isinstance(zombie, MachineProcess) and zombie.machine == lost.name and zombie.alive:
                zombie.kill()
        self.world.after(self.world.between(0.1, 2.0), partial(self._start_agent, job.machines[-1].name))

    def stop_short(self, process: ElasticProcess) -> None:
        """It hangs for a while, and perhaps somebody starts another in its place meanwhile."""
        if self.processes.get(str(process.worker_id)) is process and self.world.chance(0.6):
            self._replace(process)
        else:
            process.freeze()
        self.world.after(self.world.between(1.0, 9.0), process.wake)

    def _kill_agent(self) -> None:
        killed = self.agents_killed
        alive = {name for name, agent in self.agents.items() if agent.alive}
        super()._kill_agent()
        if self.job is not None and self.agents_killed > killed:
            for machine in self.job.machines:
                if machine.name in alive and not self.agents[machine.name].alive:
                    self.job.lose_copies(machine)

    def _new_worker(self) -> None:
        name = f"new{len(self.processes)}"
        self._names.append(name)
        if self.job is not None and (not self.processes or self.world.chance(0.5)):
            self._ranks.append(name)
        self._start(name)

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
        if self.job is not None:
            self.job.faults_end()
        for replica in self.replicas.values():
            replica.wake()
            replica.start()

    # --- the end --------------------------------------------------------------------------------------------

    def _planned(self) -> list[Process]:
        return [process for process in self.processes.values() if not isinstance(process, ElasticProcess)]

    def _final(self) -> Cluster:
        cluster = self.log.new_cluster()
        for event in self.log.committed:
            cluster.apply(event, Instant(mono_s=0.0, wall_s=0.0))
        if self.job is not None and self._ranks:
            self.job.check_end(cluster)
        return cluster


def simulate(seed: int) -> WholeResult:
    """Without its story, which is told when it fails."""
    try:
        return WholeScenario(seed, tells=False).simulate()
    except SimulationFailed as failure:
        again = WholeScenario(seed)
        again.simulate()
        raise AssertionError(f"seed {seed} is not the same twice") from failure


def try_out(seed: int) -> WholeResult | SimulationFailed:
    try:
        return simulate(seed)
    except SimulationFailed as failure:
        return failure
