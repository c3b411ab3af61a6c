"""Images in shared memory: two at most, reused, filled from the training state, and found again after a crash.

An image is a file below the memory root, allocated, mapped and faulted in once, because the first touch of a fresh page
costs ten times the copy into it. A save removes the image's mark, copies, and writes the mark (the manifest) last: an
image is a checkpoint of the memory tier exactly while its mark is there. The images belong to a job's name and to
the process that holds their folder, identified by a lock (`strata.locks`), so that processes of other containers
that share the memory can tell as well. When that process has ended, the next one of the same job takes them over; when
the job has ended as well, any Strata process removes them after a grace. A clean close removes them at once.

Space is allocated before it is written to, so a full /dev/shm is an error and never a SIGBUS. Where two images do not
fit, and no root was named, they live on disk; where two fit nowhere, there is one; where not even one fits, a save
goes through anonymous memory and leaves no snapshot: what is too small costs snapshots, never a durable checkpoint.

A process that belongs to a generation (`Staging.fence`) marks nothing once a newer one has started at this root.

A process that closes its images and will open them again, because its job is entered anew after an error, keeps them mapped and
page-locked meanwhile: faulting in and page-locking gigabytes takes longer than loading them. Nothing else is different: the
images are left to the process that takes them over, which may be another one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import logging
import mmap
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from strata import locks
from strata.checkpoint.catalog.manifest import CheckpointId, Manifest, TensorEntry, decode
from strata.checkpoint.copying.cuda import page_lock, page_unlock
from strata.checkpoint.copying.digest import Digest, digest_of, helping_threads
from strata.checkpoint.copying.engine import Copier, Copying, Destination
from strata.checkpoint.errors import CheckpointError, Damaged, MemoryLimitExceeded, Superseded
from strata.checkpoint.image.layout import FILE_NAME, Placement, Plan, Prepared
from strata.core.jobs.job import Ready
from strata.files import write_file
from strata.locks import FolderLock
from strata.processes import this_process
from strata.shared_memory import (
    GENERATION_NAME,
    OWNER_NAME,
    ROOT_VARIABLE,
    exclusively_inside,
    folders_in,
    images_folder,
    is_left,
    job_folder,
    job_owner,
    make_private,
    memory_roots,
    remove_dead_jobs,
    remove_empty,
    remove_held,
    remove_tree,
)

log = logging.getLogger("strata.checkpoint")

MARK_NAME = "mark.json"
RECORD_NAME = "upload.json"
"""Beside a mark: what the agent of the machine needs to upload the image when its process is dead (`strata.checkpoint.finishing`)."""
_ATTEMPTS = 1_000
_ANOTHER_FOLDER = f"Choose another folder: {ROOT_VARIABLE}, or Memory(root=…)."
_NOWHERE = Path("/proc/self/fd/none")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
_numbers = itertools.count()  # Two managers of one process have images of their own.


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A complete image in shared memory."""

    manifest: Manifest
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A live process, or another manager of this one, that holds images of a job."""

    folder: Path
    token: str
    """Of the process (`strata.processes`)."""
    pid: int | None = None
    """As the process itself sees it, which in another process namespace says little."""
    host: str = ""
    launch: str = ""
    """What it had to say about how it was started."""

    def __str__(self) -> str:
        where = f"pid {self.pid} on {self.host}" if self.host else f"process {self.token}"
        return f"{where}, {self.launch}" if self.launch else where


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapping:
    """The file of an image, mapped."""

    map: mmap.mmap
    bytes: torch.Tensor
    file: tuple[int, int, int]
    is_page_locked: bool
    verified: str
    """As `ImageBuffer.verified`."""

    def release(self) -> None:
        if self.is_page_locked:
            page_unlock(self.bytes)
        _close(self.map)


_kept_mapped: dict[str, list[_Mapping]] = {}
"""Of jobs that this process has closed and will open again, by their names."""


def release_mapped(job: str | None = None) -> None:
    """Let go of the images that this process has kept mapped: of one job, or of all."""
    for name in [job] if job is not None else list(_kept_mapped):
        for each in _kept_mapped.pop(name, []):
            each.release()


class ImageBuffer:
    """One image: a file, its mapping, and the plan it is laid out for."""

    def __init__(
        self, folder: Path, refuse: Callable[[], None] = lambda: None, *, record: bytes = b""
    ) -> None:
        self._record = record
        """Lies beside the mark; empty where there is none."""
        self._recorded: Path | None = None
        self.folder: Path | None = folder
        """None while the image is in anonymous memory: then it cannot be found again, and gets no mark."""
        self.path = folder / FILE_NAME
        self._refuse = refuse
        """Raises where this process may not mark anything any more."""
        self.is_given_up = False
        """It will not be used again: it is closed as soon as it is no longer in use."""
        self._anonymous_fd = -1
        self._mapped_file: tuple[int, int, int] | None = None
        self.plan: Plan | None = None
        self.entries: tuple[TensorEntry, ...] = ()
        self.is_busy = False
        self.marked: Manifest | None = None
        self._to: Destination | None = None
        self._map: mmap.mmap | None = None
        self._bytes: torch.Tensor | None = None
        self._body_bytes = 0
        self.is_page_locked = False
        self._marked_here = self.verified = ""
        """The digest of the bytes that this process has put here, and of those that it had put here when it entered its job again:
        what it has saved a moment ago to load it now."""
        self.copying: Copying | None = None

    @property
    def is_being_filled(self) -> bool:
        """A copy is on its way, and may become a snapshot."""
        return self.is_busy and self.marked is None and self.folder is not None

    @property
    def size_bytes(self) -> int:
        """Of the file; 0 where there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def snapshot(self) -> Manifest | None:
        """What a crash would leave here: None where the mark, or the file, that this process has made was deleted."""
        marked = self.marked  # Who fills the image again unmarks it meanwhile.
        if marked is None or self.folder is None or not (self.folder / MARK_NAME).is_file():
            return None
        return marked if self.size_bytes == marked.parts[0].size_bytes else None

    @property
    def order(self) -> tuple[int | float | str, ...]:
        """Of its snapshot; what has none comes first."""
        found = self.snapshot
        return found.order if found is not None else (-1,)

    @property
    def view(self) -> memoryview:
        assert self._map is not None
        return memoryview(self._map)

    def move_to(self, folder: Path | None) -> None:
        """Make it an image in this folder, or in anonymous memory; what it held elsewhere is given up."""
        if folder == self.folder:
            return
        self.discard()
        self.folder = folder
        if folder is not None:
            self.path = folder / FILE_NAME

    def prepare_for(self, plan: Plan) -> None:
        """Lay the file out for `plan` and fault its pages in; nothing to do when it is laid out for it already."""
        if self.plan is plan and self._is_as_mapped():
            return
        self.unmark()
        placement = None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            placement = self._placement_if_same(plan, self.folder)
        self._body_bytes = placement.body_capacity_bytes if placement else 0
        if placement is None:
            self._unmap()
            self._remove_file()  # Who still has the old file mapped must not see it shrink.
            placement = plan.lay_out(str(self.path)) if self.folder else self._lay_out_anonymously(plan)
        try:
            image = self._map_file(populate=True)
        except OSError:
            self._remove_file()
            raise
        self._to = Destination(plan, placement, image)
        self.entries = plan.entries(placement)
        self.plan = plan

    def mapped(self) -> torch.Tensor:
        """The bytes of the file as it is. Raises `Damaged` where it is missing, empty, or not as long as its mark says."""
        try:
            size_bytes = self.path.stat().st_size
            wanted_bytes = marked.parts[0].size_bytes if (marked := self.marked) is not None else size_bytes
            if size_bytes != wanted_bytes or not size_bytes:
                raise Damaged(
                    path=str(self.path),
                    reason=f"the image has {size_bytes} bytes, its mark says {wanted_bytes}",
                )
            if not self._is_as_mapped():
                self._unmap()
            return self._map_file(populate=False)
        except OSError as error:
            raise Damaged(
                path=str(self.path), reason=f"the image cannot be read: {error.strerror}"
            ) from error

    def _map_file(self, *, populate: bool) -> torch.Tensor:
        """With `populate`, every page of it is given space and faulted in now. (The process that has marked an
        image had done so.)"""
        if self._bytes is None:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                size_bytes = found.st_size
                if populate:
                    os.posix_fallocate(fd, 0, size_bytes)
                flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
                self._map = mmap.mmap(fd, size_bytes, flags=flags)
                self._mapped_file = _identity(found)
            finally:
                os.close(fd)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._bytes

    def take_mapped(self, kept: list[_Mapping]) -> None:
        """Use the mapping of this very file, if it is among those."""
        with contextlib.suppress(OSError):
            file = _identity(self.path.stat())
            for each in [each for each in kept if each.file == file]:
                kept.remove(each)
                self._map, self._bytes, self._mapped_file = each.map, each.bytes, each.file
                self.is_page_locked, self.verified = each.is_page_locked, each.verified

    def leave_mapped(self) -> _Mapping | None:
        """Close it, all but its mapping; None where it has none that could be of use again."""
        if self.folder is None or self._map is None or self._bytes is None or self._mapped_file is None:
            self.close()
            return None
        mapping = _Mapping(
            map=self._map,
            bytes=self._bytes,
            file=self._mapped_file,
            is_page_locked=self.is_page_locked,
            verified=self._marked_here,
        )
        self._map = self._bytes = None
        self.is_page_locked = False
        self.close()
        return mapping

    def _is_as_mapped(self) -> bool:
        """Whether the file that is mapped is there still, and as long as it was: beyond its end there is only SIGBUS."""
        try:
            return self._bytes is None or _identity(self.path.stat()) == self._mapped_file
        except OSError:
            return False

    def _lay_out_anonymously(self, plan: Plan) -> Placement:
        self._anonymous_fd = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
        self.path = Path(f"/proc/self/fd/{self._anonymous_fd}")
        with tempfile.TemporaryDirectory(prefix="strata-") as folder:  # Torch wants a name to write to.
            named = Path(folder) / FILE_NAME
            named.symlink_to(self.path)
            return plan.lay_out(str(named))

    def _remove_file(self) -> None:
        if self.folder is not None:
            try:
                self.path.unlink(missing_ok=True)
            except (IsADirectoryError, PermissionError):
                remove_tree(self.path)
        elif self._anonymous_fd >= 0:
            os.close(self._anonymous_fd)
            self._anonymous_fd = -1
            self.path = _NOWHERE

    def lock_pages(self) -> bool:
        """Page-lock the mapped file for copies to and from the device; False where the driver refuses."""
        if not self.is_page_locked:
            self.is_page_locked = page_lock(self._map_file(populate=False))
        return self.is_page_locked

    def _placement_if_same(self, plan: Plan, folder: Path) -> Placement | None:
        """Where a process that has ended laid the file out for the same structure, its pages can be used as they are."""
        if self.plan is not None or not self.path.exists():
            return None
        fresh = folder / "layout" / FILE_NAME
        fresh.parent.mkdir(exist_ok=True)
        try:
            placement = plan.lay_out(str(fresh))
            with fresh.open("rb", buffering=0) as wanted, self.path.open("rb", buffering=0) as found:
                same = os.fstat(found.fileno()).st_size == placement.size_bytes and all(
                    os.pread(wanted.fileno(), end - start, start)
                    == os.pread(found.fileno(), end - start, start)
                    for start, end in plan.frame(placement)
                )
        except OSError:  # It is no file, or another process has removed it.
            return None
        finally:
            remove_tree(fresh.parent)
        return placement if same else None

    def begin(self) -> Copying:
        """Announce a copy: there is no mark from here until `mark`, and `copying` tells how far it has come."""
        assert self._to is not None
        self.unmark()
        self._marked_here = self.verified = ""
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
        """Make the image a checkpoint of the memory tier. Raises `Superseded` where a newer generation has started."""
        assert self.folder is not None
        self._refuse()
        self.put_record()
        write_file(self.folder / MARK_NAME, manifest.encode(), durable=False)
        self.marked, self._marked_here = manifest, manifest.parts[0].digest.whole
        try:
            self._refuse()
        except Superseded:  # Just now.
            self.unmark()
            raise

    def put_record(self) -> None:
        """Before the mark: a reader that finds the mark finds the record of the same process."""
        if self.folder is None or self._recorded == self.folder:
            return
        if self._record:
            write_file(self.folder / RECORD_NAME, self._record, durable=False)
        else:
            (self.folder / RECORD_NAME).unlink(missing_ok=True)  # Of another start of the run.
        self._recorded = self.folder

    def unmark(self) -> None:
        self.marked = None
        if self.folder is not None:
            with contextlib.suppress(NotADirectoryError):
                (self.folder / MARK_NAME).unlink(missing_ok=True)

    def _unmap(self) -> None:
        self.plan = None
        self._to = None
        self.copying = None
        if self.is_page_locked and self._bytes is not None:
            page_unlock(self._bytes)
        self.is_page_locked, self._marked_here, self.verified = False, "", ""
        self._bytes = None
        if self._map is not None:
            _close(self._map)
            self._map = None

    def discard(self) -> None:
        """Give up the snapshot and its memory."""
        self.unmark()
        self._unmap()
        self._remove_file()

    def close(self) -> None:
        self._unmap()
        if self.folder is None:
            self._remove_file()


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
        """When all of it is in place."""
        if self._copying.digest is None:
            # Until it is hashed, an image that a device fills is no snapshot.
            with helping_threads() as pool:
                return digest_of(self.view, pool=pool, wait=self._copying.wait)
        self._copying.wait()
        return self._copying.digest()

    def keep(self, manifest: Manifest) -> str | None:
        if self._buffer.folder is None:
            return None
        self._buffer.mark(manifest)
        return str(self._buffer.path)

    def release(self) -> None:
        self._staging.release(self._buffer)

    def fill(self, prepared: Prepared) -> None:
        self._buffer.fill(prepared, self._staging.copier)


class Staging:
    """The images one process holds for one job."""

    def __init__(
        self,
        job: str,
        *,
        images: int = 2,
        budget_bytes: int | None = None,
        root: Path | None = None,
        launch: str = "",
        record: bytes = b"",
    ) -> None:
        """`launch` tells others how this process was started; `record` lies beside every snapshot."""
        if images < 1:
            raise ValueError(f"images ({images}) must be at least 1")
        self.job = job
        self.budget_bytes = budget_bytes
        self.copier = Copier()
        self._images = images
        self._roots = memory_roots(root)
        self._process = this_process()
        self._name = f"{self._process.token}.{next(_numbers)}"
        self._locks: dict[Path, FolderLock] = {}
        """The folders held, by their roots."""
        self._fence = Fence(job_folder(job, root=self._roots[0]))
        self._launch = launch
        self._record = record
        self._buffers: list[ImageBuffer] = []
        self._changed = threading.Condition()
        self._is_open = False
        self._said: set[str] = set()

    def open(self) -> None:
        """Take over what a dead process of this job left, and remove what no job will ask for again."""
        with self._changed:
            if self._is_open:
                return
            marked, root = self._adopt()
            folder = self._hold(root) if marked else self._hold_first()
            self._buffers = [
                ImageBuffer(folder / str(n), self._fence.refuse, record=self._record)
                for n in range(self._images)
            ]
            for buffer, number in zip(self._buffers, map(str, range(self._images)), strict=True):
                buffer.marked = marked.get(number)
                if buffer.marked is not None:
                    with contextlib.suppress(OSError):
                        buffer.put_record()
                buffer.take_mapped(_kept_mapped.get(self.job, []))
            release_mapped(self.job)  # The others were taken over by another process, or removed.
            self._is_open = True
        for each in self._roots:
            remove_dead_jobs(root=each, keep=self.job)

    def fence(self, generation: int) -> None:
        """Belong to a generation: from now on those before it mark nothing at this root, and neither does this process once
        a newer one has started. Raises `Superseded` where one has. Generation 0 belongs to none."""
        if not generation:
            return
        self.open()  # A process that closes meanwhile sees that this job has another one.
        self._fence.record(generation)

    def live_holders(self) -> list[Holder]:
        """Who else holds images of this job here, now."""
        mine = {lock.folder for lock in self._locks.values()}
        folders = [f for root in self._roots for f in folders_in(job_folder(self.job, root=root))]
        return [_holder_of(folder) for folder in folders if folder not in mine and not is_left(folder)]

    def acquire(
        self,
        plan: Plan,
        *,
        timeout_s: float | None,
        must_keep: bool = False,
        sparing: Collection[CheckpointId] | None = None,
    ) -> ImageBuffer | None:
        """An image laid out for `plan`, or None when none was released in time. Never the only snapshot's, as long
        as there is another image; or, where `sparing` is given, never one of those. With `must_keep`, one that can be
        found again: raises `MemoryLimitExceeded` where there is no space for one."""
        self.open()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        buffer = self._await(lambda: self._choose(plan, sparing), deadline_s)
        if buffer is None:
            return None
        try:
            if buffer.plan is not plan or buffer.folder is None:
                if not self._keep_to_budget(buffer, plan, deadline_s):
                    self.release(buffer)
                    return None
                if self._root_for(buffer, plan) is None and len(self._buffers) > 1:
                    self.release(buffer)
                    buffer = self._keep_only_one(plan, deadline_s)
                    if buffer is None:
                        return None
                self._lay_out(buffer, plan, must_keep=must_keep)
            else:
                buffer.prepare_for(plan)
        except BaseException:
            if buffer is not None:
                self.release(buffer)
            raise
        return buffer

    def readiness(self, plan: Plan) -> Ready:
        """What a sharded save of this plan would find in memory."""
        self.open()
        with self._changed:
            free = [buffer for buffer in self._buffers if not buffer.is_busy]
            held = [found.checkpoint_id for b in self._buffers if (found := b.snapshot) is not None]
            return Ready(
                has_image=bool(free) and not any(buffer.is_being_filled for buffer in self._buffers),
                has_one_image=len(self._buffers) == 1,
                held=frozenset(held),
                kept=frozenset(each for each in held if self._choose(plan, [each]) is not None),
            )

    def _await(
        self, choose: Callable[[], ImageBuffer | None], deadline_s: float | None
    ) -> ImageBuffer | None:
        """What is chosen, busy from now on; None where nothing could be in time."""
        with self._changed:
            while (buffer := choose()) is None:
                remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    return None
                self._changed.wait(remaining_s)
            buffer.is_busy = True
            return buffer

    def lock_ahead(self) -> None:
        """Page-lock the images that were taken over, in the background: the first save to each would wait for it."""
        from strata.checkpoint.copying.cuda import on_this_device

        def lock(buffer: ImageBuffer) -> None:
            try:
                buffer.lock_pages()
            except (Damaged, OSError) as error:
                log.debug("an image was not page-locked in advance: %s", error)
            finally:
                self.release(buffer)

        with self._changed:
            for buffer in self._buffers:
                if buffer.marked is not None and not buffer.is_busy and not buffer.is_page_locked:
                    buffer.is_busy = True
                    work = on_this_device(functools.partial(lock, buffer))
                    threading.Thread(target=work, name="strata-page-lock", daemon=True).start()

    def release(self, buffer: ImageBuffer) -> None:
        with self._changed:
            buffer.is_busy = False
            if buffer.is_given_up:
                buffer.close()
            self._changed.notify_all()

    @contextlib.contextmanager
    def held(self, snapshot: Snapshot) -> Iterator[ImageBuffer]:
        """The image of a snapshot, kept from being overwritten while it is read. Raises `Damaged` if it has been."""
        with self._changed:
            buffer = next((b for b in self._buffers if b.path == snapshot.path), None)
            marked = buffer.marked if buffer is not None else None
            if buffer is None or marked is None or marked.order != snapshot.manifest.order:
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
        if not self._is_open and not any(job_folder(self.job, root=root).exists() for root in self._roots):
            return []
        self.open()
        with self._changed:
            found = [
                Snapshot(manifest=marked, path=buffer.path)
                for buffer in self._buffers
                if (marked := buffer.marked) is not None
            ]
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

    def close(self, *, keep: bool = False, wait: bool = True, stay_mapped: bool = False) -> None:
        """Let go of the images; they are removed unless `keep`, which leaves them to the job's next process. One that is
        still being read stays mapped until that is over. Without `wait`, copies under way are not waited for. With
        `stay_mapped`, they stay mapped for the next time that this process opens them."""
        self.copier.close(wait=wait)
        with self._changed:
            if not self._is_open or self._process != this_process():
                return  # A forked child holds nothing.
            for buffer in self._buffers:
                buffer.is_given_up = True
                if buffer.is_busy:
                    continue
                if not stay_mapped:
                    buffer.close()
                elif (mapping := buffer.leave_mapped()) is not None:
                    _kept_mapped.setdefault(self.job, []).append(mapping)
            for lock in self._locks.values():
                if keep and any(_snapshots_in(lock.folder)):
                    with contextlib.suppress(FileNotFoundError):
                        lock.rename(lock.folder.with_name(f"left-{uuid.uuid4().hex}"))
                else:
                    remove_held(lock.folder)
                lock.release()
            self._locks = {}
            self._buffers = []
            self._is_open = False
            self._fence.forget()
            for root in self._roots:
                remove_empty(job_folder(self.job, root=root))

    def _hold_first(self) -> Path:
        """This process's folder at the first root that can be used; those before it are not thought of again."""
        for root in self._roots[:-1]:
            try:
                return self._hold(root)
            except CheckpointError as error:
                log.warning("%s Images are kept in %s.", error, self._roots[-1])
                self._roots.remove(root)
                self._fence = Fence(job_folder(self.job, root=self._roots[0]))
        return self._hold(self._roots[0])

    def _hold(self, root: Path) -> Path:
        """This process's folder at a root, held from now on."""
        if root in self._locks:
            return self._locks[root].folder
        folder = job_folder(self.job, root=root) / self._name
        for _ in range(_ATTEMPTS):
            self._make_folder(folder, root)
            with contextlib.suppress(FileNotFoundError):  # Removed as empty by a process that just exited.
                try:
                    self._locks[root] = locks.create(folder)
                    self._sign(folder)
                except FileNotFoundError:
                    raise
                except OSError as error:
                    raise self._unusable(root, error) from error
                return folder
        raise CheckpointError(f"{folder} is repeatedly removed by another process.")

    def _sign(self, folder: Path) -> None:
        """Say who holds a folder, and whose end is the end of the job."""
        mine = {
            "token": self._process.token,
            "pid": self._process.pid,
            "host": socket.gethostname(),
            "launch": self._launch,
        }
        (folder / OWNER_NAME).write_text(f"{job_owner().token}\n{json.dumps(mine)}\n")

    def _make_folder(self, folder: Path, root: Path) -> None:
        try:
            make_private(folder, inside=images_folder(root))
        except PermissionError as error:
            if error.filename and Path(error.filename).exists():
                raise CheckpointError(f"{error.filename}: {error.strerror}.", hint=_ANOTHER_FOLDER) from None
            raise self._unusable(root, error) from None
        except OSError as error:
            raise self._unusable(root, error) from None

    def _unusable(self, root: Path, error: OSError) -> CheckpointError:
        return CheckpointError(f"{root} cannot hold images: {error.strerror}.", hint=_ANOTHER_FOLDER)

    def _choose(self, plan: Plan, sparing: Collection[CheckpointId] | None = None) -> ImageBuffer | None:
        free = [buffer for buffer in self._buffers if not buffer.is_busy]
        found = {buffer: buffer.snapshot for buffer in self._buffers}
        kept = [buffer for buffer, snapshot in found.items() if snapshot is not None]
        if sparing is not None:
            free = [b for b in free if (it := found[b]) is None or it.checkpoint_id not in sparing]
        elif len(self._buffers) > 1 and len(kept) == 1:
            # It is the only one that a crash would leave.
            free = [buffer for buffer in free if buffer not in kept]
        # The oldest snapshot makes way; of images that hold none, one that is laid out already is the quickest.
        return min(free, key=lambda b: (b.order, b.plan is not plan), default=None)

    def _keep_to_budget(self, buffer: ImageBuffer, plan: Plan, deadline_s: float | None) -> bool:
        """Let older snapshots go until an image of this plan fits the budget; False where those in use are too large for too
        long. Raises, and lets nothing go, where it never will fit."""
        budget_bytes = self.budget_bytes
        if budget_bytes is None:
            return True
        if plan.tensor_bytes > budget_bytes:
            raise MemoryLimitExceeded(
                required_bytes=plan.tensor_bytes,
                available_bytes=budget_bytes,
                hint="Raise the memory budget (budget_bytes).",
            )

        def make_way() -> ImageBuffer | None:
            others = [other for other in self._buffers if other is not buffer]
            while sum(other.size_bytes for other in others) + plan.tensor_bytes > budget_bytes:
                idle = [other for other in others if other.size_bytes and not other.is_busy]
                if not idle:
                    return None
                oldest = min(idle, key=lambda b: b.order)
                oldest.discard()
                others.remove(oldest)
            return buffer

        return self._await(make_way, deadline_s) is not None

    def _lay_out(self, buffer: ImageBuffer, plan: Plan, *, must_keep: bool) -> None:
        """Lay an image out for a plan, at the best root that has space for it, or else in anonymous memory."""
        root = self._root_for(buffer, plan)
        if root is not None:
            self._explain(root, plan)
            try:
                buffer.move_to(self._hold(root) / str(self._buffers.index(buffer)))
                buffer.prepare_for(plan)
                return
            except OSError as error:
                if error.errno not in _NO_SPACE:  # Others have taken what was free a moment ago.
                    raise
            except CheckpointError as error:
                if root is self._roots[0]:
                    raise
                log.warning("%s", error)
        free = ", ".join(f"{root} has {_free_bytes(root) / 1e6:.1f} MB" for root in self._roots)
        hint = (
            f"{free} free. Make it larger (docker run --shm-size=…), or choose another folder: {ROOT_VARIABLE}, or "
            "Memory(root=…)."
        )
        if must_keep:
            raise MemoryLimitExceeded(
                required_bytes=plan.bound_bytes,
                available_bytes=max(self._available_bytes(root) for root in self._roots),
                hint=hint,
            )
        self._say_once(
            "none",
            f"there is no space for an image of {plan.bound_bytes / 1e6:.1f} MB, so no snapshot in memory is made; "
            f"durable checkpoints are still written, through anonymous memory. {hint}",
        )
        buffer.move_to(None)
        buffer.prepare_for(plan)

    def _root_for(self, buffer: ImageBuffer, plan: Plan) -> Path | None:
        """The first root with space for all images of this plan, and for this one now."""
        wanted_bytes = plan.bound_bytes * min(2, len(self._buffers))
        for root in self._roots:
            held_bytes = buffer.size_bytes if self._is_at(root, buffer) else 0
            if self._available_bytes(root) >= wanted_bytes and (
                _free_bytes(root) + held_bytes >= plan.bound_bytes
            ):
                return root
        return None

    def _available_bytes(self, root: Path) -> int:
        """What images may have at a root: all that is free, and what they have already. Of a disk that the user has not named,
        half, for checkpoints may be kept there as well."""
        held_bytes = sum(buffer.size_bytes for buffer in self._buffers if self._is_at(root, buffer))
        available_bytes = _free_bytes(root) + held_bytes
        return available_bytes if root is self._roots[0] else available_bytes // 2

    def _is_at(self, root: Path, buffer: ImageBuffer) -> bool:
        return buffer.folder is not None and buffer.folder.is_relative_to(images_folder(root))

    def _keep_only_one(self, plan: Plan, deadline_s: float | None) -> ImageBuffer | None:
        """There is no space for two images: continue with one, when the other is no longer in use."""

        def choose() -> ImageBuffer | None:
            if any(buffer.is_busy for buffer in self._buffers):
                return None
            kept = max(self._buffers, key=lambda b: b.order)
            for other in self._buffers:
                if other is not kept:
                    other.discard()
            self._buffers = [kept]
            return kept

        kept = self._await(choose, deadline_s)
        if kept is not None and self._root_for(kept, plan) is not None:
            self._say_once(
                "one",
                f"there is no space for two images of {plan.bound_bytes / 1e6:.1f} MB: a crash during a save leaves no "
                f"snapshot in memory. Make {self._roots[0]} larger (docker run --shm-size=…), or choose another folder: "
                f"{ROOT_VARIABLE}, or Memory(root=…).",
            )
        return kept

    def _explain(self, root: Path, plan: Plan) -> None:
        if root is self._roots[0]:
            return
        first = self._roots[0]
        self._say_once(
            "disk",
            f"images of {plan.bound_bytes / 1e6:.1f} MB do not fit in {first}, which has {_free_bytes(first) / 1e6:.1f} MB "
            f"free: they are kept in {images_folder(root)}, at the speed of that disk. Make {first} larger "
            f"(docker run --shm-size=…), or choose a folder: {ROOT_VARIABLE}, or Memory(root=…).",
        )

    def _say_once(self, kind: str, what: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            log.warning("%s", what)

    def _adopt(self) -> tuple[dict[str, Manifest], Path]:
        """Of the images that dead processes of this job left at any root, keep the set with the newest snapshot; the marks
        in it, and where it is."""
        dead = [
            (folder, root)
            for root in self._roots
            for folder in folders_in(job_folder(self.job, root=root))
            if is_left(folder)
        ]
        marks = {
            folder: {s.path.parent.name: s.manifest for s in _snapshots_in(folder)} for folder, _ in dead
        }
        newest = {
            folder: max((mark.order for mark in marks[folder].values()), default=()) for folder in marks
        }
        kept: tuple[dict[str, Manifest], Path] | None = None
        for folder, root in sorted(dead, key=lambda each: newest[each[0]], reverse=True):
            lock = locks.take(folder)
            if lock is None and locks.is_held(folder) is not None:
                continue  # Another process of this job was quicker.
            if kept is None and marks[folder]:
                with contextlib.suppress(OSError):
                    self._take_over(folder, lock, root)
                    kept = marks[folder], root
                    continue
            remove_held(folder)
            if lock is not None:
                lock.release()
        return kept or ({}, self._roots[0])

    def _take_over(self, folder: Path, lock: FolderLock | None, root: Path) -> None:
        mine = folder.with_name(self._name)
        if lock is not None:
            lock.rename(mine)
        else:  # Of version 0.1.
            folder.rename(mine)
            lock = locks.create(mine)
        self._locks[root] = lock
        self._sign(mine)
        log.info("took over the memory images left by %s", folder.name)


class Fence:
    """The newest generation of a job that has started at a root, in a small file that all its processes look at."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / GENERATION_NAME
        self._mine = 0

    def newest(self) -> int:
        try:
            return _number_in(self._path.read_bytes())
        except OSError:
            return 0

    def record(self, generation: int) -> None:
        folder = self._path.parent
        with exclusively_inside(self._path, inside=folder.parent) as file:
            newest = _number_in(os.pread(file, 64, 0))
            if newest > generation:
                raise self._superseded(generation, newest)
            os.pwrite(file, b"%020d\n" % generation, 0)
        self._mine = generation

    def refuse(self) -> None:
        """Raise `Superseded` if a newer generation than this process's has started."""
        if self._mine and (newest := self.newest()) > self._mine:
            raise self._superseded(self._mine, newest)

    def forget(self) -> None:
        """Remove the file, if no other process of this job is here and no newer generation has been."""
        if not self._path.exists():
            return
        with contextlib.suppress(FileNotFoundError), locks.exclusively(self._path) as file:
            if not folders_in(self._path.parent) and _number_in(os.pread(file, 64, 0)) <= self._mine:
                self._path.unlink()

    def _superseded(self, generation: int, newest: int) -> Superseded:
        return Superseded(where=str(self._path.parent), generation=generation, newest=newest)


def find_snapshots(job: str, *, root: Path | None = None) -> list[Snapshot]:
    """The complete images of a job, newest first, read without taking anything over."""
    holders = [folder for each in memory_roots(root) for folder in folders_in(job_folder(job, root=each))]
    found = [snapshot for holder in holders for snapshot in _snapshots_in(holder)]
    return sorted(found, key=lambda snapshot: snapshot.manifest.order, reverse=True)


def read_snapshot(folder: Path) -> Snapshot | None:
    """The snapshot in one image's folder, if its mark is there and readable. Bytes are not verified here."""
    mark = folder / MARK_NAME
    try:
        manifest = decode(mark.read_bytes(), path=str(mark), keys=None)  # The folder is this user's alone.
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (Damaged, OSError) as error:
        log.warning("ignored a memory image: %s", error)
        return None
    return Snapshot(manifest=manifest, path=folder / FILE_NAME)


def left_images(*, root: Path | None = None) -> Iterator[tuple[Path, Snapshot, bytes]]:
    """The complete images that dead processes of any job have left: of each the name of its job's folder, itself, and the record
    beside it. Nothing is taken over."""
    for each in memory_roots(root):
        for job in folders_in(images_folder(each)):
            for folder in [
                image for holder in folders_in(job) if is_left(holder) for image in folders_in(holder)
            ]:
                with contextlib.suppress(OSError):
                    record = (folder / RECORD_NAME).read_bytes()
                    if (snapshot := read_snapshot(folder)) is not None:
                        yield job, snapshot, record


def _holder_of(folder: Path) -> Holder:
    token = folder.name.partition(".")[0]
    try:
        said = json.loads((folder / OWNER_NAME).read_text(errors="replace").splitlines()[1])
        return Holder(
            folder=folder,
            token=str(said["token"]),
            pid=int(said["pid"]),
            host=str(said["host"]),
            launch=str(said["launch"]),
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError):  # Of version 0.1, or not signed yet.
        return Holder(folder=folder, token=token)


def _snapshots_in(holder: Path) -> Iterator[Snapshot]:
    for folder in folders_in(holder):
        if snapshot := read_snapshot(folder):
            yield snapshot


def _free_bytes(root: Path) -> int:
    try:
        found = os.statvfs(root)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _number_in(data: bytes) -> int:
    try:
        return int(data)
    except ValueError:
        return 0


def _close(mapped: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # A traceback may hold a view; the map goes with it.
        mapped.close()


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_dev, found.st_ino, found.st_size
