"""What a log line may be once it is in the log: plain text of bounded length, with no secrets in it.

`Tidy` is applied to every line as it comes in, wherever from. Escape sequences go, control characters are replaced,
overlong texts keep their beginning and their end, and what looks like a credential is replaced by `[redacted]`. Most
lines have nothing to tidy, so whole batches are looked at first, and lines one by one only where one of them needs it.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

LEVELS = ("debug", "info", "warn", "error")
_LEVEL_NAMES = {"warning": "warn", "critical": "error", "fatal": "error", "trace": "debug"}

MESSAGE_LIMIT = 8_192
READ_LIMIT = 64 * 1024
"""Of a longer message nothing beyond this is looked at."""
REDACTED = "[redacted]"
SHORTEST_SECRET = 4

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# What was tidied before stays as it is: a cause is tidied for the journal, and again as a line of the log.
_VALUE = r"""(?!\[redacted\])("[^"\n]{0,512}"|'[^'\n]{0,512}'|[^\s,;&"'}\])]{1,512})"""


class _Secret(NamedTuple):
    """What a kind of secret looks like. `words` and `sign` are of lower-case text, and cheaper to look for."""

    words: tuple[str, ...]
    pattern: re.Pattern[str]
    replacement: str = REDACTED
    sign: re.Pattern[str] | None = None

    def may_be_in(self, lowered: str) -> bool:
        return any(word in lowered for word in self.words) and (
            self.sign is None or self.sign.search(lowered) is not None
        )


# Repetitions have bounds, so that no text takes long.
_SECRETS = (
    _Secret(
        ("-----begin",),
        re.compile(
            r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.S
        ),
    ),
    _Secret(("://",), re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,20}://)[^\s/@\"']{1,512}@"), rf"\1{REDACTED}@"),
    _Secret(
        ("authorization",),
        re.compile(
            r"(?i)(authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:[a-z]{2,16}\s{1,3})?)[^\s\"',;]{4,2048}"
        ),
        rf"\1{REDACTED}",
    ),
    _Secret(("bearer",), re.compile(r"(?i)(\bbearer\s{1,3})[\w.~+/=-]{8,2048}"), rf"\1{REDACTED}"),
    _Secret(
        ("passw", "pwd", "secret", "credential", "signature", "key"),
        re.compile(
            r"(?i)((?:passw(?:or)?d|\bpwd|secret|credential|signature|(?:api|access|private|account)[_-]?key(?:[_-]?id)?)"
            r"[\w.-]{0,32}[\"']?\s{0,3}(?:=|:(?!//))\s{0,3})" + _VALUE
        ),
        rf"\1{REDACTED}",
    ),
    _Secret(
        ("token",),
        # A count of tokens is not a secret, and a word that follows is not one either.
        re.compile(
            r"(?i)(token(?!s)[\w.-]{0,32}[\"']?\s{0,3}[:=]\s{0,3})"
            r"(?![\d.,_]+\b|true\b|false\b|none\b|null\b|\[redacted\])[\"']?[^\s,;&\"'}\])]{8,2048}"
        ),
        rf"\1{REDACTED}",
        re.compile(
            r"token(?!s)[\w.-]{0,32}[\"']?\s{0,3}[:=]"
        ),  # `tokens/s` is in most lines of most trainings.
    ),
    _Secret(("akia", "asia"), re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")),
    _Secret(
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "hf_", "sk-", "xox", "glpat-"),
        re.compile(r"\b(?:gh[pousr]_|github_pat_|hf_|sk-|xox[abprs]-|glpat-)[A-Za-z0-9_-]{16,255}"),
    ),
    _Secret(("eyj",), re.compile(r"\beyJ[\w-]{8,2048}\.[\w-]{8,4096}\.[\w-]{4,2048}")),
)


def level_of(name: str) -> str:
    name = name.lower()
    name = _LEVEL_NAMES.get(name, name)
    return name if name in LEVELS else "info"


def clean(message: str) -> str:
    """Text that cannot move a cursor, ring a bell or turn a line around; newlines and tabs stay."""
    message = _CONTROL.sub("�", _ANSI.sub("", message).replace("\r\n", "\n"))
    if len(message) > MESSAGE_LIMIT:
        half = MESSAGE_LIMIT // 2
        left_out = len(message) - 2 * half
        message = f"{message[:half]}\n… ({left_out:,} characters left out) …\n{message[-half:]}"
    return message


class Tidy:
    """Makes messages fit for the log. `secrets` are values that must never be in it, wherever they stand."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = tuple(
            sorted((s for s in secrets if len(s) >= SHORTEST_SECRET), key=len, reverse=True)
        )

    def __call__(self, message: str) -> str:
        if len(message) > READ_LIMIT:
            message = f"{message[: READ_LIMIT // 2]}\n…\n{message[-READ_LIMIT // 2 :]}"
        return clean(self._redact(_ANSI.sub("", message)))

    def all(self, messages: Sequence[str]) -> Sequence[str]:
        """The same for many, at the cost of one where none has anything to tidy."""
        if max(map(len, messages), default=0) <= MESSAGE_LIMIT:
            together = "\n".join(messages)
            plain = all(map(str.isprintable, messages)) or not _CONTROL.search(together)
            if plain and not self._may_tell(together):
                return messages
        return [self(message) for message in messages]

    def _may_tell(self, text: str) -> bool:
        lowered = text.lower()
        return any(kind.may_be_in(lowered) for kind in _SECRETS) or any(
            secret in text for secret in self._secrets
        )

    def _redact(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        lowered = text.lower()
        for kind in _SECRETS:
            if kind.may_be_in(lowered):
                text = kind.pattern.sub(kind.replacement, text)
        return text
