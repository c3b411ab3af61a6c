"""One page of the documentation, executed from top to bottom as a reader would: one shell, one Python, one folder.

Real parts stand behind it: a coordinator that starts tasks on this machine, a home with its data directory, and where a page
speaks of them a SeaweedFS server and an etcd. The text is executed as it stands, but for what its mark replaces (`Block.executed`)
and what `Session.replaced` does: addresses and folders that a test must not share with others, and `NAME=...`, which the reader
fills in and a test has in its environment. The shell knows two commands that never end by themselves: `strata serve` is running
already (its words are parsed), and `strata logs -f` is interrupted after a while. `strata doctor` is told where the coordinator
is, and asked again where something did not answer; `strata stop` until the task has ended. The id of a task or a token in the text stands for that of the last one created.
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
from tests.rendezvous.etcd_server import EtcdServer, free_port
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
        " doctor "*)
            # What does not answer within two seconds on a busy machine may do so when it is asked again.
            for _ in 1 2 3; do
                COORDINATOR_ADDR="$TEST_COORDINATOR" command strata "${words[@]}" && return
            done
            return 1
            ;;
        " stop "*)
            command strata "${words[@]}"
            # It waits for a while only, and on a busy machine processes may take longer to exit.
            until command strata "${words[@]}" --json | grep -E '"(completed|failed|stopped)"'; do :; done
            ;;
        " token revoke "*)
            command strata token revoke "$(command strata token ls --json | python -c "$NEWEST_ID")"
            ;;
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
    def __init__(
        self,
        folder: Path,
        *,
        cwd: Path,
        env: dict[str, str],
        coordinator: Coordinator,
        addresses: dict[str, str],
    ) -> None:
        """`addresses`: those in the text, as patterns, and what stands for each."""
        self._folder = folder
        self._coordinator = coordinator
        self._addresses = addresses
        self._options: Any = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "cwd": cwd,
            "env": env,
            "start_new_session": True,
        }
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
            self.python(block.executed, where=block.where)
        elif block.language == "bash":
            self.shell(block.executed, where=block.where)
        else:
            commands, expected = console(block.executed)
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
        text = re.sub(r"(?<![\w/])/(nvme|backups)/", rf"{self._folder}/\1/", text)
        text = re.sub(r"\b([A-Z_]+)=\.\.\.(?=\s)", r'\1="$\1"', text)
        for pattern, value in self._addresses.items():
            text = re.sub(rf"\b(?:{pattern})\b", value, text)
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
    work, home = folder / "page", folder / "home"
    for each in (work / "backups", home):
        each.mkdir(parents=True)
    for name in LINKED:
        (work / name).symlink_to(ROOT / name)
    with contextlib.ExitStack() as stack:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("STRATA_", "AWS_"))}
        env |= {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, (work, ROOT / "src", ROOT))),
            "HOME": str(home),
            "TEST_ROOT": str(ROOT),
            "STRATA_CACHE_DIR": str(folder / "cache"),
            "LAST_TASK": str(folder / "last_task"),
            "NEWEST_ID": "import json, sys; print(json.load(sys.stdin)[-1]['id'])",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }
        addresses = {}
        text = "\n".join(block.text for block in blocks)
        if buckets := set(re.findall(r"(?:s3://|--s3-bucket )([\w-]+)", text)):
            server = stack.enter_context(seaweed(folder / "seaweed"))
            env |= server.environment()
            addresses[r"http://127\.0\.0\.1:9000"] = server.endpoint
            for bucket in buckets:  # They come into being with the first object in them.
                open_store(f"s3://{bucket}", **server.options()).put("made-by-the-test", b"")
        if re.search(r"\betcdctl |etcd-host:2379", text):
            etcd = EtcdServer(folder)
            stack.callback(etcd.stop)
            etcd.start()
            env["ETCDCTL_ENDPOINTS"] = addresses["etcd-host:2379"] = etcd.endpoint
        if "start_etcd.sh" in text:
            env |= {"ETCD_PORT": str(free_port()), "ETCD_PEER_PORT": str(free_port())}
            env |= {"ETCD_START_TIMEOUT_S": "120"}
            addresses["localhost:2379"] = f"127.0.0.1:{env['ETCD_PORT']}"
            stop = [str(ROOT / "scripts" / "start_etcd.sh"), "stop"]
            stack.callback(subprocess.run, stop, env=env, check=True, stdout=subprocess.DEVNULL)
        coordinator = Coordinator(home / ".strata", env={**env, "STRATA_LAUNCHER": "local"}).start()
        stack.callback(coordinator.stop)
        env |= {"STRATA_API_URL": coordinator.url, "TEST_COORDINATOR": coordinator.address}
        env |= {"STRATA_DATA_DIR": str(coordinator.data_dir)}
        addresses[r"https?://(?:localhost|127\.0\.0\.1|coordinator|host):3000"] = coordinator.url
        addresses[r"(?:localhost|127\.0\.0\.1):3000"] = f"127.0.0.1:{coordinator.http_port}"
        addresses[r"(?:localhost|127\.0\.0\.1|coordinator|host|head):50051"] = coordinator.address
        running = Session(
            work,
            cwd=ROOT if page == "CONTRIBUTING.md" else work,
            env=env,
            coordinator=coordinator,
            addresses=addresses,
        )
        stack.callback(running.stop_tasks)
        stack.callback(running.end)
        name = page.removesuffix(".md").removeprefix("docs/").replace("/", "_").replace("-", "_")
        if (setup := SETUPS / f"{name}.py").exists():
            # As a module, so that processes that a block starts find what is in it.
            (work / "page_setup.py").write_text(running.replaced(setup.read_text()))
            running.python("from page_setup import *", where=str(setup))
        yield running
