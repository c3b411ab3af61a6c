"""Values as objects in S3, Google Cloud Storage or Azure, and anything that speaks S3.

Large values travel as parallel parts, up and down. Requests are retried within a budget of time and count.
Every object carries the mark of the write that made it, so a reply lost on the way back does no harm: a write
that ends in doubt looks for its own mark, and has succeeded if it finds it. With `if_absent` the server decides
who is first, in one request, which limits such values to 5 GiB. A read in parts is pinned to one version.

An upload that is given up is ended on the server. Parts of one whose process was killed, or that were still on
their way, are invisible here but may be billed: give the bucket a lifecycle rule that ends incomplete multipart
uploads. Clients do not survive `fork`; open a new store there.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from strata.backoff import Backoff
from strata.stores.keys import RESERVED, check_key, check_prefix
from strata.stores.object_clients import (
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    PROVIDERS,
    ClientSettings,
    make_client,
)
from strata.stores.object_errors import explain
from strata.stores.object_writers import GatheringWriter, StreamWriter
from strata.stores.protocol import (
    AccessDenied,
    AlreadyExists,
    Blob,
    BlobWriter,
    Buffer,
    Misconfigured,
    NotFound,
    Replaced,
    StoreError,
    TakePart,
    Truncated,
    Unavailable,
)

log = logging.getLogger("strata.stores")

PART_BYTES = 16 << 20
MAX_CONCURRENCY = 4
"""Parts in flight at once. On two cores four were faster than eight."""

_MOST_PARTS = 10_000
_MOST_BYTES_IN_ONE_REQUEST = 5 << 30
_SLOWEST_UPLOAD_BYTES_PER_S = 4 << 20
_MOST_VERSIONS_TRIED = 100
"""A read is two requests or more: a value that is written all the time may be replaced between them many times over."""
_MARK = "stratawrite"  # Letters only: Azure takes nothing else in the name of a metadata field.


class ObjectStore:
    """A bucket, or a folder in one.

    `config` goes to the client library as it is: `region`, `endpoint`, `access_key_id`, `secret_access_key` …
    """

    def __init__(
        self,
        scheme: str,
        bucket: str,
        prefix: str = "",
        *,
        part_bytes: int = PART_BYTES,
        max_concurrency: int = MAX_CONCURRENCY,
        max_retries: int = 6,
        retry_budget_s: float = 60.0,
        connect_timeout_s: float = 5.0,
        request_timeout_s: float = 60.0,
        **config: Any,
    ) -> None:
        self._provider = PROVIDERS[scheme]
        self._bucket = bucket
        self._prefix = prefix.strip("/")
        if self._prefix:
            check_key(self._prefix, tier=self.tier)
        self._part_bytes = part_bytes
        self._max_concurrency = max_concurrency
        self._settings = ClientSettings(
            provider=self._provider,
            bucket=bucket,
            connect_timeout_s=connect_timeout_s,
            request_timeout_s=request_timeout_s,
            max_retries=max_retries,
            retry_budget_s=retry_budget_s,
            config=config,
        )
        self._client = make_client(self._settings)
        self._client_without_retries = make_client(replace(self._settings, max_retries=0))
        self._bucket_seen = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def tier(self) -> str:
        return self._provider.tier

    @property
    def url(self) -> str:
        return f"{self._provider.scheme}://{self._bucket}" + (f"/{self._prefix}" if self._prefix else "")

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        import obstore

        path, view, mark = self._path(key), memoryview(data).cast("B"), uuid.uuid4().hex
        if if_absent:
            self._put_if_absent(key, path, view, mark)
            return
        try:
            obstore.put(
                self._client,
                path,
                view,
                attributes={_MARK: mark},
                use_multipart=len(view) > self._part_bytes,
                chunk_size=self._part_bytes_for(len(view)),
                max_concurrency=self._max_concurrency,
            )
        except Exception as error:
            self._settle(error, key, path, mark)

    def open_write(
        self, key: str, *, size_hint_bytes: int | None = None, if_absent: bool = False
    ) -> BlobWriter:
        import obstore

        path, mark = self._path(key), uuid.uuid4().hex
        if if_absent:
            if self.stat(key) is not None:
                raise self._exists(key)
            return GatheringWriter(key=key, send=lambda view: self._put_if_absent(key, path, view, mark))
        file = obstore.open_writer(
            self._client,
            path,
            attributes={_MARK: mark},
            buffer_size=self._part_bytes_for(size_hint_bytes or 0),
            max_concurrency=self._max_concurrency,
        )
        return StreamWriter(
            file,
            key=key,
            fail=lambda error: self._explained(error, key, "write"),
            settle=lambda error: self._settle(error, key, path, mark),
        )

    def read(self, key: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if length is not None and length < 0:
            raise ValueError(f"length ({length}) must not be negative")
        return bytes(self._read(key, offset, length, None))

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        view = buffer.cast("B")
        self._read(key, offset, len(view), view)

    def read_parts(self, key: str, take: TakePart, *, size_bytes: int, part_bytes: int) -> None:
        found = self._found(key)
        if found["size"] != size_bytes:
            raise self._truncated(key, found["size"], f"{size_bytes} bytes were expected", size_bytes)

        def fetch(start: int) -> bool:
            end = min(start + part_bytes, size_bytes)
            data = self._fetch(key, start, end - start, found["e_tag"])
            if data is None:
                return False
            take(start, memoryview(data))
            return True

        if not self._in_parallel(fetch, range(0, size_bytes, part_bytes)):
            raise Unavailable(
                f"'{key}' in {self.url} was replaced while it was read.", tier=self.tier, key=key
            )

    def read_version(self, key: str, version: str, *, offset: int, length: int) -> memoryview:
        if length <= self._part_bytes:
            data = self._fetch(key, offset, length, version or None)
            if data is not None:
                return memoryview(data)
        else:
            target = memoryview(bytearray(length))
            if self._read_version(key, target, offset, version or None):
                return target
        self._found(key)  # Raises where it does not exist.
        raise Replaced(
            f"'{key}' in {self.url} was replaced by another version.",
            tier=self.tier,
            key=key,
            reason="it was replaced",
        )

    def stat(self, key: str) -> Blob | None:
        try:
            found = self._found(key)
        except NotFound:
            return None
        return Blob(
            key=key,
            size_bytes=found["size"],
            modified_s=found["last_modified"].timestamp(),
            version=found["e_tag"] or "",
        )

    def list(self, prefix: str = "") -> Iterator[Blob]:
        import obstore

        check_prefix(prefix, tier=self.tier)
        folder = "/".join(part for part in (self._prefix, prefix.rpartition("/")[0]) if part)
        skip = len(self._prefix) + 1 if self._prefix else 0
        found = []
        try:
            for page in obstore.list(self._client, folder or None, chunk_size=1000):
                for meta in page:
                    key = meta["path"][skip:]
                    if key.startswith(prefix) and not key.startswith(f"{RESERVED}/"):
                        modified_s = meta["last_modified"].timestamp()
                        found.append(
                            Blob(
                                key=key,
                                size_bytes=meta["size"],
                                modified_s=modified_s,
                                version=meta["e_tag"] or "",
                            )
                        )
        except Exception as error:
            raise self._explained(error, prefix, "list") from error
        self._bucket_seen = True
        # Servers that keep objects in folders list folder by folder, which is not quite key order.
        return iter(sorted(found, key=lambda blob: blob.key))

    def delete(self, key: str) -> None:
        import obstore

        path = self._path(key)
        try:
            obstore.delete(self._client, path)
        except FileNotFoundError:
            return
        except Exception as error:
            raise self._explained(error, key, "delete") from error

    def free_bytes(self) -> int | None:
        return None

    # --- writing ---

    def _part_bytes_for(self, size_bytes: int) -> int:
        """Parts as configured, or larger where a value would otherwise need more of them than servers take."""
        return max(self._part_bytes, -(-size_bytes // _MOST_PARTS))

    def _put_if_absent(self, key: str, path: str, view: memoryview, mark: str) -> None:
        import obstore

        if len(view) > _MOST_BYTES_IN_ONE_REQUEST:
            raise StoreError(
                f"'{key}' has {len(view)} bytes; values written only if absent may have at most {_MOST_BYTES_IN_ONE_REQUEST}.",
                tier=self.tier,
                key=key,
                hint="Write the large value without a condition, and publish it with a small one that names it.",
            )
        # Retries are made here and not in the client, to know which refusals may follow from a request sent twice.
        client = self._client_without_retries
        upload_s = len(view) / _SLOWEST_UPLOAD_BYTES_PER_S
        if upload_s > self._settings.request_timeout_s:
            client = make_client(replace(self._settings, max_retries=0, request_timeout_s=upload_s))
        budget = self._budget()
        while True:
            try:
                obstore.put(client, path, view, mode="create", attributes={_MARK: mark}, use_multipart=False)
                return
            except Exception as error:
                failure = error
            if type(failure).__name__ == "AlreadyExistsError":
                try:
                    found = self._mark_of(key, path, self._client)
                except AccessDenied:  # A client that may only write has to believe the refusal.
                    found = ""
                if found == mark:
                    return
                if found is not None:
                    raise self._exists(key) from failure
                # It is absent: it was deleted meanwhile, or two writers collided and the server refused both.
            else:
                explained = self._explained(failure, key, "write")
                if not isinstance(explained, Unavailable):
                    raise explained from failure
            if not self._wait(budget, f"writing '{key}' to {self.url}", failure):
                self._settle(failure, key, path, mark)
                return

    def _settle(self, error: Exception, key: str, path: str, mark: str) -> None:
        """Return if the write that ended in `error` took effect nevertheless; raise the cause if not."""
        explained = self._explained(error, key, "write")
        if isinstance(explained, Unavailable | NotFound) or type(explained) is StoreError:
            with contextlib.suppress(StoreError):
                if self._mark_of(key, path, self._client_without_retries) == mark:
                    log.warning(
                        "%s: the reply to writing '%s' was lost, but the value is there", self.url, key
                    )
                    return
        if isinstance(explained, NotFound):  # The upload no longer exists, and neither does the object.
            explained = Unavailable(
                f"The upload of '{key}' to {self.url} was ended by the server before it was complete.",
                tier=self.tier,
                key=key,
                hint="Try again.",
            )
        raise explained from error

    def _mark_of(self, key: str, path: str, client: Any) -> str | None:
        """The mark of the write that made the object, "" if it has none, None if there is no object."""
        import obstore

        try:
            return str(obstore.get(client, path, options={"head": True}).attributes.get(_MARK, ""))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._explained(error, key, "read") from error

    # --- reading ---

    def _read(self, key: str, offset: int, length: int | None, view: memoryview | None) -> memoryview:
        """`length` bytes (None: all that follow) in `view`, or in new memory."""
        if offset < 0:
            raise ValueError(f"offset ({offset}) must not be negative")
        for _ in range(_MOST_VERSIONS_TRIED):
            found = self._found(key)
            end = found["size"] if length is None else offset + length
            if offset > found["size"] or end > found["size"]:
                raise self._truncated(key, found["size"], f"bytes {offset} to {end} were asked for", end)
            target = memoryview(bytearray(end - offset)) if view is None else view
            if self._read_version(key, target, offset, found["e_tag"]):
                return target
        raise Unavailable(
            f"'{key}' in {self.url} was replaced repeatedly while it was read.", tier=self.tier, key=key
        )

    def _found(self, key: str) -> Any:
        import obstore

        path = self._path(key)
        try:
            found = obstore.head(self._client, path)
        except FileNotFoundError as error:
            self._check_bucket()
            raise NotFound(
                f"'{key}' is not in {self.url}.", tier=self.tier, key=key, reason="not found"
            ) from error
        except Exception as error:
            raise self._explained(error, key, "read") from error
        self._bucket_seen = True
        return found

    def _check_bucket(self) -> None:
        """A missing bucket answers like a missing key: make sure, once, that an empty store is not just a typo."""
        if not self._bucket_seen:
            try:
                next(self.list(f"{RESERVED}-no-such-folder/"), None)
            except Misconfigured:
                raise
            except StoreError:
                pass  # Not allowed to list: then this cannot be known.

    def _read_version(self, key: str, view: memoryview, offset: int, version: str | None) -> bool:
        """Fill `view` from one version of the object; False if that version no longer exists."""

        def fetch(start: int) -> bool:
            part = view[start : start + self._part_bytes]
            data = self._fetch(key, offset + start, len(part), version)
            if data is None:
                return False
            # Not `part[:] = …`, which would hold the interpreter's lock, also from the threads beside this one.
            np.copyto(np.frombuffer(part, np.uint8), np.frombuffer(memoryview(data), np.uint8))
            return True

        return self._in_parallel(fetch, range(0, len(view), self._part_bytes))

    def _in_parallel(self, fetch: Callable[[int], bool], starts: Sequence[int]) -> bool:
        """Whether all of them could be fetched; what fails, or is not there, ends the others."""
        if len(starts) <= 1:
            return all(fetch(start) for start in starts)
        with ThreadPoolExecutor(min(self._max_concurrency, len(starts)), "strata-read") as pool:
            try:
                return all(pool.map(fetch, starts))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, key: str, offset: int, size_bytes: int, version: str | None) -> Any | None:
        """So many bytes of one version of the object, in memory of the client's; None if that version no longer exists."""
        import obstore

        path = self._path(key)
        options: Any = {"range": (offset, offset + size_bytes), "if_match": version}
        budget = self._budget()
        while True:
            try:
                answer = obstore.get(self._client, path, options=options)
                if version and _is_another(answer.meta["e_tag"], version):
                    return None  # Not every server heeds which version it was asked for.
                data = answer.bytes()
                if len(data) == size_bytes:
                    return data
                failure: Exception = EOFError(f"received {len(data)} bytes instead of {size_bytes}")
            except FileNotFoundError:
                return None
            except Exception as error:
                if type(error).__name__ == "PreconditionError":
                    return None
                failure = error
            # The client retries whole requests; an answer that breaks off in its middle is retried here.
            explained = self._explained(failure, key, "read")
            if not isinstance(explained, Unavailable) or not self._wait(
                budget, f"reading '{key}' from {self.url}", failure
            ):
                raise explained from failure

    # --- words ---

    def _path(self, key: str) -> str:
        check_key(key, tier=self.tier)
        return f"{self._prefix}/{key}" if self._prefix else key

    def _budget(self) -> Backoff:
        return Backoff(
            first_s=FIRST_DELAY_S,
            longest_s=LONGEST_DELAY_S,
            retries=self._settings.max_retries,
            budget_s=self._settings.retry_budget_s,
        )

    def _wait(self, budget: Backoff, doing: str, failure: Exception) -> bool:
        """Pause before another attempt; False, at once, if there is to be none."""
        if (pause_s := budget.pause_s()) is None:
            return False
        log.warning("%s failed (%s), retrying in %.1f s", doing, type(failure).__name__, pause_s)
        time.sleep(pause_s)
        return True

    def _explained(self, error: BaseException, key: str, operation: str) -> StoreError:
        return explain(error, provider=self._provider, bucket=self._bucket, key=key, operation=operation)

    def _truncated(self, key: str, has_bytes: int, wanted: str, end: int) -> Truncated:
        return Truncated(
            f"'{key}' in {self.url} has {has_bytes} bytes; {wanted}.",
            tier=self.tier,
            key=key,
            reason=f"{has_bytes} bytes where {end} were expected",
        )

    def _exists(self, key: str) -> AlreadyExists:
        return AlreadyExists(
            f"'{key}' already exists in {self.url}, and was to be written only if absent.",
            tier=self.tier,
            key=key,
            reason="already exists",
        )


def _is_another(e_tag: str | None, version: str) -> bool:
    """Listings may leave out the quotes that a single object's tag has."""
    return bool(e_tag) and str(e_tag).strip('"') != version.strip('"')
