"""A dataset over a token index that can stop and resume anywhere, with any number of workers.

Everything lives in `strata.trainer.data`; here suggestions name the harness's own index builder.
"""

from __future__ import annotations

from typing import ClassVar

from elastic_harness.data.index_builder import COMMAND
from strata.data.tokens.sequences import DatasetState
from strata.trainer.data import ResumableDataset as _ResumableDataset
from strata.trainer.data import create_dataloader

__all__ = ["DatasetState", "ResumableDataset", "create_dataloader"]


class ResumableDataset(_ResumableDataset):
    __doc__ = _ResumableDataset.__doc__
    index_command: ClassVar[str] = COMMAND
