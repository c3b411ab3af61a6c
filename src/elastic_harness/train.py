"""The trainer, under the name that users know:

    torchrun --nproc-per-node=2 -m elastic_harness.train --config examples/configs/small.yaml training.max_steps=200

Everything lives in `strata.trainer.train`.
"""

from __future__ import annotations

import sys

from strata.trainer.train import Trainer, main

__all__ = ["Trainer", "main"]

if __name__ == "__main__":
    sys.exit(main())
