"""Who the ranks are after a change: the same workers under new numbers, and new ones beside them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from strata.core.jobs.regroup import BROKEN, OTHERS_MEET
from strata.core.jobs.roster import Changes, Entrant, Roster, enter

FIRST = enter([Entrant()] * 3, job="job")


def survivor(changes: Changes, name: str, cause: str = "rank 1 was killed") -> Entrant:
    return Entrant(name=name, left=changes.roster, cause=cause)


def survivors(changes: Changes, names: Sequence[str]) -> list[Entrant]:
    return [survivor(changes, name) for name in names]


def test_first_ranks_are_named_by_their_numbers_and_nobody_has_survived() -> None:
    assert Changes(roster=Roster(number=1, names=("job-rank0", "job-rank1", "job-rank2"))) == FIRST


def test_survivors_keep_their_names_and_the_replacement_takes_that_of_the_lost_one() -> None:
    two = enter(survivors(FIRST, ["job-rank0", "job-rank2"]), job="job")
    assert two.roster.names == ("job-rank0", "job-rank2")
    assert (two.survived, two.lost, two.joined) == (2, ("job-rank1",), ())
    assert two.cause == "rank 1 was killed"
    kept = survivors(two, two.roster.names)
    three = enter([kept[0], Entrant(), kept[1]], job="job")
    assert three.roster.names == FIRST.roster.names
    assert (three.survived, three.lost, three.joined) == (2, (), ("job-rank1",))


def test_machines_of_the_ranks_are_known_each_once() -> None:
    ranks = [Entrant(host=host) for host in ("b", "a", "b", "")]
    assert enter(ranks, job="job").hosts == ("a", "b")


def test_where_all_are_waited_for_the_lost_one_is_replaced_at_once() -> None:
    kept = survivors(FIRST, ["job-rank0", "job-rank2"])
    changes = enter([kept[0], Entrant(), kept[1]], job="job")
    assert changes.lost == changes.joined == ("job-rank1",)


def test_a_survivor_reports_what_it_took_and_rank_0_where_there_is_none() -> None:
    kept = survivors(FIRST, ["job-rank1", "job-rank2"])
    assert enter([Entrant(), *kept], job="job").reporter == 1
    assert enter(kept, job="job").reporter == FIRST.reporter == 0


def test_another_machine_takes_the_names_that_are_free() -> None:
    """The first of two machines is lost; those of the second are the first ranks now."""
    four = enter([Entrant()] * 4, job="job")
    two = enter(survivors(four, four.roster.names[2:]), job="job")
    again = enter([*survivors(two, two.roster.names), Entrant(), Entrant()], job="job")
    assert again.roster.names == ("job-rank2", "job-rank3", "job-rank0", "job-rank1")


def test_one_that_was_left_behind_comes_back_as_itself_and_nobody_is_lost_twice() -> None:
    one = enter(survivors(FIRST, ["job-rank0"]), job="job")
    assert one.lost == ("job-rank1", "job-rank2")
    late = survivor(FIRST, "job-rank2")
    back = enter([survivor(one, "job-rank0"), Entrant(), late], job="job")
    assert (back.survived, back.lost, back.joined) == (2, (), ("job-rank1",))


def test_cause_is_that_of_the_machine_where_it_happened() -> None:
    said = [OTHERS_MEET, f"{BROKEN} on rank 1: connection closed", "rank 3 was killed"]
    entrants = [survivor(FIRST, name, cause) for name, cause in zip(FIRST.roster.names, said, strict=True)]
    assert enter(entrants, job="job").cause == "rank 3 was killed"


def test_given_names_are_kept() -> None:
    given = enter([Entrant(given="left"), Entrant(given="right")], job="job")
    assert given.roster.names == ("left", "right")
    again = enter([survivor(given, "right"), Entrant(given="left")], job="job")
    assert (again.roster.names, again.lost, again.joined) == (("right", "left"), ("left",), ("left",))


@given(st.lists(st.tuples(st.randoms(use_true_random=False), st.integers(1, 8)), max_size=12))
def test_no_two_workers_have_one_name_and_survivors_keep_theirs(rounds: list[tuple[object, int]]) -> None:
    changes = FIRST
    for chance, world in rounds:
        names = [n for n in changes.roster.names if chance.random() < 0.6]  # type: ignore[attr-defined]
        entrants = [*survivors(changes, names), *[Entrant()] * world]
        chance.shuffle(entrants)  # type: ignore[attr-defined]
        following = enter(entrants, job="job")
        assert len(set(following.roster.names)) == len(entrants)
        assert set(names) <= set(following.roster.names)
        assert following.survived == len(names)
        assert set(following.lost) == (set(changes.roster.names) - set(names) if names else set())
        changes = following
