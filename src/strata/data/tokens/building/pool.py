"""Chunks to parts, in this process or in several.

Processes are fresh interpreters (`strata.data.tokens.building.worker`), not forks: the caller may hold threads,
and need not guard its main module. A process that loses its caller stops at its next sign of life; one that
dies is reported with the chunk it had in hand. Results come in any order.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from strata.data.tokens.building.parts import PartOptions, PartSummary, write_part
from strata.data.tokens.building.sources import Chunk
from strata.data.tokens.building.tokenizers import Encoder, LoadedTokenizer
from strata.data.tokens.errors import BuildFailed
from strata.errors import StrataError

log = logging.getLogger(__name__)

QUEUED_CHUNKS = 3
"""Chunks a process is given ahead, so that it is busy while the caller waits for the disk."""

Outcome = tuple[Chunk, PartSummary | StrataError]


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tokenize_here(
    chunks: Iterator[Chunk], tokenizer: LoadedTokenizer, options: PartOptions, folder: Path
) -> Generator[Outcome]:
    """One chunk after the other, in this process."""
    for chunk in chunks:
        yield chunk, attempt(chunk, tokenizer.encoder, options, folder)


def tokenize_in_processes(
    chunks: Iterator[Chunk], tokenizer: LoadedTokenizer, options: PartOptions, folder: Path, *, processes: int
) -> Generator[Outcome]:
    """Several chunks at a time. A tokenizer that cannot travel to another process works here instead."""
    pickled = tokenizer.pickled()
    if pickled is None:
        log.warning(
            "The tokenizer %s cannot be sent to other processes: tokenizing in one process.", tokenizer.name
        )
        yield from tokenize_here(chunks, tokenizer, options, folder)
        return
    start = pickle.dumps((pickled, options, folder))
    workers: list[_Worker] = []
    try:
        for _ in range(processes):
            workers.append(_Worker.start(start))  # noqa: PERF401  # one by one, so that a failure stops the others
        if (trouble := _first_trouble(workers)) is not None:
            log.warning(
                "The tokenizer %s does not load in another process (%s): tokenizing in one process.",
                tokenizer.name,
                trouble,
            )
            _stop(workers)
            yield from tokenize_here(chunks, tokenizer, options, folder)
            return
        for worker in workers:
            worker.refill(chunks)
        while busy := {worker.connection: worker for worker in workers if worker.chunks}:
            for connection in wait(list(busy)):
                worker = busy[connection]  # type: ignore[index]  # only connections were waited for
                outcome = worker.receive()
                if outcome is not None:
                    worker.refill(chunks)
                    yield outcome
    finally:
        _stop(workers)


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    chunks: list[Chunk] = field(default_factory=list)
    """Given and not yet answered, in order."""

    @classmethod
    def start(cls, message: bytes) -> _Worker:
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "strata.data.tokens.building.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ
                # One core for each process; the library would start a thread per core in each of them.
                | {
                    "TOKENIZERS_PARALLELISM": "false",
                    "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                },
            )
        ours.send_bytes(message)
        return cls(process, ours)

    def trouble(self) -> str | None:
        """Wait until it is ready; None if it is."""
        try:
            answer: str | None = self.connection.recv()
        except (EOFError, OSError):
            return f"exit status {self.process.wait()}"
        return answer

    def refill(self, chunks: Iterator[Chunk]) -> None:
        while len(self.chunks) < QUEUED_CHUNKS and (chunk := next(chunks, None)) is not None:
            self.chunks.append(chunk)
            try:
                self.connection.send(chunk)
            except OSError:
                return  # it died: receive() will say so

    def receive(self) -> Outcome | None:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            chunk = self.chunks[0]
            status = self.process.wait()
            how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            self.chunks.clear()
            return chunk, BuildFailed(
                f"A tokenizing process ended ({how}) while reading {chunk.source.path}, bytes {chunk.start:,} to"
                f" {chunk.stop:,}.",
                hint="The same command continues where it stopped; if memory ran out use fewer --workers.",
            )
        return None if answer is None else (self.chunks.pop(0), answer)


def _first_trouble(workers: list[_Worker]) -> str | None:
    return next((trouble for worker in workers if (trouble := worker.trouble()) is not None), None)


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
        worker.process.kill()  # its unfinished part has no summary: it never was
    for worker in workers:
        worker.process.wait()
    workers.clear()


def attempt(
    chunk: Chunk,
    encoder: Encoder,
    options: PartOptions,
    folder: Path,
    alive: Callable[[], None] = lambda: None,
) -> PartSummary | StrataError:
    """A chunk's part, or why there is none."""
    try:
        return write_part(chunk, encoder, options, folder, alive=alive)
    except StrataError as error:
        return error
    except ConnectionError:
        raise  # from `alive`: no build waits for this part any more
    except OSError as error:
        return BuildFailed(f"Reading {chunk.source.path} or writing to {folder} failed: {error}.")
