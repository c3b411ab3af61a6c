"""From a URL, or the environment, to a store.

`/dir`, `file:///dir`, `memory://job`, `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`.
Opening touches neither network nor disk beyond the temporary files of dead writers: a wrong bucket or missing
credentials show on first use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias
from urllib.parse import unquote, urlsplit

from strata.errors import StrataError
from strata.stores.protocol import Store

_EXAMPLES = "/dir, file:///dir, memory://job, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"


StoreOption: TypeAlias = str | float | bool | os.PathLike[str] | None
"""A value of one of a store's options. Which there are depends on the store, and on the client of object storage underneath."""


class InvalidStoreURL(StrataError, ValueError):
    """The text does not name a store."""

    code: ClassVar[str] = "invalid_store_url"

    def __init__(self, url: str, problem: str, *, instead: str = _EXAMPLES) -> None:
        super().__init__(f"{url!r} is not a checkpoint destination: {problem}.", hint=f"Write {instead}.")
        self.url = url


def open_store(url: str | os.PathLike[str], **options: StoreOption) -> Store:
    """The store that `url` names. `options` go to it as they are: `limit_bytes` for memory, `region`,
    `endpoint`, `max_concurrency` and the like for object storage."""
    text = os.fspath(url)
    if not text or "\0" in text:
        raise InvalidStoreURL(text, "it is empty" if not text else "it contains a NUL character")
    if "://" not in text:
        return _open_local(text, os.path.expanduser(text), options)
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise InvalidStoreURL(text, str(error)) from error
    if parts.query or parts.fragment:
        raise InvalidStoreURL(text, "it has a '?' or '#' part", instead="the options as keyword arguments")
    if parts.username is not None or parts.password is not None:
        raise InvalidStoreURL(
            f"{parts.scheme}://…",
            "it contains credentials",
            instead="them in the environment, not in the URL",
        )
    match parts.scheme:
        case "file":
            if parts.netloc not in ("", "localhost"):
                raise InvalidStoreURL(
                    text, "a file URL has three slashes", instead=f"file:///{parts.netloc}{parts.path}"
                )
            return _open_local(text, unquote(parts.path), options)
        case "memory":
            return _open_memory(text, parts.netloc, parts.path, options)
        case "s3" | "s3a" | "gs" | "gcs" | "az" | "azure":
            if not parts.netloc:
                raise InvalidStoreURL(text, "it names no bucket", instead=f"{parts.scheme}://bucket/prefix")
            from strata.stores.object import ObjectStore

            given: dict[str, Any] = options  # Checked by those who take them.
            return ObjectStore(parts.scheme, parts.netloc, parts.path, **given)
        case scheme:
            raise InvalidStoreURL(text, f"the scheme '{scheme}' is not known")


_SCHEMES = {
    "local": "",
    "file": "",
    "memory": "memory://",
    "s3": "s3://",
    "gcs": "gs://",
    "gs": "gs://",
    "azure": "az://",
    "az": "az://",
}
_AWS_OPTIONS = {
    "AWS_REGION": "region",
    "AWS_ACCESS_KEY_ID": "access_key_id",
    "AWS_SECRET_ACCESS_KEY": "secret_access_key",
    "AWS_SESSION_TOKEN": "session_token",
    "AWS_ENDPOINT_URL": "endpoint",
}


def store_from_env(environ: Mapping[str, str] | None = None) -> Store:
    """The store that `STORAGE_BACKEND` (local, s3, gcs, azure or memory) and `CHECKPOINT_BUCKET`, or `CHECKPOINT_DIR`, name.

    `CHECKPOINT_BUCKET` is a bucket with an optional prefix, a directory for `local`, a job name for `memory`, or
    a whole URL, and then says enough by itself. `CHECKPOINT_DIR` is a directory: the one that `local` means, and taken where
    nothing else is set. S3 also takes `AWS_REGION`, `AWS_ACCESS_KEY_ID`,
    `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN` and `AWS_ENDPOINT_URL` from here.
    """
    environ = os.environ if environ is None else environ
    place, folder = environ.get("CHECKPOINT_BUCKET", ""), environ.get("CHECKPOINT_DIR", "")
    backend = environ.get("STORAGE_BACKEND", "").lower()
    if backend and backend not in _SCHEMES:
        raise InvalidStoreURL(
            backend,
            "STORAGE_BACKEND must say what kind of storage is meant",
            instead="STORAGE_BACKEND=local, s3, gcs, azure or memory",
        )
    if folder and (backend == "local" or not (backend or place)):
        return open_store(folder)
    if not place:
        raise InvalidStoreURL(
            place,
            f"STORAGE_BACKEND is {backend}, and CHECKPOINT_BUCKET is not set"
            if backend
            else "neither CHECKPOINT_DIR nor CHECKPOINT_BUCKET is set",
            instead="CHECKPOINT_BUCKET=bucket, or a URL"
            if backend
            else "a path, or CHECKPOINT_DIR=/dir, or CHECKPOINT_BUCKET=s3://bucket/prefix",
        )
    if "://" not in place:
        backend = backend or ("local" if place.startswith(("/", ".")) else "")
        if not backend:
            raise InvalidStoreURL(
                place,
                "STORAGE_BACKEND must name the kind of storage of CHECKPOINT_BUCKET",
                instead="STORAGE_BACKEND=local, s3, gcs, azure or memory",
            )
        place = _SCHEMES[backend] + place
    options = {}
    if place.startswith(("s3://", "s3a://")):
        options = {option: environ[name] for name, option in _AWS_OPTIONS.items() if environ.get(name)}
    return open_store(place, **options)


def _open_local(url: str, path: str, options: dict[str, Any]) -> Store:
    from strata.stores.local import LocalStore

    if not path.startswith("/") and url.startswith("file:"):
        raise InvalidStoreURL(url, "it names no directory", instead="file:///dir")
    return LocalStore(path, **options)


def _open_memory(url: str, job: str, path: str, options: dict[str, Any]) -> Store:
    from strata.stores.memory import MemoryStore

    if not job or path.strip("/"):
        raise InvalidStoreURL(url, "memory has one name and no path", instead="memory://job")
    try:
        return MemoryStore(job, **options)
    except ValueError as error:
        raise InvalidStoreURL(url, str(error), instead="memory://job") from error
