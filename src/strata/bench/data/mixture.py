"""Mixtures: how fast positions become samples, how far away a position may be, and what packing and mixing cost a loader.

Rates are those of one core in CPU time: all of it is computing in one thread.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from strata.bench.table import Row
from strata.core.data.mixture import Change, Definition, MixturePlan, Source
from strata.core.data.packing import pack_lengths
from strata.data.composing.mixture import Mixture
from strata.data.composing.packing import pack
from strata.data.loading.loader import ElasticLoader
from strata.data.loading.sampler import ElasticSampler
from strata.data.tokens.building.builder import BuildOptions, build_index
from strata.data.tokens.documents import tokens

AT = 10**9
CHUNK = 65_536
ROUNDS = 7
LENGTH, BATCH = 2_048, 16
WEIGHTS = (0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05)


def run(*, draws: int = 1_000_000, documents: int = 20_000, batches: int = 150) -> Iterator[Row]:
    yield from _draws(draws)
    with tempfile.TemporaryDirectory() as folder:
        yield from _loaders(Path(folder), documents=documents, batches=batches)


def _plan() -> MixturePlan:
    names = [f"source{i}" for i in range(len(WEIGHTS))]
    definition = Definition(
        sources=tuple(Source(name=name, size=5_000_000 * (i + 1)) for i, name in enumerate(names)),
        weights=dict(zip(names, WEIGHTS, strict=True)),
        schedule=(Change(step=10_000, weights={names[1]: 0.4}),),
    )
    return MixturePlan(definition=definition, global_batch_size=256)


def _draws(draws: int) -> Iterator[Row]:
    plan = _plan()
    plan.choose(np.arange(AT, AT + CHUNK))
    rates = []
    for round_at in range(AT, AT + ROUNDS * draws, draws):
        began_s = time.process_time()
        for first in range(round_at, round_at + draws, CHUNK):
            plan.choose(np.arange(first, first + CHUNK))
        rates.append(draws / (time.process_time() - began_s) / 1e6)
    yield Row(
        name="mixture of 8 sources, positions to samples",
        measured=max(rates),
        unit="M draws/s",
        target=2.0,
        note=f"on one core, in CPU time; the slowest of {ROUNDS} rounds {min(rates):.2g}",
    )
    seeks = []
    for place in range(AT, AT + 200 * 7_919, 7_919):
        began_s = time.perf_counter()
        fresh = _plan()
        laid_out_s = time.perf_counter()
        fresh.choose([place])
        seeks.append(time.perf_counter() - laid_out_s)
    middle = sorted(seeks)[len(seeks) // 2]
    yield Row(
        name="seek to position 10⁹ of a mixture",
        measured=middle * 1e3,
        unit="ms",
        target=1.0,
        better="lower",
        peer=f"laying it out with its schedule: {(laid_out_s - began_s) * 1e3:.2f} ms",
        note=f"slowest of {len(seeks)}: {max(seeks) * 1e3:.2f} ms",
    )
    leaf = plan.draw(np.arange(AT, AT + 200_000)).leaf
    before = np.zeros((len(leaf) + 1, len(WEIGHTS)))
    before[1:] = np.cumsum(leaf[:, None] == np.arange(len(WEIGHTS)), axis=0)
    shares = np.asarray([float(weight) for weight in plan.settings()[-1][1]])
    off = np.abs((before[10_000:] - before[:-10_000]) / 10_000 - shares).max()
    yield Row(
        name="any 10,000 draws in a row, distance from the weights",
        measured=float(off) * 100,
        unit="%",
        target=0.1,
        better="lower",
    )


def _loaders(folder: Path, *, documents: int, batches: int) -> Iterator[Row]:
    draw = random.Random(3)
    lengths = [min(20_000, int(draw.lognormvariate(6, 1)) + 1) for _ in range(documents)]
    packing_s = _timed(lambda: pack_lengths(lengths, LENGTH))
    packing = pack_lengths(lengths, LENGTH)
    yield Row(
        name=f"sequences of {LENGTH:,} tokens filled by packing",
        measured=float(packing.tokens.mean()) / LENGTH * 100,
        unit="%",
        peer=f"{documents / packing_s:,.0f} documents/s packed",
    )
    paths = []
    for number in range(4):
        text = folder / f"{number}.txt"
        text.write_text("".join("x" * length + "\n" for length in lengths[number::4]))
        paths.append(
            build_index([text], folder / f"{number}.index", tokenizer="bytes", options=BuildOptions()).path
        )
    single = pack(tokens(paths[0]), LENGTH)
    alone = ElasticLoader(single, ElasticSampler(len(single), global_batch_size=BATCH))
    mixture = Mixture(
        {f"s{n}": tokens(path) for n, path in enumerate(paths)},
        weights={"s0": 0.4, "s1": 0.3, "s2": 0.2, "s3": 0.1},
        sequence_length=LENGTH,
        pack=True,
    )
    mixed = ElasticLoader(mixture, ElasticSampler(mixture, global_batch_size=BATCH))
    rates = {"alone": 0.0, "mixed": 0.0}
    for _ in range(3):  # In turn, so that neither has the quieter machine.
        for name, loader in (("alone", alone), ("mixed", mixed)):
            rates[name] = max(rates[name], _tokens_per_second(loader, batches))
    share = rates["mixed"] / rates["alone"]
    yield Row(
        name="tokens/s of a mixed, packed loader beside a single source",
        measured=share,
        unit="×",
        target=0.7,
        peer=f"{rates['mixed'] / 1e6:.1f} M and {rates['alone'] / 1e6:.1f} M tokens/s",
        note="four packed sources beside one, in CPU time, no loader process in between",
    )


def _tokens_per_second(loader: ElasticLoader, batches: int) -> float:
    """For each second of the processor: other work on the machine does not count."""
    count = 0
    began_s = time.process_time()
    while count < batches:
        count += sum(1 for _ in islice(loader, batches - count))
    return batches * BATCH * LENGTH / (time.process_time() - began_s)


def _timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s
