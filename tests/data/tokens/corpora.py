"""Small corpora and a plain, slow reading of them to compare with."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from strata.data.tokens.building.builder import BuildOptions, BuildReport, build_index
from strata.data.tokens.index import TokenIndex

WORDS = [
    "the",
    "a",
    "fox",
    "über",
    "東京",
    "runs🦊",
    "over",
    "lazy",
    "dogs",
    "and",
    "naïve",
    "cats",
    "while",
    "3.14",
    "people",
    "watch",
]


def texts(count: int, *, seed: int = 0, longest: int = 40) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(count)]


def write_jsonl(path: Path, lines: Sequence[str], *, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(lines)))
    return path


def build(
    path: Path, files: Sequence[Path], *, tokenizer: object = "bytes", **options: object
) -> BuildReport:
    return build_index(files, path, tokenizer=tokenizer, options=BuildOptions(**options))  # type: ignore[arg-type]


def tokens_of(path: Path) -> list[int]:
    with TokenIndex(path) as index:
        return [int(token) for token in index.tokens]


def text_of(path: Path) -> str:
    return bytes(tokens_of(path)).decode()


class WordTokenizer:
    """Gives each word a stable number; knows nothing of its vocabulary."""

    def encode(self, text: str) -> list[int]:
        return [sum(word.encode()) for word in text.split()]
