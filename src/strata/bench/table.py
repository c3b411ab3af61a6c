"""What every benchmark prints: one row for each figure, beside its target and its peer, as a table or as JSON.

Imports nothing beyond the standard library; `rich` draws the table where it is installed.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement."""

    name: str
    measured: float
    unit: str
    target: float | None = None
    better: Literal["higher", "lower"] = "higher"
    """Which side of the target is the good one."""
    peer: str = ""
    """The same work done by someone else, or the limit of the hardware, measured in the same run."""
    note: str = ""
    """How it was measured, and how far the repetitions lie apart."""

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None where there is none."""
        if self.target is None:
            return None
        return self.measured >= self.target if self.better == "higher" else self.measured <= self.target

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "met": self.met}

    def cells(self) -> tuple[str, str, str, str, str]:
        target = ""
        if self.target is not None:
            target = f"{'≥' if self.better == 'higher' else '≤'} {number(self.target)}"
        met = {None: "", True: "yes", False: "NO"}[self.met]
        return self.name, f"{number(self.measured)} {self.unit}", target, met, self.peer


COLUMNS = ("figure", "measured", "target", "met", "peer or limit")


def number(value: float) -> str:
    """Three digits that matter, thousands kept apart."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def report(title: str, rows: Iterable[Row], *, as_json: bool) -> None:
    """Print rows as they come in, the table once all are there."""
    if as_json:
        body = {"title": title, "machine": machine(), "rows": [row.to_json() for row in rows]}
        sys.stdout.write(json.dumps(body, indent=2, ensure_ascii=False) + "\n")
        return
    done = []
    for row in rows:
        done.append(row)
        sys.stderr.write(f"  {row.name}: {number(row.measured)} {row.unit}\n")
    _print_table(f"{title} ({machine()})", [row.cells() for row in done])
    for row in done:
        if row.note:
            print(f"  {row.name}: {row.note}")


def machine() -> str:
    """The load average tells a reader how quiet it was."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, load average {load:.1f}"


def _print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(title)
        widths = [max(len(cell) for cell in column) for column in zip(COLUMNS, *rows, strict=True)]
        for row in (COLUMNS, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style="bold red" if cell == "NO" else "") for cell in row))
    Console(highlight=False).print(table)
