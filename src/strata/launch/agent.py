"""`strata torchrun`: torchrun's agent with every flag it has, our rendezvous, warm workers and settings for quick recovery.

    python -m strata.launch.agent [torchrun's flags] (-m MODULE | SCRIPT) [ARGUMENTS]

Every flag the user gives wins; see `arguments` for what holds without. Workers are forked with torch in place
(`strata.agent.warm`): the server that forks them imports torch at the same time as the agent does, so the first start
is not delayed. When the agent is done both leave at once: Python takes seconds to take torch apart, while the user waits
for the end. A run that fails ends with the script's own traceback and its exit status.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver

from strata.fork_server import ForkServer
from strata.processes import run_exit_functions


def main() -> None:
    # Until torchrun has a handler of its own.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        code = _run(sys.argv[1:])
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        # A signal may come once more while torch's handler is there, and what it has ended cleans up.
        number = getattr(error, "sigval", None)
        if number is None:
            traceback.print_exc()
        code = 1 if number is None else 128 + int(number)
    _leave(code)


def _run(words: Sequence[str]) -> int:
    # Imported here: each worker reads this module too, as Python's multiprocessing does with its parent's program.
    from strata.launch.arguments import VARIABLES, may_be_warm, run_named

    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    if may_be_warm(words):
        from strata.agent.preload import preload

        preload(run_named(words))
        forkserver.ensure_running()

    from strata.launch.arguments import launch

    return launch(words)


def _leave(code: int) -> None:
    """A signal that arrives now has nothing left to do."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if (server := ForkServer.current()) is not None:
        server.kill()
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
