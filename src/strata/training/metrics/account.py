"""Where this process's time goes: every second of it is charged to exactly one part.

`enter` says what is being done from now on; what was done until now is charged. A process that replaces one that died
begins its account with that one's last step, so that no second between them is lost; the first account of any other
process begins with the process, and later ones when they are made. A process that survives the loss of others keeps its
account.
"""

from __future__ import annotations

import itertools
import time

from strata.agent.trace import Footprint, process_start_mono_s
from strata.core.telemetry.goodput import LIFE_METRIC, METRIC_NAMES, PARTS

_accounts_created = itertools.count()


class TimeAccount:
    def __init__(self, before: Footprint | None) -> None:
        began_mono_s = process_start_mono_s() if next(_accounts_created) == 0 else time.monotonic()
        self._totals_s = dict.fromkeys(PARTS, 0.0)
        self._part = "waiting" if before is None else "recovery"
        self._since_mono_s = began_mono_s if before is None else min(before.mono_s, began_mono_s)
        self._began_s = time.time()
        self._to_redo = before.step if before is not None else 0
        self._recovered = before is None

    def enter(self, part: str) -> None:
        now_mono_s = time.monotonic()
        self._totals_s[self._part] += now_mono_s - self._since_mono_s
        self._part, self._since_mono_s = part, now_mono_s

    def enter_step(self, step: int) -> None:
        """Step number `step` is being made; one that had been made before the loss is part of the recovery."""
        self.enter("training" if self._recovered and step >= self._to_redo else "recovery")

    def resume(self, before: Footprint) -> None:
        """Others were lost after this step, and this process continues: since then it recovers."""
        at_mono_s = max(self._since_mono_s, min(before.mono_s, time.monotonic()))
        self._totals_s[self._part] += at_mono_s - self._since_mono_s
        self._part, self._since_mono_s = "recovery", at_mono_s
        self._to_redo, self._recovered = before.step, False

    def made_step(self) -> None:
        """The first step ends what a restart takes."""
        self._recovered = True

    def waited(self, seconds: float) -> None:
        """So much of the step being made was waiting for other ranks."""
        self.enter(self._part)
        moved_s = min(seconds, self._totals_s[self._part])
        self._totals_s[self._part] -= moved_s
        self._totals_s["waiting"] += moved_s

    def totals(self) -> dict[str, float]:
        """As they are reported: seconds by part since the beginning, and which account this is."""
        self.enter(self._part)
        return {
            **{METRIC_NAMES[part]: seconds for part, seconds in self._totals_s.items()},
            LIFE_METRIC: self._began_s,
        }
