"""Mixtures of real datasets, read by real loaders: proportions, packing, functions that drop or split, and the audit."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import strata
from strata.core.data.ledger import DataCommit
from strata.core.data.mixture import Change, MixtureError
from strata.data.composing.mapping import filtered, mapped
from strata.data.composing.mixture import Mixture
from strata.data.composing.packing import cu_seqlens, document_mask, pack
from strata.data.errors import DataError, StateMismatch
from strata.data.loading.commits import DataLedger
from strata.data.loading.loader import ElasticLoader
from strata.data.loading.sampler import ElasticSampler
from strata.data.loading.steps import Batch, ThinnedBatch
from tests.cli.running import strata as run_strata
from tests.data.manifests import publish
from tests.data.tokens.corpora import build, write_jsonl

LENGTH = 16


def indexed(folder: Path, name: str, documents: int) -> Path:
    """An index of documents of 1 to 29 tokens, one for each byte."""
    lines = [chr(97 + number % 26) * (1 + number % 29) for number in range(documents)]
    return build(folder / f"{name}.index", [write_jsonl(folder / f"{name}.jsonl", lines)]).path


class Documents:
    """Documents of any other origin: a list of ids each."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, sample: int) -> dict[str, Any]:
        return {"input_ids": [1_000 + sample] * (1 + sample % 7)}


@pytest.fixture
def mixed(tmp_path: Path) -> Mixture:
    return Mixture(
        {
            "web": strata.tokens(indexed(tmp_path, "web", 300)),
            "code": strata.tokens(indexed(tmp_path, "code", 120)),
            "chat": Documents(40),
        },
        weights={"web": 0.7, "code": 0.2, "chat": 0.1},
        schedule=[(5, {"code": 0.4})],
        sequence_length=LENGTH,
        pack=True,
        seed=7,
    )


def loader_of(mixture: Mixture, **options: Any) -> ElasticLoader:
    sampler = ElasticSampler(mixture, global_batch_size=8, dataset="mix")
    return ElasticLoader(mixture, sampler, **options)


def test_a_packed_batch_has_all_that_attention_needs(mixed: Mixture) -> None:
    batch = next(iter(loader_of(mixed)))
    assert {name: tuple(value.shape) for name, value in batch.data.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids", "document_ids"), (8, LENGTH)
    )
    for ids, labels, positions, documents in zip(
        *(batch.data[name].tolist() for name in ("input_ids", "labels", "position_ids", "document_ids")),
        strict=True,
    ):
        for at, document in enumerate(documents):
            begins = at == 0 or documents[at - 1] != document
            assert positions[at] == (0 if begins or document < 0 else positions[at - 1] + 1)
            continues = at + 1 < LENGTH and documents[at + 1] == document and document >= 0
            if continues:
                assert labels[at] == ids[at + 1]
            elif document < 0:
                assert (ids[at], labels[at]) == (0, -100)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_variable_length_attention_and_flex_attention_take_the_document_ids() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ids = torch.tensor([[0, 0, 0, 1, 1, -1, -1, -1], [0, 1, 1, 1, 1, 1, 2, 2]])
    edges, longest = cu_seqlens(ids)
    assert (edges.dtype, edges.tolist(), longest) == (torch.int32, [0, 3, 5, 8, 9, 14, 16], 5)
    mask = create_block_mask(document_mask(ids), B=2, H=None, Q_LEN=8, KV_LEN=8, device="cpu", BLOCK_SIZE=8)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 1, 8, 4) for _ in range(3))
    together = flex_attention(query, key, value, block_mask=mask)
    for row in range(2):
        for document in ids[row].unique().tolist():
            where = (ids[row] == document).nonzero().flatten()
            alone = torch.nn.functional.scaled_dot_product_attention(
                query[row, :, where], key[row, :, where], value[row, :, where], is_causal=True
            )
            torch.testing.assert_close(together[row, :, where], alone)


def test_an_epoch_of_packed_sequences_has_every_token_of_every_document(tmp_path: Path) -> None:
    documents = strata.tokens(indexed(tmp_path, "web", 300))
    packed = pack(documents, LENGTH)
    counted: Counter[int] = Counter()
    labels: Counter[int] = Counter()
    for row in packed.__getitems__(range(len(packed))):
        counted.update(row["input_ids"][row["document_ids"] >= 0].tolist())
        labels.update(row["labels"][row["labels"] >= 0].tolist())
    every = [documents[i]["input_ids"].tolist() for i in range(len(documents))]
    assert counted == Counter(token for tokens in every for token in tokens)
    assert labels == Counter(token for tokens in every for token in tokens[1:])
    numbers = np.arange(len(packed))
    assert packed.tokens_of(numbers).sum() == documents.index.total_tokens
    assert packed.documents_of(numbers).sum() == len(documents)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_processes_and_the_world_do_not_matter(mixed: Mixture, num_workers: int) -> None:
    alone = [batch.data["input_ids"] for batch in islice(loader_of(mixed), 12)]
    loaders = [loader_of(mixed, num_workers=num_workers) for _ in range(3)]
    for rank, loader in enumerate(loaders):
        loader.set_world(rank, 3)
    for whole, parts in zip(alone, zip(*loaders, strict=False), strict=False):
        assert torch.equal(whole, torch.cat([part.data["input_ids"] for part in parts]))


def test_the_audit_by_source_counts_samples_documents_and_tokens(mixed: Mixture, tmp_path: Path) -> None:
    loader = loader_of(mixed)
    ledger = DataLedger(loader)
    batches = list(islice(loader, 40))
    data = DataCommit.from_json(ledger.commit("c1"))
    publish(tmp_path / "run", "c1", parent=None, sequence=1, data=data)
    ran = run_strata("audit", str(tmp_path / "run"), "--by-source", "--json")
    assert ran.code == 0, ran.out + ran.err
    found = json.loads(ran.out)["sources"]
    assert [each["source"] for each in found] == ["web", "code", "chat"]
    assert sum(each["samples"] for each in found) == 40 * 8
    trained = sum(int((batch.data["document_ids"] >= 0).sum()) for batch in batches)
    assert sum(each["tokens"] for each in found) == trained
    chat = found[2]
    assert chat["epochs"] >= 1
    table = run_strata("audit", str(tmp_path / "run"), "--by-source")
    assert (table.code, "320 samples so far, each exactly once" in table.out) == (0, True)
    whole = run_strata("audit", "--source", str(tmp_path / "run"))
    assert whole.code == 0, whole.out


def test_an_audit_by_source_says_what_was_lost_and_where(tmp_path: Path) -> None:
    mixture = Mixture({"a": range(100), "b": range(10)}, weights={"a": 1, "b": 1})
    loader = loader_of(mixture)
    ledger = DataLedger(loader)
    list(islice(loader, 5))
    first = DataCommit.from_json(ledger.commit("c1"))
    loader.sampler.move(0, 24)  # Two steps once more.
    list(islice(loader, 4))
    publish(tmp_path, "c1", parent=None, sequence=1, data=first)
    publish(tmp_path, "c2", parent="c1", sequence=2, data=DataCommit.from_json(ledger.commit("c2")))
    ran = run_strata("audit", str(tmp_path), "--by-source")
    assert ran.code == 1
    assert "b: 8 samples trained more than once in epoch 1" in ran.out
    assert run_strata("audit", str(tmp_path / "nothing"), "--by-source").code == 2
    assert run_strata("audit", "--by-source").code == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_dropped_or_split_keeps_its_position(num_workers: int) -> None:
    rows = mapped(range(40), _repeated)
    sampler = ElasticSampler(len(rows), global_batch_size=5, shuffle=False)
    loader = ElasticLoader(rows, sampler, num_workers=num_workers)
    batches = list(loader)
    assert [(batch.step.start, batch.step.stop) for batch in batches] == [(n, n + 5) for n in range(0, 40, 5)]
    got = [value for batch in batches if batch.weight for value in batch.data.tolist()]
    assert got == [row for row in range(40) for _ in range(_times(row))]
    empty = [batch for batch in batches if isinstance(batch, ThinnedBatch) and not batch.kept]
    assert [(batch.step.start, batch.weight, batch.data.tolist()) for batch in empty] == [(20, 0.0, [25])]
    assert loader.epoch == 1


def _times(row: int) -> int:
    return 0 if 20 <= row < 25 else row % 3 + (row == 25)


def _repeated(row: int) -> list[int]:
    return [row] * _times(row)


def test_a_filter_that_keeps_nothing_says_so() -> None:
    rows = filtered(range(8), lambda row: False)
    with pytest.raises(DataError, match="All samples of a batch were dropped"):
        next(iter(ElasticLoader(rows, ElasticSampler(8, global_batch_size=2))))


def test_filtered_documents_are_packed_without_what_was_dropped() -> None:
    kept = filtered(Documents(60), lambda row: len(row["input_ids"]) > 3)
    packed = pack(kept, LENGTH)
    tokens = Counter(
        token
        for row in packed.__getitems__(range(len(packed)))
        for token in row["input_ids"][row["document_ids"] >= 0].tolist()
    )
    assert tokens == {1_000 + n: 1 + n % 7 for n in range(60) if n % 7 >= 3}


def test_each_sample_has_random_numbers_of_its_own_in_every_epoch_of_its_source() -> None:
    mixture = Mixture({"a": _Augmented(3), "b": _Augmented(50)}, weights={"a": 1, "b": 1}, seed=3)
    one = [batch.data.tolist() for batch in islice(loader_of(mixture, num_workers=1), 6)]
    two = [batch.data.tolist() for batch in islice(loader_of(mixture, num_workers=2), 6)]
    assert one == two
    of_a = [value for batch in one for source, value in batch if source == 3]
    assert len(set(of_a)) == len(of_a)


class _Augmented:
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, sample: int) -> torch.Tensor:
        return torch.tensor([float(self._size), float(torch.rand(()))])


def test_a_change_while_reading_is_read_from_its_step_on() -> None:
    mixture = Mixture({"a": range(1_000), "b": range(1_000, 2_000)}, weights={"a": 1, "b": 1})
    loader = loader_of(mixture, num_workers=1)
    taken: list[Batch] = list(islice(loader, 3))
    loader.sampler.change_weights(Change(step=5, weights={"a": 0.25}))
    taken += islice(loader, 7)
    a = [int((batch.data < 1_000).sum()) for batch in taken]
    assert a == [4] * 5 + [2] * 5
    with pytest.raises(MixtureError, match="step 9 has already started; the first that can be changed is 10"):
        loader.sampler.change_weights(Change(step=9, weights={"a": 0.5}))


def test_a_mixture_that_has_ended_says_why_and_what_to_do() -> None:
    mixture = Mixture({"a": range(10), "b": range(40)}, weights={"a": 1, "b": 1}, epochs={"a": 2})
    loader = loader_of(mixture)
    assert sum(len(batch.step) for batch in loader) == loader.sampler.total
    with pytest.raises(DataError, match="source 'a' has run out"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "seed 0 .here 1."),
        ({"weights": {"a": 2, "b": 1}}, "weights was"),
        ({"sources": {"a": range(10), "b": range(6)}}, "size of source 'b' was 5, is 6"),
        ({"sources": {"a": range(10), "c": range(5)}, "weights": {"a": 1, "c": 1}}, "its sources were a, b"),
    ],
)
def test_a_position_in_another_mixture_is_refused(other: dict[str, Any], message: str) -> None:
    base: dict[str, Any] = {"sources": {"a": range(10), "b": range(5)}, "weights": {"a": 1, "b": 1}}
    loader = loader_of(Mixture(base["sources"], weights=base["weights"]))
    next(iter(loader))
    changed = {**base, **other}
    sources = changed.pop("sources")
    with pytest.raises(StateMismatch, match=message):
        loader_of(Mixture(sources, **changed)).load_state_dict(loader.state_dict())
    plain = ElasticSampler(15, global_batch_size=8, dataset="mix")
    plain.seed = 0
    with pytest.raises(StateMismatch):
        plain.load_state_dict(loader.state_dict())


def test_what_cannot_be_a_source_is_refused_with_the_reason() -> None:
    with pytest.raises(MixtureError, match="'a' is a generator"):
        Mixture({"a": (n for n in range(3))}, weights={"a": 1})  # type: ignore[dict-item]
    with pytest.raises(MixtureError, match="needs a sequence_length"):
        Mixture({"a": range(3)}, weights={"a": 1}, pack=True)
    with pytest.raises(DataError, match="is not a document of token ids"):
        Mixture({"a": ["text"]}, weights={"a": 1}, pack=True, sequence_length=8)
    with pytest.raises(ValueError, match="needs a global_batch_size"):
        ElasticSampler(
            Mixture({"a": range(3), "b": range(3)}, weights={"a": 1, "b": 1}, schedule=[(3, {"a": 0.1})]),
            batch_size=4,
        )


def test_token_indexes_without_packing_are_read_in_sequences(tmp_path: Path) -> None:
    path = indexed(tmp_path, "web", 100)
    mixture = Mixture({"web": strata.tokens(path)}, weights={"web": 1}, sequence_length=LENGTH, epochs=1)
    loader = loader_of(mixture)
    ledger = DataLedger(loader)
    rows = torch.cat([batch.data["labels"] for batch in loader])
    total = strata.tokens(path).index.total_tokens
    assert int((rows >= 0).sum()) == total - 1
    measured = ledger.commit("c")["states"]["mix"]["mixture"]["measured"]["sources"]["web"]
    assert measured == [100 - 1, total - 1]  # The first document has one token, which nothing predicts.
