"""`strata.Histogram`: the distribution of many values at a step, for `job.log`.

Nothing is computed before it is logged, and nothing waits for a device: the values stay where they are, and what leaves the
device is one small tensor.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from strata.core.messages import InvalidArgument
from strata.core.telemetry.histograms import PERCENTS

SAMPLED = 1 << 16
"""Of more values than this, quantiles are those of so many of them, spread evenly; the least, the greatest, mean, deviation and
number are of all."""


class Histogram:
    """Many values that are logged as one metric: `job.log({"grads": strata.Histogram(grad)})`.

    values: a tensor, an array or a list of numbers, of any shape. Of a sharded tensor, only this rank's part is used.
    Values that are not finite are left out.
    """

    __slots__ = ("values",)

    def __init__(self, values: torch.Tensor | npt.ArrayLike) -> None:
        self.values = values

    def parts(self, name: str) -> tuple[torch.Tensor, ...]:
        """As `core.telemetry.histograms.PARTS` names them; 0-dimensional, on the device of the values."""
        return summarized(_flat(name, self.values)).unbind()


def summarized(flat: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        precise = torch.float32 if flat.device.type == "mps" else torch.float64
        finite = flat.isfinite()
        number = finite.sum().to(precise)
        mean = flat.where(finite, 0).sum(dtype=precise) / number
        around = (flat - mean.to(flat.dtype)).where(finite, 0).square()
        deviation = (around.sum(dtype=precise) / number).sqrt()
        low, high = flat.where(finite, torch.inf).amin(), flat.where(finite, -torch.inf).amax()
        # An odd distance: an even one would see some columns of a matrix alone.
        some = flat if len(flat) <= SAMPLED else flat[:: (len(flat) // SAMPLED) | 1]
        there = some.isfinite()
        ordered = some.where(there, torch.inf).sort().values
        shares = torch.tensor(PERCENTS, dtype=precise, device=flat.device) / 100
        at = (shares * (there.sum() - 1).clamp(min=0)).round().long()
        quantiles = ordered[at].to(precise)
        inner = quantiles[1:-1].clamp(low.to(precise), high.to(precise))
        ends = torch.stack([low.to(precise), high.to(precise)])
        return torch.cat([ends[:1], inner, ends[1:], torch.stack([mean, deviation, number])])


def _flat(name: str, values: Any) -> torch.Tensor:
    # What other ranks have of a sharded tensor is not asked for: only this rank may be logging.
    local = values.to_local() if hasattr(values, "to_local") else values
    what = ""
    try:
        found = local.detach() if isinstance(local, torch.Tensor) else torch.as_tensor(local)
        if found.is_complex():
            what = "is of complex numbers."
        elif not found.numel():
            what = "has no values."
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"has values that are not numbers: {error}."
    if what:
        raise InvalidArgument(f"histogram '{name}'", what, hint="Pass a tensor or an array of numbers.")
    flat = found.reshape(-1)
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.to(torch.float32)
