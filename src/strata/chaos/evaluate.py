"""The loss of a trained sample job on text of its own data: how two runs of it are compared."""

from __future__ import annotations

from strata.chaos.run import final_parameters
from strata.launch.sample_job import SampleJob

SEQUENCES = 64


def loss_of(job: SampleJob) -> float:
    """Mean loss of the newest checkpoint over the first sequences of the data."""
    import numpy as np
    import torch

    from strata.data.tokens.index import TokenIndex
    from strata.data.tokens.sequences import SequenceReader
    from strata.trainer.model import GPT, GPTConfig

    settings = job.settings()["model"]
    parameters = final_parameters(job.checkpoints)
    vocabulary = parameters["tokens.weight"].shape[0]  # type: ignore[attr-defined]
    model = GPT(GPTConfig(vocab_size=vocabulary, **settings))  # type: ignore[arg-type]
    model.load_state_dict(parameters)
    model.eval()
    reader = SequenceReader(TokenIndex(job.index), int(str(settings["seq_length"])))
    inputs, labels = reader.read(np.arange(min(SEQUENCES, reader.full)))
    with torch.no_grad():
        return float(model(torch.from_numpy(inputs), torch.from_numpy(labels)))
