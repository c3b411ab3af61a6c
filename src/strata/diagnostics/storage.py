"""Checks of where checkpoints go: local disk and S3."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from strata.diagnostics.report import CheckResult, Targets
from strata.errors import StrataError

GIB = 1 << 30
FULL_BYTES, SCARCE_BYTES = GIB, 10 * GIB


def disk(targets: Targets) -> Iterator[CheckResult]:
    folder = Path(targets.checkpoint_dir or ".").expanduser().absolute()
    if not folder.is_dir():
        yield CheckResult(
            name="disk", verdict="fail", found=f"{folder} does not exist", fix=f"Create it: mkdir -p {folder}"
        )
        return
    stat = os.statvfs(folder)
    free, total = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        yield CheckResult(
            name="disk",
            verdict="fail",
            found=f"{folder} cannot be written: {error.strerror}",
            fix=f"Check free space and owner: df -h {folder}; ls -la {folder}",
        )
        return
    yield CheckResult(
        name="disk",
        verdict="fail" if free < FULL_BYTES else "warn" if free < SCARCE_BYTES else "ok",
        found=f"{folder}: {free / GIB:.1f} of {total / GIB:.1f} GiB free, writable",
        fix=""
        if free >= SCARCE_BYTES
        else "Remove old checkpoints, or keep fewer: checkpoint.keep_last_n: 3",
    )


def s3(targets: Targets) -> Iterator[CheckResult]:
    if not targets.s3_bucket:
        yield CheckResult(
            name="s3",
            verdict="skip",
            found="no bucket named",
            fix="Pass one to check it: strata doctor --s3-bucket BUCKET",
        )
        return
    yield from _probe(targets.s3_bucket, targets.s3_region)


def probe_s3(bucket: str, *, region: str | None = None) -> list[str]:
    """What the credentials of this process may not do in the bucket; empty if they may do all that is needed."""
    return [
        f"{result.found.rstrip('.')}. {result.fix}"
        for result in _probe(bucket, region)
        if result.verdict == "fail"
    ]


def _probe(bucket: str, region: str | None) -> Iterator[CheckResult]:
    from strata.stores import open_store

    key, payload = f"strata-doctor-{uuid.uuid4().hex}", b"probe"
    try:
        options = {"region": region} if region else {}
        store = open_store(
            f"s3://{bucket}", max_retries=1, retry_budget_s=5.0, request_timeout_s=5.0, **options
        )
    except StrataError as error:
        yield CheckResult(name="s3", verdict="fail", found=error.message, fix=error.hint)
        return

    def read_back() -> None:
        if store.read(key) != payload:
            raise StrataError("the object read back differs from the one written")

    written = False
    steps: tuple[tuple[str, Callable[[], object]], ...] = (
        ("write", lambda: store.put(key, payload)),
        ("read", read_back),
        ("list", lambda: list(store.list(key))),
        ("delete", lambda: store.delete(key)),
    )
    for step, action in steps:
        name = f"s3 {step}"
        if step == "read" and not written:
            yield CheckResult(name=name, verdict="skip", found="nothing was written that could be read back")
            continue
        try:
            action()
        except StrataError as error:
            left = f"; {key} is left in the bucket" if step == "delete" and written else ""
            yield CheckResult(
                name=name, verdict="fail", found=f"s3://{bucket}: {error.message}{left}", fix=error.hint
            )
        else:
            written = written or step == "write"
            yield CheckResult(name=name, verdict="ok", found=f"s3://{bucket}: allowed")
