"""Signed manifests: who cannot sign cannot make a checkpoint that is loaded, nor change one.

`STRATA_SIGNING_KEY` names key files, with commas. The first signs what this process publishes; all of them are accepted when
it reads, so that keys can be replaced one after the other. A file holds either an Ed25519 key as PEM (a public one can
check and not sign; needs the package `cryptography`), or a secret of at least 32 characters for HMAC-SHA256. The word
`unsigned` among them accepts manifests without a signature too, for a run that has some already.

With keys, digests of payloads are SHA-256: a signature over a digest that can be forged would prove nothing. A signature says
who wrote a checkpoint, not that it is the newest: who can delete files can still bring back an older one.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from strata.checkpoint.copying.digest import KEY_VARIABLE as KEY_VARIABLE
from strata.checkpoint.errors import CheckpointError
from strata.errors import MissingDependency

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

UNSIGNED = "unsigned"
LEAST_SECRET_BYTES = 32
_PURPOSE = b"strata manifest 1\0"
"""What else these keys may sign some day, it is not a manifest."""


class SigningError(CheckpointError):
    """The keys that were named cannot be used."""

    code = "signing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    key_id: str
    algorithm: str
    value: str


class Key(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def algorithm(self) -> str: ...

    def sign(self, message: bytes) -> bytes: ...

    def accepts(self, message: bytes, signature: bytes) -> bool: ...


class HmacKey:
    algorithm = "hmac-sha256"

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = _id(b"hmac", hashlib.sha256(secret).digest())

    def sign(self, message: bytes) -> bytes:
        return hmac.digest(self._secret, message, "sha256")

    def accepts(self, message: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(self.sign(message), signature)


class Ed25519Key:
    algorithm = "ed25519"

    def __init__(self, public: Ed25519PublicKey, private: Ed25519PrivateKey | None, *, path: Path) -> None:
        self._public = public
        self._private = private
        self._path = path
        self.id = _id(b"ed25519", public.public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        if self._private is None:
            raise SigningError(
                f"{self._path}, the first key of {KEY_VARIABLE}, is a public key: it can verify, not sign.",
                hint="Put the private key first where checkpoints are written.",
            )
        return self._private.sign(message)

    def accepts(self, message: bytes, signature: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            self._public.verify(signature, message)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The first signs, all are accepted."""

    keys: tuple[Key, ...]
    accepts_unsigned: bool = False

    def sign(self, body: bytes) -> Signature:
        key = self.keys[0]
        return Signature(key_id=key.id, algorithm=key.algorithm, value=key.sign(_PURPOSE + body).hex())

    def problem(self, body: bytes, signature: Signature | None) -> str | None:
        """Why a manifest with this body is not to be believed; None where it is."""
        if signature is None:
            return None if self.accepts_unsigned else f"the manifest is not signed, and {KEY_VARIABLE} is set"
        key = next((key for key in self.keys if key.id == signature.key_id), None)
        if key is None or key.algorithm != signature.algorithm:
            known = ", ".join(key.id for key in self.keys)
            return f"the manifest is signed with the key {signature.key_id}; accepted keys: {known}"
        try:
            value = bytes.fromhex(signature.value)
        except ValueError:
            value = b""
        if not key.accepts(_PURPOSE + body, value):
            return f"the manifest's signature with the key {key.id} is wrong: it was changed, or forged"
        return None


def configured() -> Keys | None:
    """The keys of `STRATA_SIGNING_KEY`; None where it is not set. Raises `SigningError`, and `MissingDependency`."""
    named = os.environ.get(KEY_VARIABLE, "")
    return _read(named) if named.strip() else None


@functools.lru_cache(maxsize=8)
def _read(named: str) -> Keys:
    words = [word.strip() for word in named.split(",") if word.strip()]
    keys = tuple(_read_key(Path(word).expanduser()) for word in words if word != UNSIGNED)
    if not keys:
        raise SigningError(
            f"{KEY_VARIABLE} is '{UNSIGNED}' and names no key.", hint="Add a key file, or unset it."
        )
    return Keys(keys=keys, accepts_unsigned=UNSIGNED in words)


def _read_key(path: Path) -> Key:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(65_536)
    except OSError as error:
        raise SigningError(
            f"{path}, named by {KEY_VARIABLE}, cannot be read: {error.strerror}.",
            hint="It must hold paths of key files: see docs/security.md.",
        ) from None
    is_pem = content.startswith(b"-----BEGIN ")
    is_public = content.startswith(b"-----BEGIN PUBLIC KEY-----")
    if not is_public and stat.S_IMODE(mode) & 0o007:
        raise SigningError(
            f"{path}, named by {KEY_VARIABLE}, can be read by every user of this machine.",
            hint=f"chmod 600 {path}",
        )
    if is_pem:
        return _read_pem(path, content, is_public=is_public)
    secret = content.strip()
    if len(secret) < LEAST_SECRET_BYTES:
        raise SigningError(
            f"{path}, named by {KEY_VARIABLE}, holds {len(secret)} characters; a secret needs at least {LEAST_SECRET_BYTES}.",
            hint=f"openssl rand -hex 32 > {path}",
        )
    return HmacKey(secret)


def _read_pem(path: Path, content: bytes, *, is_public: bool) -> Ed25519Key:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    except ImportError:
        raise MissingDependency("cryptography", extra="security", feature="Signing with Ed25519") from None
    try:
        if is_public:
            public = serialization.load_pem_public_key(content)
            if isinstance(public, Ed25519PublicKey):
                return Ed25519Key(public, None, path=path)
        else:
            private = serialization.load_pem_private_key(content, password=None)
            if isinstance(private, Ed25519PrivateKey):
                return Ed25519Key(private.public_key(), private, path=path)
        reason = "it is a key of another kind"
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise SigningError(
        f"{path}, named by {KEY_VARIABLE}, is not an Ed25519 key: {reason}.",
        hint=f"openssl genpkey -algorithm ed25519 -out {path}",
    )


def _id(kind: bytes, material: bytes) -> str:
    return hashlib.sha256(b"strata key " + kind + b"\0" + material).hexdigest()[:16]
