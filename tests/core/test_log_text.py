"""What comes into the log is text without secrets, whatever was printed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.telemetry.logtext import MESSAGE_LIMIT, Tidy, clean, level_of

tidy = Tidy(["a-strata-token", "abc"])

SECRETS = [
    ("key id AKIAIOSFODNN7EXAMPLE in use", "AKIAIOSFODNN7EXAMPLE"),
    ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
    ("export AWS_ACCESS_KEY_ID='ASIAXXXXXXXXXXXXXXXX'", "ASIAX"),
    ("Authorization: Bearer abcdef0123456789", "abcdef0123456789"),
    ("authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    ("headers={'Authorization': 'Token 0123456789'}", "0123456789"),
    ("sent bearer eyJhbGciOiJIUzI1NiJ9.e30x.x", "eyJhbGci"),
    ("password=hunter2 user=joe", "hunter2"),
    ('{"db_password": "two words"}', "two words"),
    ("PASSWORD : hunter2", "hunter2"),
    ("api-key: 12345", "12345"),
    ("STRATA_TOKEN=0123456789abcdef", "0123456789abcdef"),
    ("the token is a-strata-token, says the config", "a-strata-token"),
    ("s3://key:s3cr3t@bucket/path", "s3cr3t"),
    ("cloning https://joe:hunter2@example.com/x.git", "hunter2"),
    ("https://ghp_0123456789abcdefghij@github.com/x", "0123456789abcdefghij"),
    ("login with hf_abcdefghijklmnopqrst", "abcdefghijklmnopqrst"),
    ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abcdef", "eyJzdWIi"),
    ("GET /x?X-Amz-Signature=deadbeef&y=1", "deadbeef"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----", "MIIEow"),
    ("-----BEGIN PRIVATE KEY-----\ncut short", "cut short"),
    ("pass\x1b[31mword=\x1b[0mhunter2", "hunter2"),
]


@pytest.mark.parametrize(("message", "secret"), SECRETS, ids=[message[:24] for message, _ in SECRETS])
def test_secrets_do_not_come_into_the_log(message: str, secret: str) -> None:
    told = tidy(message)
    assert secret not in told
    assert "[redacted]" in told
    assert tidy.all(["calm", message])[1] == told, "in a batch as alone"


@pytest.mark.parametrize(
    "message",
    [
        "step 10: loss 3.1, 1,024 tokens/s",
        "tokens: 4096, max_tokens=512",
        "token = 17",
        "saved to s3://bucket/path/step_00000100.pt",
        "http://127.0.0.1:3000/docs is open, mail joe@example.com",
        "KeyError: 'text'",
        "unexpected token: 'if'",
        "Asia, bearers, a secret society and passwords",
        "user@host:/path",
    ],
)
def test_plain_speech_is_left_alone(message: str) -> None:
    assert tidy(message) == message


def test_control_characters_and_escape_sequences_are_neutralised() -> None:
    assert clean("a\x1b[31mred\x1b[0m\x07b\rc\x1b]0;title\x07d\te\r\nf\u202eg\ud800") == "ared�b�cd\te\nf�g�"


def test_overlong_text_keeps_its_beginning_and_its_end() -> None:
    told = clean("first" + "x" * 100_000 + "last")
    assert told.startswith("first")
    assert told.endswith("last")
    assert "characters left out" in told
    assert len(told) < MESSAGE_LIMIT + 100


def test_levels_of_others_are_ours() -> None:
    assert [level_of(name) for name in ("WARNING", "critical", "TRACE", "Info", "strange")] == [
        "warn",
        "error",
        "debug",
        "info",
        "info",
    ]


@given(st.lists(st.text(max_size=200), max_size=20))
def test_a_batch_is_tidied_like_its_lines(messages: list[str]) -> None:
    assert list(tidy.all(messages)) == [tidy(message) for message in messages]


@pytest.mark.parametrize(
    "message",
    [
        "password=hunter2 (3 times)",
        'raise ValueError("secret: hunter2")',
        "MY_PASSWORD='a b'",
        "api_key=abcdefgh",
        "https://u:pa55word@host/x?X-Amz-Signature=abcdef0123456789",
        "Authorization: Bearer abcdefghijklmnop",
        "token: abcdefghijklmnop",
    ],
)
def test_what_is_tidied_twice_is_as_if_tidied_once(message: str) -> None:
    once = tidy(message)
    assert "[redacted]" in once
    assert tidy(once) == once


@pytest.mark.parametrize(
    "piece",
    ["password", "token ", "://", "bearer ", "secret" * 10, "eyJaaaaaaaaa.", "key=", "authorization: "],
)
def test_no_text_takes_long(piece: str) -> None:
    message = piece * (60_000 // len(piece))
    began_s = time.thread_time()  # A machine that pauses makes no text long.
    tidy(message)
    assert time.thread_time() - began_s < 5.0
