"""What is drawn at random for a sample: a function of seed, epoch and sample, whichever process reads it and when.

PyTorch seeds a loader process once. What it draws for a sample would then depend on how many loader processes there
are and on what each has read before, and after a restart every augmentation would be another one. So in loader
processes the generators of torch, NumPy and Python are seeded anew for each sample; where a dataset of one's own reads
whole batches (`__getitems__`), for each batch by its first sample. In the training process nothing is touched: its
generators are the model's too, and a checkpoint keeps them.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strata.data.composing.mixture import Mixture
from strata.data.dataset import ElasticDataset

if TYPE_CHECKING:
    from strata.data.loading.sampler import ElasticSampler


def seed_at(sampler: ElasticSampler, epoch: int, place: int) -> int:
    """63 bits, different for every place of every epoch."""
    text = f"{sampler.dataset}/{sampler.seed}/{epoch}/{place}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def read_samples(samples: Any, ids: Sequence[int], sampler: ElasticSampler, epoch: int) -> list[Any]:
    """The samples of one batch, each with random numbers of its own."""
    from torch.utils.data import get_worker_info

    many = getattr(samples, "__getitems__", None)
    if get_worker_info() is None:
        return list(many(ids)) if many else [samples[sample] for sample in ids]

    def begin(sample: int) -> None:
        seed_generators(seed_at(sampler, epoch, sample))

    if isinstance(samples, ElasticDataset | Mixture):
        return samples.read(ids, begin=begin)
    if many:
        begin(ids[0])
        return list(many(ids))
    found = []
    for sample in ids:
        begin(sample)
        found.append(samples[sample])
    return found


def seed_generators(seed: int) -> None:
    """This process's generators; those of accelerators have no place in a loader process."""
    import torch

    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
