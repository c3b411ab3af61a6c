"""Which of several coordinators is asked, and where a standby's word is followed to."""

from __future__ import annotations

import pytest

from strata.leader import UNLISTED_LIMIT, Coordinators
from strata.worker.address import coordinator_address, is_secure, split_addresses


def test_every_address_is_asked_once_before_a_pause() -> None:
    search = Coordinators(["a", "b", "c"]).search()
    asked = []
    for _ in range(3):
        asked.append(search.address)
        at_once = search.failed("away")
    assert (asked, at_once, search.address) == (["a", "b", "c"], False, "a")
    assert search.failed("away"), "the next round starts after the pause"


def test_a_standby_that_knows_the_leader_is_believed_first() -> None:
    search = Coordinators(["a", "b", "c"]).search()
    assert search.failed("standby", leader="c")
    assert search.address == "c"


def test_two_that_point_at_each_other_end_in_a_pause() -> None:
    search = Coordinators(["a", "b"]).search()
    assert search.failed("standby", leader="b")
    assert not search.failed("standby", leader="a")


def test_the_last_leader_is_asked_first_by_every_client() -> None:
    coordinators = Coordinators(["a", "b", "c"])
    search = coordinators.search()
    search.failed("away")
    search.worked()
    assert coordinators.search().address == "b"
    late = coordinators.search()
    late.failed("away")
    late.failed("away", leader="b")
    late.worked()
    assert coordinators.current == "a", "it was the last that did"


def test_one_that_failed_late_does_not_hide_the_leader_that_was_found() -> None:
    coordinators = Coordinators(["a", "b", "c"])
    slow, quick = coordinators.search(), coordinators.search()
    quick.failed("away", leader="c")
    quick.worked()
    slow.failed("time-out")
    assert coordinators.current == "c"


def test_over_an_open_connection_only_addresses_of_the_list_are_followed() -> None:
    search = Coordinators(["a", "b"]).search()
    search.failed("standby", leader="evil")
    assert search.address == "b"
    search.failed("connection refused")
    assert search.report() == (
        "a: standby (it says that evil leads, which is not among the addresses given); b: connection refused"
    )


def test_over_verified_connections_others_are_followed_and_not_without_end() -> None:
    coordinators = Coordinators(["a"], follows_unlisted=True)
    search = coordinators.search()
    for number in range(UNLISTED_LIMIT):
        assert search.failed("standby", leader=f"other-{number}")
        assert search.address == f"other-{number}"
    search.failed("standby", leader="one-too-many")
    assert search.address == "a"


def test_a_single_address_is_asked_again_after_a_pause() -> None:
    search = Coordinators(["a", "a"]).search()
    assert not search.failed("away")
    assert search.address == "a"


def test_several_addresses_are_read_like_one() -> None:
    address = coordinator_address(" https://a, https://b:7 ,https://[::1]:8")
    assert address == "a:50051,b:7,[::1]:8"
    assert split_addresses(address) == ("a:50051", "b:7", "[::1]:8")
    assert is_secure("https://a,https://b")
    assert coordinator_address("a,b:1,") == "a:50051,b:1"


@pytest.mark.parametrize("given", ["https://a,b", "a,ftp://b", ",", "a,b:port"])
def test_several_addresses_that_are_none(given: str) -> None:
    with pytest.raises(ValueError, match="is not a coordinator address"):
        coordinator_address(given)
