"""A Ray cluster of several nodes on this machine, and the end of one of them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil

from strata.launch.cleanup import is_tracker

ENVIRONMENT = {
    # Without this Ray looks for another address than loopback, and waits for it.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A dead node, which refuses connections, is seen after a second instead of fifteen. One that is only slow, on a
    # machine that has much to do, is waited for.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "20000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "500",
}
STORE_BYTES = 80 << 20


class RayCluster:
    def __init__(self, nodes: int, *, cpus: int) -> None:
        from ray.cluster_utils import Cluster

        arguments: dict[str, Any] = {
            "node_ip_address": "127.0.0.1",
            "num_gpus": 0,
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
        }
        # The head only leads: it holds the cluster's memory and cannot be taken away.
        self._cluster = Cluster(initialize_head=True, head_node_args={**arguments, "num_cpus": 0})
        del arguments["include_dashboard"]
        self.nodes = [self._cluster.add_node(**arguments, num_cpus=cpus) for _ in range(nodes)]
        self._cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def free_cpus(self) -> float:
        return float(self._cluster.global_state.available_resources().get("CPU", 0.0))

    def lose(self, node: Any) -> None:
        """Everything that runs on the node is gone at once, as with a machine that lost its power.

        All but Python's resource trackers: this machine continues, and they remove the semaphores of the dead from it.
        """
        (raylet,) = node.all_processes["raylet"]
        daemon = psutil.Process(raylet.process.pid)
        doomed = [daemon, *(p for p in daemon.children(recursive=True) if not is_tracker(p.pid))]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)  # Nobody sees another one go and saves what it has.
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


def kept(nodes: list[Any]) -> list[int]:
    """Process ids of what keeps a torchrun agent on these nodes."""
    found = []
    for node in nodes:
        (raylet,) = node.all_processes["raylet"]
        for process in psutil.Process(raylet.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "strata.launch.supervisor" in process.cmdline():
                    found.append(process.pid)
    return sorted(found)


def agents_on(node: Any) -> int:
    return len(kept([node]))


@contextlib.contextmanager
def ray_cluster(nodes: int, *, cpus: int) -> Iterator[RayCluster]:
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        cluster = RayCluster(nodes, cpus=cpus)
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
