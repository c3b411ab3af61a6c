"""Draw the figures of the documentation: diagrams, and the plots of the benchmarks' tables (`benchmarks/plots.py`).

    python scripts/make_figures.py            write docs/figures/*.svg
    python scripts/make_figures.py --check    say which are not current, and end with status 1

Output depends on nothing but the tables and these files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.drawing import Drawing  # noqa: E402
from benchmarks.plots import PLOTS, TableChanged  # noqa: E402

FIGURES = ROOT / "docs" / "figures"


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


DIAGRAMS: dict[str, Callable[[], str]] = {
    "overview.svg": overview,
    "tiers.svg": tiers,
    "order.svg": order,
    "engine.svg": engine,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; say which figures are not current"
    )
    check = parser.parse_args(arguments).check
    try:
        drawn = {name: draw() for name, draw in (DIAGRAMS | PLOTS).items()}
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
