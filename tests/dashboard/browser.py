"""A real browser for tests, through the driver in `dashboard/e2e`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support_programs import ROOT, program

import build_dashboard as build_dashboard  # isort: skip  # Importable through tests.support_programs, which adds its folder.

DRIVER = ROOT / "dashboard" / "e2e" / "driver.mjs"
TIMEOUT_S = 45.0
VIEWS = (
    "/",
    "/runs",
    "/incidents",
    "/compare",
    "/workers",
    "/data",
    "/checkpoints",
    "/barriers",
    "/logs",
    "/coordinator",
    "/settings",
    "/sign-in",
)


def npx(*command: str, **environment: str) -> None:
    """Runs one of the dashboard's own tools; its output is the error message."""
    npx = program("npx")
    node = Path(npx).parent
    build_dashboard.install_modules(node, build_dashboard.SOURCES)
    ran = subprocess.run(
        [npx, "--no-install", *command],
        cwd=build_dashboard.SOURCES,
        env={**build_dashboard.environment(node), "CI": "true", **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


class BrowserError(Exception):
    """A command that the page did not complete."""


class Browser:
    """One page. Elements are found by role and name, label, text or CSS."""

    def __init__(self, base: str, **settings: Any) -> None:
        chromium, node = program("chromium"), program("node")
        build_dashboard.install_modules(Path(node).parent, build_dashboard.SOURCES)
        self.base = base
        self._number = 0
        self._process = subprocess.Popen(
            [node, str(DRIVER), json.dumps({"chromium": chromium, **settings})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=DRIVER.parent,
        )

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _do(self, op: str, **rest: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._number += 1
        self._process.stdin.write(json.dumps({"n": self._number, "op": op, **rest}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BrowserError(f"the driver ended with status {self._process.wait(10)}")
        answer = json.loads(line)
        assert answer["n"] == self._number
        if "error" in answer:
            raise BrowserError(f"{op} {rest}: {answer['error']}")
        return answer["value"]

    def open(self, path: str) -> None:
        self._do("open", url=self.base + path)

    def click(self, role: str, name: str, **find: Any) -> None:
        self._do("click", find={"role": role, "name": name, **find})

    def fill(self, label: str, value: str) -> None:
        self._do("fill", find={"label": label, "exact": True}, value=value)

    def choose(self, label: str, value: str) -> None:
        self._do("choose", find={"label": label, "exact": True}, value=value)

    def mouse(
        self, *points: tuple[float, float], held: bool = False, twice: bool = False, **find: Any
    ) -> None:
        """Over an element, from point to point, each as fractions of its width and height."""
        self._do("mouse", find=find, points=points, held=held, twice=twice)

    def hold(self, **find: Any) -> None:
        """Press the mouse button over it. `release` is its end."""
        self._do("hold", find=find)

    def release(self) -> None:
        self._do("release")

    def drag(self, find: dict[str, Any], onto: dict[str, Any]) -> None:
        self._do("drag", find=find, onto=onto)

    def press(self, *keys: str) -> None:
        """One after the other, without a pause between them."""
        self._do("press", keys=keys)

    def settle(self) -> None:
        """Wait until pending drawing and scrolling is done."""
        self._do("settle")

    def see(self, text: str | None = None, *, within_s: float = TIMEOUT_S, **find: Any) -> None:
        """Wait until it is visible."""
        found = {**find} if text is None else {"text": text, **find}
        self._do("see", find=found, timeout_ms=within_s * 1000)

    def miss(self, text: str | None = None, *, within_s: float = TIMEOUT_S, **find: Any) -> None:
        """Wait until it has disappeared."""
        found = {**find} if text is None else {"text": text, **find}
        self._do("miss", find=found, timeout_ms=within_s * 1000)

    def count(self, **find: Any) -> int:
        return int(self._do("count", find=find))

    def text(self, **find: Any) -> str:
        return str(self._do("text", find=find))

    def texts(self, **find: Any) -> list[str]:
        return list(self._do("texts", find=find))

    def evaluate(self, script: str) -> Any:
        return self._do("evaluate", script=script)

    def until(self, script: str, *, within_s: float = TIMEOUT_S) -> None:
        """Wait until the expression is true on the page."""
        self._do("until", script=script, timeout_ms=within_s * 1000)

    def size(self, width: int, height: int) -> None:
        self._do("size", width=width, height=height)

    def theme(self, *, dark: bool) -> None:
        self._do("theme", dark=dark)

    def picture(self, path: Path) -> None:
        self._do("picture", path=str(path))

    def download(self, path: Path, role: str, name: str) -> str:
        return str(self._do("download", path=str(path), find={"role": role, "name": name}))

    @property
    def url(self) -> str:
        return str(self._do("url"))

    def serious(self, rules: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Serious and critical axe violations, by all rules of WCAG 2.2 AA or only by these."""
        return [
            found
            for found in self._do("axe", rules=list(rules))
            if found["impact"] in ("serious", "critical")
        ]

    def complaints(self) -> list[str]:
        """Console errors since the last call, without 4xx responses and lost connections, which the page itself shows."""
        expected = re.compile(r"Failed to load resource: (net::ERR_(?!BLOCKED)|.*status of 4\d\d)")
        return [text for text in self._do("complaints") if not expected.search(text)]

    def refusals(self) -> list[str]:
        """Error responses since the last call, each with its URL."""
        return list(self._do("refusals"))

    def allow(self, permission: str) -> None:
        self._do("allow", permission=permission, origin=self.base)

    def leave(self) -> None:
        """Open a blank page: the server may stop now."""
        self._do("open", url="about:blank")

    def violations(self) -> list[str]:
        """Violations of the content security policy."""
        return list(self.evaluate("window.violations"))
