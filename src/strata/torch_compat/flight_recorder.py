"""The last collectives of this process, as torch's flight recorder knows them.

Torch keeps them in a ring (`TORCH_FR_BUFFER_SIZE`): of NCCL since 2.7, of gloo since later versions. Where it keeps none, none are
known. A rank that hangs shows by them which collective it waits in, and which one the others have not come to.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""What torch calls it, newest first. Neither has to be there."""


def last_collectives(limit: int = 20) -> list[str]:
    """One line each, newest first: '#312 gloo:all_reduce [[1024]] Float, started 4.2 s ago, not known to have ended'."""
    from torch._C import _distributed_c10d as c10d

    for name in DUMPS:
        if (dump := getattr(c10d, name, None)) is not None:
            with suppress(Exception):  # It is asked for when something is wrong already.
                entries = json.loads(dump()).get("entries", [])
                return [_line(entry) for entry in reversed(entries[-limit:])]
    return []


def _line(entry: dict[str, Any]) -> str:
    began_s = entry.get("time_created_ns", 0) / 1e9
    age = f"{max(0.0, time.time() - began_s):.1f} s ago" if began_s else "at an unknown time"
    ended = entry.get("state") == "completed" or entry.get("retired")
    sequence = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    dtypes = ", ".join(map(str, entry.get("input_dtypes", [])))
    what = f"#{sequence} {entry.get('profiling_name', 'collective')} {entry.get('input_sizes', [])} {dtypes}"
    return f"{what}, started {age}, {'ended' if ended else 'not known to have ended'}"
