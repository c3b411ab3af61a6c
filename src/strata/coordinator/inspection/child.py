"""The process that reads what a client has named: one request from stdin, one answer to stdout, and it ends.

Before anything is read it limits itself: memory, processor time, open files, and what it may write. A file that needs more,
or that makes a decoder fail in whatever way, ends this process or becomes an error in its answer, never the coordinator's
trouble. Local files are checked once they are open; nothing is executed or unpickled.
"""

from __future__ import annotations

import os
import resource
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import orjson

from strata.coordinator.auth.paths import PathRefused, ReadScope
from strata.processes import end_with_parent

TOKEN_FORMATS = ("tokens", "token-index")
TOKENS_SHOWN = 128
CONFUSED_LIMIT = 300
"""Characters of what a decoder has to say."""

BEGUN = b"\n"
"""Said when reading begins: white space before the answer, which is JSON."""

Request = Mapping[str, Any]


def main() -> None:
    end_with_parent(signal.SIGKILL)
    answers = os.dup(1)
    os.dup2(2, 1)  # What libraries print is no answer.
    request: Request = orjson.loads(sys.stdin.buffer.read())
    _limit(request["limits"])
    with os.fdopen(answers, "wb") as out:

        def begin() -> None:
            out.write(BEGUN)
            out.flush()

        out.write(orjson.dumps(_answer(request, begin)))
    os._exit(0)  # What a decoder has left behind needs no tidying.


def _limit(limits: Mapping[str, int]) -> None:
    with suppress(OSError):  # Where memory runs out all the same, this process is the one to end.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    # Data, not address space: files of any size may be mapped, which costs nothing.
    _set(resource.RLIMIT_DATA, limits["memory_bytes"])
    _set(resource.RLIMIT_CPU, limits["cpu_s"], grace=5)  # Ended by SIGXCPU, which says why.
    _set(resource.RLIMIT_NOFILE, limits["files"])
    _set(resource.RLIMIT_FSIZE, limits["written_bytes"])
    _set(resource.RLIMIT_CORE, 0)


def _set(kind: int, most: int, *, grace: int = 0) -> None:
    _, hard = resource.getrlimit(kind)
    allowed = most + grace if hard == resource.RLIM_INFINITY else min(most + grace, hard)
    resource.setrlimit(kind, (min(most, allowed), allowed))


def _answer(request: Request, begin: Callable[[], None]) -> dict[str, Any]:
    from strata.data.streaming import sources
    from strata.errors import StrataError

    scope = ReadScope(**{key: _plain(value) for key, value in request["scope"].items()}).resolved()
    sources.restrict_to(lambda fd, path: scope.check_opened(fd, shown=path))
    work = {"count": _count, "preview": _preview, "verify": _verify}[request["kind"]]
    try:
        scope.check(request["path"])
        begin()
        return {"result": work(request, scope)}
    except PathRefused as error:
        return {"refused": error.message, "hint": error.hint}
    except MemoryError:
        return {
            "error": f"needs more than {request['limits']['memory_bytes'] >> 20:,} MiB of memory to be read."
        }
    except StrataError as error:
        return {"error": error.message, "hint": error.hint, "code": error.code}
    except Exception as error:  # A decoder may raise anything at all.
        said = " ".join(str(error).split())[:CONFUSED_LIMIT]
        return {"error": f"cannot be read: {type(error).__name__}{': ' if said else ''}{said}."}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# --- datasets -------------------------------------------------------------------------------------------------


def _count(request: Request, scope: ReadScope) -> dict[str, Any]:
    from strata.data.reader import discover

    found = discover(request["path"], request["format"])
    return {"total": found.total, "files": [[file.path, file.samples] for file in found.files]}


def _preview(request: Request, scope: ReadScope) -> list[dict[str, Any]]:
    from strata.data.preview import preview

    if request["format"] in TOKEN_FORMATS:
        return preview(_sequences(request, scope))
    rows: dict[int, dict[str, Any]] = {}
    for path, samples, wanted in request["files"]:
        rows |= _rows(path, request["format"], samples, wanted)
    return preview(rows[index] for index in request["indices"] if index in rows)


def _rows(
    path: str, format: str, samples: int | None, wanted: Sequence[tuple[int, int]]
) -> dict[int, dict[str, Any]]:
    """Of one file, or a whole dataset: samples by their number in the dataset; `wanted` has that and the row."""
    from strata.data.errors import DataError
    from strata.data.reader import DatasetReader

    reader = DatasetReader(path, format)
    if samples is not None and len(reader) != samples:
        raise DataError.at(
            path,
            f"it holds {len(reader):,} samples now and held {samples:,} when it was registered",
            hint="Data must not change: restore it, or register it again.",
        )
    there = [(index, row) for index, row in wanted if row < len(reader)]
    found = reader.read([row for _, row in there])
    return {index: row for (index, _), row in zip(there, found, strict=True)}


def _sequences(request: Request, scope: ReadScope) -> Iterator[dict[str, Any]]:
    """Sequences of a token index: their ids, and their text where bytes are the tokens."""
    import numpy as np

    from strata.data.tokens.errors import TokenDataError
    from strata.data.tokens.index import TokenIndex
    from strata.data.tokens.sequences import SequenceReader

    path = request["path"].removeprefix("file://")
    length = int(request["metadata"].get("seq_length", "128"))
    with _opened(path, scope) as same_file:
        try:
            sequences = SequenceReader(TokenIndex(same_file), max(1, length))
            wanted = [index for index in request["indices"] if index < sequences.count]
            inputs, _ = sequences.read(np.asarray(wanted, np.int64))
            as_text = sequences.index.meta.tokenizer == "bytes"
        except TokenDataError as error:
            message = error.message.replace(same_file, path)
            raise TokenDataError(message, hint=error.hint) from error
    for row in inputs:
        fields: dict[str, Any] = {"tokens": row[:TOKENS_SHOWN].tolist()}
        if as_text:
            fields["text"] = bytes(int(t) for t in row if t < 256).decode(errors="replace")
        yield fields


@contextmanager
def _opened(path: str, scope: ReadScope) -> Iterator[str]:
    """A path that leads to the file that was opened and checked, wherever `path` leads later."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        scope.check_opened(fd, shown=path)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"'{path}' is not a regular file")
        yield f"/dev/fd/{fd}"
    finally:
        os.close(fd)


# --- checkpoints ----------------------------------------------------------------------------------------------


def _verify(request: Request, scope: ReadScope) -> dict[str, Any]:
    """What is wrong with a checkpoint; `missing` where its manifest says nothing of use."""
    from strata.checkpoint.catalog.listing import Catalog, Entry
    from strata.checkpoint.errors import Damaged
    from strata.checkpoint.verify import verify_entry
    from strata.stores.protocol import NotFound

    store, key = _store(request["folder"], scope), request["key"]
    try:
        manifest = Catalog(store).read(key)
        if manifest.checkpoint_id != request["checkpoint_id"]:
            return {"missing": f"found another checkpoint there: {manifest.checkpoint_id}"}
        verified = verify_entry(store, Entry(key=key, manifest=manifest))
    except Damaged as error:
        return {"missing": error.reason}
    except NotFound:
        return {"missing": "its manifest is missing"}
    most = request["shown"]
    return {
        "count": len(verified.damages),
        "damages": [
            {
                "path": damage.path,
                "reason": damage.reason,
                "start_bytes": damage.start_bytes,
                "end_bytes": damage.end_bytes,
                "tensors": [tensor.name for tensor in damage.tensors[:most]],
            }
            for damage in verified.damages[:most]
        ],
    }


def _store(folder: str, scope: ReadScope) -> Any:
    from strata.stores import open_store
    from strata.stores.local import LocalStore

    class CheckedFolder(LocalStore):
        """Reads what may be read, and tidies nothing."""

        @contextmanager
        def _opened(self, key: str) -> Iterator[tuple[int, int]]:
            with super()._opened(key) as (fd, size_bytes):
                scope.check_opened(fd, shown=str(self.path_of(key)))
                yield fd, size_bytes

        def clean_up(self) -> int:
            return 0

    path = folder.removeprefix("file://")
    return open_store(path) if "://" in path else CheckedFolder(path)


if __name__ == "__main__":
    main()
