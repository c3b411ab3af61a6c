"""Plots of the tables in docs/benchmarks; `scripts/make_figures.py` writes them, with the other figures of the documentation.

They read their numbers from the tables, so a plot and its table cannot disagree; a table that no longer has the expected rows is
an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.drawing import Drawing

TABLES = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"


class TableChanged(Exception):
    """A plot's table is not what the plot expects: change them together."""


def table(page: str, *columns: str) -> dict[str, dict[str, str]]:
    """The first table of a benchmark page that has these columns: rows by their first cell."""
    lines = (TABLES / page).read_text().splitlines()
    for index, line in enumerate(lines):
        head = cells(line)
        if line.startswith("|") and set(columns) <= set(head):
            rows = [cells(each) for each in takewhile_table(lines[index + 2 :])]
            return {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    raise TableChanged(f"docs/benchmarks/{page} has no table with the columns {', '.join(columns)}")


def takewhile_table(lines: Sequence[str]) -> list[str]:
    end = next((index for index, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return list(lines[:end])


def cells(line: str) -> list[str]:
    return [cell.strip().replace("`", "").replace("*", "") for cell in line.strip().strip("|").split("|")]


def value(rows: dict[str, dict[str, str]], row: str, column: str) -> float:
    """The first number of a cell; the row is named by how it begins."""
    found = [each for name, each in rows.items() if name.startswith(row)]
    if len(found) != 1 or column not in found[0]:
        raise TableChanged(f"{len(found)} rows begin with '{row}', or there is no column '{column}'")
    return number(found[0][column])


def number(text: str) -> float:
    match = re.search(r"\d[\d,]*\.?\d*", text)
    if match is None:
        raise TableChanged(f"'{text}' has no number in it")
    return float(match[0].replace(",", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    name: str
    value: float
    shown: str
    is_ours: bool = False


def bars(
    title: str, bars: Sequence[Bar], *, note: str, about: str, target: float | None = None, log: bool = False
) -> str:
    """Horizontal bars, the longest across the plot; a dashed line is the target."""
    left, right, row, top = 280, 170, 34, 64
    drawing = Drawing(760, top + row * len(bars) + 44, about)
    drawing.text(24, 34, title, style="title")
    width = drawing.width - left - right
    most = max(max(bar.value for bar in bars), target or 0.0)
    least = 10 ** math.floor(math.log10(min(bar.value for bar in bars))) if log else 0.0

    def across(amount: float) -> float:
        if not log:
            return amount / most * width
        return math.log10(amount / least) / math.log10(most / least) * width

    bottom = top + row * len(bars)
    if target is not None:
        x = left + across(target)
        drawing.line((x, top - 8), (x, bottom - 4), style="limit")
        drawing.text(x, top - 12, "target", style="small limitink", anchor="middle")
    for index, bar in enumerate(bars):
        y = top + index * row
        style = "strong" if bar.is_ours else ""
        drawing.text(left - 12, y + 17, bar.name, style=style, anchor="end")
        drawing.rect(
            left, y + 2, max(across(bar.value), 2), 20, style="ours" if bar.is_ours else "peer", radius=3
        )
        drawing.text(left + across(bar.value) + 8, y + 17, bar.shown, style=f"num halo {style}")
    drawing.text(24, bottom + 22, note, style="soft small")
    return drawing.svg()


def recovery_plot() -> str:
    ours = table("recovery.md", "figure", "measured", "target", "met")
    peers = table("recovery.md", "peer", "next new step", "until all train again")
    found = [
        ("Strata", value(ours, "process crash → next new step, p50", "measured"), True),
        ("torchft DDP, the survivor alone", value(peers, "torchft DDP", "next new step"), False),
        ("torchft DDP, all of them", value(peers, "torchft DDP", "until all train again"), False),
        (
            "torchrun, tuned, torch.save",
            value(ours, "peer: plain torchrun, tuned", "measured"),
            False,
        ),
        ("torchrun as it is", value(ours, "peer: plain torchrun as it is", "measured"), False),
        ("Ray Train, elastic", value(peers, "Ray Train", "until all train again"), False),
    ]
    return bars(
        "From SIGKILL to the next new step",
        [Bar(name=name, value=s, shown=f"{s:g} s", is_ours=ours_) for name, s, ours_ in found],
        note="Median, two workers on two cores; torchft and Ray Train from an earlier run on the same machine. Shorter is better.",
        about="Seconds from killing a worker to the next new step, beside peers",
    )


def phases_plot() -> str:
    """To the scale of the medians in docs/benchmarks/recovery.md."""
    text = (TABLES / "recovery.md").read_text()
    match = re.search(
        r"detect ([\d.]+) s, rendezvous ([\d.]+) s, spawn ([\d.]+) s, load ([\d.]+) s, first step ([\d.]+) s",
        text,
    )
    if match is None:
        raise TableChanged("docs/benchmarks/recovery.md does not say how long each phase takes")
    seconds = [float(each) for each in match.groups()]
    phases = list(
        zip(
            ("detect", "rendezvous", "spawn", "load", "first step"),
            (
                "the agent sees it",
                "agents meet again",
                "forked with torch",
                "from shared memory",
                "training again",
            ),
            seconds,
            strict=True,
        )
    )
    d = Drawing(760, 250, "The phases of a recovery, to scale")
    d.text(24, 34, f"A recovery, by phase: {sum(seconds):.2f} s at the median", style="title")
    left, width = 24, 712
    x: float = left
    for index, (name, what, elapsed_s) in enumerate(phases):
        wide = elapsed_s / sum(seconds) * width
        d.rect(x, 60, wide - 2, 34, style="ours" if index % 2 == 0 else "peer", radius=3)
        label = 24 + index * 142
        d.line((x + wide / 2, 94), (x + wide / 2, 112), (label + 62, 132), style="grid")
        d.text(label + 62, 150, name, style="strong", anchor="middle")
        d.text(label + 62, 170, f"{elapsed_s:g} s", style="num", anchor="middle")
        d.text(label + 62, 190, what, style="soft small", anchor="middle")
        x += wide
    d.text(
        left,
        226,
        "SIGKILL of one of two workers; snapshot in shared memory; warm workers. Then the lost steps are made again.",
        style="soft small",
    )
    return d.svg()


def in_process_plot() -> str:
    column = "next new step, median (range)"
    rows = table("recovery.md", "one rank is killed", column)
    return bars(
        "One rank killed: the next new step of the others",
        [
            Bar(
                name=name,
                value=number(row[column]),
                shown=f"{number(row[column]):g} s",
                is_ours=name.startswith("Strata"),
            )
            for name, row in rows.items()
        ],
        note="Median, one after the other in the same quarter of an hour on two busy cores. Shorter is better.",
        about="Seconds from killing a rank to the next new step of those that survive, beside peers",
    )


def saving_plot() -> str:
    rows = table("checkpoint.md", "saver", "256 tensors, to durable")
    return bars(
        "Saving 1 GiB to disk, durable",
        [
            Bar(
                name=name,
                value=number(row["256 tensors, to durable"]),
                shown=row["256 tensors, to durable"],
                is_ours=name == "Strata",
            )
            for name, row in rows.items()
        ],
        note="256 tensors, CPU, the best of seven rounds, fsynced. Longer is better.",
        about="Megabytes a second to durable storage, beside other savers",
    )


def damage_plot() -> str:
    rows = table("checkpoint.md", "saver", "one flipped bit: loaded silently wrong")
    column = "one flipped bit: loaded silently wrong"
    return bars(
        "One flipped bit in a saved file: loaded silently wrong",
        [
            Bar(
                name=name,
                value=number(row[column]),
                shown=f"{number(row[column]):g} %",
                is_ours=name == "Strata",
            )
            for name, row in rows.items()
            if row[column]
        ],
        note="300 files of each saver, one random bit changed in each. Shorter is better.",
        about="Share of damaged files that load without an error and differ",
    )


def stall_plot() -> str:
    ours = table("checkpoint-gpu.md", "figure", "measured", "peer or limit")
    peers = table("checkpoint-gpu.md", "saver", "to durable", "stall")
    stall_ms = value(ours, "stall of a running loop", "measured")
    shown = [Bar(name="Strata", value=stall_ms / 1000, shown=f"{stall_ms:g} ms", is_ours=True)]
    shown += [Bar(name=name, value=number(row["stall"]), shown=row["stall"]) for name, row in peers.items()]
    return bars(
        "How long training stands still for a save of 8.6 GB",
        shown,
        note="One NVIDIA H200, bf16, medians. The scale is logarithmic. Shorter is better.",
        about="Stall of a training loop for one save on a GPU, beside other savers",
        log=True,
    )


def samples_plot() -> str:
    """Samples lost and repeated, summed over the schedules of the table."""
    rows = table("data.md", "schedule", "Strata", "torchdata")
    names = [name for name in next(iter(rows.values())) if name != "schedule"]
    shown = []
    for name in names:
        resumed = [row[name] for row in rows.values() if "does not resume" not in row[name]]
        pairs = [[int(part) for part in cell.split("+")] for cell in resumed]
        lost, repeated = (sum(pair[index] for pair in pairs) for index in (0, 1))
        failed = len(rows) - len(resumed)
        shown.append(
            Bar(
                name=name,
                value=lost + repeated,
                shown=f"{lost} lost, {repeated} repeated" + (f", {failed} not resumed" if failed else ""),
                is_ours=name == "Strata",
            )
        )
    return bars(
        "Samples lost or repeated when the fleet changes",
        shown,
        note=f"1,003 samples, one epoch, summed over {len(rows)} schedules of resizing. Shorter is better.",
        about="Samples lost and repeated in an epoch with resizing, beside other samplers",
    )


def coordinator_plot() -> str:
    """Each figure as a share of its target, so that one plot shows them all. What misses its target is shown like the rest."""
    rows = table("coordinator.md", "figure", "measured", "target", "met")
    shown = []
    for name, row in rows.items():
        if ", " in row["target"]:  # Two limits in one row.
            continue
        target, measured = number(row["target"]), number(row["measured"])
        used = target / measured if "≥" in row["target"] else measured / target
        shown.append(
            Bar(name=short(name), value=100 * used, shown=f"{100 * used:.0f} %", is_ours=used <= 1.0)
        )
    return bars(
        "Coordinator: how much of each limit is used",
        shown,
        note="100 % is the target; beyond it the target is missed (grey). Two cores shared with the load generator.",
        about="Figures of the coordinator as a share of their targets",
        target=100.0,
    )


def short(name: str) -> str:
    name = (
        name.replace(" workers", "")
        .replace("in a process", "in process")
        .replace("p99, ", "")
        .replace(" connections", " conn.")
        .replace("/api/dashboard meanwhile, ", "dashboard, ")
        .replace("one browser", "1")
    )
    return name if len(name) <= 34 else name[:33].rstrip(" ,") + "…"


PLOTS: dict[str, Callable[[], str]] = {
    "recovery.svg": recovery_plot,
    "recovery-phases.svg": phases_plot,
    "recovery-in-process.svg": in_process_plot,
    "saving.svg": saving_plot,
    "damage.svg": damage_plot,
    "stall.svg": stall_plot,
    "samples.svg": samples_plot,
    "coordinator.svg": coordinator_plot,
}
