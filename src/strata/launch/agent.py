"""A torchrun agent with warm workers, whatever its rendezvous is (`strata.rendezvous.warm`).

    python -m strata.launch.agent --start-method=forkserver --run-path SCRIPT...        (and all else that torchrun takes)

The server that forks the workers imports torch at the same time as the agent does, so the first start is not delayed. When
the agent is done both leave at once: Python takes seconds to take torch apart, while somebody waits for the end.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback
from contextlib import suppress
from multiprocessing import forkserver
from typing import Any


def main() -> None:
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # Until torchrun has one of its own.
    try:
        _run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        if type(error).__name__ != "SignalException":  # Of which torchrun has told.
            traceback.print_exc()
        code = 1
    _leave(code)


def _run() -> None:
    # Imported here: each worker reads this module too, as Python's multiprocessing does with its parent's program.
    from strata.rendezvous.preload import preload

    preload()
    forkserver.ensure_running()

    from torch.distributed.run import main as torchrun

    from strata.rendezvous.warm import warm_up

    warm_up()
    torchrun()


def _leave(code: int) -> None:
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        with suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
