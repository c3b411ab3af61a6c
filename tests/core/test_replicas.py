"""Which of several copies is wrong."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from strata.core.jobs.replicas import Agreed, Odd, Undecided, judge


def test_equal_copies_agree() -> None:
    assert judge(["a", "a", "a"]) == Agreed()
    assert judge(["a"]) == Agreed()


def test_one_of_three_is_odd_and_the_first_of_the_others_replaces_it() -> None:
    assert judge(["b", "a", "a"]) == Odd(ranks=(0,), source=1)
    assert judge(["a", "a", "b"]) == Odd(ranks=(2,), source=0)


def test_two_that_differ_cannot_tell_who_is_wrong() -> None:
    assert judge(["a", "b"]) == Undecided(groups=((0,), (1,)))
    assert judge(["a", "b", "b", "a"]) == Undecided(groups=((0, 3), (1, 2)))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_a_verdict_names_every_rank_outside_the_majority_and_nobody_else(digests: list[str]) -> None:
    verdict = judge(digests)
    common, votes = Counter(digests).most_common(1)[0]
    if votes == len(digests):
        assert verdict == Agreed()
    elif 2 * votes > len(digests):
        assert isinstance(verdict, Odd)
        assert digests[verdict.source] == common
        assert {digests[rank] for rank in verdict.ranks}.isdisjoint({common})
        assert len(verdict.ranks) == len(digests) - votes
    else:
        assert isinstance(verdict, Undecided)
        assert sorted(rank for group in verdict.groups for rank in group) == list(range(len(digests)))
