"""What waits for a worker that is slow to read."""

from __future__ import annotations

from strata.coordinator.sessions import OUTBOX_LIMIT, TOPOLOGY, WorkerSession
from strata.core.messages import JobId, WorkerId
from strata.rpc import coordinator_pb2 as pb

DATASETS = 300


async def test_of_news_that_was_not_heard_yet_the_newest_is_kept_and_none_ends_a_session() -> None:
    session = WorkerSession(WorkerId("slow"), 1, JobId("job"))
    for version in range(1, 20):
        session.tell(TOPOLOGY, pb.CoordinatorMessage(topology=pb.Topology(generation=version)))
        for n in range(DATASETS):
            plan = pb.PlanChanged(dataset_id=f"d{n}", plan_version=version)
            session.tell(f"plan of d{n}", pb.CoordinatorMessage(plan=plan))
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
