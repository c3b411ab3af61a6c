"""What a run's curve shows after rollbacks is what its model was trained by, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strata.core.telemetry.branches import Start, committed_until


@st.composite
def trained(draw: st.DrawFn) -> tuple[list[Start], list[tuple[tuple[int, int], int]], set[int]]:
    """A run that is started again and again: its starts, every value it logged in order, and those that led to its model."""
    starts: list[Start] = []
    logged: list[tuple[tuple[int, int], int]] = []
    model: list[int] = []
    """Which of the logged values made the model, one for each of its steps."""
    generation = 0
    for number in range(draw(st.integers(1, 8))):
        generation += draw(st.integers(0, 2))
        resumed = draw(st.integers(0, len(model)))
        del model[resumed:]
        start = Start(generation=generation, started_ms=number, resumed_step=resumed)
        starts.append(start)
        for _ in range(draw(st.integers(0, 6))):
            model.append(len(logged))
            logged.append((start.order, len(model)))
    return starts, logged, set(model)


@given(trained(), st.randoms())
def test_committed_values_are_those_that_made_the_model(
    run: tuple[list[Start], list[tuple[tuple[int, int], int]], set[int]], chance: object
) -> None:
    starts, logged, model = run
    chance.shuffle(starts)  # type: ignore[attr-defined]
    limits = committed_until(starts)
    committed = {
        number
        for number, (order, step) in enumerate(logged)
        if (limit := limits[order]) is None or step <= limit
    }
    assert committed == model


def test_every_value_of_a_run_without_rollback_is_committed() -> None:
    starts = [
        Start(generation=1, started_ms=5, resumed_step=0),
        Start(generation=2, started_ms=9, resumed_step=40),
    ]
    assert committed_until(starts) == {(1, 5): 40, (2, 9): None}


def test_going_back_twice_abandons_what_the_first_time_had_kept() -> None:
    starts = [Start(generation=g, started_ms=g, resumed_step=s) for g, s in ((1, 0), (2, 80), (3, 20))]
    assert committed_until(starts) == {(1, 1): 20, (2, 2): 20, (3, 3): None}
