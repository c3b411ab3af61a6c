"""The built-in trainer: a GPT on token data that survives crashes, joins and leaves, and its configuration.

    train.py        the loop, and its command line
    config.py       one YAML file and its overrides; validation.py finds everything that is wrong with it
    model.py        a small GPT, with nothing elastic in it
    distributed.py  joining and leaving the process group
    scaling.py      learning rate and accumulation for a world that changes size
    data.py         token sequences from an index that fits its files

What makes it elastic is `strata.elastic`, which serves any other loop as well. Everything raised on purpose is an
`ElasticTrainingError`. Importing this loads no torch.
"""

from strata.logs import hide_level_from_torch

hide_level_from_torch()  # Before any of its modules imports torch.
