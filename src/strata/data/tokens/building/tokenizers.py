"""Tokenizers: from a name or an object to something that turns many texts into one array of ids.

`bytes` is built in and needs nothing. A path is a Hugging Face `tokenizer.json`. Any other name is looked up
by the tokenizers library, in its cache and then on its hub. Anything with `encode(str)` that gives ids, or an
object with `.ids`, is a tokenizer too. What `encode` gives for one text is what the index holds, whatever
padding or truncation a tokenizer is set to: those would make a document's tokens depend on its neighbours.
"""

from __future__ import annotations

import abc
import os
import pickle
import socket
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import xxhash
from numpy.typing import NDArray

from strata.data.tokens.errors import TokenizerUnavailable
from strata.errors import MissingDependency

BYTES_NAME = "bytes"
HUB_TIMEOUT_S = 5.0
PROBE = "The quick brown fox: naïve café, 東京 🦊\n\t1,234.5 != x_y"

Ids = NDArray[np.uint16] | NDArray[np.uint32]


class Encoder(Protocol):
    """Many texts in, all their ids in one array out, with the number of ids of each text."""

    vocab_size: int | None

    def encode_texts(self, texts: Sequence[str], eos_id: int | None) -> tuple[Ids, list[int]]:
        """With `eos_id` given, it follows each text and counts to its length."""
        ...


class ByteTokenizer:
    """The built-in one: each UTF-8 byte is its own id; 256 marks the end of a document."""

    vocab_size: int | None = 257
    eos_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def encode_texts(self, texts: Sequence[str], eos_id: int | None) -> tuple[Ids, list[int]]:
        pieces = [text.encode() for text in texts]
        if eos_id is None:
            return np.frombuffer(b"".join(pieces), np.uint8).astype(np.uint16), list(map(len, pieces))
        pieces.append(b"")
        # 0xFF never occurs in UTF-8, so it can hold the place of the end mark while bytes are joined.
        joined = np.frombuffer(b"\xff".join(pieces), np.uint8)
        ids: Ids = joined.astype(np.uint32) if eos_id >> 16 else joined.astype(np.uint16)
        ids[ids == 0xFF] = eos_id
        return ids, [len(piece) + 1 for piece in pieces[:-1]]


class _ListEncoder(abc.ABC):
    """Common to tokenizers that give Python lists: flatten them and check that every id fits."""

    vocab_size: int | None

    @abc.abstractmethod
    def _lists(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_texts(self, texts: Sequence[str], eos_id: int | None) -> tuple[Ids, list[int]]:
        flat = array("I")
        lengths = []
        for ids in self._lists(texts):
            before = len(flat)
            try:
                flat.extend(ids)
            except (TypeError, OverflowError) as error:
                raise TokenizerUnavailable(
                    f"The tokenizer returned something that is not a list of token ids ({error}).",
                    hint="Its encode(text) must return whole numbers from 0 to 2^32 - 1.",
                ) from None
            if eos_id is not None:
                flat.append(eos_id)
            lengths.append(len(flat) - before)
        packed = np.frombuffer(flat, np.uint32) if flat else np.empty(0, np.uint32)
        if (
            self.vocab_size is not None
            and packed.size
            and int(packed.max()) >= max(self.vocab_size, 1 + (eos_id or 0))
        ):
            raise TokenizerUnavailable(
                f"The tokenizer returned id {int(packed.max())}, but its vocabulary has {self.vocab_size} ids.",
                hint="Correct its vocab_size.",
            )
        return packed, lengths


class HuggingFaceEncoder(_ListEncoder):
    """A tokenizer of the tokenizers library, through its batch call without offsets."""

    def __init__(self, serialized: str) -> None:
        from tokenizers import Tokenizer

        self.serialized = serialized
        self.tokenizer = Tokenizer.from_str(serialized)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.vocab_size = int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def _lists(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]

    def __reduce__(self) -> tuple[type[HuggingFaceEncoder], tuple[str]]:
        return type(self), (self.serialized,)


class ObjectEncoder(_ListEncoder):
    """Anything with `encode`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = _declared_vocab_size(tokenizer)

    def _lists(self, texts: Sequence[str]) -> list[list[int]]:
        encode = self.tokenizer.encode
        return [getattr(encoded, "ids", encoded) for encoded in map(encode, texts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer ready to work, and what identifies it."""

    encoder: Encoder
    name: str
    """What loads it again, or where that is impossible how it describes itself."""
    named: bool
    """Whether `name` loads it again on a command line."""
    probe: str
    """Digest of what it makes of a fixed text: equal for two tokenizers that behave alike. May be empty."""
    fingerprint: str | None
    """Digest of all of it; None for an object whose code may have changed since."""

    @property
    def token_bytes(self) -> int:
        vocab_size = self.encoder.vocab_size
        return 2 if vocab_size is not None and vocab_size <= 1 << 16 else 4

    def token_id(self, token: str) -> int:
        """The id of a special token, given as the token or as a number."""
        if token.isdecimal() and int(token) < 1 << 32:
            return int(token)
        found = None
        if isinstance(self.encoder, HuggingFaceEncoder):
            found = self.encoder.tokenizer.token_to_id(token)
        if found is None:
            raise TokenizerUnavailable(
                f"The tokenizer {self.name} has no token {token!r}.", hint="Pass its id instead."
            )
        return int(found)

    def pickled(self) -> bytes | None:
        """For a tokenizing process of its own; None where another process could not load it."""
        if isinstance(self.encoder, ObjectEncoder) and type(self.encoder.tokenizer).__module__ == "__main__":
            return None
        try:
            return pickle.dumps(self.encoder)
        except Exception:  # whatever a foreign object's pickling raises means the same: it stays here
            return None


def load_tokenizer(tokenizer: object) -> LoadedTokenizer:
    """A name, a path or an object; see the top of this module."""
    if isinstance(tokenizer, Path):
        tokenizer = str(tokenizer)
    if isinstance(tokenizer, str):
        if tokenizer == BYTES_NAME:
            return _loaded(ByteTokenizer(), name=BYTES_NAME, named=True, fingerprint=BYTES_NAME)
        return _hugging_face(_serialized(tokenizer), name=tokenizer, named=True)
    if isinstance(tokenizer, ByteTokenizer):
        return load_tokenizer(BYTES_NAME)
    if not callable(getattr(tokenizer, "encode", None)):
        raise TokenizerUnavailable(
            f"{type(tokenizer).__name__} is not a tokenizer: it has no encode method.",
            hint="Pass an object with encode(str), a path to a tokenizer.json, a name, or 'bytes'.",
        )
    name = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    if type(tokenizer).__module__.partition(".")[0] == "tokenizers" and hasattr(tokenizer, "to_str"):
        return _hugging_face(str(tokenizer.to_str()), name=name, named=False)
    return _loaded(ObjectEncoder(tokenizer), name=name, named=False, fingerprint=None)


def _hugging_face(serialized: str, *, name: str, named: bool) -> LoadedTokenizer:
    try:
        encoder = HuggingFaceEncoder(serialized)
    except ImportError:
        raise MissingDependency("tokenizers", extra="data", feature=f"The tokenizer '{name}'") from None
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise TokenizerUnavailable(
            f"{name} is not a tokenizer.json ({error}).", hint="Save one with tokenizer.save(path)."
        ) from None
    fingerprint = xxhash.xxh3_128_hexdigest(encoder.tokenizer.to_str().encode())
    return _loaded(encoder, name=name, named=named, fingerprint=fingerprint)


def _loaded(encoder: Encoder, *, name: str, named: bool, fingerprint: str | None) -> LoadedTokenizer:
    try:
        ids, _ = encoder.encode_texts([PROBE], None)
        probe = xxhash.xxh3_64_hexdigest(ids.astype("<u4").tobytes())
    except Exception:  # a tokenizer that cannot take this text may still take the user's
        probe = ""
    return LoadedTokenizer(encoder=encoder, name=name, named=named, probe=probe, fingerprint=fingerprint)


def _serialized(name: str) -> str:
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerUnavailable(f"{path} cannot be read ({error}).") from None
    if name.endswith(".json") or name.startswith((".", "/", "~")):
        raise TokenizerUnavailable(f"There is no tokenizer file {path}.", hint="Check the path.")
    return _from_hub(name)


def _from_hub(name: str) -> str:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise MissingDependency("tokenizers", extra="data", feature=f"The tokenizer '{name}'") from None
    instead = "Pass a local tokenizer.json, or use the built-in byte-level tokenizer: --tokenizer bytes"
    try:
        try:
            path = hf_hub_download(name, "tokenizer.json", local_files_only=True)
        except LocalEntryNotFoundError:
            # Asked first, because the library itself retries for half a minute before it gives up.
            if (trouble := _hub_trouble()) is not None:
                raise TokenizerUnavailable(
                    f"The tokenizer '{name}' is not in the local cache, and the hub is unreachable ({trouble}).",
                    hint=instead,
                ) from None
            path = hf_hub_download(name, "tokenizer.json")
        return Path(path).read_text(encoding="utf-8")
    except TokenizerUnavailable:
        raise
    except Exception as error:  # unknown name, forbidden, malformed name: the hub's words say which
        raise TokenizerUnavailable(
            f"The tokenizer '{name}' could not be downloaded from the hub ({str(error).splitlines()[0]}).",
            hint=instead,
        ) from None


def _hub_trouble() -> str | None:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}:
        return "HF_HUB_OFFLINE is set"
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return None  # only the proxy can tell
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=HUB_TIMEOUT_S).close()
    except OSError as error:
        return f"{hub.hostname}: {error.strerror or error}"
    return None


def _declared_vocab_size(tokenizer: Any) -> int | None:
    """What the object says of itself, special tokens included; None where it says nothing usable."""
    try:
        size: object = len(tokenizer)
    except TypeError:
        size = getattr(tokenizer, "vocab_size", None)
    return size if isinstance(size, int) and size > 0 else None
