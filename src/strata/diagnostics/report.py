"""The shape of a check's answer, and the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One answer. `fix` is empty where nothing needs doing."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What to look at. A place that was named must work; one that is only the default may be absent."""

    coordinator: str | None = None
    api: str | None = None
    etcd: str | None = None
    checkpoint_dir: str | None = None
    s3_bucket: str | None = None
    s3_region: str | None = None
    ports: tuple[int, ...] = ()

    DEFAULT_COORDINATOR = "127.0.0.1:50051"
    DEFAULT_API = "http://127.0.0.1:3000"
    DEFAULT_ETCD = "localhost:2379"
    DEFAULT_PORTS = (29500, 50051, 3000)


Check = Callable[[Targets], Iterator[CheckResult]]


def run_all(targets: Targets) -> Iterator[CheckResult]:
    """Every check, one after the other, as their answers come."""
    from strata.diagnostics import machine, network, storage

    checks: tuple[tuple[str, Check], ...] = (
        ("versions", machine.versions),
        ("gpu", machine.gpu),
        ("health", machine.health),
        ("shared memory", machine.shared_memory),
        ("limits", machine.limits),
        ("environment", network.torchrun_environment),
        ("variables", network.unread_variables),
        ("host name", network.host_name),
        ("network cards", network.network_cards),
        ("ports", network.ports),
        ("etcd", network.etcd),
        ("coordinator", network.coordinator),
        ("disk", storage.disk),
        ("s3", storage.s3),
    )
    for name, check in checks:
        try:
            yield from check(targets)
        except Exception as error:  # A check that breaks must not hide the others.
            yield CheckResult(
                name=name, verdict="warn", found=f"could not be checked: {type(error).__name__}: {error}"
            )
