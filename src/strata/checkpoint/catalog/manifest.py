"""The manifest: the one small file whose existence makes a checkpoint exist.

Plain JSON, never pickle. It says what the payload must hash to, where each tensor lies in it, which data had been
consumed, who wrote it and after which checkpoint. It ends with a digest of itself and is written in one exact
form, so that any changed bit is noticed. Where keys are configured it is signed as well (`signing`). Manifests are never
changed, only published and deleted.

Order in time is `order`: the generation, then a sequence number that each author counts on from the highest it has
seen. It is not the step, which goes back when training does, and not the clock alone, which machines disagree about.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, NoReturn, TypeAlias

import xxhash

from strata.checkpoint.catalog.signing import Keys, Signature, SigningError
from strata.checkpoint.copying.digest import KEY_VARIABLE, SHA256, XXH3, Digest, new_hasher
from strata.checkpoint.errors import Damaged, NewerFormat, Untrusted
from strata.core.types import CheckpointId as CheckpointId
from strata.stores.keys import check_key

SCHEMA = 2
SCHEMA_WITH_ALGORITHM = 3
READABLE = (1, 2, 3)
"""Version 1 had neither runs nor lineages, and called the durable parent `lasting_parent`. Version 3 is 2 with digests by
another algorithm than xxh3-128, which earlier versions would take for damage."""
SUFFIX = ".manifest.json"

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

IMAGE = "image"  # one payload: a .pt file
BYTES = "bytes"  # one payload: what the caller gave
SHARDED = "sharded"  # one payload per rank, described by `layout`


class TensorEntry(NamedTuple):
    """Where the bytes of one tensor lie in the payload, and what it was when saved. A tuple, because a manifest may have
    tens of thousands of them, and a restart reads them all."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    kind: str = "tensor"
    """`tensor`, or what it is turned back into on load: `numpy`, `numpy_scalar`, `jax`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One payload object and what it must hash to."""

    key: str
    size_bytes: int
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    checkpoint_id: CheckpointId
    step: int
    epoch: int
    created_at: float
    """Unix seconds by the author's clock, for display. `order` decides which checkpoint is newer."""
    format: str
    parts: tuple[Part, ...]
    tensors: tuple[TensorEntry, ...] = ()
    layout: Json = None
    """For sharded state: whatever its reader needs. Opaque here."""
    metadata: Mapping[str, Json] = field(default_factory=dict)
    data: Json = None
    """The committed data position that belongs to these weights. Opaque here."""
    world_size: int = 1
    generation: int = 0
    sequence: int = 0
    author: str = ""
    run: str = ""
    """The run it belongs to; empty if no elastic job saved it."""
    lineage: str = ""
    """Named after the first ancestor; see `strata.core.jobs.lineage`."""
    parent: CheckpointId | None = None
    """The nearest ancestor, in whatever tier."""
    durable_parent: CheckpointId | None = None
    """The nearest ancestor that was known to be durable when this one was created."""

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def digest(self) -> str:
        """One digest for the whole checkpoint."""
        if len(self.parts) == 1:
            return self.parts[0].digest.whole
        return str(xxhash.xxh3_128_hexdigest("".join(part.digest.whole for part in self.parts).encode()))

    @property
    def order(self) -> tuple[int, int, float, str]:
        return (self.generation, self.sequence, self.created_at, self.checkpoint_id)

    def tensors_in(self, chunks: Iterable[int]) -> list[str]:
        """Names of the tensors with bytes in these chunks of a single payload."""
        chunk_bytes = self.parts[0].digest.chunk_bytes
        spans = [(n * chunk_bytes, (n + 1) * chunk_bytes) for n in chunks]
        return [
            entry.name
            for entry in self.tensors
            if any(
                entry.offset_bytes < end and start < entry.offset_bytes + entry.size_bytes
                for start, end in spans
            )
        ]

    def encode(self, keys: Keys | None = None) -> bytes:
        """As it is stored; signed where there are keys to sign with. Raises `SigningError` where that is not possible."""
        algorithms = {part.digest.algorithm for part in self.parts}
        if keys is not None and algorithms != {SHA256}:
            raise SigningError(
                f"The checkpoint {self.checkpoint_id} was hashed with {', '.join(algorithms)}, which can be forged, "
                "so it cannot be signed.",
                hint=f"Save it again: {KEY_VARIABLE} was set after it was created.",
            )
        body = {
            "schema": SCHEMA if algorithms <= {XXH3} else SCHEMA_WITH_ALGORITHM,
            "checkpoint_id": self.checkpoint_id,
            "step": self.step,
            "epoch": self.epoch,
            "created_at": self.created_at,
            "format": self.format,
            "parts": [
                {
                    "key": part.key,
                    "size": part.size_bytes,
                    "digest": part.digest.whole,
                    "chunk_size": part.digest.chunk_bytes,
                    "chunks": part.digest.chunks,
                    **({"algorithm": part.digest.algorithm} if part.digest.algorithm != XXH3 else {}),
                }
                for part in self.parts
            ],
            "layout": plain_json(self.layout, name="layout"),
            "metadata": plain_json(self.metadata, name="metadata"),
            "data": plain_json(self.data, name="data"),
            "world_size": self.world_size,
            "generation": self.generation,
            "sequence": self.sequence,
            "author": self.author,
            "run": self.run,
            "lineage": self.lineage,
            "parent": self.parent,
            "durable_parent": self.durable_parent,
        }
        pieces = {name: _canonical(value) for name, value in body.items()} | {"tensors": _table(self.tensors)}
        text = "{" + ",".join(f'"{name}":{pieces[name]}' for name in sorted(pieces)) + "}"
        sealed = text.encode()
        return _seal(sealed, keys.sign(sealed) if keys is not None else None)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Ten thousand new tuples would trigger the cyclic collector repeatedly, for no benefit."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@no_collection()
def decode(raw: bytes, *, path: str, keys: Keys | None) -> Manifest:
    """Read a manifest back. Raises `Damaged` unless every bit is as it was written, `NewerFormat` where another version wrote
    them, and `Untrusted` where `keys` do not accept it."""
    try:
        unsigned, signature = _split_signature(raw)
        sealed = unsigned[len(_SEAL_HEAD) : -_SEAL_TAIL_BYTES]
        if raw != _seal(sealed, signature):
            raise Damaged(path=path, reason="the manifest does not match its own digest")
        if keys is not None and (problem := keys.problem(sealed, signature)) is not None:
            raise Untrusted(path=path, reason=problem)
        body = json.loads(sealed.decode(), parse_constant=_refuse, parse_float=_finite)
        if b"\\ud" in sealed.lower():
            # Half a character, written as an escape, is text that cannot be encoded.
            json.dumps(body, ensure_ascii=False).encode()
        if body["schema"] > READABLE[-1]:
            raise NewerFormat(path=path, what="manifest schema", found=body["schema"], newest=READABLE[-1])
        if body["schema"] not in READABLE:
            raise Damaged(path=path, reason=f"unknown manifest schema {body['schema']}")
        if body["schema"] == 1:
            body |= {"run": "", "lineage": "", "durable_parent": body["lasting_parent"]}
        manifest = Manifest(
            checkpoint_id=CheckpointId(body["checkpoint_id"]),
            step=body["step"],
            epoch=body["epoch"],
            created_at=body["created_at"],
            format=body["format"],
            parts=tuple(
                Part(
                    key=part["key"],
                    size_bytes=part["size"],
                    digest=Digest(
                        chunk_bytes=part["chunk_size"],
                        chunks=tuple(part["chunks"]),
                        whole=part["digest"],
                        algorithm=part.get("algorithm", XXH3),
                    ),
                )
                for part in body["parts"]
            ),
            tensors=tuple(
                TensorEntry(name, dtype, tuple(shape), offset, size, kind)
                for name, dtype, shape, offset, size, kind in body["tensors"]
            ),
            layout=body["layout"],
            metadata=body["metadata"],
            data=body["data"],
            world_size=body["world_size"],
            generation=body["generation"],
            sequence=body["sequence"],
            author=body["author"],
            run=body["run"],
            lineage=body["lineage"],
            parent=body["parent"],
            durable_parent=body["durable_parent"],
        )
        _check(manifest)
        if (
            keys is not None
            and signature is not None
            and any(p.digest.algorithm != SHA256 for p in manifest.parts)
        ):
            raise Untrusted(path=path, reason="it is signed over digests that can be forged")
        return manifest
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise Damaged(path=path, reason=f"the manifest is not readable ({type(error).__name__})") from error


def _check(manifest: Manifest) -> None:
    """A digest stops accidents, not somebody who writes a manifest of their own: what is read must be what the rest of
    the code takes it for. Raises `ValueError`."""
    counts = [manifest.step, manifest.epoch, manifest.world_size, manifest.generation, manifest.sequence]
    texts = [manifest.checkpoint_id, manifest.format, manifest.author, manifest.run, manifest.lineage]
    texts += [parent for parent in (manifest.parent, manifest.durable_parent) if parent is not None]
    for part in manifest.parts:
        counts += [part.size_bytes, part.digest.chunk_bytes]
        texts += [part.key, part.digest.algorithm, part.digest.whole, *part.digest.chunks]
    if manifest.tensors:
        names, dtypes, shapes, offsets, sizes, kinds = zip(*manifest.tensors, strict=True)
        counts += [*offsets, *sizes, *chain.from_iterable(shapes)]
        texts += [*names, *dtypes, *kinds]
    if set(map(type, counts)) != {int} or min(counts) < 0 or max(counts) >= 2**63:
        raise ValueError("not a count")
    if set(map(type, texts)) != {str} or not isinstance(manifest.metadata, dict):
        raise ValueError("not text")
    if type(manifest.created_at) not in (int, float) or not math.isfinite(manifest.created_at):
        raise ValueError("not a time")
    if not manifest.parts:
        raise ValueError("not a manifest")
    if manifest.format != SHARDED and len(manifest.parts) != 1:
        raise ValueError("too many parts")
    for part in manifest.parts:
        check_key(part.key, tier="")
        new_hasher(part.digest.algorithm)
        if len(part.digest.chunks) != -(-part.size_bytes // part.digest.chunk_bytes):
            raise ValueError("chunks that do not cover their part")


def plain_json(value: object, *, name: str = "manifest") -> Json:
    """The value as JSON can hold it; a number that JSON cannot write (NaN, infinity) becomes its name.

    Raises `ValueError` naming the place of anything that is not JSON.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{name} has the key {key!r}; JSON keys are strings")
        return {key: plain_json(inner, name=f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner, name=name) for inner in value]
    raise ValueError(f"{name} is a {type(value).__name__}, which JSON cannot hold")


def _table(tensors: tuple[TensorEntry, ...]) -> str:
    """The tensor table as JSON. A run's saves have the same tables again and again, one for each of its images, thousands of
    lines long."""
    for known, text in tuple(_recent_tables):
        if known is tensors:
            return text
    text = _canonical(tensors)
    _recent_tables.append((tensors, text))
    return text


_recent_tables: deque[tuple[tuple[TensorEntry, ...], str]] = deque(maxlen=2)


def _canonical(body: object) -> str:
    return json.dumps(body, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _finite(text: str) -> float:
    """A number that is too large for a float would come back as infinity, which JSON cannot write."""
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_SEAL_HEAD = b'{"body":'
_SEAL_TAIL_BYTES = len(b',"digest":""}\n') + 32


_SIGNATURE_HEAD = b',"signature":'
_MOST_SIGNATURE_BYTES = 1024


def _seal(body: bytes, signature: Signature | None = None) -> bytes:
    sealed = _SEAL_HEAD + body + b',"digest":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode()
    if signature is None:
        return sealed
    facts = {"key": signature.key_id, "algorithm": signature.algorithm, "value": signature.value}
    return sealed.removesuffix(b"}\n") + _SIGNATURE_HEAD + _canonical(facts).encode() + b"}\n"


def _split_signature(raw: bytes) -> tuple[bytes, Signature | None]:
    """A manifest as it would be without its signature, and that."""
    at = raw.rfind(_SIGNATURE_HEAD, max(0, len(raw) - _MOST_SIGNATURE_BYTES))
    if at < 0 or not raw.endswith(b"}}\n"):
        return raw, None
    facts = json.loads(raw[at + len(_SIGNATURE_HEAD) : -2])
    signature = Signature(key_id=facts["key"], algorithm=facts["algorithm"], value=facts["value"])
    if {type(text) for text in (signature.key_id, signature.algorithm, signature.value)} != {str}:
        raise ValueError("not a signature")
    return raw[:at] + b"}\n", signature
