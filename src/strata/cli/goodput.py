"""Where the time of jobs went, as a bar of characters."""

from __future__ import annotations

from typing import Any

from rich.text import Text

BAR_WIDTH = 20
PARTS = (
    ("training", "█", "green"),
    ("checkpoint", "▓", "cyan"),
    ("recovery", "▒", "red"),
    ("waiting", "░", "yellow"),
)
"""Each with a shade of its own: colour alone says nothing to some, and to none in a file."""


def bar(goodput: dict[str, Any] | None, *, width: int = BAR_WIDTH) -> Text:
    """`████████▓▒░  93 %`: one shade for each part, and the share that was training."""
    if goodput is None or not goodput["total_s"]:
        return Text("not measured yet", style="dim")
    text, at = Text(), 0
    passed_s = 0.0
    for part, shade, style in PARTS:
        passed_s += goodput[f"{part}_s"]
        until = round(passed_s / goodput["total_s"] * width)
        text.append(shade * (until - at), style=style)
        at = until
    return text.append(f" {goodput['goodput'] * 100:.0f} %")


def legend() -> Text:
    return Text("  ").join(Text.assemble((shade, style), f" {part}") for part, shade, style in PARTS)
