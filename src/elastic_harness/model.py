"""The trainer's model, a small GPT. Everything lives in `strata.trainer.model`."""

from __future__ import annotations

from strata.trainer.model import (
    GPT,
    IGNORED_LABEL,
    Block,
    GPTConfig,
)

__all__ = [
    "GPT",
    "IGNORED_LABEL",
    "Block",
    "GPTConfig",
]
