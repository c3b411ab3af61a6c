"""Sharded state (FSDP2, tensor parallel, DTensor) through PyTorch's distributed checkpoints, kept by Strata.

    dcp.save(state, storage_writer=StrataStorageWriter("s3://bucket/run", step=500, generation=7))
    dcp.load(state, storage_reader=StrataStorageReader("s3://bucket/run"))

PyTorch's planners decide which rank writes what (replicated state once, spread over the ranks) and how a state saved
by one number of ranks is read by another. Strata keeps the bytes: each rank writes one part, and when all of them are
durable the coordinating rank publishes one manifest with every part's size and digests. Before that there is no
checkpoint, afterwards it is complete. A writer of an older generation than the newest manifest is refused.

Nothing is pickled but objects that are no tensors; those must load with `weights_only=True`, which is tried when saving
and done when loading. Every byte is verified before it is used. What fails raises on all ranks at once, inside DCP's
`CheckpointException`; a damaged part is named. Where to fall back to is the caller's choice: `steps` and `latest` tell
what there is.
"""

from __future__ import annotations

from strata.checkpoint.sharded.listing import latest, steps
from strata.errors import MissingDependency

try:
    from strata.checkpoint.sharded.reader import StrataStorageReader
    from strata.checkpoint.sharded.writer import StaleGeneration, StrataStorageWriter
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingDependency("torch", extra="torch", feature="Sharded state") from error

__all__ = ["StaleGeneration", "StrataStorageReader", "StrataStorageWriter", "latest", "steps"]
