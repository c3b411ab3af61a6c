"""What full disks, failing devices and strange neighbours do to the local store: a typed error, the old value,
and nothing left over."""

from __future__ import annotations

import errno
import mmap
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from strata.stores import (
    AccessDenied,
    InvalidKey,
    NoSpace,
    NotFound,
    StoreError,
    Truncated,
)
from strata.stores.direct import CHUNK_BYTES, DirectFile
from strata.stores.local import LocalStore
from tests.stores.actor import value_of
from tests.stores.mounts import remount, small_ext4, small_tmpfs
from tests.stores.suite import each_file
from tests.support_programs import program

PAGE_BYTES = 4096


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "values")


def temporary_files(store: LocalStore) -> list[str]:
    return [name for name in each_file(store.root) if name.startswith(".strata/tmp/")]


# --- full disks ---


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "tmpfs":
        with small_tmpfs(tmp_path / "disk", size_bytes=4 << 20) as at:
            yield at
    else:
        with small_ext4(tmp_path / "disk", size_bytes=8 << 20) as at:
            yield at


def test_a_disk_that_fills_at_any_byte_keeps_the_old_value(small_disk: Path) -> None:
    """Leave a little more space each time, until the value fits: every page it could run out at is tried."""
    store = LocalStore(small_disk / "values")
    store.put("k", b"old")
    value = value_of(9, 160_000)
    filler = small_disk / "filler"
    full_at: list[int] = []
    for free_bytes in range(0, 400_000, PAGE_BYTES):
        leave_free(filler, store, free_bytes)
        try:
            with store.open_write(
                "k"
            ) as writer:  # No hint of the size: the space cannot be checked beforehand.
                for start in range(0, len(value), 10_000):
                    writer.write(value[start : start + 10_000])
                writer.commit()
        except NoSpace as error:
            full_at.append(free_bytes)
            assert "[NVME]" in str(error)  # noqa: PT017 - the loop is about when it stops being raised
            assert error.reason == "No space left on device"  # noqa: PT017
            assert store.read("k") == b"old"
            assert temporary_files(store) == []
        else:
            break
    assert len(full_at) >= 160_000 // PAGE_BYTES
    assert store.read("k") == value
    assert temporary_files(store) == []


def test_a_large_aligned_value_on_a_full_disk_keeps_the_old_one(small_disk: Path) -> None:
    store = LocalStore(small_disk / "values")
    store.put("k", b"old")
    filler = small_disk / "filler"
    with mmap.mmap(-1, 2 << 20) as pages, memoryview(pages) as value:
        for free_bytes in (0, 512 << 10, (1 << 20) + PAGE_BYTES):
            leave_free(filler, store, free_bytes)
            with pytest.raises(NoSpace):
                stream(store, value)
            assert store.read("k") == b"old"
            assert temporary_files(store) == []
        filler.unlink()
        store.put("k", value)
        assert store.read("k") == bytes(2 << 20)


def test_space_is_checked_before_the_first_byte(small_disk: Path) -> None:
    store = LocalStore(small_disk / "values")
    store.put("k", b"old")
    free_bytes = store.free_bytes()
    with pytest.raises(
        NoSpace, match=r"^\[NVME\] Could not write 'k' to .*: No space left on device"
    ) as caught:
        store.put("k", bytes(free_bytes + 1))
    assert caught.value.required_bytes == free_bytes + 1
    assert caught.value.available_bytes == free_bytes
    assert "df -h" in caught.value.hint
    with pytest.raises(NoSpace):
        store.open_write("k", size_hint_bytes=free_bytes + 1)
    assert store.read("k") == b"old"
    assert temporary_files(store) == []


def stream(store: LocalStore, *chunks: bytes | memoryview) -> None:
    """Write 'k' without a hint of its size, so that the space cannot be checked beforehand."""
    with store.open_write("k") as writer:
        for chunk in chunks:
            writer.write(chunk)
        writer.commit()


def leave_free(filler: Path, store: LocalStore, free_bytes: int) -> None:
    """Fill the disk up to `free_bytes`, about: file systems round."""
    filler.unlink(missing_ok=True)
    to_fill_bytes = store.free_bytes() - free_bytes
    with open(filler, "wb", buffering=0) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(to_fill_bytes, 1))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        os.fsync(file.fileno())


def test_a_full_device_is_reported_by_the_first_write() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left on device"):
            DirectFile(fd, direct=True).write(memoryview(mmap.mmap(-1, 1 << 20)))
    finally:
        os.close(fd)


def test_a_limit_on_file_size_is_no_space_at_any_byte(store: LocalStore) -> None:
    """A real failure of write(2) at byte N, on the direct path: the process may write no larger files."""
    script = (
        "import mmap, resource, sys\n"
        "from strata.stores import NoSpace\n"
        "from strata.stores.local import LocalStore\n"
        "store = LocalStore(sys.argv[1])\n"
        "for limit in (1, 4095, 4096, 100_000, 1 << 20, (2 << 20) - 1):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))\n"
        "    try:\n"
        "        store.put('k', memoryview(mmap.mmap(-1, 2 << 20)))\n"
        "        sys.exit(f'written in spite of a limit of {limit}')\n"
        "    except NoSpace:\n"
        "        pass\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))\n"
        "store.put('k', memoryview(mmap.mmap(-1, 2 << 20)))\n"
    )
    store.put("k", b"old")
    subprocess.run([sys.executable, "-c", script, str(store.root)], check=True, timeout=60)
    assert store.read("k") == bytes(2 << 20)
    assert temporary_files(store) == []


# --- failing devices ---


PUT = "store.put('folder/k', value_of(5, 3 << 20))"
PUT_IF_ABSENT = "store.put('folder/k', value_of(5, 3 << 20), if_absent=True)"
READ = "store.read_into('folder/k', memoryview(bytearray(3 << 20)))"


def under_strace(store: LocalStore, what: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Do `what` in a process whose system calls strace spoils or shows; its exit status is the kind of error."""
    script = (
        "import os\n"
        "from strata.stores.protocol import DeviceError, NoSpace, StoreError\n"
        "from strata.stores.local import LocalStore\n"
        "from tests.stores.actor import value_of\n"
        f"store, outcome = LocalStore({str(store.root)!r}), 0\n"
        f"try: {what}\n"
        "except DeviceError: outcome = 5\n"
        "except NoSpace: outcome = 28\n"
        "except StoreError: outcome = 99\n"
        "os._exit(outcome)\n"
    )
    command = [program("strace"), "-f", "-qq", "--seccomp-bpf", *arguments]
    command += [sys.executable, "-B", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def with_failing(store: LocalStore, what: str, call: str, error: str, number: int = 1) -> int:
    """The outcome of `what` when the system call `call` fails, the `number`-th time only."""
    inject = f"inject={call}:error={error}:when={number}"
    result = under_strace(store, what, "-o", "/dev/null", "-e", f"trace={call}", "-e", inject)
    assert result.returncode in (0, 5, 28), result.stderr
    return result.returncode


def test_a_flush_that_fails_is_an_error_and_is_never_retried(store: LocalStore) -> None:
    """Whichever flush fails, and though the next one would succeed: the file's, or that of a directory."""
    store.put("other", b"older")
    store.put("folder/k", b"old")
    outcomes = []
    for number in range(1, 5):
        outcomes.append(with_failing(store, PUT, "fsync", "EIO", number))
        assert store.read("folder/k") in (b"old", value_of(5, 3 << 20))
        assert temporary_files(store) == []
        if number == 1:
            assert store.read("folder/k") == b"old", "published after the flush of its bytes had failed"
    assert outcomes == [5, 5, 5, 0]  # The file, its folder, the root; there is no fourth.
    assert store.read("other") == b"older"


def test_an_exclusive_write_that_fails_can_be_tried_again(store: LocalStore) -> None:
    """Also when only a directory could not be flushed, and the name was there already."""
    store.put("other", b"x")
    for number in range(1, 4):
        assert with_failing(store, PUT_IF_ABSENT, "fsync", "EIO", number) == 5
        assert store.stat("folder/k") is None
        assert temporary_files(store) == []
    assert with_failing(store, PUT_IF_ABSENT, "fsync", "EIO", 4) == 0
    assert store.read("folder/k") == value_of(5, 3 << 20)


@pytest.mark.parametrize(
    ("call", "error", "outcome"), [("write", "EIO", 5), ("write", "ENOSPC", 28), ("rename", "EIO", 5)]
)
def test_a_failing_device_keeps_the_old_value(store: LocalStore, call: str, error: str, outcome: int) -> None:
    store.put("folder/k", b"old")
    assert with_failing(store, PUT, call, error) == outcome
    assert [blob.key for blob in store.list()] == ["folder/k"]
    assert store.read("folder/k") == b"old"
    assert temporary_files(store) == []


def test_a_folder_that_cannot_be_created_leaves_nothing(store: LocalStore) -> None:
    store.put("other", b"older")
    assert with_failing(store, PUT, "mkdir", "ENOSPC") == 28
    assert [blob.key for blob in store.list()] == ["other"]
    assert temporary_files(store) == []


def test_a_read_that_fails_is_a_device_error(store: LocalStore) -> None:
    store.put("folder/k", bytes(3 << 20))
    assert with_failing(store, READ, "preadv,preadv2", "EIO") == 5


def test_bytes_are_flushed_before_the_name_and_the_directories_after(store: LocalStore) -> None:
    result = under_strace(store, PUT, "-y", "-e", "trace=fsync,rename,link,unlink")
    assert result.returncode == 0
    calls = [re.sub(r"^\[pid +\d+\] ", "", line) for line in result.stderr.splitlines()]
    told = [line.split("(")[0] + " " + " ".join(re.findall(r'[<"]([^<>"]+)[>"]', line)) for line in calls]
    root = str(store.root)
    publish = next(number for number, line in enumerate(told) if line.startswith("rename"))
    source, target = told[publish].split()[1:]
    assert target == f"{root}/folder/k"
    assert told[publish - 1] == f"fsync {source}"
    assert told[publish + 1 :] == [f"fsync {root}/folder", f"fsync {root}"]
    assert f"fsync {store.root.parent}" in told[:publish], "the root was made, and its own name not flushed"


def test_a_read_only_disk_is_access_denied(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "disk", size_bytes=1 << 20) as disk:
        store = LocalStore(disk / "values")
        store.put("k", b"old")
        remount(disk, "ro")
        reopened = LocalStore(disk / "values")
        with pytest.raises(AccessDenied, match="Read-only file system"):
            reopened.put("k", b"new")
        with pytest.raises(AccessDenied, match="Read-only file system"):
            reopened.delete("k")
        assert reopened.read("k") == b"old"


# --- neighbours ---


def test_opening_cleans_up_after_dead_writers_only(store: LocalStore) -> None:
    with store.open_write("k") as living:
        living.write(b"still at it")
        (store.root / ".strata/tmp/left-by-the-dead").write_bytes(b"half a value")
        again = LocalStore(store.root)
        assert len(temporary_files(again)) == 1
        assert list(again.list()) == []
        living.commit()
    assert again.read("k") == b"still at it"


def test_opening_while_others_write_is_harmless(store: LocalStore) -> None:
    """A new temporary file exists for a moment before it is locked."""
    stop = threading.Event()

    def keep_opening() -> None:
        while not stop.is_set():
            LocalStore(store.root)

    openers = [threading.Thread(target=keep_opening) for _ in range(2)]
    for opener in openers:
        opener.start()
    try:
        for number in range(60):
            store.put("k", value_of(number, 500))
            assert store.read("k") == value_of(number, 500)
    finally:
        stop.set()
        for opener in openers:
            opener.join()


def test_writing_beside_deletes_that_remove_the_folder(store: LocalStore) -> None:
    """Deleting the last value of a folder removes the folder, perhaps under the feet of the next write."""
    stop = threading.Event()

    def keep_deleting() -> None:
        while not stop.is_set():
            store.delete("a/b/other")
            store.put("a/b/other", b"x")
            store.delete("a/b/other")

    deleter = threading.Thread(target=keep_deleting)
    deleter.start()
    try:
        for number in range(60):
            store.put("a/b/k", value_of(number, 100), if_absent=number % 2 == 1)
            assert store.read("a/b/k") == value_of(number, 100)
            store.delete("a/b/k")
    finally:
        stop.set()
        deleter.join()


def test_opening_and_reading_make_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "not/there")
    assert list(store.list()) == []
    assert store.stat("k") is None
    store.delete("k")
    assert store.free_bytes() > 0
    assert list(tmp_path.iterdir()) == []
    store.put("k", b"x")
    assert (tmp_path / "not/there/k").read_bytes() == b"x"


def test_deleting_everything_leaves_no_folders(store: LocalStore) -> None:
    store.put("a/b/c", b"x")
    store.put("a/d", b"x")
    store.delete("a/b/c")
    assert sorted(path.name for path in (store.root / "a").iterdir()) == ["d"]
    store.delete("a/d")
    assert [path.name for path in store.root.iterdir()] == [".strata"]


def test_a_value_and_a_folder_cannot_share_a_name(store: LocalStore) -> None:
    store.put("a/b", b"x")
    store.put("k", b"x")
    for if_absent in (False, True):
        for key in ("a", "k/below", "k/far/below"):
            with pytest.raises(InvalidKey) as caught:
                store.put(key, b"y", if_absent=if_absent)
            assert caught.value.key == key
    assert {blob.key: store.read(blob.key) for blob in store.list()} == {"a/b": b"x", "k": b"x"}
    assert temporary_files(store) == []


def test_files_of_other_programs_are_values_too(store: LocalStore, tmp_path: Path) -> None:
    store.root.mkdir()
    (store.root / "legacy.pt").write_bytes(b"torch")
    (tmp_path / "elsewhere").write_bytes(b"linked")
    (store.root / "link").symlink_to(tmp_path / "elsewhere")
    (store.root / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(store.root / "pipe")
    assert [blob.key for blob in store.list()] == ["legacy.pt", "link"]
    assert store.read("link") == b"linked"
    for key in ("dangling", "folder"):
        with pytest.raises(NotFound):
            store.read(key)


def test_a_file_cut_short_by_others_is_truncated_not_short(store: LocalStore) -> None:
    size_bytes = 2 * CHUNK_BYTES
    store.put("k", bytes(size_bytes))
    os.truncate(store.path_of("k"), size_bytes - 1)
    with pytest.raises(Truncated):
        store.read_into("k", memoryview(bytearray(size_bytes)))
    with pytest.raises(Truncated):
        store.read("k", length=size_bytes)


def test_a_root_that_is_a_file_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    store = LocalStore(tmp_path / "file")
    with pytest.raises(StoreError):
        store.put("k", b"x")
    assert list(store.list()) == []
    assert store.stat("k") is None


# --- the direct path ---


def test_large_aligned_memory_goes_around_the_page_cache(store: LocalStore) -> None:
    with mmap.mmap(-1, 2 << 20) as pages, memoryview(pages) as value, store.open_write("k") as writer:
        writer.write(value)
        assert is_direct(writer._fd), "this file system has direct I/O: it must be used"
        writer.commit()


@pytest.fixture
def disk_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk: tmpfs, which many systems have at /tmp, takes any direct write."""
    for place in (tmp_path, Path("/var/tmp"), Path(__file__).parent):
        with suppress(OSError), tempfile.TemporaryDirectory(prefix="strata-test-", dir=place) as folder:
            if refuses_misaligned_writes(Path(folder)):
                yield Path(folder)
                return
    pytest.skip("needs a file system that refuses misaligned direct writes")


def refuses_misaligned_writes(folder: Path) -> bool:
    fd = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        os.write(fd, b"odd")
    except OSError as error:
        return error.errno == errno.EINVAL
    else:
        return False
    finally:
        os.close(fd)


def test_a_file_system_that_refuses_direct_writes_gets_buffered_ones(disk_folder: Path) -> None:
    path = disk_folder / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.write(fd, b"odd")  # Every direct write from here on is misaligned, which the kernel refuses.
        with mmap.mmap(-1, 2 << 20) as pages, memoryview(pages) as value:
            value[:5] = b"start"
            file = DirectFile(fd, direct=True)
            file.write(value)
            file.finish()
            assert path.read_bytes() == b"odd" + bytes(value)
        assert not is_direct(fd)
    finally:
        os.close(fd)


def is_direct(fd: int) -> bool:
    flags = re.search(r"flags:\s*([0-7]+)", Path(f"/proc/self/fdinfo/{fd}").read_text())
    assert flags is not None
    return bool(int(flags[1], 8) & os.O_DIRECT)
