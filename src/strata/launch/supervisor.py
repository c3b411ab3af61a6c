"""The one process of a run that outlives coordinators: it starts the agent, keeps its output, and writes down its end.

    python -m strata.launch.supervisor RUN_DIR COMMAND...

Files in RUN_DIR, each complete from the moment it exists: `supervisor.json` (which process it is), `output-NNNNNN.jsonl` (what
its processes wrote, in segments, the oldest of which go when there are too many), `socket` (where workers send output and
failures; only processes of this user and root are listened to), `ended.json` (how it ended, written when nothing of the run
is left). SIGTERM is passed on to the agent, whose workers save and leave. Were the supervisor killed,
the kernel would send the agent the same signal. A run whose workers fail the same way repeatedly is abandoned.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strata.agent import run_policy
from strata.agent.supervised import SUPERVISOR_VARIABLE
from strata.core.faults.restarts import Policy, PolicyError
from strata.core.jobs.finishing import NOT_UPLOADED, UPLOADED
from strata.core.messages import ExitCause
from strata.files import write_file
from strata.launch.causes import TICK_S, Failures
from strata.launch.cleanup import RUN_VARIABLE, end_processes
from strata.launch.output import LINE_LIMIT_BYTES, OutputFile
from strata.processes import end_with_parent, this_process
from strata.sockets import is_own_peer, listen_privately

DRAIN_S = 1.0
SIGNAL_AGAIN_S = 3.0
"""A signal may be lost in whatever the agent does: one that still starts workers after this time is signalled again."""
CHUNK_BYTES = 64 * 1024
SOCKET_NAME = "socket"


class Supervisor:
    def __init__(self, run_dir: Path, command: Sequence[str]) -> None:
        self._run_dir = run_dir
        self._command = command
        self._output = OutputFile(run_dir)
        self._failures = Failures(policy=_policy())
        self._readers: set[asyncio.Task[None]] = set()
        self._asked_to_stop = False
        self._given_up = False
        self._signal_again_s = 0.0
        self._agent: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        address = self._run_dir.absolute() / SOCKET_NAME
        server = await asyncio.start_unix_server(self._accept, sock=listen_privately(address))
        write_atomically(
            self._run_dir / "supervisor.json", {"process": this_process().token, "pid": os.getpid()}
        )
        self._agent = agent = await asyncio.create_subprocess_exec(
            *self._command,
            env={**os.environ, SUPERVISOR_VARIABLE: str(address)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=CHUNK_BYTES,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
        )
        if self._asked_to_stop:
            agent.terminate()
        assert agent.stdout is not None
        assert agent.stderr is not None
        self._read(agent.stdout, "stdout", None)
        self._read(agent.stderr, "stderr", None)
        ticking = asyncio.create_task(self._tick())
        code = await agent.wait()
        ticking.cancel()
        end_processes(os.environ.get(RUN_VARIABLE, ""))
        await self._drain()
        server.close()
        address.unlink(missing_ok=True)
        self._output.close()
        cause = self._failures.cause(code, asked_to_stop=self._asked_to_stop, agent_pid=agent.pid)
        write_atomically(
            self._run_dir / "ended.json", {"cause": asdict(cause) if cause is not None else None}
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._failures.tick()

    def _stop(self) -> None:
        self._asked_to_stop = True
        if self._agent is not None and self._agent.returncode is None:
            with suppress(ProcessLookupError):
                self._agent.terminate()

    def _give_up_if_hopeless(self) -> None:
        cause = self._failures.hopeless()
        if cause is None or self._agent is None:
            return
        if not self._given_up:
            self._given_up = True
            self._say(f"given up: {cause.message}")
        elif time.monotonic() < self._signal_again_s:
            return
        self._signal_again_s = time.monotonic() + SIGNAL_AGAIN_S
        with suppress(ProcessLookupError):
            self._agent.terminate()

    # --- output ---------------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A worker: a line that says what this connection is, then what it writes."""
        try:
            if not is_own_peer(writer.get_extra_info("socket")):
                return
            header = json.loads(await reader.readline())
            if "failure" in header:
                self._failures.reported(header["rank"], header["failure"])
                self._give_up_if_hopeless()
            elif "lines" in header:
                lines = self._failures.last_lines(header["rank"])[-int(header["lines"]) :]
                writer.write(json.dumps(lines).encode() + b"\n")
                await writer.drain()
            else:
                await self._read(reader, header["stream"], header["rank"])
        except (ValueError, KeyError, TypeError, OSError):
            pass  # Not one of our workers.
        finally:
            writer.close()

    def _read(self, reader: asyncio.StreamReader, stream: str, rank: int | None) -> asyncio.Task[None]:
        task = asyncio.create_task(self._copy(reader, stream, rank))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return task

    async def _copy(self, reader: asyncio.StreamReader, stream: str, rank: int | None) -> None:
        rest = b""
        while True:
            try:
                data = await reader.read(CHUNK_BYTES)
            except OSError:
                data = b""
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > LINE_LIMIT_BYTES:
                lines.append(rest)
                rest = b""
            self._write(lines, stream, rank)
        if rest:
            self._write([rest], stream, rank)

    def _write(self, lines: Sequence[bytes], stream: str, rank: int | None) -> None:
        # An agent that is asked to leave complains of it at length.
        is_complaint = rank is None and stream == "stderr" and (self._asked_to_stop or self._given_up)
        texts = [line.decode(errors="replace") for line in lines]
        shown = [text for text in texts if _is_about_upload(text)] if is_complaint else texts
        if shown:
            self._output.write(shown, at_s=time.time(), stream=stream, rank=rank)
        if is_complaint and self._asked_to_stop:
            return
        for text in texts if stream == "stderr" else ():
            cause = self._failures.read_line(rank, text)
            if cause is not None:
                self._say(cause.message)
                self._give_up_if_hopeless()

    def _say(self, text: str) -> None:
        self._output.write([f"WARNING strata: {text}"], at_s=time.time(), stream="stderr", rank=None)

    async def _drain(self) -> None:
        if self._readers:
            await asyncio.wait(set(self._readers), timeout=DRAIN_S)


def _is_about_upload(text: str) -> bool:
    return UPLOADED in text or NOT_UPLOADED in text


def _policy() -> Policy:
    """The run's; one that cannot be read is the agent's to refuse."""
    with suppress(PolicyError):
        return run_policy()
    return Policy()


def write_atomically(path: Path, value: Mapping[str, Any]) -> None:
    """The file is there with all of it, or not at all."""
    write_file(path, json.dumps(value), durable=True)


def main() -> None:
    run_dir, *command = sys.argv[1:]
    supervisor = Supervisor(Path(run_dir), command)
    try:
        asyncio.run(supervisor.run())
    except OSError as error:
        cause = ExitCause(kind="launch", message=f"the run could not be supervised: {error}")
        with suppress(OSError):
            write_atomically(Path(run_dir) / "ended.json", {"cause": asdict(cause)})
        raise


if __name__ == "__main__":
    main()
