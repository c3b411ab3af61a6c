"""What an agent uploads of what its dead workers left, decided by what destinations answer."""

from __future__ import annotations

from dataclasses import replace

from strata.core.jobs.finishing import (
    PATIENCE_S,
    Ended,
    Finishing,
    Left,
    Look,
    Meet,
    Outcome,
    Seen,
    Wait,
    Write,
)
from strata.core.types import CheckpointId


def left(step: int, *, generation: int = 3, **changes: object) -> Left:
    snapshot = Left(
        checkpoint_id=CheckpointId(f"c{step}"),
        run="run",
        step=step,
        generation=generation,
        sequence=step,
        destinations=("near", "far"),
    )
    return replace(snapshot, **changes)  # type: ignore[arg-type]


def seen(step: int | None, *, claimed: int = 3, generation: int = 3) -> Seen:
    newest = None if step is None else (generation, step)
    return Seen(run="run", claimed=claimed, newest=newest, newest_step=step)


def outcomes(finishing: Finishing, now_s: float = 0.0) -> list[Outcome]:
    ended = finishing.decide(now_s)
    assert isinstance(ended, Ended), ended
    return list(ended.outcomes)


def test_newest_snapshot_goes_to_every_destination_near_to_far() -> None:
    finishing = Finishing([left(12), left(14)], now_s=0.0)
    for name in ("near", "far"):
        assert finishing.decide(0.0) == Look(destination=name)
        finishing.saw(name, seen(8))
        assert finishing.decide(0.0) == Write(destination=name, snapshot=left(14))
        finishing.wrote(name, left(14))
    near, far = outcomes(finishing)
    assert (near.result, far.result, near.steps_saved) == ("saved", "saved", 6)
    assert str(near) == "near: step 14 is saved (6 steps more)"


def test_newer_generation_and_newer_checkpoint_win() -> None:
    finishing = Finishing([left(14)], now_s=0.0)
    finishing.saw("near", seen(8, claimed=4))
    finishing.saw("far", seen(14))
    near, far = outcomes(finishing)
    assert (near.result, far.result) == ("refused", "known")
    assert near.reason == "generation 4 of the run has started, this is generation 3"


def test_snapshot_of_an_older_generation_does_not_count() -> None:
    finishing = Finishing([left(40, generation=2), left(14)], now_s=0.0)
    finishing.saw("near", seen(None))
    assert finishing.decide(0.0) == Write(destination="near", snapshot=left(14))


def test_destination_of_another_run_is_left_alone() -> None:
    finishing = Finishing([left(14, destinations=("near",))], now_s=0.0)
    finishing.saw("near", Seen(run=""))
    [near] = outcomes(finishing)
    assert (near.result, near.reason) == ("refused", "it belongs to no run, not to run run")


def test_destination_that_is_away_keeps_no_other_waiting_and_fails_in_the_end() -> None:
    finishing = Finishing([left(14)], now_s=0.0)
    assert finishing.decide(0.0) == Look(destination="near")
    finishing.away("near", "no route", now_s=0.0)
    assert finishing.decide(0.0) == Look(destination="far")
    finishing.saw("far", seen(8))
    finishing.wrote("far", left(14))
    now_s = 0.0
    while isinstance(instruction := finishing.decide(now_s), Wait | Look):
        if isinstance(instruction, Wait):
            now_s = instruction.until_s
        else:
            finishing.away("near", "no route", now_s=now_s)
    assert now_s >= PATIENCE_S
    near = outcomes(finishing)[0]
    assert (near.result, near.reason) == ("failed", "no route")


def test_damaged_image_makes_way_for_the_one_before_it() -> None:
    finishing = Finishing([left(14), left(12)], now_s=0.0)
    finishing.saw("near", seen(8))
    finishing.damaged(left(14).checkpoint_id, "bytes changed")
    assert finishing.decide(0.0) == Write(destination="near", snapshot=left(12))
    finishing.damaged(left(12).checkpoint_id, "bytes changed too")
    finishing.saw("far", seen(8))
    assert {each.result for each in outcomes(finishing)} == {"failed"}


def test_nothing_is_published_once_workers_are_back() -> None:
    finishing = Finishing([left(14)], now_s=0.0)
    finishing.saw("near", seen(8))
    write = finishing.decide(0.0)
    assert isinstance(write, Write)
    assert finishing.admit(write.snapshot, claimed=3, is_there=False) is None
    assert finishing.admit(write.snapshot, claimed=4, is_there=False) == "superseded"
    assert finishing.admit(write.snapshot, claimed=3, is_there=True) == "known"
    finishing.give_up("workers are started again")
    assert finishing.admit(write.snapshot, claimed=3, is_there=False) == "given up"
    assert {each.result for each in outcomes(finishing)} == {"given up"}


def test_sharded_snapshot_waits_for_every_rank_and_is_one_that_all_have() -> None:
    newest, before = (left(step, ranks=(0, 1), world_size=3, destinations=("near",)) for step in (14, 12))
    finishing = Finishing([newest, before], now_s=0.0)
    finishing.saw("near", seen(8))
    assert finishing.decide(0.0) == Meet(destination="near", generation=3)
    both = [newest.checkpoint_id, before.checkpoint_id]
    finishing.met("near", {0: both, 1: both}, now_s=0.0)
    waiting = finishing.decide(0.0)
    assert isinstance(waiting, Wait)
    assert waiting.reason == "no agent has reported what rank 2 of 3 has in memory"
    finishing.met("near", {0: both, 1: both, 2: [before.checkpoint_id]}, now_s=1.0)
    assert finishing.decide(1.0) == Write(destination="near", snapshot=before)


def test_ranks_that_never_report_are_named() -> None:
    finishing = Finishing([left(14, ranks=(0,), world_size=3, destinations=("near",))], now_s=0.0)
    finishing.saw("near", seen(8))
    assert isinstance(finishing.decide(0.0), Meet)
    finishing.met("near", {0: [left(14).checkpoint_id]}, now_s=PATIENCE_S)
    [near] = outcomes(finishing, PATIENCE_S)
    assert (near.result, near.reason) == (
        "failed",
        "no agent has reported what rank 1, 2 of 3 has in memory",
    )
