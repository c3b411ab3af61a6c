"""Real worker processes that tests command: each hosts any number of workers.

Run as a program it is the worker side: it reads one JSON command per line and answers each from a thread of
its own, so that a call that waits (a barrier) does not hold up the next. Times in answers are the machine's
monotonic clock, which processes share.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, is_dataclass
from types import TracebackType
from typing import Any

ANSWER_S = 60.0
CALL_S = 50.0
"""How long a worker's call may take: on a busy machine it takes longer than the usual half a minute to start a coordinator again."""


class RemoteError(Exception):
    """What a worker's call raised, over there."""

    def __init__(self, kind: str, message: str, facts: dict[str, Any], at_mono_s: float) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.facts = facts
        self.at_mono_s = at_mono_s


@dataclass(frozen=True, kw_only=True)
class Answer:
    value: Any
    at_mono_s: float


@dataclass(kw_only=True)
class _Calls:
    pending: dict[int, Future[Answer]] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)


class Fleet:
    """A process with workers in it. Every `TrainingOrchestrator` method can be called by name."""

    def __init__(self, address: str, *, env: dict[str, str] | None = None) -> None:
        self._calls = _Calls()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.service.fleet", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "STRATA_TOKEN": "", **(env or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def begin(self, worker: str, method: str, /, *args: Any, **kwargs: Any) -> Future[Answer]:
        number = next(self._calls.numbers)
        answer: Future[Answer] = Future()
        self._calls.pending[number] = answer
        command = {"n": number, "worker": worker, "method": method, "args": args, "kwargs": kwargs}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return answer

    def call(self, worker: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self.begin(worker, method, *args, **kwargs).result(ANSWER_S).value

    def register(self, *workers: str, **kwargs: Any) -> list[dict[str, Any]]:
        """Register and connect; the answers, in order."""
        begun = [self.begin(w, "register_worker", w, **kwargs) for w in workers]
        answers = [b.result(ANSWER_S).value for b in begun]
        assert all(b.result(ANSWER_S).value for b in [self.begin(w, "wait_connected", 30.0) for w in workers])
        return answers

    def kill(self) -> float:
        """SIGKILL; the moment of it."""
        at_mono_s = time.monotonic()
        self.process.kill()
        self.process.wait(30)
        return at_mono_s

    def freeze(self) -> float:
        at_mono_s = time.monotonic()
        self.process.send_signal(signal.SIGSTOP)
        return at_mono_s

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self._reader.join(30)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            future = self._calls.pending.pop(answer["n"])
            if "error" in answer:
                error = answer["error"]
                future.set_exception(
                    RemoteError(error["kind"], error["message"], error["facts"], answer["at_mono_s"])
                )
            else:
                future.set_result(Answer(value=answer["value"], at_mono_s=answer["at_mono_s"]))
        for future in list(self._calls.pending.values()):
            future.cancel()


# --- the worker side ------------------------------------------------------------------------------------------


class _Host:
    """What runs in the process: workers by name, and the load they can be put under."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._workers: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._output = threading.Lock()
        self._loads: dict[str, _Load] = {}

    def handle(self, command: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"n": command["n"]}
        try:
            value = self._call(command["worker"], command["method"], command["args"], command["kwargs"])
            answer["value"] = _plain(value)
        except Exception as error:
            facts = {k: _plain(v) for k, v in vars(error).items() if not k.startswith("_")}
            answer["error"] = {"kind": type(error).__name__, "message": str(error), "facts": facts}
        answer["at_mono_s"] = time.monotonic()
        line = json.dumps(answer)
        with self._output:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def _call(self, name: str, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        worker = self._worker(name)
        match method:
            case "begin_load":
                self._loads[name] = _Load(name, worker)
                return None
            case "end_load":
                return self._loads.pop(name).end()
            case _:
                found = getattr(worker, method)
                return found(*args, **kwargs) if callable(found) else found

    def _worker(self, name: str) -> Any:
        from strata import TrainingOrchestrator

        with self._lock:
            if name not in self._workers:
                self._workers[name] = TrainingOrchestrator(self._address, timeout_s=CALL_S)
            return self._workers[name]


class _Load:
    """One worker that keeps registering datasets and notifying checkpoints, and notes what was acknowledged."""

    DATASETS = 12  # The coordinator keeps a thousand in all.

    def __init__(self, name: str, worker: Any) -> None:
        self._name = name
        self._worker = worker
        self._over = threading.Event()
        self._acknowledged: dict[str, list[str]] = {"datasets": [], "checkpoints": []}
        self._errors: list[str] = []
        self._run_id = os.getpid()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for step in itertools.count(1):
            if self._over.wait(0.02):
                return
            try:
                if step <= self.DATASETS:
                    dataset = f"{self._name}-data-{step}"
                    self._worker.register_dataset(dataset, "/data", "parquet", 1_000 + step, 100)
                    self._acknowledged["datasets"].append(dataset)
                checkpoint = f"{self._name}-{self._run_id}-step-{step}"
                self._worker.notify_checkpoint(checkpoint, step, path=f"/ckpt/{checkpoint}", size_bytes=step)
                self._acknowledged["checkpoints"].append(checkpoint)
                self._worker.heartbeat(current_step=step)
            except Exception as error:
                self._errors.append(f"{type(error).__name__}: {error}")
                return

    def end(self) -> dict[str, list[str]]:
        self._over.set()
        self._thread.join(ANSWER_S)
        return {**self._acknowledged, "errors": self._errors}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | dict | None) else repr(value)


def main() -> None:
    host = _Host(sys.argv[1])
    for line in sys.stdin:
        threading.Thread(target=host.handle, args=(json.loads(line),), daemon=True).start()


if __name__ == "__main__":
    main()
