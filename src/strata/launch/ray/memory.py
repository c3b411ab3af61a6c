"""What coordinators remember in the Ray cluster itself: which of them leads, and how runs ended.

A **term** is claimed before anything is looked for; a coordinator that finds a later one changes nothing more. The end of a run is
here before its last trace is removed: where the coordinator is lost before it has recorded the end, the next one finds it.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from ray.experimental import internal_kv

from strata.core.messages import ExitCause
from strata.launch.ray.messages import RayOptions, Superseded


class ClusterMemory:
    def __init__(self, options: RayOptions) -> None:
        self._term = options.term
        self._terms = f"strata:{options.namespace}:terms/"
        self._ends = f"strata:{options.namespace}:ends/"

    # --- who leads ------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Raises `Superseded`. Each term has a key of its own, so that no claim can take another's place."""
        if not self._term:
            return  # The only coordinator there is.
        internal_kv._internal_kv_put(self._key(self._term), b"1")
        self.check()
        for term in self._claimed():
            if term < self._term:
                internal_kv._internal_kv_del(self._key(term))

    def check(self) -> None:
        """Raises `Superseded` where a later leader has been here."""
        latest = max(self._claimed(), default=0) if self._term else 0
        if latest > self._term:
            raise Superseded(self._term, latest)

    def _claimed(self) -> list[int]:
        return [int(key[len(self._terms) :]) for key in internal_kv._internal_kv_list(self._terms)]

    def _key(self, term: int) -> str:
        return f"{self._terms}{term:020d}"

    # --- how runs ended -------------------------------------------------------------------------------------

    def note_end(self, run_id: str, cause: ExitCause | None) -> None:
        text = json.dumps(asdict(cause) if cause is not None else None)
        internal_kv._internal_kv_put(self._ends + run_id, text)

    def ends(self) -> dict[str, ExitCause | None]:
        """By run."""
        found: dict[str, ExitCause | None] = {}
        for key in internal_kv._internal_kv_list(self._ends):
            text = internal_kv._internal_kv_get(key)
            if text is not None:
                facts = json.loads(text)
                found[key[len(self._ends) :].decode()] = ExitCause(**facts) if facts is not None else None
        return found

    def forget_end(self, run_id: str) -> None:
        internal_kv._internal_kv_del(self._ends + run_id)
