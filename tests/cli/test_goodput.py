"""Where time went, drawn so that it can be read without colours."""

from __future__ import annotations

from strata.cli.watching.listings import goodput_bar, goodput_legend


def spent(**parts_s: float) -> dict[str, float]:
    parts = {
        f"{part}_s": parts_s.get(part, 0.0) for part in ("training", "checkpoint", "recovery", "waiting")
    }
    total_s = sum(parts.values())
    return {**parts, "total_s": total_s, "goodput": parts["training_s"] / total_s if total_s else 0.0}


def test_bar_is_as_wide_as_it_should_be_and_each_part_has_its_share() -> None:
    assert (
        goodput_bar(spent(training=16, checkpoint=1, recovery=1, waiting=2)).plain == "█" * 16 + "▓▒░░ 80 %"
    )
    assert goodput_bar(spent(training=1), width=10).plain == "█" * 10 + " 100 %"
    assert goodput_bar(spent(waiting=3), width=4).plain == "░░░░ 0 %"
    for thirds in (1, 7, 999):
        drawn = goodput_bar(spent(training=thirds, checkpoint=thirds, recovery=thirds), width=10).plain
        assert len(drawn.split(" ")[0]) == 10


def test_nothing_measured_is_said_and_not_drawn() -> None:
    assert goodput_bar(None).plain == goodput_bar(spent()).plain == "not measured yet"


def test_legend_names_every_shade() -> None:
    assert goodput_legend().plain == "█ training  ▓ checkpoint  ▒ recovery  ░ waiting"
