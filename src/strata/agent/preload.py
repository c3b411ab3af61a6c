"""What Python's fork server is to import before it forks workers. Needs no torch itself.

The first server imports what every worker needs. A script imports more: what it asks for, and what torch imports behind its
back, like its compiler when the first optimizer is made, which takes seconds. So a worker notes, at its first optimizer step,
what it has imported since it was forked, and the agent starts a second server in the background that has imported that too.
Replacements come from the second one as soon as it is ready. What it has imported is left in the run's folder: the first server
of an agent that comes back to the run imports it from the start, so that no core imports torch a second time beside training.

Only installed packages are imported this way, and Strata itself: a script's own modules may read arguments or change files.
Importing must leave a process that can be forked. If a module starts a thread or CUDA, that server is given up, its package is
left out, and another one is started; after `ATTEMPTS` of them, replacements come from the first server as before.
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from strata.agent import PRELOAD_VARIABLE
from strata.files import write_file
from strata.fork_server import ForkServer
from strata.processes import end_with_parent
from strata.shared_memory import NOTED, VERIFIED_MODULES, make_private, remove_empty, run_folder

log = logging.getLogger("strata.rendezvous")

EVERY_WORKER_NEEDS = (
    "torch.distributed.run",
    "torch.nn.parallel",
    "strata.agent.warm",
    "strata.training.job",
)
SEEN_VARIABLE = "STRATA_SEEN_IMPORTS"
"""To a second server: the file with the names to import, beside which it puts its outcome."""
SEEN = "strata.agent.seen"
MOST_NAMES = 10_000
MODULES_LIMIT_BYTES = 60_000
"""They travel on the server's command line."""
FEWEST_NAMES = 30
"""For less, a second server is not worth its memory."""
ATTEMPTS = 3


def preload(run: str = "") -> None:
    """In the agent, before its fork server runs."""
    multiprocessing.set_forkserver_preload([*_always(), *_verified_modules(run)])


def _verified_modules(run: str) -> list[str]:
    """What a server of an earlier agent of this run has imported on this machine, and could be forked afterwards."""
    with suppress(OSError, ValueError):
        if run:
            names: list[str] = json.loads((run_folder(run) / VERIFIED_MODULES).read_text())
            return names
    return []


def _always() -> list[str]:
    own = [name.strip() for name in os.environ.get(PRELOAD_VARIABLE, "").split(",")]
    return [*EVERY_WORKER_NEEDS, *filter(None, own)]


# --- in a worker ----------------------------------------------------------------------------------------------


def note_imports(run: str, already: Collection[str]) -> None:
    """Leave the names of the installed modules that this process has imported, besides those it had `already`."""
    names = [name for name in list(sys.modules) if name not in already and _is_installed(name)]
    if len(names) < FEWEST_NAMES:
        return
    with suppress(OSError):
        folder = run_folder(run)
        make_private(folder, inside=folder.parent)
        write_file(folder / NOTED, json.dumps(names[:MOST_NAMES]), durable=False)


def _is_installed(name: str) -> bool:
    module = sys.modules.get(name)
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    if name.startswith("__") or getattr(module, "__name__", None) != name or not isinstance(origin, str):
        return False
    return name.partition(".")[0] == "strata" or not _WHERE_PACKAGES_ARE.isdisjoint(Path(origin).parts)


_WHERE_PACKAGES_ARE = {"site-packages", "dist-packages"}


# --- in a second server ---------------------------------------------------------------------------------------


def import_seen() -> None:
    """Import what workers were seen to import; ends the process if that leaves one that must not be forked."""
    path = Path(os.environ.pop(SEEN_VARIABLE))
    end_with_parent(signal.SIGKILL)  # Until it listens, it would not notice that the agent has ended.
    try:
        imported = []
        for name in json.loads(path.read_text()):
            # Whatever a module does when it is imported, it has done it in a worker too, which continued.
            with suppress(Exception, SystemExit):
                importlib.import_module(name)
                imported.append(name)
            if spoiled := _spoiled():
                _leave(path, {"spoiled": [name, spoiled]})
                os._exit(1)
        _leave(path, {"imported": imported})
    except OSError:  # The run has ended, and its folder was removed.
        os._exit(1)
    end_with_parent(0)


def _spoiled() -> str:
    """What this process has that a fork would not survive."""
    if threading.active_count() > 1:
        return "started a thread"
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "initialized CUDA"
    return ""


def _leave(path: Path, outcome: Mapping[str, Sequence[str]]) -> None:
    write_file(_outcome_of(path), json.dumps(outcome), durable=False)


def _outcome_of(path: Path) -> Path:
    return path.with_suffix(".outcome")


# --- in the agent ---------------------------------------------------------------------------------------------


class SecondServer:
    """Looks for what workers have imported, and has a server with it ready for those that replace them."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._path: Path | None = None
        self._server: ForkServer | None = None
        self._attempts = 0
        self._retired: list[ForkServer] = []
        """Servers whose workers may still live."""

    def look(self, run: str) -> None:
        """Called repeatedly while workers run; does a little at a time, and never waits."""
        if self._path is None:
            self._take_note(run)
            return
        if self._server is None or not _outcome_of(self._path).exists():
            return
        outcome = json.loads(_outcome_of(self._path).read_text())
        if "spoiled" in outcome:
            self._give_up(*outcome["spoiled"])
        else:
            _prove(run, outcome["imported"])
            self._take_over()

    def replace_workers(self) -> None:
        """Called when all workers have ended, before others are started: an old server is no longer needed."""
        for server in self._retired:
            server.end()
        self._retired.clear()

    def _take_note(self, run: str) -> None:
        note = run_folder(run) / NOTED
        if not note.exists():
            return
        with suppress(OSError, ValueError):
            self._names = json.loads(note.read_text())
        self._path = note.with_name(f"imports-{os.getpid()}.json")
        with suppress(OSError):
            note.unlink()
        self._start()

    def _start(self) -> None:
        assert self._path is not None
        self._attempts += 1
        with suppress(OSError):
            self._path.write_text(json.dumps(self._names))
            os.environ[SEEN_VARIABLE] = str(self._path)
            try:
                self._server = ForkServer.start([*_always(), SEEN])
            finally:
                del os.environ[SEEN_VARIABLE]
            atexit.register(self._end_unready)

    def _end_unready(self) -> None:
        """It is still importing when the agent ends."""
        if self._server is not None:
            self._server.end()
            self._server = None
            self._clean()

    def _give_up(self, module: str, spoiled: str) -> None:
        parts = module.split(".")
        left_out = ".".join(parts[:2] if parts[0] == "torch" else parts[:1])
        log.warning(
            "importing %s %s: replacement workers will import %s themselves", module, spoiled, left_out
        )
        assert self._server is not None
        self._server.end()
        self._server = None
        self._names = [
            name for name in self._names if name != left_out and not name.startswith(left_out + ".")
        ]
        assert self._path is not None
        _outcome_of(self._path).unlink(missing_ok=True)
        if self._attempts < ATTEMPTS:
            self._start()
        else:
            self._clean()

    def _take_over(self) -> None:
        """From now on, workers are forked by the second server."""
        assert self._server is not None
        if (first := self._server.take_over()) is not None:
            self._retired.append(first)
        atexit.unregister(self._end_unready)
        self._server = None
        self._clean()

    def _clean(self) -> None:
        assert self._path is not None
        for path in (self._path, _outcome_of(self._path)):
            with suppress(OSError):
                path.unlink()
        remove_empty(self._path.parent)


def _prove(run: str, names: list[str]) -> None:
    if len(repr(names)) <= MODULES_LIMIT_BYTES:
        with suppress(OSError):
            write_file(run_folder(run) / VERIFIED_MODULES, json.dumps(names), durable=False)
