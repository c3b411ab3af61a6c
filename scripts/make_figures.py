"""Draw the figures of the documentation: diagrams, and plots of the tables in docs/benchmarks.

    python scripts/make_figures.py            write docs/figures/*.svg
    python scripts/make_figures.py --check    say which are not current, and end with status 1

Plots read their numbers from the tables, so a figure and its table cannot disagree; a table that no longer has the expected
rows is an error. Output depends on nothing but the tables and this file. Each SVG carries both palettes and its own ground,
so that it can be read in light and dark, on the site and wherever else it is shown.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
BENCHMARKS = ROOT / "docs" / "benchmarks"

STYLE = """
svg{--ground:#fbfcfd;--edge:#d5dce4;--ink:#1c2733;--soft:#5b6875;--fill:#eef2f6;--accent:#1d6fd1;--peer:#9aa7b4;--limit:#c2410c;--good:#d9e8fb}
@media (prefers-color-scheme:dark){svg{--ground:#161c24;--edge:#333f4c;--ink:#e6ebf1;--soft:#9aa8b6;--fill:#212a35;--accent:#5aa2f5;--peer:#66737f;--limit:#fb923c;--good:#1e3a5c}}
text{font:14px ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;fill:var(--ink)}
.soft{fill:var(--soft)}.small{font-size:12px}.title{font-size:16px;font-weight:600}.strong{font-weight:600}
.num{font-variant-numeric:tabular-nums;}.halo{paint-order:stroke;stroke:var(--ground);stroke-width:4px;stroke-linejoin:round}.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px}
.ground{fill:var(--ground);stroke:var(--edge)}.box{fill:var(--fill);stroke:var(--edge)}.hot{fill:var(--good);stroke:var(--accent)}
.ours{fill:var(--accent)}.peer{fill:var(--peer)}.on{fill:#fff}
.line{stroke:var(--soft);fill:none;stroke-width:1.5}.grid{stroke:var(--edge);fill:none}.limit{stroke:var(--limit);stroke-width:1.5;stroke-dasharray:4 3}
.limitink{fill:var(--limit)}.head{fill:var(--soft)}
"""


class TableChanged(Exception):
    """A plot's table is not what the plot expects: change them together."""


@dataclass(slots=True)
class Drawing:
    """One SVG, filled piece by piece. Coordinates are pixels from the top left."""

    width: int
    height: int
    about: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, *, style: str = "", anchor: str = "start") -> None:
        at = f'x="{num(x)}" y="{num(y)}"'
        self.parts.append(f'<text {at} text-anchor="{anchor}" class="{style}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, *lines: str, style: str = "box") -> None:
        """A rounded box; its first line is strong, the others soft."""
        self.rect(x, y, width, height, style=style)
        top = y + height / 2 - (len(lines) - 1) * 9 + 5
        for index, words in enumerate(lines):
            self.text(
                x + width / 2,
                top + index * 18,
                words,
                style="strong" if index == 0 else "soft small",
                anchor="middle",
            )

    def rect(self, x: float, y: float, width: float, height: float, *, style: str, radius: float = 6) -> None:
        size = f'width="{num(width)}" height="{num(height)}" rx="{num(radius)}"'
        self.parts.append(f'<rect x="{num(x)}" y="{num(y)}" {size} class="{style}"/>')

    def line(self, *points: tuple[float, float], style: str = "line", arrow: bool = False) -> None:
        path = " ".join(f"{num(x)},{num(y)}" for x, y in points)
        head = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(f'<polyline points="{path}" class="{style}"{head}/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        self.line(*points, arrow=True)

    def svg(self) -> str:
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path d="M0 0 8 4 0 8z" class="head"/></marker>'
        )
        ground = (
            f'<rect x=".5" y=".5" width="{self.width - 1}" height="{self.height - 1}" rx="8" class="ground"/>'
        )
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self.about)}">',
                f"<title>{escape(self.about)}</title><style>{STYLE}</style><defs>{head}</defs>",
                ground,
                *self.parts,
                "</svg>\n",
            ]
        )


def num(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


# --- tables ---


def table(page: str, *columns: str) -> dict[str, dict[str, str]]:
    """The first table of a benchmark page that has these columns: rows by their first cell."""
    lines = (BENCHMARKS / page).read_text().splitlines()
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


# --- plots ---


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


# --- diagrams ---


def overview() -> str:
    d = Drawing(760, 330, "Workers, coordinator, stores and those who watch")
    d.box(
        24,
        40,
        210,
        120,
        "torchrun workers",
        "model, optimizer, data position",
        "one elastic job per rank",
        style="hot box",
    )
    d.box(
        320,
        40,
        210,
        120,
        "coordinator",
        "who is alive · who reads what",
        "which checkpoint is safe",
        "who waits for whom",
    )
    d.box(616, 40, 120, 120, "you", "API · CLI", "dashboard", "Prometheus")
    d.arrow((234, 85), (320, 85))
    d.text(277, 76, "one stream", style="soft small", anchor="middle")
    d.text(277, 106, "each", style="soft small", anchor="middle")
    d.arrow((616, 100), (530, 100))
    d.text(573, 91, "HTTP", style="soft small", anchor="middle")
    d.arrow((129, 160), (129, 216))
    d.text(141, 194, "one image of the state", style="soft small")
    for index, (name, where, survives) in enumerate(
        (
            ("shared memory", "/dev/shm", "the process"),
            ("local disk", "fsynced", "the machine"),
            ("object storage", "S3, GCS, Azure", "the site"),
        )
    ):
        x = 24 + index * 256
        d.box(x, 218, 200, 56, name, where)
        d.text(x + 100, 300, f"survives {survives}", style="soft small", anchor="middle")
        if index:
            d.arrow((x - 56, 246), (x, 246))
    return d.svg()


def tiers() -> str:
    d = Drawing(760, 300, "One image travels through three tiers; the manifest comes last")
    d.text(24, 34, "One save", style="title")
    d.box(24, 60, 170, 70, "live tensors", "on the CPU or a GPU", style="hot box")
    d.arrow((194, 95), (262, 95))
    d.text(228, 86, "copy", style="soft small", anchor="middle")
    d.box(262, 60, 230, 70, "image in shared memory", "a valid .pt file, hashed")
    d.text(377, 152, "training waits for this much", style="small", anchor="middle")
    d.line((24, 170), (736, 170), style="grid")
    d.text(24, 190, "in the background, the same bytes", style="soft small")
    d.arrow((310, 160), (310, 206))
    d.box(210, 208, 160, 60, "local disk", "direct I/O, fsync")
    d.arrow((430, 160), (430, 182), (480, 182), (480, 206))
    d.box(400, 208, 160, 60, "object storage", "parallel parts")
    d.box(616, 208, 120, 60, "manifest", "in each store:", "digests, position")
    d.arrow((560, 238), (616, 238))
    d.line((290, 268), (290, 286), (676, 286))
    d.arrow((676, 286), (676, 270))
    d.text(676, 198, "now it exists", style="strong small", anchor="middle")
    return d.svg()


def recovery_phases() -> str:
    """To the scale of the medians in docs/benchmarks/recovery.md."""
    text = (BENCHMARKS / "recovery.md").read_text()
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


def order() -> str:
    d = Drawing(760, 270, "The order of samples does not depend on the number of workers")
    d.text(24, 34, "One epoch: the order is fixed, who reads it is not", style="title")
    samples = [7, 2, 9, 4, 11, 0, 5, 10, 3, 8, 1, 6]
    size, left = 46, 180
    owners = [(number // 2) % 3 for number in range(6)] + [(number % 6) // 3 for number in range(6)]
    d.text(left - 16, 96, "seed + epoch → order", style="soft small", anchor="end")
    d.text(left - 16, 146, "read by rank", style="soft small", anchor="end")
    for index, sample in enumerate(samples):
        x = left + index * size
        d.rect(x, 70, size - 6, 40, style="box")
        d.text(x + size / 2 - 3, 95, str(sample), style="num", anchor="middle")
        d.rect(x, 122, size - 6, 36, style="hot" if owners[index] == 0 else "box", radius=3)
        d.text(x + size / 2 - 3, 145, str(owners[index]), style="num strong", anchor="middle")
    middle = left + 6 * size - 3
    d.line((middle, 58), (middle, 196), style="limit")
    d.text(left + 3 * size, 184, "three workers", style="small", anchor="middle")
    d.text(left + 9 * size, 184, "two workers", style="small", anchor="middle")
    d.text(middle, 214, "a worker is lost here", style="small limitink", anchor="middle")
    d.text(
        24,
        248,
        "A global batch of six: two samples for each of three, then three for each of two. The position (6) is in the checkpoint.",
        style="soft small",
    )
    return d.svg()


def engine() -> str:
    d = Drawing(760, 270, "Commands enter one core; facts are made durable; then answers leave")
    d.text(24, 34, "Decide, make durable, only then answer", style="title")
    for index, name in enumerate(("workers", "API, CLI", "clock")):
        d.box(24, 60 + index * 60, 150, 44, name)
        d.arrow((174, 82 + index * 60), (222, 142))
    d.box(222, 110, 104, 64, "queue", "bounded")
    d.arrow((326, 142), (362, 142))
    d.box(362, 100, 130, 84, "core", "pure: no clock,", "no I/O", style="hot box")
    d.arrow((492, 142), (528, 142))
    d.text(510, 133, "facts", style="soft small", anchor="middle")
    d.box(528, 110, 96, 64, "journal", "one commit")
    d.arrow((624, 142), (660, 142))
    d.box(660, 110, 76, 64, "answers", "events")
    d.text(24, 252, "A crash between any two boxes loses nothing that was acknowledged.", style="soft small")
    return d.svg()


FILES: dict[str, Callable[[], str]] = {
    "overview.svg": overview,
    "tiers.svg": tiers,
    "recovery-phases.svg": recovery_phases,
    "order.svg": order,
    "engine.svg": engine,
    "recovery.svg": recovery_plot,
    "recovery-in-process.svg": in_process_plot,
    "saving.svg": saving_plot,
    "damage.svg": damage_plot,
    "stall.svg": stall_plot,
    "samples.svg": samples_plot,
    "coordinator.svg": coordinator_plot,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; say which figures are not current"
    )
    check = parser.parse_args(arguments).check
    try:
        drawn = {name: draw() for name, draw in FILES.items()}
    except TableChanged as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    stale = [
        name
        for name, text in drawn.items()
        if not (FIGURES / name).exists() or (FIGURES / name).read_text() != text
    ]
    if check:
        for name in stale:
            print(f"docs/figures/{name} is not current: python scripts/make_figures.py")
        return 1 if stale else 0
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (FIGURES / name).write_text(drawn[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
