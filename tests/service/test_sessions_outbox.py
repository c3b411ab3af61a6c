"""What waits for a worker that is slow to read, and what news may tell."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

from strata.coordinator.engine import Engine, SystemClock
from strata.coordinator.grpc.sessions import GATHER_S, OUTBOX_LIMIT, TOPOLOGY, Sessions, WorkerSession
from strata.coordinator.journal.sqlite import SqliteJournal
from strata.core.cluster import Cluster
from strata.core.messages import Command, Event, JobId, RegisterWorker, WorkerId
from strata.rpc import coordinator_pb2 as pb
from tests.core.builders import worker_spec

DATASETS = 300


async def test_of_news_that_was_not_delivered_yet_the_newest_is_kept_and_none_ends_a_session() -> None:
    session = WorkerSession(WorkerId("slow"), 1, JobId("job"))
    for version in range(1, 20):
        session.notify(TOPOLOGY, pb.CoordinatorMessage(topology=pb.Topology(generation=version)))
        for n in range(DATASETS):
            plan = pb.PlanChanged(dataset_id=f"d{n}", plan_version=version)
            session.notify(f"plan of d{n}", pb.CoordinatorMessage(plan=plan))
    session.push(pb.CoordinatorMessage(welcome=pb.Welcome()))
    assert not session.over
    topology, *plans, welcome = await session.next_messages()
    assert topology.topology.generation == 19
    assert [(m.plan.dataset_id, m.plan.plan_version) for m in plans] == [
        (f"d{n}", 19) for n in range(DATASETS)
    ]
    assert welcome.HasField("welcome")


async def test_answers_that_pile_up_end_the_session_after_all_is_said() -> None:
    session = WorkerSession(WorkerId("deaf"), 1, JobId("job"))
    for _ in range(OUTBOX_LIMIT + 1):
        session.push(pb.CoordinatorMessage(barrier=pb.BarrierOutcome()))
    assert session.over
    assert len(await session.next_messages()) == OUTBOX_LIMIT
    assert await session.next_messages() == []


class HeldJournal(SqliteJournal):
    """Makes a batch durable once it is allowed to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write, self.is_asked = threading.Event(), threading.Event()
        self.may_write.set()

    def append(self, events: Sequence[Event]) -> None:
        self.is_asked.set()
        assert self.may_write.wait(60)
        super().append(events)


async def test_news_names_no_join_that_a_crash_could_still_take_back(tmp_path: Path) -> None:
    journal = HeldJournal(tmp_path)
    engine = Engine(Cluster(), journal, SystemClock())
    sessions = Sessions(engine)
    engine.listeners.append(sessions.committed)
    running = asyncio.create_task(engine.run())

    def join(name: str) -> Command:
        return RegisterWorker(spec=worker_spec(name), registration_id=name)

    await engine.submit(join("first"))
    session = sessions.open(WorkerId("first"), 1)
    await session.next_messages()
    worlds: asyncio.Queue[int] = asyncio.Queue()

    async def read() -> None:
        while messages := await session.next_messages():
            for message in messages:
                worlds.put_nowait(message.topology.world_size)
                assert ("third" in message.topology.reason) == (message.topology.world_size == 3)

    reading = asyncio.create_task(read())
    await engine.submit(join("second"))  # Its news is being gathered.
    journal.is_asked.clear()
    journal.may_write.clear()
    third = asyncio.create_task(engine.submit(join("third")))
    await asyncio.to_thread(journal.is_asked.wait, 60)
    await asyncio.sleep(2 * GATHER_S)  # Gathering ends while the third is on its way to the disk.
    early = [worlds.get_nowait() for _ in range(worlds.qsize())]
    assert 3 not in early
    journal.may_write.set()
    await third
    while await worlds.get() != 3:
        assert not reading.done()
    reading.cancel()
    engine.stop()
    await running
    engine.close()
