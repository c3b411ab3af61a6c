"""The examples for trainers that people already use are short, and each has a page that runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 60


@pytest.mark.parametrize(
    ("example", "page"),
    [
        ("hf_trainer.py", "huggingface.md"),
        ("lightning_trainer.py", "lightning.md"),
        ("fabric_loop.py", "lightning.md"),
        ("accelerate_loop.py", "accelerate.md"),
    ],
)
def test_an_example_is_short_and_has_a_page(example: str, page: str) -> None:
    text = (ROOT / "examples" / example).read_text()
    assert len(text.splitlines()) <= MOST_LINES
    shown = (ROOT / "docs" / "tutorials" / page).read_text()
    assert f"strata torchrun --nproc-per-node=2 examples/{example}" in shown
