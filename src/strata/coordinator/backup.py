"""A copy of everything a coordinator keeps, taken while it runs, and a data directory made from such a copy.

A backup is one compressed tar, private to its user: first `backup.json`, which lists the other files with their sizes and SHA-256
digests, then the files. Databases are copied with SQLite's own backup, so each is as it was at one instant, whatever the
coordinator writes meanwhile; the journal is copied first, and what others say of it (logs, metrics) may be a moment newer. What
the coordinator had acknowledged when the backup began is in it. What tasks wrote (their folders, their checkpoints) is not.

`restore` verifies every file before the directory gets its name, and never writes to one that is in use or has anything in it. A
coordinator that starts from an older state must not give out a number again that was given out after the backup: the restored
journal continues far beyond all of them, so a client that holds a newer incarnation, generation or version is refused and registers anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import sqlite3
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import strata
from strata.coordinator.engine import Engine, SystemClock
from strata.coordinator.journal.protocol import JournalError
from strata.coordinator.journal.sqlite import JOURNAL_NAME, SqliteJournal, open_privately
from strata.core.cluster import Cluster
from strata.core.events import CountersRestored
from strata.errors import StrataError
from strata.files import fresh_file, fresh_folder, sync

FORMAT = 1
INDEX_NAME = "backup.json"
HISTORY = ("logs.sqlite", "metrics.sqlite")
"""What a fleet can continue without."""
DATABASES = (JOURNAL_NAME, *HISTORY)
FILES = ("tokens.json", "task-tokens.key", "audit.jsonl*")
RECIPES = "recipes"
NUMBERS_SKIPPED = 1_000_000_000
"""More than a coordinator gives out between a backup and the loss of its disk."""
_INDEX_LIMIT_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}(/[A-Za-z0-9][A-Za-z0-9._-]{0,199})?")


class BackupError(StrataError):
    """The backup was not made, or not restored. Nothing has changed."""

    code = "backup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """What a backup says of itself."""

    version: str
    created_at_s: float
    host: str
    files: tuple[Copied, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def back_up(data_dir: Path, to: Path, *, history: bool = True) -> Backup:
    """Write a backup of a data directory, of a running coordinator or of none. Without `history`, logs and metrics are left out."""
    if not (data_dir / JOURNAL_NAME).is_file():
        raise BackupError(
            f"There is no journal in {data_dir}.", hint="Pass the --data-dir that `strata serve` was given."
        )
    if to.exists():
        raise BackupError(f"{to} exists already.", hint="Choose another name; no backup is overwritten.")
    left_out = () if history else HISTORY
    try:
        with tempfile.TemporaryDirectory(prefix=".strata-backup-", dir=to.parent) as folder:
            copies = [
                _copy(data_dir / name, Path(folder) / name)
                for name in _names(data_dir)
                if name not in left_out
            ]
            made = Backup(
                version=strata.__version__,
                created_at_s=time.time(),
                host=socket.gethostname(),
                files=tuple(_measured(Path(folder), path) for path in copies),
            )
            with fresh_file(to, durable=True) as file:
                with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
                    index = Path(folder) / INDEX_NAME
                    index.write_text(json.dumps(_encode(made), indent=1))
                    archive.add(index, INDEX_NAME)
                    for copied in made.files:
                        archive.add(Path(folder) / copied.name, copied.name)
    except (OSError, sqlite3.Error) as error:
        raise BackupError(
            f"The backup {to} could not be written: {error}.", hint="Free some space, or choose another path."
        ) from error
    return made


def restore(backup: Path, data_dir: Path) -> Backup:
    """Make a data directory from a backup."""
    if data_dir.exists() and (not data_dir.is_dir() or any(data_dir.iterdir())):
        raise BackupError(
            f"{data_dir} is not empty, and nothing in it is overwritten.",
            hint=f"Stop its coordinator and move it away, or restore to another --data-dir: mv {data_dir} {data_dir}.old",
        )
    try:
        with ExitStack() as stack:
            try:
                fresh = stack.enter_context(fresh_folder(data_dir))
            except OSError as error:
                raise BackupError(
                    f"{data_dir} cannot be created: {error.strerror}.", hint="Choose another --data-dir."
                ) from error
            found = _unpack(backup, fresh)
            _skip_numbers(fresh, found)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise BackupError(
            f"The backup {backup} could not be restored: {error}.",
            hint="Nothing was changed. Use another copy.",
        ) from error
    except JournalError as error:
        raise BackupError(
            f"The journal in {backup} cannot be used: {error.message}",
            hint="Nothing was changed. Use another copy.",
        ) from error
    return found


def _names(data_dir: Path) -> Iterator[str]:
    """What there is to be copied, the journal first."""
    for pattern in (*DATABASES, *FILES, f"{RECIPES}/*"):
        for path in sorted(data_dir.glob(pattern)):
            name = str(path.relative_to(data_dir))
            if path.is_file() and _NAME.fullmatch(name):
                yield name


def _copy(path: Path, to: Path) -> Path:
    to.parent.mkdir(exist_ok=True)
    if path.name not in DATABASES:
        shutil.copyfile(path, to)
        return to
    open_privately(to)
    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as source:
        with closing(sqlite3.connect(to)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # One file, complete by itself.
    return to


def _measured(folder: Path, path: Path) -> Copied:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Copied(name=str(path.relative_to(folder)), size_bytes=path.stat().st_size, sha256=digest)


def _encode(backup: Backup) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": backup.version,
        "created_at": backup.created_at_s,
        "host": backup.host,
        "files": [{"name": f.name, "size": f.size_bytes, "sha256": f.sha256} for f in backup.files],
    }


def _decode(data: bytes, backup: Path) -> Backup:
    try:
        found = json.loads(data)
        if found["format"] != FORMAT:
            raise BackupError(
                f"The backup {backup} has format {found['format']}; this is Strata {strata.__version__}, which reads format "
                f"{FORMAT}.",
                hint=f"Use Strata {found.get('version', 'of the version that wrote it')}.",
            )
        files = [
            Copied(name=str(f["name"]), size_bytes=int(f["size"]), sha256=str(f["sha256"]))
            for f in found["files"]
        ]
        made = Backup(
            version=str(found["version"]),
            created_at_s=float(found["created_at"]),
            host=str(found["host"]),
            files=tuple(files),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _no_backup(backup, f"its {INDEX_NAME} cannot be read") from error
    names = [file.name for file in made.files]
    if JOURNAL_NAME not in names or len(set(names)) != len(names) or not all(map(_NAME.fullmatch, names)):
        raise _no_backup(backup, f"its {INDEX_NAME} lists unknown files")
    return made


def _no_backup(backup: Path, why: str) -> BackupError:
    return BackupError(
        f"{backup} is not an intact backup: {why}.", hint="Nothing was changed. Use another copy."
    )


def _unpack(backup: Path, to: Path) -> Backup:
    """All files of a backup, verified. What else is in the archive is no part of it."""
    with tarfile.open(backup, "r:gz") as archive:
        index = archive.next()
        if index is None or index.name != INDEX_NAME or index.size > _INDEX_LIMIT_BYTES:
            raise _no_backup(backup, f"it does not begin with {INDEX_NAME}")
        found = _decode(_reader(archive, index, backup).read(), backup)
        for copied in found.files:
            member = archive.next()
            if member is None or member.name != copied.name or member.size != copied.size_bytes:
                raise _no_backup(backup, f"{copied.name} is missing or has another size")
            path = to / copied.name
            path.parent.mkdir(mode=0o700, exist_ok=True)
            digest = hashlib.sha256()
            reader = _reader(archive, member, backup)
            with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                while block := reader.read(_BLOCK_BYTES):
                    digest.update(block)
                    file.write(block)
                sync(file)
            if digest.hexdigest() != copied.sha256:
                raise _no_backup(backup, f"the bytes of {copied.name} have changed")
    return found


def _reader(archive: tarfile.TarFile, member: tarfile.TarInfo, backup: Path) -> Any:
    reader = archive.extractfile(member) if member.isfile() else None
    if reader is None:
        raise _no_backup(backup, f"{member.name} is not a file")
    return reader


def _skip_numbers(data_dir: Path, backup: Backup) -> None:
    """Replay the journal, which proves that it can be, and continue its numbers beyond all that may have been given out since."""
    cluster = Cluster()
    with closing(SqliteJournal(data_dir)) as journal:
        engine = Engine(cluster, journal, SystemClock())
        engine.replay()
        counters = next(event for event in cluster.compact() if isinstance(event, CountersRestored))
        reserved = max(counters.value_version, cluster.values.version) + NUMBERS_SKIPPED
        journal.append(
            [
                replace(
                    counters,
                    generation=counters.generation + NUMBERS_SKIPPED,
                    incarnation=counters.incarnation + NUMBERS_SKIPPED,
                    value_version=reserved,
                    soft_value_version=reserved,
                    checkpoint_revision=counters.checkpoint_revision + NUMBERS_SKIPPED,
                    reason=f"restored from a backup of {backup.host}",
                    at_s=time.time(),
                )
            ]
        )
