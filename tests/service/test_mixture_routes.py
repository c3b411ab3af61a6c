"""A request to change weights is a journaled fact: it is there after the coordinator was killed, once, in its order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest

from strata.core.data.mixture import Definition, Source
from strata.core.data.mixture_changes import Board, board_key, decide
from strata.rpc.cas import CoordinatorCasClient
from tests.cli.running import strata as run_strata
from tests.support import Coordinator


def a_board() -> Board:
    sources = (Source(name="web", size=100), Source(name="code", size=10))
    return Board(
        run="r1",
        definition=Definition(sources=sources, weights={"web": 0.7, "code": 0.3}),
        global_batch_size=4,
    )


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path / "coordinator").start()
    yield server
    server.stop()


def test_a_request_is_journaled_and_the_ranks_decide(coordinator: Coordinator) -> None:
    path = "/api/jobs/mixed/mixture"
    with pytest.raises(HTTPError) as unknown:
        coordinator.get(path)
    with unknown.value:
        assert unknown.value.code == 404
    ranks = CoordinatorCasClient(coordinator.address, timeout_s=30)
    ranks.cas(board_key("mixed"), a_board().to_bytes(), None)

    status, asked = coordinator.post(path, {"weights": {"code": 0.5}, "from_step": 20})
    assert (status, asked["number"], asked["status"]) == (202, 1, "waiting")
    for body, says in (
        ({"weights": {"chat": 0.5}, "from_step": 20}, "there is no source 'chat'"),
        ({"weights": {"code": 1.5}, "from_step": 20}, "add up to 1.5"),
        ({"weights": {}, "from_step": 20}, ""),
        ({"weights": {"code": 0.5}, "from_step": -1}, ""),
    ):
        status, answer = coordinator.post(path, body)
        assert 400 <= status < 500
        assert says in str(answer)

    coordinator.kill()
    coordinator.start()
    shown = run_strata("mixture", "show", "mixed", "--api", coordinator.url)
    assert (shown.code, "waiting" in shown.out) == (0, True)
    late = run_strata(
        "mixture", "set", "mixed", "web=0.9", "--from-step", "3", "--wait", "0", "--api", coordinator.url
    )
    assert (late.code, "not decided yet" in late.out) == (0, True)

    found_value = ranks.get(board_key("mixed"))
    assert found_value is not None
    board = Board.from_bytes(found_value[0])
    decided = decide(board.requests, board.plan, next_step=8, lead=2)
    ranks.cas(board_key("mixed"), board.decided(decided.requests).to_bytes(), found_value[1])
    found = coordinator.get(path)
    assert [(each["number"], each["status"]) for each in found["changes"]] == [(1, "adopted"), (2, "refused")]
    assert found["changes"][1]["reason"] == "step 3 has already started; the first possible step is 10"
    assert [each["from_step"] for each in found["weights"]] == [0, 20]
    assert found["weights"][1]["weights"] == {"web": 0.5, "code": 0.5}
    ranks.close()


def test_what_is_no_share_is_refused_before_anybody_is_asked() -> None:
    ran = run_strata("mixture", "set", "mixed", "code:0.5", "--from-step", "3")
    assert (ran.code, "'code:0.5' is not NAME=SHARE" in ran.err) == (2, True)
