"""An agent that does nothing but speak for its machine's workers: until its standard input ends, or it is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from strata.agent.session_relay import SessionRelay


class RelayProcess:
    def __init__(self, path: Path) -> None:
        self.path = path
        command = [sys.executable, "-m", "tests.service.relay", str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"listening\n"

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


if __name__ == "__main__":
    relay = SessionRelay(Path(sys.argv[1]))
    print("listening", flush=True)
    sys.stdin.read()
    relay.close()
