"""One page of the documentation, executed from top to bottom as a reader would: one shell, one Python, one folder.

Real parts stand behind it: a coordinator that starts tasks on this machine, and where a page speaks of buckets a SeaweedFS
server. The text is executed as it stands but for `REPLACED`, the addresses and folders that a test must not share with others.
The shell knows two commands that never end by themselves: `strata serve` is running already (its words are parsed), and
`strata logs -f` is interrupted after a while. `strata doctor` is told where the coordinator is. A task's id in the text stands for that of the last task submitted.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from strata.stores import open_store
from tests.docs.blocks import ROOT, Block
from tests.support import Coordinator
from tests.support_programs import program
from tests.support_seaweed import seaweed

BLOCK_S = 400.0
SETUPS = Path(__file__).parent / "setups"
LINKED = ("examples", "deploy", "scripts")
DONE = "block is done"

PRELUDE = """
set -eo pipefail
strata() {
    local words=() word status
    for word in "$@"; do
        if [[ $word =~ ^task-[0-9a-f]{12}$ ]]; then word=$(cat "$LAST_TASK"); fi
        words+=("$word")
    done
    case " ${words[*]} " in
        " doctor "*) COORDINATOR_ADDR="$TEST_COORDINATOR" command strata "${words[@]}" ;;
        " serve "*) python -m tests.docs.commands strata "${words[@]}" ;;
        *" -f "*)
            status=0
            timeout --signal INT 5 strata "${words[@]}" || status=$?
            [[ $status == 124 ]]
            ;;
        " submit "*)
            command strata "${words[@]}" | tee "$LAST_TASK.printed"
            grep -oE 'task-[0-9a-f]{12}' "$LAST_TASK.printed" | tail -1 > "$LAST_TASK"
            ;;
        *) command strata "${words[@]}" ;;
    esac
}
"""

RUNNER = f"""
import sys, traceback
scope = {{"__name__": "__main__"}}
for line in sys.stdin:
    path, where = line.rstrip("\\n").split("\\t")
    status = 0
    try:
        exec(compile(open(path).read(), where, "exec"), scope)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    print(f"\\n{DONE} {{status}}", flush=True)
"""


class BlockFailed(AssertionError):
    """With all that was printed."""


class Process:
    """A shell or an interpreter that takes one block after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def execute(self, command: str, *, where: str) -> str:
        """What it printed."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        printed: list[str] = []
        while True:
            try:
                line = self._lines.get(timeout=BLOCK_S)
            except queue.Empty:
                raise BlockFailed(f"{where} did not end:\n{''.join(printed)}") from None
            if line is None:
                raise BlockFailed(f"{where} failed:\n{''.join(printed)}")
            if line.startswith(DONE):
                break
            printed.append(line)
        if line.split()[-1] != "0":
            raise BlockFailed(f"{where} failed:\n{''.join(printed)}")
        return "".join(printed)

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(60)
        self._reader.join(60)
        self._process.stdout.close()


class Session:
    def __init__(self, folder: Path, *, env: dict[str, str], coordinator: Coordinator) -> None:
        self._folder = folder
        self._options: Any = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "cwd": folder,
            "env": env,
            "start_new_session": True,
        }
        self._coordinator = coordinator
        self._shell: Process | None = None
        self._python: Process | None = None
        self._count = 0
        self.printed = ""

    def write(self, block: Block) -> None:
        path = self._folder / block.about
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.replaced(block.text))

    def run(self, block: Block) -> None:
        if block.language == "python":
            self.python(block.text, where=block.where)
        elif block.language == "bash":
            self.shell(block.text, where=block.where)
        else:
            commands, expected = console(block.text)
            self.shell(commands, where=block.where)
            self.expect(expected, where=block.where)
        self.stop_tasks()

    def python(self, text: str, *, where: str) -> None:
        if self._python is None:
            self._python = Process(subprocess.Popen([sys.executable, "-u", "-c", RUNNER], **self._options))
        self.printed += self._python.execute(f"{self._written(text)}\t{where}", where=where)

    def shell(self, text: str, *, where: str) -> None:
        if self._shell is None:
            self._shell = Process(subprocess.Popen([program("bash")], **self._options))
            self._shell.execute(f"source {self._written(PRELUDE)}; echo; echo {DONE} 0", where="the shell")
        path = self._written(text)
        self.printed += self._shell.execute(f"source {path}; echo; echo {DONE} 0", where=where)

    def _written(self, text: str) -> Path:
        self._count += 1
        path = self._folder / ".blocks" / str(self._count)
        path.parent.mkdir(exist_ok=True)
        path.write_text(self.replaced(text))
        return path

    def replaced(self, text: str) -> str:
        for pattern, value in (
            (r"(?<![\w/])/nvme/", f"{self._folder}/nvme/"),
            (r"\b(localhost|127\.0\.0\.1):3000\b", f"127.0.0.1:{self._coordinator.http_port}"),
            (r"\b(localhost|127\.0\.0\.1|coordinator):50051\b", f"127.0.0.1:{self._coordinator.grpc_port}"),
        ):
            text = re.sub(pattern, value, text)
        return text

    def expect(self, lines: list[str], *, where: str, exact: bool = False) -> None:
        """Each line was printed; numbers and ids may be others unless `exact`."""
        as_is: Callable[[str], str] = str.strip
        of = as_is if exact else pattern_of
        printed = [of(line) for line in self.printed.splitlines()]
        missing = [line for line in lines if not any(of(line) in each for each in printed)]
        if missing:
            raise BlockFailed(f"{where}: not printed:\n" + "\n".join(missing) + f"\nprinted:\n{self.printed}")

    def stop_tasks(self) -> None:
        """What a block has left running would only keep the next ones waiting."""
        for task in self._coordinator.get("/api/tasks"):
            if task["status"] in ("pending", "running"):
                self._coordinator.post(f"/api/tasks/{task['id']}/stop?wait=20", {})

    def end(self) -> None:
        for process in (self._shell, self._python):
            if process is not None:
                process.end()


def pattern_of(line: str) -> str:
    line = re.sub(r"\b[0-9a-f]{12}\b", "ID", line)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,.]*", "N", line)).strip()


def console(text: str) -> tuple[str, list[str]]:
    """Commands (after `$ `, with the lines they are continued on) and what they print."""
    commands: list[str] = []
    printed: list[str] = []
    continues = False
    for line in text.splitlines():
        if continues or line.startswith("$ "):
            commands.append(line.removeprefix("$ "))
            continues = line.endswith("\\")
        elif line.strip():
            printed.append(line)
    return "\n".join(commands) + "\n", printed


@contextlib.contextmanager
def session(page: str, blocks: list[Block], folder: Path) -> Iterator[Session]:
    work = folder / "page"
    work.mkdir()
    for name in LINKED:
        (work / name).symlink_to(ROOT / name)
    with contextlib.ExitStack() as stack:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("STRATA_", "AWS_"))}
        env |= {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}",
            "PYTHONPATH": f"{work}{os.pathsep}{ROOT}",
            "TEST_ROOT": str(ROOT),
            "STRATA_CACHE_DIR": str(folder / "cache"),
            "LAST_TASK": str(folder / "last_task"),
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }
        text = "\n".join(block.text for block in blocks)
        if buckets := set(re.findall(r"(?:s3://|--s3-bucket )([\w-]+)", text)):
            server = stack.enter_context(seaweed(folder / "seaweed"))
            env |= server.environment()
            for bucket in buckets:  # They come into being with the first object in them.
                open_store(f"s3://{bucket}", **server.options()).put("made-by-the-test", b"")
        coordinator = Coordinator(folder / "coordinator", env={**env, "STRATA_LAUNCHER": "local"}).start()
        stack.callback(coordinator.stop)
        env |= {"STRATA_API_URL": coordinator.url, "TEST_COORDINATOR": coordinator.address}
        env |= {"STRATA_DATA_DIR": str(coordinator.data_dir)}
        running = Session(work, env=env, coordinator=coordinator)
        stack.callback(running.stop_tasks)
        stack.callback(running.end)
        setup = (
            SETUPS
            / f"{page.removesuffix('.md').removeprefix('docs/').replace('/', '_').replace('-', '_')}.py"
        )
        if setup.exists():  # As a module, so that processes that a block starts find what is in it.
            (work / "page_setup.py").write_text(running.replaced(setup.read_text()))
            running.python("from page_setup import *", where=str(setup))
        yield running
