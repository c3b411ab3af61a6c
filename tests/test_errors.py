"""What an error says, and what to do next, read as sentences."""

from __future__ import annotations

import pytest

from strata.checkpoint.errors import MemoryLimitExceeded, SaveFailed
from strata.errors import StrataError


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("It failed.", "It failed. Try again."),
        ("It failed", "It failed. Try again."),
        ("It failed (twice)", "It failed (twice). Try again."),
        ("It ended:\nlast line", "It ended:\nlast line Try again."),
    ],
)
def test_message_and_hint_are_two_sentences(message: str, text: str) -> None:
    assert str(StrataError(message, hint="Try again.")) == text
    assert str(StrataError(message)) == message


def test_texts_that_users_know_stay_as_they_are() -> None:
    full = MemoryLimitExceeded(required_bytes=2 << 30, available_bytes=512 << 20, hint="Raise it.")
    assert full.message == "Cannot save snapshot: 2048.0MB required, but only 512.0MB available"
    assert str(full) == f"{full.message}. Raise it."
    save = SaveFailed(tier="NVME", path="/f/a.pt", reason="Not a directory", hint="Choose another key.")
    assert str(save) == "[NVME] Failed to save checkpoint to '/f/a.pt': Not a directory. Choose another key."
