"""Images in shared memory: two at most, reused, filled from the training state, and found again after a crash.

An image is a file below `/dev/shm`, allocated, mapped and faulted in once, because the first touch of a fresh page
costs ten times the copy into it. A save removes the image's mark, copies, and writes the mark (the manifest) last: an
image is a checkpoint of the memory tier exactly while its mark is there. The images belong to a job's name and to
the process that holds them. When that process is gone, the next one of the same job takes them over; when the job
is gone as well, any Strata process removes them after a grace. A clean close removes them at once.

Room is allocated before it is written to, so a full /dev/shm is an error and never a SIGBUS.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from strata.checkpoint.copying import Copier, Copying, Destination
from strata.checkpoint.device import page_lock, page_unlock
from strata.checkpoint.digest import Digest, digest_of
from strata.checkpoint.errors import CheckpointError, Damaged, MemoryLimitExceeded
from strata.checkpoint.identity import Process, parent_process, this_process
from strata.checkpoint.image import FILE_NAME, Placement, Plan, Prepared
from strata.checkpoint.manifest import CheckpointId, Manifest, TensorEntry, decode
from strata.shared_memory import SHARED_MEMORY, images_folder, make_private, remove_empty

log = logging.getLogger("strata.checkpoint")

MARK_NAME = "mark.json"
OWNER_NAME = "owner"
GRACE_S = 600.0
LONG_GRACE_S = 3600.0
_numbers = itertools.count()  # Two managers of one process have images of their own.


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A complete image in shared memory."""

    manifest: Manifest
    path: Path


class ImageBuffer:
    """One image: a file, its mapping, and the plan it is laid out for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE_NAME
        self.plan: Plan | None = None
        self.entries: tuple[TensorEntry, ...] = ()
        self.is_busy = False
        self.marked: Manifest | None = None
        self._to: Destination | None = None
        self._map: mmap.mmap | None = None
        self._bytes: torch.Tensor | None = None
        self._body_bytes = 0
        self.is_page_locked = False
        self.copying: Copying | None = None

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def view(self) -> memoryview:
        assert self._map is not None
        return memoryview(self._map)

    def prepare_for(self, plan: Plan) -> None:
        """Lay the file out for `plan` and fault its pages in; nothing to do when it is laid out for it already."""
        if self.plan is plan and self.path.exists():
            return
        self.unmark()
        self.folder.mkdir(parents=True, exist_ok=True)
        placement = self._placement_if_same(plan)
        self._body_bytes = placement.body_room_bytes if placement else 0
        if placement is None:
            self._unmap()
            self.path.unlink(missing_ok=True)  # Who still has the old file mapped must not see it shrink.
            placement = plan.lay_out(str(self.path))
        image = self.mapped(populate=True)
        self._to = Destination(plan, placement, image)
        self.entries = plan.entries(placement)
        self.plan = plan

    def mapped(self, *, populate: bool = False) -> torch.Tensor:
        """The bytes of the file as it is; with `populate`, every page of it is given room and faulted in now. (Whoever
        has marked an image had done so.)"""
        if self._bytes is None:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                size_bytes = os.fstat(fd).st_size
                if populate:
                    os.posix_fallocate(fd, 0, size_bytes)
                flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
                self._map = mmap.mmap(fd, size_bytes, flags=flags)
            except OSError:
                self.path.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._bytes

    def lock_pages(self) -> bool:
        """Page-lock the mapped file for copies to and from the device; False where the driver refuses."""
        if not self.is_page_locked:
            self.is_page_locked = page_lock(self.mapped())
        return self.is_page_locked

    def _placement_if_same(self, plan: Plan) -> Placement | None:
        """Where a process that is gone laid the file out for the same structure, its pages can be used as they are."""
        if self.plan is not None or not self.path.exists():
            return None
        fresh = self.folder / "layout" / FILE_NAME
        fresh.parent.mkdir(exist_ok=True)
        try:
            placement = plan.lay_out(str(fresh))
            with fresh.open("rb", buffering=0) as wanted, self.path.open("rb", buffering=0) as found:
                same = os.fstat(found.fileno()).st_size == placement.size_bytes and all(
                    os.pread(wanted.fileno(), end - start, start)
                    == os.pread(found.fileno(), end - start, start)
                    for start, end in plan.frame(placement)
                )
        finally:
            remove_tree(fresh.parent)
        return placement if same else None

    def begin(self) -> Copying:
        """Announce a copy: there is no mark from here until `mark`, and `copying` tells how far it has come."""
        assert self._to is not None
        self.unmark()
        self.copying = Copying(self._to.placement.size_bytes)
        return self.copying

    def fill(self, prepared: Prepared, copier: Copier) -> None:
        """Copy one state in, or leave that to the device. What fails here ends in `copying`."""
        assert self.plan is prepared.plan
        assert self._to is not None
        assert self._map is not None
        assert self.copying is not None
        try:
            start, length = self._to.placement.body_offset_bytes, len(prepared.body)
            stale_bytes = max(0, self._body_bytes - length)
            self._map[start : start + length + stale_bytes] = prepared.body + bytes(stale_bytes)
            self._body_bytes = length
            self._to.is_page_locked = prepared.is_on_cuda and self.lock_pages()
            copier.copy(self.copying, prepared, self._to)
        except BaseException as error:
            self.copying.fail(error)
            if not isinstance(error, Exception):
                raise

    def mark(self, manifest: Manifest) -> None:
        """Make the image a checkpoint of the memory tier."""
        fresh = self.folder / (MARK_NAME + ".new")
        fresh.write_bytes(manifest.encode())
        fresh.rename(self.folder / MARK_NAME)
        self.marked = manifest

    def unmark(self) -> None:
        self.marked = None
        (self.folder / MARK_NAME).unlink(missing_ok=True)

    def _unmap(self) -> None:
        self.plan = None
        self._to = None
        self.copying = None
        if self.is_page_locked and self._bytes is not None:
            page_unlock(self._bytes)
        self.is_page_locked = False
        self._bytes = None
        if self._map is not None:
            with contextlib.suppress(BufferError):  # A traceback may hold a view; the map goes with it.
                self._map.close()
            self._map = None

    def discard(self) -> None:
        """Give up the snapshot and its memory."""
        self.unmark()
        self._unmap()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._unmap()


class ImagePayload:
    """A filled image on its way through the pipeline; it is the memory tier's copy as well."""

    def __init__(self, staging: Staging, buffer: ImageBuffer) -> None:
        self._staging = staging
        self._buffer = buffer
        self._copying = buffer.begin()

    @property
    def view(self) -> memoryview:
        return self._buffer.view

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        return self._buffer.entries

    def wait(self, upto_bytes: int | None = None) -> None:
        self._copying.wait(upto_bytes)

    def digest(self) -> Digest:
        hashed_on_the_way = self._copying.digest
        return hashed_on_the_way() if hashed_on_the_way is not None else digest_of(self.view)

    def keep(self, manifest: Manifest) -> str | None:
        self._buffer.mark(manifest)
        return str(self._buffer.path)

    def release(self) -> None:
        self._staging.release(self._buffer)

    def fill(self, prepared: Prepared) -> None:
        self._buffer.fill(prepared, self._staging.copier)


class Staging:
    """The images one process holds for one job."""

    def __init__(
        self, job: str, *, images: int = 2, budget_bytes: int | None = None, root: Path = SHARED_MEMORY
    ) -> None:
        if images < 1:
            raise ValueError(f"images ({images}) must be at least 1")
        self.job = job
        self.budget_bytes = budget_bytes
        self.copier = Copier()
        self._images = images
        self._root = root
        self._process = this_process()
        self._folder = job_folder(job, root=root) / f"{self._process.token}.{next(_numbers)}"
        self._buffers: list[ImageBuffer] = []
        self._changed = threading.Condition()
        self._is_open = False

    def open(self) -> None:
        """Take over what a dead process of this job left, and remove what no job will ask for again."""
        with self._changed:
            if self._is_open:
                return
            self._make_folder()
            marked = self._adopt()
            (self._folder / OWNER_NAME).write_text(_owner().token)
            self._buffers = [ImageBuffer(self._folder / str(n)) for n in range(self._images)]
            for buffer in self._buffers:
                buffer.marked = marked.get(buffer.folder.name)
            self._is_open = True
        remove_dead_jobs(root=self._root, keep=self.job)

    def acquire(self, plan: Plan, *, timeout_s: float | None) -> ImageBuffer | None:
        """An image laid out for `plan`, or None when none was released in time. Never the newest snapshot's, as long
        as there is another."""
        self.open()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while (buffer := self._choose(plan)) is None:
                remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    return None
                self._changed.wait(remaining_s)
            buffer.is_busy = True
        try:
            if buffer.plan is not plan:
                self._check_room(buffer, plan)
            buffer.prepare_for(plan)
        except BaseException:
            self.release(buffer)
            raise
        return buffer

    def release(self, buffer: ImageBuffer) -> None:
        with self._changed:
            buffer.is_busy = False
            self._changed.notify_all()

    @contextlib.contextmanager
    def held(self, snapshot: Snapshot) -> Iterator[ImageBuffer]:
        """The image of a snapshot, kept from being overwritten while it is read. Raises `Damaged` if it has been."""
        with self._changed:
            buffer = next((b for b in self._buffers if b.path == snapshot.path), None)
            if buffer is None or buffer.marked is None or buffer.marked.order != snapshot.manifest.order:
                raise Damaged(
                    path=str(snapshot.path), reason="the memory image is in use for a newer checkpoint"
                )
            was_busy, buffer.is_busy = buffer.is_busy, True
        try:
            yield buffer
        finally:
            if not was_busy:
                self.release(buffer)

    def snapshots(self) -> list[Snapshot]:
        """The complete images of this job, newest first."""
        if not self._is_open and not self._folder.parent.exists():
            return []
        self.open()
        with self._changed:
            found = [Snapshot(manifest=b.marked, path=b.path) for b in self._buffers if b.marked is not None]
        return sorted(found, key=lambda snapshot: snapshot.manifest.order, reverse=True)

    def drop(self, chosen: Collection[CheckpointId] | None = None) -> None:
        """Give up these snapshots, or all, and their memory. One that is being written or read stays."""
        self.snapshots()
        with self._changed:
            for buffer in self._buffers:
                if buffer.marked is None or buffer.is_busy:
                    continue
                if chosen is None or buffer.marked.checkpoint_id in chosen:
                    buffer.discard()

    def close(self, *, keep: bool = False) -> None:
        """Let go of the images; they are removed unless `keep`, which leaves them to the job's next process."""
        self.copier.close()
        with self._changed:
            if not self._is_open or self._process != this_process():
                return  # A forked child holds nothing.
            for buffer in self._buffers:
                buffer.close()
            if keep and any(_snapshots_in(self._folder)):
                self._folder.rename(self._folder.with_name(f"left-{uuid.uuid4().hex}"))
            else:
                remove_tree(self._folder)
                remove_empty(self._folder.parent)
            self._buffers = []
            self._is_open = False

    def _make_folder(self) -> None:
        try:
            make_private(self._folder, inside=images_folder(self._root))
        except PermissionError as error:
            raise CheckpointError(
                f"{error.filename} belongs to another user.",
                hint=f"Ask them to remove it, or use another folder than {self._root}.",
            ) from None

    def _choose(self, plan: Plan) -> ImageBuffer | None:
        free = [buffer for buffer in self._buffers if not buffer.is_busy]
        if len(self._buffers) > 1:
            marked = [buffer for buffer in self._buffers if buffer.marked is not None]
            newest = max(marked, key=lambda b: b.marked.order, default=None)  # type: ignore[union-attr]
            free = [buffer for buffer in free if buffer is not newest]
        # The oldest snapshot makes room; of images that hold none, one that is laid out already is the quickest.
        return min(
            free, key=lambda b: (b.marked.order if b.marked else (-1,), b.plan is not plan), default=None
        )

    def _check_room(self, buffer: ImageBuffer, plan: Plan) -> None:
        held_bytes = buffer.size_bytes
        room = os.statvfs(self._root)
        available_bytes = room.f_bavail * room.f_frsize + held_bytes
        if self.budget_bytes is not None:
            others_bytes = sum(other.size_bytes for other in self._buffers if other is not buffer)
            available_bytes = min(available_bytes, self.budget_bytes - others_bytes)
        if plan.bound_bytes > available_bytes:
            raise MemoryLimitExceeded(
                required_bytes=plan.bound_bytes,
                available_bytes=max(available_bytes, 0),
                hint=f"Raise the memory budget, make {self._root} larger (docker run --shm-size), keep one image instead "
                "of two, or name another folder: Memory(root=…).",
            )

    def _adopt(self) -> dict[str, Manifest]:
        """Of the images that dead processes of this job left, keep the set with the newest snapshot; the marks in it."""
        dead = [folder for folder in _folders_in(self._folder.parent) if _is_left(folder)]
        marks = {folder: {s.path.parent.name: s.manifest for s in _snapshots_in(folder)} for folder in dead}
        newest = {folder: max((mark.order for mark in marks[folder].values()), default=()) for folder in dead}
        kept: dict[str, Manifest] = {}
        for folder in sorted(dead, key=lambda f: newest[f], reverse=True):
            if not kept and marks[folder]:
                with contextlib.suppress(OSError):  # Another process of this job was quicker.
                    folder.rename(self._folder)
                    log.info("took over the memory images that %s left", folder.name)
                    kept = marks[folder]
                    continue
            remove_tree(folder)
        return kept


def job_folder(job: str, *, root: Path = SHARED_MEMORY) -> Path:
    """Where a job's images are. Each user has a place of their own."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", job):
        raise ValueError(
            f"job {job!r} must be 1 to 100 letters, digits, '.', '_' or '-', starting with a letter or digit"
        )
    return images_folder(root) / job


def find_snapshots(job: str, *, root: Path = SHARED_MEMORY) -> list[Snapshot]:
    """The complete images of a job, newest first, read without taking anything over."""
    holders = _folders_in(job_folder(job, root=root))
    found = [snapshot for holder in holders for snapshot in _snapshots_in(holder)]
    return sorted(found, key=lambda snapshot: snapshot.manifest.order, reverse=True)


def read_snapshot(folder: Path) -> Snapshot | None:
    """The snapshot in one image's folder, if its mark is there and readable. Bytes are not verified here."""
    mark = folder / MARK_NAME
    try:
        manifest = decode(mark.read_bytes(), path=str(mark))
    except FileNotFoundError:
        return None
    except Damaged as error:
        log.warning("ignored a memory image: %s", error)
        return None
    return Snapshot(manifest=manifest, path=folder / FILE_NAME)


def remove_dead_jobs(*, root: Path = SHARED_MEMORY, keep: str = "", grace_s: float = GRACE_S) -> list[str]:
    """Remove the images of jobs whose processes and owner are all gone, and have been for `grace_s`."""
    removed = []
    for job in _folders_in(images_folder(root)):
        with contextlib.suppress(FileNotFoundError):  # It changes while it is looked at: others are at it.
            if job.name != keep and _job_is_dead(job, grace_s):
                remove_tree(job)
                remove_empty(job)
                removed.append(job.name)
                log.info("removed the memory images of job %s, which is gone", job.name)
    return removed


def remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _owner() -> Process:
    """Whose end is the end of the job: the launcher's under torchrun, else this process's."""
    return parent_process() if "TORCHELASTIC_RUN_ID" in os.environ else this_process()


def _job_is_dead(job: Path, grace_s: float) -> bool:
    """Whether nobody will come back for a job's images: its processes are gone and so are their owners, or they are
    long gone although an owner lives (the rank they belonged to is on another machine now)."""
    folders = _folders_in(job)
    if not all(_is_left(folder) for folder in folders):
        return False
    newest_s = max(path.stat().st_mtime for path in [job, *job.rglob("*")])
    is_owned = any(_owner_lives(folder) for folder in folders)
    return time.time() - newest_s > (LONG_GRACE_S if is_owned else grace_s)


def _owner_lives(folder: Path) -> bool:
    try:
        return not Process.parse((folder / OWNER_NAME).read_text()).is_gone()
    except (OSError, ValueError):
        return False


def _is_left(folder: Path) -> bool:
    """Whether nobody holds a folder: the process it is named after is gone, or has let go of it."""
    try:
        return Process.parse(folder.name.partition(".")[0]).is_gone()
    except ValueError:
        return True


def _snapshots_in(holder: Path) -> Iterator[Snapshot]:
    for folder in _folders_in(holder):
        if snapshot := read_snapshot(folder):
            yield snapshot


def _folders_in(folder: Path) -> list[Path]:
    """None where it is not there: another process of the job may just have taken it over, or ended."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
