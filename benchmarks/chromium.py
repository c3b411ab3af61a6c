"""A headless Chromium with one page, told what to do over two pipes in its own protocol. Needs nothing but the program."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from types import TracebackType
from typing import Any

from strata.errors import StrataError

PATIENCE_S = 60.0
_COMMAND_FD, _ANSWER_FD = 3, 4
"""Where Chromium listens and answers when it is told to use pipes."""


class BrowserMissing(StrataError):
    code = "browser_missing"

    def __init__(self) -> None:
        super().__init__(
            "There is no Chromium on this machine.", hint="Install it (Debian: apt-get install chromium)."
        )


class BrowserFailed(StrataError):
    code = "browser_failed"


class Chromium:
    """Open with `with`; nothing of it is left afterwards."""

    def __init__(self) -> None:
        program = (
            shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
        )
        if program is None:
            raise BrowserMissing
        self._program = program
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        self._folder = tempfile.mkdtemp(prefix="strata-chromium-")
        their_commands, self._commands = (_high(fd) for fd in os.pipe())
        self._answers, their_answers = (_high(fd) for fd in os.pipe())
        arguments = [
            self._program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder}",
            "--window-size=1440,900",
            "about:blank",
        ]
        self._pid = os.posix_spawn(
            self._program,
            arguments,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, their_commands, _COMMAND_FD),
                (os.POSIX_SPAWN_DUP2, their_answers, _ANSWER_FD),
            ],
            setsid=True,
        )
        os.close(their_commands)
        os.close(their_answers)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.call("Performance.enable", timeDomain="threadTicks")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._commands)
        os.close(self._answers)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        until_s = time.monotonic() + PATIENCE_S
        while True:
            answer = self._next(until_s)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserFailed(f"{method}: {answer['error'].get('message')}")
                found: dict[str, Any] = answer["result"]
                return found
            if "method" in answer:
                self._events.append(answer)

    def open(self, url: str) -> None:
        """Until the page is loaded, from an empty cache."""
        self.call("Network.clearBrowserCache")
        self._events.clear()
        self.call("Page.navigate", url=url)
        until_s = time.monotonic() + PATIENCE_S
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            event = self._next(until_s)
            if "method" in event:
                self._events.append(event)
        self._events.clear()

    def before_every_page(self, script: str) -> None:
        self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def worked_s(self) -> float:
        """Processor seconds that the page's main thread has used: these do not depend on how busy the machine is."""
        figures = self.call("Performance.getMetrics")["metrics"]
        return float(next(figure["value"] for figure in figures if figure["name"] == "TaskDuration"))

    def evaluate(self, expression: str) -> Any:
        """The value of an expression; of a promise, what it comes to."""
        said = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in said:
            raise BrowserFailed(
                f"{expression[:80]}: {said['exceptionDetails'].get('exception', {}).get('description')}"
            )
        self._events.clear()
        return said["result"].get("value")

    def _next(self, until_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until_s - time.monotonic()))
            piece = os.read(self._answers, 1 << 20) if ready else b""
            if not piece:
                raise BrowserFailed(
                    "Chromium ended." if ready else f"Chromium said nothing for {PATIENCE_S:.0f} s."
                )
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _high(fd: int) -> int:
    """The same pipe under a number that is none of those Chromium will have."""
    found = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(fd)
    return found
