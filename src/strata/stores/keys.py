"""What a key may look like, decided once for every store.

A key that passes here can be a file, a shared-memory segment and an object: what one tier accepts every tier
accepts, so a checkpoint never turns out to be unnameable half-way down the ladder.
"""

from __future__ import annotations

from strata.stores.protocol import InvalidKey

MAX_KEY_BYTES = 1024
MAX_PART_BYTES = 255

RESERVED = ".strata"
"""First part of every path that stores keep for themselves (temporary files, owner records)."""


def check_key(key: str, *, tier: str) -> str:
    """`key` itself, or `InvalidKey` saying which rule it breaks."""
    problem = _problem(key)
    if problem:
        raise InvalidKey(
            f"{_shown(key)} cannot be a key: {problem}.",
            tier=tier,
            key=key,
            hint="Use a relative path such as 'ckpt-00000012/payload.pt'.",
            reason=problem,
        )
    return key


def check_prefix(prefix: str, *, tier: str) -> str:
    """`prefix` itself, if some valid key starts with it."""
    if prefix:
        # A prefix may end inside a part or right after a slash: it is good if one more letter makes a key of it.
        check_key(prefix + "x" if prefix.endswith(("/", ".")) else prefix, tier=tier)
    return prefix


def _problem(key: str) -> str:
    if not key:
        return "it is empty"
    try:
        encoded = key.encode()
    except UnicodeEncodeError:
        return "it is not valid Unicode text"
    if len(encoded) > MAX_KEY_BYTES:
        return f"it is {len(encoded)} bytes long; at most {MAX_KEY_BYTES} are allowed"
    if any(byte < 0x20 or byte == 0x7F for byte in encoded):
        return "it contains a control character"
    if "\\" in key:
        return "it contains a backslash, which some servers read as a slash"
    if key.startswith("/"):
        return "it is an absolute path"
    parts = key.split("/")
    if "" in parts:
        return "it has an empty part (a double or trailing slash)"
    if "." in parts or ".." in parts:
        return "it has a '.' or '..' part"
    if any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return f"one of its parts is longer than {MAX_PART_BYTES} bytes"
    if parts[0] == RESERVED:
        return f"'{RESERVED}' is reserved for the store itself"
    return ""


def _shown(key: str) -> str:
    return ascii(key if len(key) <= 80 else f"{key[:77]}...")
