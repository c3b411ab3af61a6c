"""One rank of a spread GPT beside the plain one: `python -m tests.harness.parallel_script FOLDER TP FSDP CHECKPOINTED`.

It says how far norms, parameters and names are apart after some steps with several micro-batches each.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from strata.torch_compat import lazy_dynamo
from strata.trainer.config import ParallelSection
from strata.trainer.model import GPT, GPTConfig
from strata.trainer.parallel import build_mesh, clip, exchange_gradients, spread
from tests.support_ranks import join, say

STEPS, PARTS, LENGTH, WORDS = 4, 2, 16, 64


def build(*, checkpointed: bool) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=WORDS, n_embd=32, seq_length=LENGTH))
    if checkpointed:
        model.gradient_checkpointing_enable()
    return model


def main() -> None:
    folder, tp, fsdp, checkpointed = (
        Path(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3] == "1",
        sys.argv[4] == "1",
    )
    _, world = join(folder)
    lazy_dynamo.install()
    plain, model = build(checkpointed=checkpointed), build(checkpointed=checkpointed)
    mesh = build_mesh(ParallelSection(tp=tp, fsdp=fsdp), world, "cpu")
    assert mesh is not None
    spread(model, mesh, fsdp=fsdp, compiled=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, foreach=True) for each in (plain, model)]
    generator = torch.Generator().manual_seed(5)
    readers, reader = mesh["dp"].size(), mesh["dp"].get_local_rank()
    norms = []
    for _ in range(STEPS):
        x, y = torch.randint(0, WORDS, (2, readers * PARTS, LENGTH), generator=generator)
        plain(x, y).backward()
        for part in range(PARTS):
            exchange_gradients(model, wanted=part == PARTS - 1)
            row = slice(reader * PARTS + part, reader * PARTS + part + 1)
            (model(x[row], y[row]) / PARTS).backward()
        norms.append((clip(plain, 0.5), clip(model, 0.5)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected, found = dict(plain.named_parameters()), dict(model.named_parameters())
    say(
        folder,
        {
            "norms": norms,
            "same_names": list(expected) == list(found),
            "tied": model.head.weight is model.tokens.weight,
            "apart": max(
                float((expected[name] - value.full_tensor()).abs().max())  # type: ignore[attr-defined]
                for name, value in found.items()
            ),
            "local": sum(value.to_local().numel() for value in found.values()),  # type: ignore[attr-defined]
            "total": sum(value.numel() for value in expected.values()),
        },
    )


if __name__ == "__main__":
    main()
