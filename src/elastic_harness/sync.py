"""How long this rank waits for the others when gradients are exchanged. Everything lives in `strata.trainer.sync`."""

from __future__ import annotations

from strata.trainer.sync import SyncTimer

__all__ = ["SyncTimer"]
