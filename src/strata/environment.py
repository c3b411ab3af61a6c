"""The environment variables that Strata reads, and what happens to those that look like one and are not.

A `.env` in the working directory may come from a stranger, such as the author of a repository that was cloned: only what can
neither reveal a secret nor send anything elsewhere nor name a program is taken from it (`SAFE`). `unread` names every variable that
changes nothing although the user probably meant it to, with the nearest one that does. A test compares the table with the sources, so
that it stays complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from strata.validation import closest

OURS = ("STRATA_", "COORDINATOR_", "CHECKPOINT_", "RDZV_")
"""A variable that starts so was meant for us."""

KNOWN = frozenset(
    [
        "STRATA_ADVERTISE",
        "STRATA_AGENT",
        "STRATA_AGENT_GRACE",
        "STRATA_ALLOWED_HOSTS",
        "STRATA_API_URL",
        "STRATA_ARCHIVE",
        "STRATA_BARRIER_TIMEOUT",
        "STRATA_CACHE_DIR",
        "STRATA_CACHE_LIMIT_MB",
        "STRATA_CHECKPOINTS",
        "STRATA_CHECKPOINT_DIR",
        "STRATA_CURRENCY",
        "STRATA_DATA_DIR",
        "STRATA_DATA_ROOTS",
        "STRATA_DISCONNECT_GRACE",
        "STRATA_DISK_RESERVE_MB",
        "STRATA_ENTRANCE",
        "STRATA_ETCD_CA",
        "STRATA_ETCD_CERT",
        "STRATA_ETCD_KEY",
        "STRATA_ETCD_PASSWORD",
        "STRATA_ETCD_USER",
        "STRATA_FINISH_SECONDS",
        "STRATA_GRACE_S",
        "STRATA_GRPC_PORT",
        "STRATA_HEALTH",
        "STRATA_HEARTBEAT_INTERVAL",
        "STRATA_HEARTBEAT_TIMEOUT",
        "STRATA_HOST",
        "STRATA_HTTP_PORT",
        "STRATA_JOB_ID",
        "STRATA_JOURNAL",
        "STRATA_KEEPER",
        "STRATA_KEEPS_IMAGES",
        "STRATA_KEEP_BARRIERS_DAYS",
        "STRATA_KEEP_CHECKPOINTS_DAYS",
        "STRATA_KEEP_TASKS_DAYS",
        "STRATA_KEEP_VALUES_DAYS",
        "STRATA_LAUNCH",
        "STRATA_LAUNCHER",
        "STRATA_LEADER_LEASE",
        "STRATA_LOG",
        "STRATA_LOG_DAYS",
        "STRATA_LOG_LIMIT_MB",
        "STRATA_LOG_LINES_PER_SECOND",
        "STRATA_MAX_CONNECTIONS",
        "STRATA_MAX_CONNECTIONS_PER_CLIENT",
        "STRATA_MAX_WORKERS",
        "STRATA_MEMORY_ROOT",
        "STRATA_METADATA_URL",
        "STRATA_METRICS_LIMIT_MB",
        "STRATA_METRICS_PORT",
        "STRATA_NOTICES",
        "STRATA_NOTIFY",
        "STRATA_NOTIFY_RULES",
        "STRATA_NOTIFY_SECRET",
        "STRATA_OTEL_ENDPOINT",
        "STRATA_PEERS",
        "STRATA_PEER_BUDGET",
        "STRATA_POLICY",
        "STRATA_PRELOAD",
        "STRATA_PREVIEWS",
        "STRATA_PRICE_PER_GPU_HOUR",
        "STRATA_RACK",
        "STRATA_RAY_ADDRESS",
        "STRATA_RAY_CPUS_PER_WORKER",
        "STRATA_RECIPES_DIR",
        "STRATA_ROUND_STORES",
        "STRATA_RUN_ID",
        "STRATA_SEEN_IMPORTS",
        "STRATA_SESSIONS",
        "STRATA_SHIP_LOGS",
        "STRATA_SIGNING_KEY",
        "STRATA_SLOT",
        "STRATA_TASK",
        "STRATA_TASK_ENVIRONMENT",
        "STRATA_TASK_GPUS",
        "STRATA_TASK_ID",
        "STRATA_TASK_STOP_TIMEOUT",
        "STRATA_TASK_TLS_CA",
        "STRATA_TASK_TLS_CERT",
        "STRATA_TASK_TLS_KEY",
        "STRATA_TASK_WORKERS",
        "STRATA_TLS_CA",
        "STRATA_TLS_CERT",
        "STRATA_TLS_CLIENT_CA",
        "STRATA_TLS_KEY",
        "STRATA_TOKEN",
        "STRATA_TRUST_LOOPBACK",
        "COORDINATOR_ADDR",
        "COORDINATOR_URL",
        "CHECKPOINT_BUCKET",
        "CHECKPOINT_DIR",
        "STORAGE_BACKEND",
        "NNODES",
        "MIN_NODES",
        "MAX_NODES",
        "NPROC_PER_NODE",
        "RDZV_BACKEND",
        "RDZV_ENDPOINT",
        "RDZV_ID",
        "CONFIG_FILE",
        "WORKER_ID",
        "LOG_FORMAT",
        "LOGLEVEL",
    ]
)

SAFE = frozenset(
    [
        "STRATA_BARRIER_TIMEOUT",
        "STRATA_CURRENCY",
        "STRATA_DISCONNECT_GRACE",
        "STRATA_DISK_RESERVE_MB",
        "STRATA_GRPC_PORT",
        "STRATA_HEARTBEAT_INTERVAL",
        "STRATA_HEARTBEAT_TIMEOUT",
        "STRATA_HTTP_PORT",
        "STRATA_JOB_ID",
        "STRATA_KEEP_BARRIERS_DAYS",
        "STRATA_KEEP_CHECKPOINTS_DAYS",
        "STRATA_KEEP_TASKS_DAYS",
        "STRATA_KEEP_VALUES_DAYS",
        "STRATA_LEADER_LEASE",
        "STRATA_LOG",
        "STRATA_LOG_DAYS",
        "STRATA_LOG_LIMIT_MB",
        "STRATA_LOG_LINES_PER_SECOND",
        "STRATA_MAX_CONNECTIONS",
        "STRATA_MAX_WORKERS",
        "STRATA_METRICS_LIMIT_MB",
        "STRATA_NOTIFY_RULES",
        "STRATA_POLICY",
        "STRATA_PRICE_PER_GPU_HOUR",
        "STRATA_RAY_CPUS_PER_WORKER",
        "STRATA_TASK_GPUS",
        "STRATA_TASK_STOP_TIMEOUT",
        "STRATA_TASK_WORKERS",
        "NNODES",
        "MIN_NODES",
        "MAX_NODES",
        "NPROC_PER_NODE",
        "RDZV_ID",
        "WORKER_ID",
        "LOG_FORMAT",
        "LOGLEVEL",
    ]
)
"""What a `.env` in the working directory may set: neither secrets, nor addresses, nor paths."""

OTHER_NAMES = {
    "RUST_LOG": "STRATA_LOG",
    "LOG_LEVEL": "LOGLEVEL",
    "S3_BUCKET": "CHECKPOINT_BUCKET",
    "STORAGE_TYPE": "STORAGE_BACKEND",
    "NUM_NODES": "NNODES",
    "GPUS_PER_NODE": "NPROC_PER_NODE",
    "CONFIG_PATH": "CONFIG_FILE",
    "CHECKPOINT_PATH": "CHECKPOINT_DIR",
    "COORDINATOR_ADDRESS": "COORDINATOR_ADDR",
    "COORDINATOR_ENDPOINT": "COORDINATOR_ADDR",
    "COORDINATOR_HOST": "COORDINATOR_ADDR",
}
"""What other programs call them."""

# Kubernetes sets these for every service of a namespace, whatever its name; of those that end in `_PORT` the value tells.
_SERVICE_LINK = re.compile(r"\w+_(SERVICE_(HOST|PORT\w*)|PORT_\d+_\w+)=.*|\w+_PORT=\w+://.*")


def refused_in_dotenv(names: Iterable[str]) -> list[str]:
    """Of the variables in a `.env`, those that were meant for us and are not taken from there."""
    return sorted(name for name in names if name not in SAFE and (name in KNOWN or name.startswith(OURS)))


def nodes_wanted(environ: Mapping[str, str]) -> str:
    """How many machines are to take part, or a range of them, MIN:MAX; empty where nothing is said. `MIN_NODES` and `MAX_NODES` are
    the ends of a range; where one of them is not set, `NNODES` is that end."""
    nodes, low, high = (environ.get(name, "") for name in ("NNODES", "MIN_NODES", "MAX_NODES"))
    if not (low or high):
        return nodes
    low = low or nodes or "1"
    return f"{low}:{high or nodes or low}"


def unread(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each variable that changes nothing, in alphabetical order."""
    found = []
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name in KNOWN or _SERVICE_LINK.fullmatch(f"{name}={value}"):
            continue
        near = OTHER_NAMES.get(name)
        if near is None and name.startswith(OURS):
            near = closest(name, KNOWN) or ""
        elif near is None:  # May be another program's: named where a letter or an underscore is wrong.
            near = closest(name, KNOWN, likeness=0.93)
        if near is not None:
            meant = f" (did you mean {near}?)" if near else ""
            found.append(f"the environment variable {name} changes nothing{meant}")
    return found
