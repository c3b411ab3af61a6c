"""Names, files and objects become tokenizers, or an error that says what to do instead."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from strata.data.tokens.building.tokenizers import ByteTokenizer, load_tokenizer
from strata.data.tokens.errors import BuildFailed, TokenizerUnavailable
from strata.data.tokens.index import TokenIndex
from tests.data.tokens.bpe import train
from tests.data.tokens.corpora import WordTokenizer, build, texts, tokens_of, write_jsonl


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    return train(tmp_path / "tokenizer.json")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(100))


def flat(lists: list[list[int]]) -> list[int]:
    return [i for ids in lists for i in ids]


def test_bytes_are_their_own_ids_and_come_back() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve 🦊"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eos_id]) == text


def test_end_mark_follows_each_document(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["ab", "", "cü"])
    report = build(tmp_path / "x.index", [path], eos=256)
    assert tokens_of(report.path) == [97, 98, 256, 99, 0xC3, 0xBC, 256]


def test_file_of_the_tokenizers_library_gives_exactly_its_ids(tmp_path: Path, bpe: Path, data: Path) -> None:
    from tokenizers import Tokenizer

    expected = flat([Tokenizer.from_file(str(bpe)).encode(text).ids for text in texts(100)])
    assert tokens_of(build(tmp_path / "x.index", [data], tokenizer=str(bpe)).path) == expected
    assert (
        tokens_of(build(tmp_path / "y.index", [data], tokenizer=Tokenizer.from_file(str(bpe))).path)
        == expected
    )
    with TokenIndex(tmp_path / "x.index") as index:
        assert (index.tokens.dtype, index.meta.tokenizer) == (np.dtype(np.uint16), str(bpe))


def test_padding_and_truncation_do_not_leak_into_the_index(tmp_path: Path, bpe: Path, data: Path) -> None:
    from tokenizers import Tokenizer

    plain = tokens_of(build(tmp_path / "x.index", [data], tokenizer=bpe).path)
    padded = Tokenizer.from_file(str(bpe))
    padded.enable_padding(length=64)
    padded.enable_truncation(5)
    assert tokens_of(build(tmp_path / "y.index", [data], tokenizer=padded).path) == plain
    assert padded.padding is not None  # the caller's own object is left as it was


def test_end_mark_may_be_named_by_its_token(tmp_path: Path, bpe: Path, data: Path) -> None:
    report = build(tmp_path / "x.index", [data], tokenizer=bpe, eos="<|endoftext|>")
    assert report.meta.eos_id == 0
    assert tokens_of(report.path).count(0) == 100
    with pytest.raises(TokenizerUnavailable, match="no token '<eos>'"):
        build(tmp_path / "y.index", [data], tokenizer=bpe, eos="<eos>")


def test_any_object_with_encode_will_do(tmp_path: Path, data: Path) -> None:
    class WithIds:
        class Encoding:
            def __init__(self, ids: list[int]) -> None:
                self.ids = ids

        def encode(self, text: str) -> Encoding:
            return self.Encoding(WordTokenizer().encode(text))

    expected = flat([WordTokenizer().encode(text) for text in texts(100)])
    for name, tokenizer in (("x", WordTokenizer()), ("y", WithIds())):
        report = build(tmp_path / f"{name}.index", [data], tokenizer=tokenizer)
        assert tokens_of(report.path) == expected
        assert report.header.token_bytes == 4  # it does not say how large its vocabulary is


class Sized(WordTokenizer):
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


@pytest.mark.parametrize(("vocab_size", "token_bytes"), [(65_536, 2), (65_537, 4)])
def test_width_follows_the_vocabulary(tmp_path: Path, data: Path, vocab_size: int, token_bytes: int) -> None:
    report = build(tmp_path / "x.index", [data], tokenizer=Sized(vocab_size))
    assert report.header.token_bytes == token_bytes
    assert tokens_of(report.path) == flat([WordTokenizer().encode(text) for text in texts(100)])


def test_end_mark_beyond_sixteen_bits_widens_the_tokens(tmp_path: Path, data: Path) -> None:
    report = build(tmp_path / "x.index", [data], eos=70_000)
    assert tokens_of(report.path).count(70_000) == 100


def test_id_beyond_the_vocabulary_is_an_error_not_an_overflow(tmp_path: Path, data: Path) -> None:
    with pytest.raises(TokenizerUnavailable, match="but its vocabulary has 50 ids"):
        build(tmp_path / "x.index", [data], tokenizer=Sized(50))
    assert not (tmp_path / "x.index").exists()


@pytest.mark.parametrize("result", [["a"], [-1], [2**32], None, 3])
def test_nonsense_from_a_tokenizer_is_named(tmp_path: Path, data: Path, result: object) -> None:
    class Nonsense:
        def encode(self, text: str) -> object:
            return result

    with pytest.raises(TokenizerUnavailable, match="not a list of token ids"):
        build(tmp_path / "x.index", [data], tokenizer=Nonsense())


def test_error_of_a_tokenizer_names_the_file_and_leaves_no_part(tmp_path: Path, data: Path) -> None:
    class Broken:
        def encode(self, text: str) -> list[int]:
            raise RuntimeError("no luck")

    with pytest.raises(BuildFailed, match=r"raised RuntimeError on text from .*a\.jsonl: no luck"):
        build(tmp_path / "x.index", [data], tokenizer=Broken())
    assert list(tmp_path.rglob("*00000000*")) == []


def test_tokenizer_that_cannot_travel_works_in_this_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Local(WordTokenizer):
        pass

    data = write_jsonl(tmp_path / "a.jsonl", texts(300))
    with caplog.at_level(logging.WARNING):
        report = build(tmp_path / "x.index", [data], tokenizer=Local(), workers=2, chunk_bytes=10_000)
    assert tokens_of(report.path) == flat([WordTokenizer().encode(text) for text in texts(300)])
    assert "tokenizing in one process" in caplog.text


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"version": 1}')
    for tokenizer, reason in (
        (object(), "no encode method"),
        (str(broken), "is not a tokenizer.json"),
        (str(tmp_path / "none.json"), "There is no tokenizer file"),
    ):
        with pytest.raises(TokenizerUnavailable, match=reason):
            load_tokenizer(tokenizer)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://does-not-exist.invalid"])
def test_unreachable_hub_says_so_at_once_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(TokenizerUnavailable) as caught:
        load_tokenizer("some-org/not-in-any-cache")
    assert "not in the local cache, and the hub is unreachable" in str(caught.value)
    assert "--tokenizer bytes" in str(caught.value)
    assert "tokenizer.json" in str(caught.value)


def test_offline_switch_of_the_hub_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TokenizerUnavailable, match="HF_HUB_OFFLINE is set"):
        load_tokenizer("some-org/not-in-any-cache")
