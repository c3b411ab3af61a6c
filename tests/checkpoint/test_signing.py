"""Signed manifests: who has no key can neither change a checkpoint nor make one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from strata.checkpoint import CheckpointManager
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.signing import KEY_VARIABLE, SigningError
from strata.checkpoint.copying.digest import digest_of
from strata.checkpoint.errors import CheckpointNotFound, LoadFailed, SaveFailed, Untrusted
from strata.checkpoint.image.plain import load_plain
from strata.checkpoint.verify import verify_store
from strata.stores.local import LocalStore
from tests.cli.running import strata
from tests.support_programs import program

Use = Callable[..., None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Use:
    """Set the keys, or none."""
    monkeypatch.setenv("STRATA_MEMORY_ROOT", str(tmp_path / "memory"))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)

    def use(*keys: Path | str) -> None:
        if keys:
            monkeypatch.setenv(KEY_VARIABLE, ",".join(map(str, keys)))
        else:
            monkeypatch.delenv(KEY_VARIABLE, raising=False)

    return use


def secret(path: Path, text: str = "0123456789abcdef" * 4) -> Path:
    path.write_text(text + "\n")
    path.chmod(0o600)
    return path


def ed25519(folder: Path, name: str = "key") -> tuple[Path, Path]:
    """The files of a private and a public key."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    private.chmod(0o600)
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


def save(folder: Path, step: int, value: float = 1.0) -> None:
    with CheckpointManager([LocalStore(folder)]) as manager:
        manager.save({"weight": torch.full((1_000,), value)}, step=step).result(60)


def load(folder: Path) -> tuple[int, float]:
    with CheckpointManager([LocalStore(folder)]) as manager:
        restored = manager.restore()
        return restored.info.step, float(restored.state["weight"][0])


def forge(folder: Path, step: int, value: float) -> None:
    """Change the weights of a checkpoint, and all digests with them: no key is needed for that."""
    store = LocalStore(folder)
    before = os.environ.pop(KEY_VARIABLE, None)
    try:
        entry = next(e for e in Catalog(store).list().entries if e.manifest.step == step)
        part = entry.manifest.parts[0]
        body = bytearray(store.read(part.key))
        old = torch.full((1_000,), 1.0).numpy().tobytes()
        new = torch.full((1_000,), value).numpy().tobytes()
        assert body.count(old) == 1
        body[:] = body.replace(old, new)
        store.put(part.key, body)
        digest = digest_of(memoryview(body), algorithm=part.digest.algorithm)
        manifest = replace(entry.manifest, parts=(replace(part, digest=digest),))
        signature = json.loads(store.read(entry.key)).get("signature")
        raw = manifest.encode()
        if signature is not None:  # The old one, which is all that can be had.
            text = json.dumps(signature, sort_keys=True, separators=(",", ":"))
            raw = raw.removesuffix(b"}\n") + b',"signature":' + text.encode() + b"}\n"
        store.put(entry.key, raw)
    finally:
        if before is not None:
            os.environ[KEY_VARIABLE] = before


def test_without_a_key_changed_weights_with_new_digests_are_loaded(tmp_path: Path, use: Use) -> None:
    """The attack is real: it is what signing is for."""
    save(tmp_path / "c", 1)
    forge(tmp_path / "c", 1, 6.66)
    step, value = load(tmp_path / "c")
    assert (step, round(value, 2)) == (1, 6.66)


@pytest.mark.parametrize("kind", ["hmac", "ed25519"])
def test_with_a_key_changed_weights_are_refused_for_the_next_older_step(
    tmp_path: Path, use: Use, kind: str
) -> None:
    folder = tmp_path / "c"
    use(secret(tmp_path / "key") if kind == "hmac" else ed25519(tmp_path)[0])
    for step in (1, 2):
        save(folder, step)
    assert load(folder) == (2, 1.0)
    forge(folder, 2, 6.66)
    with CheckpointManager([LocalStore(folder)]) as manager:
        restored = manager.restore()
    assert (restored.info.step, float(restored.state["weight"][0])) == (1, 1.0)
    assert any("signature" in reason and "forged" in reason for reason in restored.reasons)
    found = {each.step: each for each in verify_store(LocalStore(folder))}
    assert found[1].is_intact
    assert "forged" in str(found[None].damages[0])


def test_the_command_that_verifies_says_what_is_not_signed(tmp_path: Path, use: Use) -> None:
    folder = tmp_path / "c"
    save(folder, 1)
    assert strata("checkpoint", "verify", str(folder)).code == 0
    use(secret(tmp_path / "key"))
    ran = strata("checkpoint", "verify", str(folder))
    assert ran.code == 1
    assert "not signed" in ran.out + ran.err


def test_payloads_of_signed_manifests_cannot_be_swapped(tmp_path: Path, use: Use) -> None:
    """Digests are SHA-256 then: those without a key are quick, and can be forged."""
    use(secret(tmp_path / "key"))
    save(tmp_path / "c", 1)
    (entry,) = Catalog(LocalStore(tmp_path / "c")).list().entries
    assert entry.manifest.parts[0].digest.algorithm == "sha256"
    store = LocalStore(tmp_path / "c")
    body = bytearray(store.read(entry.manifest.parts[0].key))
    body[-100_000 % len(body)] ^= 1
    store.put(entry.manifest.parts[0].key, body)
    with pytest.raises(LoadFailed, match="changed since"):
        load(tmp_path / "c")


def test_an_unsigned_run_does_not_start_over_because_a_key_was_set(tmp_path: Path, use: Use) -> None:
    folder, key = tmp_path / "c", secret(tmp_path / "key")
    save(folder, 1)
    use(key)
    with pytest.raises(LoadFailed, match="none signed with an accepted key") as refused:
        load(folder)
    assert not isinstance(refused.value, CheckpointNotFound)
    use(key, "unsigned")
    assert load(folder) == (1, 1.0)
    save(folder, 2)
    use(key)
    assert load(folder) == (2, 1.0)


def test_keys_are_replaced_one_after_the_other(tmp_path: Path, use: Use) -> None:
    old, new = secret(tmp_path / "old", "o" * 40), secret(tmp_path / "new", "n" * 40)
    folder = tmp_path / "c"
    use(old)
    save(folder, 1)
    use(new, old)
    assert load(folder) == (1, 1.0)
    save(folder, 2)
    use(new)
    assert load(folder) == (2, 1.0)
    use(old)
    assert load(folder) == (1, 1.0)
    use(secret(tmp_path / "third", "t" * 40))
    with pytest.raises(LoadFailed, match="accepted"):
        load(folder)


def test_a_public_key_checks_and_cannot_sign(tmp_path: Path, use: Use) -> None:
    private, public = ed25519(tmp_path)
    use(private)
    save(tmp_path / "c", 1)
    public.chmod(0o644)
    use(public)
    assert load(tmp_path / "c") == (1, 1.0)
    with pytest.raises(SaveFailed, match="is a public key"):
        save(tmp_path / "c", 2)


@pytest.mark.parametrize(
    ("content", "mode", "told"),
    [
        (b"short", 0o600, "at least 32"),
        (b"x" * 64, 0o644, "every user of this machine"),
        (b"-----BEGIN PRIVATE KEY-----\nnonsense\n-----END PRIVATE KEY-----\n", 0o600, "not an Ed25519 key"),
        (None, 0, "cannot be read"),
    ],
)
def test_a_key_that_cannot_be_used_is_reported(
    tmp_path: Path, use: Use, content: bytes | None, mode: int, told: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    use(path)
    with pytest.raises((SigningError, SaveFailed), match=told):
        save(tmp_path / "c", 1)


def test_damaged_signatures_are_no_traceback(tmp_path: Path, use: Use) -> None:
    use(secret(tmp_path / "key"))
    save(tmp_path / "c", 1)
    store = LocalStore(tmp_path / "c")
    (entry,) = Catalog(store).list().entries
    whole = store.read(entry.key)
    for start in range(len(whole) - 160, len(whole)):
        for wrong in (bytes([whole[start] ^ 1]), b""):
            store.put(entry.key, whole[:start] + wrong + whole[start + 1 :])
            listing = Catalog(store).list()
            assert listing.entries == ()
            assert len(listing.problems) == 1


def test_a_file_without_a_manifest_is_refused_unless_its_source_is_trusted(tmp_path: Path, use: Use) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "plain.pt")
    use(secret(tmp_path / "key"))
    store = LocalStore(tmp_path)
    with pytest.raises(Untrusted, match="no manifest"):
        load_plain(store, "plain.pt")
    assert load_plain(store, "plain.pt", trusted_source=True)["weight"].sum() == 3


def test_keys_of_openssl_are_read(tmp_path: Path, use: Use) -> None:
    private = tmp_path / "key.pem"
    made = subprocess.run(
        [program("openssl"), "genpkey", "-algorithm", "ed25519", "-out", str(private)],
        check=False,
        capture_output=True,
    )
    if made.returncode:
        pytest.skip("openssl cannot make Ed25519 keys here")
    private.chmod(0o600)
    use(private)
    save(tmp_path / "c", 1)
    assert load(tmp_path / "c") == (1, 1.0)
