"""Work on files that a client has named, each in a process of its own (`child`), within limits.

One at a time for each client, and a few altogether. No caller waits for ever: the limit of time is for reading, and waiting for a
turn and for the process to start have their own. A coordinator that stops waits for none of them. However such a process ends, its
slot is free again and its caller learns what happened. It gets no environment but what reading needs: credentials of object
stores are there, the coordinator's own secrets are not.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from strata.coordinator.auth.paths import PathRefused, ReadScope
from strata.coordinator.inspection.child import BEGUN
from strata.core.messages import InvalidArgument, Overloaded
from strata.errors import StrataError

CHILD = "strata.coordinator.inspection.child"
AT_ONCE = 4
WAITING_LIMIT = 16
"""Calls of one client that wait for their turn."""
WAIT_S, START_S = 60.0, 60.0
"""How long a call waits for its turn, and then for its process to start. Neither is time to read in."""
ANSWER_LIMIT_BYTES = 16 << 20
KEPT_VARIABLES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHOME"),
        *(
            "VIRTUAL_ENV",
            "LD_LIBRARY_PATH",
            "XDG_CACHE_HOME",
            "STRATA_CACHE_DIR",
            "STRATA_CACHE_LIMIT_MB",
            "SSL_CERT_FILE",
        ),
        *("SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    }
)
KEPT_PREFIXES = ("LC_", "AWS_", "GOOGLE_", "GCS_", "GCP_", "AZURE_")
VERIFYING_VARIABLES = KEPT_VARIABLES | {"STRATA_SIGNING_KEY"}
"""Signatures of manifests are checked too."""
FEW_THREADS = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # The others reserve a gigabyte before they use a byte.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    memory_bytes: int = 1 << 30
    cpu_s: int = 30
    wall_s: float = 20.0
    files: int = 256
    written_bytes: int = 256 << 20
    """Of one file: indexes of large datasets are kept in the cache."""


class ReaderLacks(StrataError):
    """A package that the file's format needs is not installed where the coordinator runs."""

    code = "missing_dependency"


class InspectionProcesses:
    def __init__(self, *, at_once: int = AT_ONCE, variables: frozenset[str] = KEPT_VARIABLES) -> None:
        """`variables` are those of the environment that the processes get, beside the credentials of stores."""
        self._variables = variables
        self._gate = asyncio.Semaphore(at_once)
        self._turns: dict[str, asyncio.Lock] = {}
        self._calls: dict[str, int] = {}
        self._running: set[Process] = set()

    @property
    def running(self) -> int:
        return len(self._running)

    async def run(
        self,
        request: Mapping[str, Any],
        *,
        field: str,
        scope: ReadScope,
        client: str,
        limits: ChildLimits,
        hint: str,
    ) -> Any:
        """The answer to `request`. Raises `PathRefused`, `Overloaded` where it was not read for want of time, or `InvalidArgument` about
        `field` for whatever else is wrong."""
        async with AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(WAIT_S):
                    await turn.enter_async_context(self._turn(client))
                    await turn.enter_async_context(self._gate)
            except TimeoutError:
                raise Overloaded(
                    f"Other files were being read for {WAIT_S:g} s, and this one had to wait.", hint="Retry."
                ) from None
            try:
                body, code = await self._exchange(
                    orjson.dumps({**request, "scope": asdict(scope), "limits": asdict(limits)}), limits
                )
            except TimeoutError:
                raise InvalidArgument(
                    field, f"could not be read within {limits.wall_s:g} s.", hint=hint
                ) from None
        answer = _decoded(body)
        if answer is None:
            raise InvalidArgument(field, f"cannot be read: {_end_of(code, limits)}.", hint=hint)
        if "refused" in answer:
            raise PathRefused(answer["refused"], hint=answer["hint"])
        if answer.get("code") == ReaderLacks.code:
            raise ReaderLacks(answer["error"], hint=answer["hint"])
        if "error" in answer:
            raise InvalidArgument(field, answer["error"], hint=answer.get("hint") or hint)
        return answer["result"]

    def close(self) -> None:
        """End them all; their callers learn that nothing came."""
        for process in self._running:
            with suppress(ProcessLookupError):
                process.kill()

    @asynccontextmanager
    async def _turn(self, client: str) -> AsyncIterator[None]:
        if self._calls.get(client, 0) > WAITING_LIMIT:
            raise Overloaded(
                f"{WAITING_LIMIT} calls of this client already wait for files to be read, which is the limit.",
                hint="Wait for their answers.",
            )
        self._calls[client] = self._calls.get(client, 0) + 1
        try:
            async with self._turns.setdefault(client, asyncio.Lock()):
                yield
        finally:
            self._calls[client] -= 1
            if not self._calls[client]:
                del self._calls[client], self._turns[client]

    async def _exchange(self, request: bytes, limits: ChildLimits) -> tuple[bytes, int]:
        """What the process answered, and how it ended. Raises `TimeoutError` when it has read for too long."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", CHILD),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env=child_environment(os.environ, self._variables),
        )
        self._running.add(process)
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(ConnectionError):
                process.stdin.write(request)
                await process.stdin.drain()
            process.stdin.close()
            try:
                async with asyncio.timeout(START_S):
                    body = bytearray(await process.stdout.read(len(BEGUN)))
            except TimeoutError:
                raise Overloaded(
                    f"The process that reads the file did not start within {START_S:g} s: this machine is busy.",
                    hint="Retry.",
                ) from None
            async with asyncio.timeout(limits.wall_s):
                while len(body) <= ANSWER_LIMIT_BYTES and (part := await process.stdout.read(1 << 20)):
                    body += part
                if len(body) <= ANSWER_LIMIT_BYTES:
                    await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            self._running.discard(process)
            # Through a cancellation too: it was killed, so this takes no time, and nothing is left behind.
            await asyncio.shield(process.wait())
        return bytes(body), process.returncode or 0


def child_environment(
    environ: Mapping[str, str], variables: frozenset[str] = KEPT_VARIABLES
) -> dict[str, str]:
    kept = {
        name: value for name, value in environ.items() if name in variables or name.startswith(KEPT_PREFIXES)
    }
    return {**kept, **FEW_THREADS}


def _decoded(body: bytes) -> dict[str, Any] | None:
    if len(body) > ANSWER_LIMIT_BYTES:
        return {"error": f"gives more than {ANSWER_LIMIT_BYTES >> 20} MiB of output."}
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return answer if isinstance(answer, dict) else None


def _end_of(code: int, limits: ChildLimits) -> str:
    """Why there is no answer."""
    memory = f"{limits.memory_bytes >> 20:,} MiB of memory"
    if code == -signal.SIGXCPU:
        return f"it takes more than {limits.cpu_s} s of processor time"
    if code == -signal.SIGKILL:
        return f"its reader was killed, perhaps because the file needs more than {memory}"
    if code < 0:
        return f"its reader was killed by {signal.Signals(-code).name}: the file is damaged, or needs more than {memory}"
    return f"its reader ended with status {code}"
