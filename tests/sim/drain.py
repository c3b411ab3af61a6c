"""Machines that go, simulated: notices, agents, a coordinator that crashes, and those who continue, in any order.

Each machine has an agent with the real `Handover`; the coordinator is the real `Cluster` with its journal. Agents leave in time, late or
never; reports are lost, doubled and late; recoveries overtake them, or were from something before; drains are cancelled, shortened and
asked for again. What must hold:

* a machine that is asked to go is let in again only after a cancel, whoever crashes meanwhile;
* it is drained when its deadline has come, at the latest with the next tick;
* an agent never works beyond its deadline: it asks before it kills, and kills before the machine goes;
* what is said to be lost is what was lost by a recovery without that machine, and never changes once it is known;
* the state after a crash is the state before it, from the journal and from a compacted one.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from strata.core.cluster import Cluster
from strata.core.fleet.drains import Draining, DrainView
from strata.core.jobs.handover import Handover, Notice, Outcome, Summary, summarize
from strata.core.messages import (
    SOFT_EVENTS,
    CancelDrain,
    ClockResumed,
    Command,
    DrainHost,
    Event,
    Instant,
    JobId,
    RegisterWorker,
    ReportHandover,
    ReportRecovery,
    Tick,
    Unknown,
    WorkerId,
)
from tests.core.builders import limits, worker_spec

END_S = 300.0
TICK_S = 0.5
JOB = "run"
LIMITS = limits(heartbeat_timeout_s=1e6)
"""Workers are not what this is about."""


class Violation(AssertionError):
    pass


@dataclass(slots=True)
class Agent:
    """Of one machine, and what it would say."""

    host: str
    number: int
    handover: Handover = field(default_factory=Handover)
    leaves_s: float = 0.0
    has_left: bool = False
    summary: Summary | None = None

    @property
    def node(self) -> str:
        return f"{self.host}_{self.number}"


class Fleet:
    def __init__(self, seed: int, *, machines: int = 4) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.now_s = 1000.0
        self.wall_offset_s = 1.7e9
        self.cluster = Cluster(LIMITS)
        self.journal: list[Event] = []
        self.counts: Counter[str] = Counter()
        self.story: list[str] = []
        self.numbers = 0
        self.agents: dict[str, Agent] = {}
        self.step = 100
        self.known_lost: dict[tuple[str, float], int] = {}
        self.worlds: dict[int, frozenset[str]] = {}
        """Which machines each recovery continued with, by the step at which it did."""
        self.asked: set[str] = set()
        """Machines that were asked to go, and for which nobody has cancelled."""
        self.in_flight: list[tuple[float, Command]] = []
        for number in range(machines):
            host = f"m{number}"
            self._do(
                RegisterWorker(
                    spec=worker_spec(f"{JOB}-rank{number}", JOB, hostname=host), registration_id=host
                )
            )
            self._start(host)

    # --- the world ------------------------------------------------------------------------------------------

    @property
    def now(self) -> Instant:
        return Instant(mono_s=self.now_s, wall_s=self.now_s + self.wall_offset_s)

    def _say(self, text: str) -> None:
        self.story.append(f"{self.now_s:8.1f} {text}")

    def _do(self, command: Command) -> None:
        events = self.cluster.handle(command, self.now).events
        self.journal += [event for event in events if not isinstance(event, SOFT_EVENTS)]

    def _start(self, host: str) -> bool:
        """An agent wants to join."""
        try:
            self.cluster.drains.admit(host)
        except Draining:
            if host not in self.asked:
                raise Violation(f"{host} is refused, and nobody has asked it to go") from None
            self.counts["refused"] += 1
            return False
        if host in self.asked:
            raise Violation(f"{host} was asked to go, and is let in")
        self.numbers += 1
        self.agents[host] = Agent(host, self.numbers)
        return True

    def run(self) -> None:
        try:
            while self.now_s < 1000.0 + END_S:
                self.now_s += self.chance.uniform(0.05, 2.0)
                self._happen()
                self._agents_act()
                self._deliver()
                self._do(Tick())
                self._check()
            self._settle()
        except Violation as error:
            story = "\n".join(self.story[-40:])
            raise Violation(f"seed {self.seed}: {error}\n{story}") from None

    def _happen(self) -> None:
        kind = self.chance.choices(
            ["nothing", "drain", "again", "cancel", "crash", "join", "vanish", "recovery"],
            [10, 3, 1, 1, 2, 3, 1, 2],
        )[0]
        host = self.chance.choice([f"m{number}" for number in range(4)])
        if kind in ("drain", "again"):
            within_s = self.chance.choice([0.0, 1.0, 5.0, 30.0, 90.0])
            present = host in self.agents and not self.agents[host].has_left
            self._do(DrainHost(host=host, within_s=within_s, reason="r", by="ada", agents=int(present)))
            self._say(f"{host} is to go within {within_s:g} s")
            self.asked.add(host)
            self.counts["drain"] += 1
            if present:
                self._notify(self.agents[host])
        elif kind == "cancel":
            try:
                self._do(CancelDrain(host=host, by="bob"))
            except Unknown:
                return
            self._say(f"{host} is cancelled")
            self.asked.discard(host)
            self.counts["cancel"] += 1
            for key in [key for key in self.known_lost if key[0] == host]:
                del self.known_lost[key]
        elif kind == "crash":
            self._crash()
        elif kind == "join" and (host not in self.agents or self.agents[host].has_left):
            self._start(host)
        elif kind == "vanish" and host in self.agents:
            self._say(f"{host} vanishes")
            del self.agents[host]
            self.counts["vanish"] += 1
        elif kind == "recovery":
            self._recover()

    def _notify(self, agent: Agent) -> None:
        """The coordinator's stream says how long there is."""
        left_s = self.cluster.drains.left_s(agent.host, self.now)
        assert left_s is not None
        was_asked = agent.handover.state == "draining"
        agent.handover.take(Notice(source="drain", reason="r", deadline_s=self.now_s + left_s))
        ask_s, kill_s = agent.handover.ask_in_s(self.now_s), agent.handover.kill_in_s(self.now_s)
        if ask_s is None or kill_s is None or not 0 <= ask_s <= kill_s <= left_s:
            raise Violation(f"{agent.node} would end its workers at {ask_s} and {kill_s} of {left_s} s")
        # Some workers save in time, some have to be killed.
        wanted_s = self.chance.uniform(0.0, 20.0)
        leaves_s = self.now_s + min(wanted_s, kill_s)
        agent.leaves_s = min(agent.leaves_s, leaves_s) if was_asked else leaves_s
        in_time = wanted_s <= ask_s
        saved = self.step if in_time else self.step - self.chance.randint(0, 20)
        agent.summary = summarize(
            [
                Outcome(
                    step=self.step,
                    saved_step=saved,
                    where=self.chance.choice(["durable", "memory"]),
                    others_stay=True,
                    in_time=in_time,
                )
            ],
            workers=1,
        )

    def _agents_act(self) -> None:
        for agent in self.agents.values():
            if agent.handover.state != "draining" or agent.has_left or self.now_s < agent.leaves_s:
                continue
            agent.has_left = True
            agent.handover.left()
            assert agent.summary is not None
            self._say(f"{agent.node} has left: {agent.summary.reason}")
            self.counts["left"] += 1
            command = ReportHandover(
                host=agent.host,
                node=agent.node,
                launch=JOB,
                job_id=JobId(JOB),
                saved_step=agent.summary.saved_step,
                lost_steps=agent.summary.lost_steps,
                where=agent.summary.where,
                reason=agent.summary.reason,
            )
            for _ in range(self.chance.choice([0, 1, 1, 1, 2])):
                self.in_flight.append((self.now_s + self.chance.expovariate(1.0), command))

    def _deliver(self) -> None:
        due = [one for one in self.in_flight if one[0] <= self.now_s]
        self.in_flight = [one for one in self.in_flight if one[0] > self.now_s]
        for _, command in sorted(due, key=lambda one: one[0]):
            self._do(command)

    def _recover(self) -> None:
        lost = self.chance.randint(0, 20)
        hosts = frozenset(agent.host for agent in self.agents.values() if not agent.has_left)
        if not hosts:
            return
        self.step += 20 + self.chance.randint(1, 50)  # No two recoveries continue at the same step.
        self.worlds[self.step - lost] = hosts
        report = ReportRecovery(
            worker_id=WorkerId(f"{JOB}-rank0"),
            incarnation=0,
            phases_s={"load": 0.1},
            resumed_step=self.step - lost,
            lost_steps=lost,
            tier="memory",
            world_before=4,
            world_after=len(hosts),
            reason="",
            hosts=tuple(sorted(hosts)),
        )
        self.in_flight.append((self.now_s + self.chance.choice([0.0, 0.0, 5.0]), report))
        self._say(f"the run continues at step {self.step - lost} on {sorted(hosts)}, {lost} steps lost")

    def _crash(self) -> None:
        before = self._shown()
        compacted = self.chance.random() < 0.5
        events = self.cluster.compact() if compacted else self.journal
        self.now_s += self.chance.uniform(0.0, 20.0)
        self.cluster = Cluster(LIMITS)
        for event in events:
            self.cluster.apply(event, Instant(mono_s=0.0, wall_s=0.0))
        # Another process has another monotonic clock.
        jump_s = self.chance.uniform(0.0, 500.0)
        self.now_s += jump_s
        self.wall_offset_s -= jump_s
        for agent in self.agents.values():
            agent.leaves_s += jump_s
            if agent.handover.notice is not None:
                notice = agent.handover.notice
                agent.handover.notice = Notice(
                    source=notice.source, reason=notice.reason, deadline_s=notice.deadline_s + jump_s
                )
        self.in_flight = [(at_s + jump_s, command) for at_s, command in self.in_flight]
        self.cluster.observe(ClockResumed(), self.now)
        self.journal = list(events)
        self.counts["crash"] += 1
        self._say("the coordinator crashes, and is back")
        if self._shown() != before:
            raise Violation(f"a crash has changed {before} to {self._shown()}")
        for host in self.asked:
            if host in self.agents and not self.agents[host].has_left and host in self.cluster.drains.hosts:
                self._notify(self.agents[host])

    # --- what must hold --------------------------------------------------------------------------------------

    def _shown(self) -> list[DrainView]:
        return self.cluster.drains.shown()

    def _check(self) -> None:
        shown = {one.host: one for one in self._shown()}
        if shown.keys() != self.asked:
            raise Violation(f"drained are {sorted(shown)}, asked were {sorted(self.asked)}")
        for host, one in shown.items():
            if one.state == "draining" and self.now.wall_s > one.deadline:
                raise Violation(f"{host} is draining after its deadline")
            for handover in one.handovers:
                key = (host, one.since)
                if handover.lost_steps is None:
                    if key in self.known_lost:
                        raise Violation(f"what {host} lost is forgotten")
                    continue
                if (
                    handover.reason.startswith("the run continued")
                    and host in self.worlds[handover.saved_step or 0]
                ):
                    raise Violation(f"{host} took part in the recovery that is said to have followed it")
                before = self.known_lost.setdefault(key, handover.lost_steps)
                if before != handover.lost_steps:
                    raise Violation(f"{host} had lost {before} steps, and now {handover.lost_steps}")

    def _settle(self) -> None:
        """Faults end: every drain does too, and every machine comes back when it is cancelled."""
        for _ in range(200):
            self.now_s += 1.0
            self._agents_act()
            self._deliver()
            self._do(Tick())
            self._check()
        if any(one.state != "drained" for one in self._shown()):
            raise Violation("somebody drains for ever")
        for host in sorted(self.asked):
            self._do(CancelDrain(host=host, by="bob"))
        self.asked.clear()
        for number in range(4):
            if not self._start(f"m{number}"):
                raise Violation(f"m{number} cannot come back")
