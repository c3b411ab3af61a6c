"""The launcher that the settings ask for, and what it needs to know about this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from strata.coordinator.settings import CoordinatorSettings
from strata.launch.protocol import Capacity, Launcher, Listener

LEAST_WORKERS = 8


def launcher_maker(settings: CoordinatorSettings, *, term: int = 0) -> Callable[[Listener], Launcher] | None:
    """None: tasks are kept, and nothing runs them. `term`: in which this coordinator leads, among several."""
    tasks_dir = tasks_dir_of(settings)

    def local(listener: Listener) -> Launcher:
        from strata.launch.local import LocalLauncher

        return LocalLauncher(listener, tasks_dir=tasks_dir, capacity=machine_capacity(settings))

    def ray(listener: Listener) -> Launcher:
        from strata.launch.ray.launcher import RayLauncher, namespace
        from strata.launch.ray.messages import RayOptions

        options = RayOptions(
            address=settings.ray_address,
            namespace=namespace(settings.data_dir, shared=settings.journal),
            cpus_per_worker=settings.ray_cpus_per_worker,
            term=term,
        )
        return RayLauncher(listener, tasks_dir=tasks_dir, options=options)

    return {"local": local, "ray": ray}.get(settings.launcher)


def launching_place(settings: CoordinatorSettings) -> str:
    """Which of several coordinators can see what this one launches: itself alone on its machine, any of them over Ray."""
    return (
        f"{socket.gethostname()}:{settings.data_dir.resolve()}"[-256:] if settings.launcher == "local" else ""
    )


def tasks_dir_of(settings: CoordinatorSettings) -> Path:
    return settings.data_dir.absolute() / "tasks"


def machine_capacity(settings: CoordinatorSettings) -> Capacity:
    gpus = settings.task_gpus
    if gpus < 0:
        gpus = sum(1 for _ in Path("/proc/driver/nvidia/gpus").glob("*"))
    workers = settings.task_workers or max(LEAST_WORKERS, os.cpu_count() or 1)
    return Capacity(workers=workers, gpus=gpus)


def worker_tls(settings: CoordinatorSettings) -> dict[str, str]:
    """What tasks' workers need to speak TLS: the coordinator's own certificate and key are not for them."""
    authority = settings.task_tls_ca or settings.tls_client_ca
    files = {"CA": authority, "CERT": settings.task_tls_cert, "KEY": settings.task_tls_key}
    return {f"STRATA_TLS_{name}": str(file.absolute()) for name, file in files.items() if file is not None}


def worker_address(settings: CoordinatorSettings, grpc_port: int) -> str:
    """Where workers reach this coordinator: an address to listen on everywhere is none to call."""
    host = settings.url_host
    if host in ("0.0.0.0", "[::]"):
        host = "127.0.0.1" if settings.launcher == "local" else socket.gethostname()
    scheme = "https://" if settings.tls_cert is not None else ""
    return f"{scheme}{host}:{grpc_port}"
