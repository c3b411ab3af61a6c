"""Restarted workers that would meet where the dead ones have met: torchrun's trap, and a way around it.

Torch lets workers meet at a key-value store of their agent, and keeps that store through restarts: new workers may read the
addresses of dead ones, fail again, or wait for ever. So does every run with `--master-port`, whatever is set. Here each
attempt gets keys of its own, where all workers know the number of their attempt: on one machine, and where only a static
rendezvous can be the reason. `import strata` does this in restarted workers, which must come before they meet.

Elsewhere `warning` says in one line what to do.
"""

from __future__ import annotations

import os

ROUND_STORES_VARIABLE = "STRATA_ROUND_STORES"
"""Names the run whose agent makes a new store in every round: our own rendezvous, which knows no trap."""

_separated = False


def separate_attempts() -> None:
    """In a restarted worker, before it joins its process group: meet under keys of this attempt. Else nothing."""
    global _separated
    if _separated or not _shares_store() or not _attempt() or not _all_know_the_attempt():
        return
    from torch.distributed import is_initialized

    from strata.torch_compat.stores import prefix_worker_stores

    if is_initialized():
        return
    prefix_worker_stores(f"attempt-{_attempt()}")
    _separated = True


def warning() -> str | None:
    """The warning for the user of a restarted worker that may read what dead ones have left; None where it cannot."""
    if _separated or not _shares_store() or not _attempt() or _has_fresh_stores():
        return None
    return (
        f"this is attempt {_attempt() + 1}, and torchrun reuses the last attempt's rendezvous store: it may read addresses of dead "
        "workers, fail again or hang. Start it with `strata torchrun …` in place of `torchrun …`, or set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    )


def _shares_store() -> bool:
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    is_fresh = run is not None and os.environ.get(ROUND_STORES_VARIABLE) == run
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not is_fresh


def _attempt() -> int:
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0


def _has_fresh_stores() -> bool:
    return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"


def _all_know_the_attempt() -> bool:
    """Agents count their own restarts, so those of several machines may differ. A static rendezvous cannot change, so
    there a failure is everybody's; it is the only one that shares a store although it was asked not to."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE") or _has_fresh_stores()
