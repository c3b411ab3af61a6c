"""Drawings as SVG: plots of measurements, and the diagrams of the documentation.

Each carries both palettes and its own ground, so that it can be read in light and dark, on the site and wherever else it is
shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

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
