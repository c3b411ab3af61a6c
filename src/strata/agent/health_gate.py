"""Before an agent joins, and after a failure that may have been its machine's: the machine is examined, and reported.

What is examined is in `strata.diagnostics.health`, what follows in `strata.core.fleet.health`: the coordinator quarantines a machine that
is not fit, with the reason, so that a machine that stands by takes its place. `STRATA_HEALTH` says when: `auto`, the default, where
machines meet at a coordinator and are started by `strata torchrun`; `on` always, so that a machine that is not fit does not start without a
coordinator either; `off` never.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

from strata.core.faults.failures import Failure, classify
from strata.core.messages import ReportHealth
from strata.fork_server import ForkServer

if TYPE_CHECKING:
    from strata.diagnostics.health import Findings
    from strata.rpc.cas import CoordinatorCasClient

log = logging.getLogger("strata.rendezvous")

HEALTH_VARIABLE = "STRATA_HEALTH"
LATER_REPORT_S = 60.0
"""How long a report may take that nothing waits for."""
CHOICES = ("auto", "on", "off")
SUSPICIOUS_SIGNALS = frozenset({signal.SIGBUS, signal.SIGILL, signal.SIGSEGV})
"""Which a program gets for its own mistakes too, and from memory that fails."""


def mode() -> str:
    """Raises `ValueError` with what may be written."""
    asked = os.environ.get(HEALTH_VARIABLE, "auto").strip().lower() or "auto"
    if asked not in CHOICES:
        raise ValueError(f"{HEALTH_VARIABLE}={asked}: write {', '.join(CHOICES[:-1])} or {CHOICES[-1]}.")
    return asked


def check_before_joining(client: CoordinatorCasClient) -> str:
    """Why this machine is not to join; empty where it is fit, and where it is not checked."""
    if mode() == "off" or (mode() == "auto" and not _has_fork_server()):
        return ""
    return _report(client, _examine(), reason="before joining")


def _has_fork_server() -> bool:
    """Whether a process with torch in place can be had at once: else the check would take longer to start than all it checks."""
    return ForkServer.current() is not None


def check_alone() -> str:
    """The same without a coordinator, where that is asked for."""
    if mode() != "on":
        return ""
    found = _examine()
    return "; ".join(f"{name}: {why}" for name, why in sorted(found.failed.items()))


def check_after(failure: Failure | None, coordinator: str) -> None:
    """After a worker has ended in a way that a machine may be to blame for. Nothing waits for it: a machine that is not fit is asked to
    leave by the coordinator."""
    if failure is None or not coordinator or not is_suspicious(failure) or mode() == "off":
        return
    reason = f"after a failure: {failure}"[:1000]
    threading.Thread(
        target=_check_again, args=(coordinator, reason), name="strata-health", daemon=True
    ).start()


def is_suspicious(failure: Failure) -> bool:
    code = failure.exit_code or 0
    return classify(failure) == "gpu" or -code in SUSPICIOUS_SIGNALS


def _check_again(coordinator: str, reason: str) -> None:
    from strata.rpc.cas import CoordinatorCasClient

    client = CoordinatorCasClient(coordinator, timeout_s=LATER_REPORT_S)
    try:
        _report(client, _examine(), reason=reason)
    finally:
        client.close()


def _examine() -> Findings:
    from strata.diagnostics.health import examine_in_subprocess

    began_s = time.monotonic()
    found = examine_in_subprocess(folder=None)
    log.info(
        "health checks of this machine finished in %.1f s (%.1f s until they could start)",
        *(found.seconds, max(0.0, time.monotonic() - began_s - found.seconds)),
    )
    return found


def _report(client: CoordinatorCasClient, found: Findings, *, reason: str) -> str:
    command = ReportHealth(
        host=socket.gethostname(),
        kind=found.kind,
        measured=found.measured,
        failed=found.failed,
        clock_s=time.time(),
        seconds=found.seconds,
        reason=reason,
    )
    try:
        unfit = client.report_health(command)
    except ConnectionError as error:
        log.debug("the coordinator could not be notified of this machine's health checks: %s", error)
        unfit = "; ".join(f"{name}: {why}" for name, why in sorted(found.failed.items()))
    if unfit:
        log.error("this machine is not fit to train: %s", unfit)
    return unfit
