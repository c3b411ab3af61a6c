"""Sharded state: what is loaded from many memories and destinations, and when a save may begin. And what survivors save alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.core.jobs.job import (
    MEMORY,
    AwaitSave,
    Fence,
    Finished,
    JobProtocol,
    Load,
    LoadReport,
    LoadShards,
    LookAgain,
    Offer,
    Ready,
    Resume,
    Save,
    SaveEnded,
    Skip,
    StartAnew,
    Stop,
    Survey,
)
from strata.core.jobs.peers import PEER
from strata.core.types import CheckpointId

A, B, C = CheckpointId("a"), CheckpointId("b"), CheckpointId("c")
SEQUENCE = {A: 1, B: 2, C: 3}
DISTANCE = {"disk": 1, "s3": 2}


def protocol() -> JobProtocol:
    return JobProtocol(run="run", save_every=10, snapshot_every=2, patience_s=1.0)


def _offer(name: CheckpointId, where: str, distance: int, part: str = "", count: int = 0) -> Offer:
    return Offer(
        checkpoint_id=name,
        run="run",
        step=10 * SEQUENCE[name],
        generation=1,
        sequence=SEQUENCE[name],
        lineage="a",
        parent=None,
        durable_parent=None,
        tier="DISK" if distance else MEMORY,
        where=where,
        distance=distance,
        is_sharded=True,
        part=part,
        parts=tuple(str(number) for number in range(count)),
    )


def image(name: CheckpointId, part: int, *, of: int, where: str = "") -> Offer:
    return _offer(name, where or f"image-{name}-{part}", 0, str(part), of)


def stored(name: CheckpointId, where: str = "disk") -> Offer:
    return _offer(name, where, DISTANCE[where])


def surveys(
    *memories: tuple[Offer, ...], destinations: tuple[Offer, ...] = (), machines: int = 2
) -> list[Survey]:
    """A rank for each memory, on machines in turn; the first one looks at the destinations."""
    found = [
        Survey(machine=f"m{rank % machines}", offers=offers, generation=2)
        for rank, offers in enumerate(memories)
    ]
    found[0] = replace(
        found[0], offers=(*found[0].offers, *destinations), destinations=("disk", "s3"), generation=2
    )
    return found


def failed(*struck: str, fault: str = "copy") -> LoadReport:
    assert fault in ("copy", "away")
    return LoadReport(error="unreadable", fault="away" if fault == "away" else "copy", struck=struck)


FINE = LoadReport()


# --- loading ----------------------------------------------------------------------------------------------------


def test_parts_in_all_memories_make_up_a_snapshot() -> None:
    job = protocol()
    load = job.surveyed(surveys((image(B, 0, of=2),), (image(B, 1, of=2),), destinations=(stored(A),)))
    assert isinstance(load, LoadShards)
    assert load.offer.checkpoint_id == B
    assert [source.name for source in load.sources] == ["m0:image-b-0", "m1:image-b-1"]
    resumed = job.loaded([FINE, FINE])
    assert isinstance(resumed, Resume)
    assert not resumed.is_durable


def test_replicas_are_copies_of_one_part() -> None:
    job = protocol()
    load = job.surveyed(surveys((image(A, 0, of=2),), (image(A, 1, of=2),), (image(A, 0, of=2, where="r"),)))
    assert isinstance(load, LoadShards)
    again = job.loaded([failed("m0:image-a-0"), FINE, FINE])
    assert isinstance(again, LoadShards)
    assert {source.name for source in again.sources} == {"m1:image-a-1", "m0:r"}


def test_a_snapshot_without_one_of_its_parts_is_none() -> None:
    job = protocol()
    load = job.surveyed(surveys((image(B, 0, of=2),), (), destinations=(stored(A),)))
    assert isinstance(load, LoadShards)
    assert load.offer.checkpoint_id == A
    resumed = job.loaded([FINE, FINE])
    assert isinstance(resumed, Resume)
    assert resumed.reasons == ("step 20 in MEMORY: 1 of its 2 parts are missing",)


def test_incomplete_memory_and_empty_destinations_are_a_new_beginning() -> None:
    job = protocol()
    assert isinstance(job.surveyed(surveys((image(B, 0, of=2),), ())), StartAnew)


def test_a_destination_fills_the_gaps_of_memory() -> None:
    job = protocol()
    load = job.surveyed(surveys((image(B, 0, of=2),), (), destinations=(stored(B),)))
    assert isinstance(load, LoadShards)
    assert [source.name for source in load.sources] == ["m0:image-b-0", "disk"]
    resumed = job.loaded([FINE, FINE])
    assert isinstance(resumed, Resume)
    assert resumed.is_durable


def test_each_rank_reads_its_own_machine_first_and_destinations_last() -> None:
    job = protocol()
    load = job.surveyed(
        surveys((image(A, 0, of=2),), (image(A, 1, of=2),), destinations=(stored(A, "s3"), stored(A, "disk")))
    )
    assert isinstance(load, LoadShards)
    names = [source.name for source in load.seen_from("m1")]
    assert names == ["m1:image-a-1", "m0:image-a-0", "disk", "s3"]


def test_a_damaged_image_is_read_from_a_destination_and_everything_again() -> None:
    job = protocol()
    job.surveyed(surveys((image(B, 0, of=2),), (image(B, 1, of=2),), destinations=(stored(B),)))
    again = job.loaded([failed("m0:image-b-0"), FINE])
    assert isinstance(again, LoadShards)
    assert [source.name for source in again.sources] == ["m1:image-b-1", "disk"]
    resumed = job.loaded([FINE, FINE])
    assert isinstance(resumed, Resume)
    assert resumed.load == again
    assert resumed.reasons == ("step 20, read by rank 0: unreadable",)


def test_an_image_that_two_ranks_have_found_is_struck_once_for_both() -> None:
    job = protocol()
    same = image(B, 0, of=1, where="shared")
    job.surveyed(surveys((same,), (same,), destinations=(stored(B),), machines=1))
    again = job.loaded([failed("m0:shared"), failed("m0:shared")])
    assert isinstance(again, LoadShards)
    assert [source.name for source in again.sources] == ["disk"]


def test_all_copies_of_one_part_damaged_is_the_checkpoint_before() -> None:
    job = protocol()
    job.surveyed(
        surveys(
            (image(B, 0, of=2),), (image(B, 1, of=2),), destinations=(stored(A), stored(B), stored(A, "s3"))
        )
    )
    without_image = job.loaded([failed("m0:image-b-0"), FINE])
    assert isinstance(without_image, LoadShards)
    without_part = job.loaded([failed("disk/0"), failed("disk/0")])
    assert isinstance(without_part, LoadShards)
    assert without_part.offer.checkpoint_id == B
    assert without_part.struck == ("disk/0",)
    older = job.loaded([failed(), FINE])
    assert isinstance(older, LoadShards)
    assert older.offer.checkpoint_id == A
    assert older.struck == ()


def test_a_damaged_part_of_a_destination_is_fetched_from_a_peer_that_has_it() -> None:
    job = protocol()
    elsewhere = replace(image(B, 1, of=2, where="peer"), tier=PEER, holder="m7")
    load = job.surveyed(
        surveys((image(B, 0, of=2), elsewhere), destinations=(stored(A), stored(B)), machines=1)
    )
    assert isinstance(load, LoadShards)
    assert [source.offer.where for source in load.sources] == [
        "image-b-0",
        "disk",
    ]  # Nothing has to be fetched.
    again = job.loaded([failed("disk/1")])
    assert isinstance(again, LoadShards)
    assert [source.offer.where for source in again.sources] == ["image-b-0", "peer", "disk"]
    assert isinstance(job.loaded([FINE]), Resume)


def test_a_part_that_was_struck_before_is_nothing_new_but_a_source_beside_it_is() -> None:
    job = protocol()
    job.surveyed(surveys((image(B, 0, of=2),), (), destinations=(stored(A), stored(B), stored(B, "s3"))))
    job.loaded([failed("disk/1"), FINE])
    again = job.loaded([failed("disk/1", "m0:image-b-0"), FINE])
    assert isinstance(again, LoadShards)
    assert again.offer.checkpoint_id == B
    older = job.loaded([failed("disk/1"), FINE])
    assert isinstance(older, LoadShards)
    assert older.offer.checkpoint_id == A


def test_nothing_left_of_the_only_checkpoint_ends_the_start() -> None:
    job = protocol()
    job.surveyed(surveys((), destinations=(stored(A),)))
    stop = job.loaded([failed()])
    assert isinstance(stop, Stop)
    assert stop.kind == "unloadable"


def test_a_destination_that_is_away_is_waited_for_where_memory_has_gaps() -> None:
    job = protocol()
    found = surveys((image(B, 0, of=2),), (), destinations=(stored(A, "disk"), stored(B, "s3")))
    job.surveyed(found)
    assert isinstance(job.loaded([FINE, failed("s3", fault="away")]), LookAgain)
    load = job.surveyed(found)
    assert isinstance(load, LoadShards)
    assert load.offer.checkpoint_id == B


def test_a_destination_that_is_away_is_not_needed_where_memory_has_all() -> None:
    job = protocol()
    job.surveyed(surveys((image(B, 0, of=1),), destinations=(stored(B, "s3"),)))
    load = job.loaded([failed("s3", fault="away")])
    assert isinstance(load, LoadShards)
    assert [source.name for source in load.sources] == ["m0:image-b-0"]


def test_a_checkpoint_is_not_given_up_while_a_destination_of_it_is_away() -> None:
    job = protocol()
    found = surveys((image(B, 0, of=2),), (), destinations=(stored(A), stored(B), stored(B, "s3")))
    job.surveyed(found)
    nearer = job.loaded([failed("disk/1"), failed("s3", fault="away")])
    assert isinstance(nearer, LoadShards)
    assert [source.name for source in nearer.sources] == ["m0:image-b-0", "disk"]
    assert isinstance(job.loaded([failed(), FINE]), LookAgain)
    load = job.surveyed(found)
    assert isinstance(load, LoadShards)
    assert load.offer.checkpoint_id == B
    assert [source.name for source in load.sources] == ["m0:image-b-0", "disk", "s3"]


def test_what_is_away_without_a_name_is_the_destinations() -> None:
    job = protocol()
    job.surveyed(surveys((image(B, 0, of=1),), destinations=(stored(B),)))
    load = job.loaded([failed(fault="away")])
    assert isinstance(load, LoadShards)
    assert [source.name for source in load.sources] == ["m0:image-b-0"]
    assert isinstance(job.loaded([failed(fault="away")]), LookAgain)


def test_a_state_of_another_shape_ends_the_start() -> None:
    job = protocol()
    job.surveyed(surveys((image(A, 0, of=1),)))
    stop = job.loaded([LoadReport(error="another shape", fault="state")])
    assert isinstance(stop, Stop)
    assert stop.kind == "mismatch"


def test_a_zombies_manifest_does_not_count_and_its_memory_alone_is_not_complete() -> None:
    job = protocol()
    found = surveys((image(B, 0, of=2),), (), destinations=(stored(A), stored(B)))
    found[0] = replace(found[0], fences=(Fence(generation=2, seen=(1, SEQUENCE[A])),))
    load = job.surveyed(found)
    assert isinstance(load, LoadShards)
    assert load.offer.checkpoint_id == A


@pytest.mark.parametrize("struck", ["disk", "disk/0"])
def test_a_final_state_that_was_found_to_be_damaged_is_saved_again(struck: str) -> None:
    job = protocol()
    job.surveyed(surveys((image(A, 0, of=1),), destinations=(stored(A), stored(A, "s3"))))
    job.loaded([failed(struck)])
    assert isinstance(job.loaded([FINE]), Resume)
    save = job.finish(10, B, now_ms=5, ready=[Ready(has_image=True)])
    assert isinstance(save, Save)
    assert save.destinations is None


# --- saving -----------------------------------------------------------------------------------------------------


def started(*memories: tuple[Offer, ...], destinations: tuple[Offer, ...] = ()) -> JobProtocol:
    """A job of two ranks that has resumed from what there is."""
    job = protocol()
    found = job.surveyed(surveys(*(memories or ((), ())), destinations=destinations))
    if isinstance(found, LoadShards):
        assert isinstance(job.loaded([FINE] * 2), Resume)
    return job


def ready(
    *held: CheckpointId,
    kept: tuple[CheckpointId, ...] | None = None,
    has_image: bool = True,
    busy: tuple[str, ...] = (),
    part: str = "",
    has_one_image: bool = False,
) -> Ready:
    return Ready(
        has_image=has_image,
        held=frozenset(held),
        kept=frozenset(held if kept is None else kept),
        busy=frozenset(busy),
        part=part,
        has_one_image=has_one_image,
    )


def begin(job: JobProtocol, name: CheckpointId, *ranks: Ready, durable: bool = False) -> Save | Skip:
    return job.save_shards(name, ranks, step=10 * SEQUENCE[name], now_ms=1, durable=durable)


def began(job: JobProtocol, name: CheckpointId, *ranks: Ready, durable: bool = False) -> Save:
    save = begin(job, name, *ranks, durable=durable)
    assert isinstance(save, Save)
    return save


def test_a_save_begins_on_all_ranks_or_on_none() -> None:
    job = started()
    skip = begin(job, A, ready(), ready(has_image=False))
    assert skip == Skip(reason="the images of earlier saves are still in use (rank 1)")
    assert job.lineage.parent is None
    assert began(job, A, ready(), ready()).placement.parent is None


def test_a_long_list_of_ranks_is_cut() -> None:
    skip = begin(started(), A, *(ready(has_image=False) for _ in range(10)))
    assert isinstance(skip, Skip)
    assert skip.reason.endswith("(rank 0, 1, 2, 3, 4, 5, 6, 7 and others)")


def test_every_rank_keeps_the_last_complete_snapshot() -> None:
    job = started()
    assert began(job, A, ready(), ready()).keep is None
    assert began(job, B, ready(A), ready(A)).keep == A
    assert began(job, C, ready(A, B), ready(A, B)).keep == B


def test_a_rank_that_failed_to_copy_makes_the_others_keep_the_one_before() -> None:
    job = started()
    began(job, A, ready(), ready())
    began(job, B, ready(A), ready(A))
    assert began(job, C, ready(A, B), ready(A)).keep == A


def test_a_save_waits_where_the_only_free_image_has_the_last_complete_snapshot() -> None:
    job = started()
    began(job, A, ready(), ready())
    began(job, B, ready(A), ready(A))
    skip = begin(job, C, ready(A, B), ready(A, B, kept=(A,)))
    assert skip == Skip(reason="the only free image has the last complete snapshot (rank 1)")


def test_a_snapshot_is_complete_where_one_replica_has_it() -> None:
    job = started()
    began(job, A, ready(part="0"), ready(part="1"), ready(part="0"))
    began(job, B, ready(A, part="0"), ready(A, part="1"), ready(A, part="0"))
    save = began(job, C, ready(A, B, part="0"), ready(A, B, part="1"), ready(A, part="0"))
    assert save.keep == B


def test_what_was_resumed_from_is_kept_by_a_world_of_another_size_until_there_is_another() -> None:
    job = started((image(A, 0, of=1),), ())
    assert began(job, B, ready(A), ready()).keep == A
    skip = begin(job, C, ready(A, kept=()), ready(B))
    assert isinstance(skip, Skip)
    assert began(job, C, ready(A, B), ready(B)).keep == B


def test_one_image_is_overwritten_rather_than_never_saving_again() -> None:
    job = started()
    began(job, A, ready(has_one_image=True), ready())
    save = began(job, B, ready(A, kept=(), has_one_image=True), ready(A))
    assert save.keep is None


def test_a_durable_save_leaves_out_the_destinations_that_are_busy() -> None:
    job = started()
    save = began(job, A, ready(), ready(busy=("s3",)), durable=True)
    assert save.durable
    assert save.destinations == ("disk",)


@pytest.mark.parametrize("rank", [ready(busy=("disk", "s3")), ready(has_image=False)])
def test_a_durable_save_that_could_not_begin_is_made_up_for(rank: Ready) -> None:
    job = started()
    found = begin(job, A, ready(), rank, durable=True)
    assert isinstance(found, Skip) or not found.durable
    assert job.due(12) == "durable"
    assert began(job, B, ready(), ready(), durable=True).durable
    assert job.due(14) == "snapshot"


def test_a_run_without_destinations_owes_no_durable_save() -> None:
    job = protocol()
    job.surveyed([Survey(machine="m0"), Survey(machine="m1")])
    begin(job, A, ready(), ready(has_image=False), durable=True)
    assert job.due(2) == "snapshot"


# --- ending -----------------------------------------------------------------------------------------------------


def test_the_final_save_waits_for_the_earlier_ones_and_is_for_every_destination() -> None:
    job = started()
    began(job, A, ready(), ready(), durable=True)
    ranks = [ready(A), ready(A, busy=("s3",))]
    assert job.finish(20, B, now_ms=5, ready=ranks) == AwaitSave(checkpoint_id=A)
    ranks = [ready(A), ready(A, has_image=False)]
    assert job.finish(20, B, now_ms=5, ready=ranks) == AwaitSave(checkpoint_id=A)
    job.learn([SaveEnded(checkpoint_id=A, is_durable=True)])
    save = job.finish(20, B, now_ms=5, ready=[ready(A), ready(A)])
    assert isinstance(save, Save)
    assert (save.final, save.destinations, save.keep) == (True, None, A)
    assert job.finish(20, C, now_ms=6, ready=[ready(A, B), ready(A, B)]) == AwaitSave(checkpoint_id=B)
    job.learn([SaveEnded(checkpoint_id=B, is_durable=True)])
    assert job.finish(20, C, now_ms=6, ready=[ready(A, B), ready(A, B)]) == Finished(step=20)


def test_the_final_save_is_asked_for_again_while_a_snapshot_is_being_copied() -> None:
    job = started()
    began(job, A, ready(), ready())
    skip = job.finish(10, B, now_ms=5, ready=[ready(), ready(has_image=False)])
    assert isinstance(skip, Skip)
    assert isinstance(job.finish(10, B, now_ms=5, ready=[ready(A), ready(A)]), Save)


def test_a_last_save_that_left_out_a_destination_is_not_the_end() -> None:
    job = started()
    began(job, A, ready(), ready(busy=("s3",)), durable=True)
    job.learn([SaveEnded(checkpoint_id=A, is_durable=True)])
    save = job.finish(10, B, now_ms=5, ready=[ready(A), ready(A)])
    assert isinstance(save, Save)
    assert save.destinations is None


def test_a_final_state_that_never_arrives_ends_the_run_with_what_is_missing() -> None:
    job = started()
    for number in range(3):
        name = CheckpointId(f"final-{number}")
        assert isinstance(job.finish(10, name, now_ms=number, ready=[ready(), ready()]), Save)
        job.learn([SaveEnded(checkpoint_id=name, is_durable=True, missing=("s3: part 1 failed",))])
    stop = job.finish(10, CheckpointId("final-3"), now_ms=9, ready=[ready(), ready()])
    assert stop == Stop(kind="final", reasons=("s3: part 1 failed",))


# --- rescuing ---------------------------------------------------------------------------------------------------


def resumed(*, generation: int = 2) -> JobProtocol:
    """A rank of a start that continues from step 10, in memory."""
    job = protocol()
    found = replace(image(A, 0, of=1), is_sharded=False, part="", parts=())
    job.surveyed([Survey(machine="m0", offers=(found,), generation=generation, destinations=("disk",))])
    assert isinstance(job.loaded([FINE]), Resume)
    return job


def rescued(job: JobProtocol, name: str, *, step: int, where: str = "image") -> Offer:
    """What the next start would find of a rescue."""
    save = job.rescue(CheckpointId(name), step=step)
    assert not save.durable
    placement = save.placement
    return Offer(
        checkpoint_id=placement.checkpoint_id,
        run=placement.run,
        step=save.step,
        generation=placement.generation,
        sequence=placement.sequence,
        lineage=placement.lineage,
        parent=placement.parent,
        durable_parent=placement.durable_parent,
        tier=MEMORY,
        where=where,
        distance=0,
    )


def chosen(*offers: Offer, generation: int = 9) -> Load:
    """What a start loads that finds these, each on a machine of its own."""
    instruction = protocol().surveyed(
        [
            Survey(machine=f"m{rank}", offers=(offer,), generation=generation)
            for rank, offer in enumerate(offers)
        ]
    )
    assert isinstance(instruction, Load)
    return instruction


def test_the_furthest_rescue_wins_whatever_the_clocks_say() -> None:
    behind, ahead = resumed(), resumed()
    for job in (behind, ahead):
        job.save(B, step=20, now_ms=5_000, durable=True)
    offers = [rescued(behind, "at-26", step=26), rescued(ahead, "at-27", step=27)]
    assert chosen(*offers).offer.step == chosen(*reversed(offers)).offer.step == 27


def test_a_rescue_is_newer_than_what_its_generation_saved_before() -> None:
    job = resumed()
    saved = replace(
        rescued(job, "snapshot", step=20),
        sequence=job.save(B, step=20, now_ms=9_999, durable=False).placement.sequence,
    )
    assert chosen(saved, rescued(job, "rescue", step=20)).offer.checkpoint_id == "rescue"


def test_rescues_of_one_step_are_copies_of_one_checkpoint() -> None:
    offers = [rescued(resumed(), "same", step=26, where=f"image-{n}") for n in range(2)]
    load = chosen(*offers)
    assert (load.source, load.mapped, load.images) == (0, (1,), ("image-1",))


def test_nothing_of_an_older_generation_is_preferred_to_a_newer_one() -> None:
    zombie = rescued(resumed(generation=2), "zombie", step=500)
    successor = rescued(resumed(generation=3), "successor", step=11)
    assert chosen(zombie, successor).offer.checkpoint_id == "successor"


def test_a_rescue_continues_what_its_rank_resumed() -> None:
    offer = rescued(resumed(), "rescue", step=11)
    assert (offer.parent, offer.lineage, offer.generation) == (A, "a", 2)
