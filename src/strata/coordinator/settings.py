"""The settings of a coordinator, and the rules between them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from strata.config import ConfigError, read_config, setting
from strata.coordinator.auth.gatekeeper import DIGEST_PREFIX
from strata.coordinator.auth.paths import problems_of_roots
from strata.coordinator.auth.peers import is_loopback
from strata.coordinator.auth.principals import ROLES, Role
from strata.coordinator.journal.etcd import EtcdLocation, parse_location
from strata.coordinator.notify.settings import NotifySettings, read_notify
from strata.core.cluster import Limits
from strata.core.faults.cost import PriceList
from strata.core.fleet.barriers import BarrierLimits
from strata.core.fleet.membership import MembershipLimits
from strata.core.fleet.presence import PresenceLimits
from strata.core.fleet.retention import DAY_S, RetentionLimits

SECTION = "coordinator"
EVERYWHERE = ("0.0.0.0", "::")
ARCHIVE_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure", "file")
TOKEN_CHARACTERS = 16
"""What a configured token must have where other machines can try to guess it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    host: str = setting("127.0.0.1", "Address to listen on.", env="STRATA_HOST")
    grpc_port: int = setting(
        50051, "gRPC port; 0 picks a free one.", env="STRATA_GRPC_PORT", least=0, most=65535
    )
    http_port: int = setting(
        3000, "Port of API and dashboard; 0 picks a free one.", env="STRATA_HTTP_PORT", least=0, most=65535
    )
    metrics_port: int = setting(
        -1,
        "Additional port that serves only /api/health and /metrics, even when the API is overloaded; 0 picks "
        "a free one, -1: none.",
        env="STRATA_METRICS_PORT",
        least=-1,
        most=65535,
    )
    data_dir: Path = setting(
        lambda: Path.home() / ".strata", "Directory of the journal.", env="STRATA_DATA_DIR"
    )
    journal: str = setting(
        "",
        "Shared journal of several coordinators, one of which leads: etcd://HOST:PORT,HOST:PORT/PREFIX, or "
        "etcds:// with TLS; in the data directory when not given.",
        env="STRATA_JOURNAL",
    )
    advertise: str = setting(
        "",
        "Host name or address at which workers and other coordinators reach this one; the host it listens on when not given.",
        env="STRATA_ADVERTISE",
    )
    leader_lease: float = setting(
        2.0,
        "Seconds after which another coordinator takes over when this one is lost; a whole number, by "
        "default etcd needs at least 2.",
        env="STRATA_LEADER_LEASE",
        least=1,
        most=600,
    )
    etcd_user: str = setting("", "etcd user, for a journal in etcd.", env="STRATA_ETCD_USER")
    etcd_password: str = setting("", "Password of that user.", env="STRATA_ETCD_PASSWORD", secret=True)
    etcd_ca: Path | None = setting(None, "CA certificate (PEM) of etcd; enables TLS.", env="STRATA_ETCD_CA")
    etcd_cert: Path | None = setting(
        None, "Client certificate (PEM) for etcd; enables TLS.", env="STRATA_ETCD_CERT"
    )
    etcd_key: Path | None = setting(None, "Key of that certificate (PEM).", env="STRATA_ETCD_KEY")
    archive: str = setting(
        "",
        "Archive of logs, metrics of runs and output of tasks, so that the next leader has them: "
        "s3://bucket/prefix, gs://…, az://… or a shared folder; one for each cluster.",
        env="STRATA_ARCHIVE",
    )
    disk_reserve_mb: int = setting(
        16,
        "Megabytes of disk reserved for records that must be written on a full disk; changes are refused "
        "while less than as much is free besides.",
        env="STRATA_DISK_RESERVE_MB",
        least=1,
        most=100_000,
    )
    heartbeat_interval: float = setting(
        1.0, "Seconds between a worker's heartbeats.", env="STRATA_HEARTBEAT_INTERVAL", least=0.05, most=3600
    )
    heartbeat_timeout: float = setting(
        30.0,
        "Seconds without a heartbeat after which a worker is failed.",
        env="STRATA_HEARTBEAT_TIMEOUT",
        least=0.1,
        most=86400,
    )
    disconnect_grace: float = setting(
        0.5,
        "Seconds a worker has to reconnect after its connection dropped.",
        env="STRATA_DISCONNECT_GRACE",
        least=0,
        most=3600,
    )
    agent_grace: float = setting(
        0.25,
        "Seconds an agent has to reconnect after its connection dropped, before the others rendezvous without it.",
        env="STRATA_AGENT_GRACE",
        least=0,
        most=3600,
    )
    barrier_timeout: float = setting(
        1800.0,
        "Default timeout of a barrier, in seconds.",
        env="STRATA_BARRIER_TIMEOUT",
        least=0.1,
        most=604800,
    )
    max_workers: int = setting(
        20_000, "Maximum number of workers.", env="STRATA_MAX_WORKERS", least=1, most=1_000_000
    )
    max_connections: int = setting(
        4_096,
        "HTTP connections served at a time.",
        env="STRATA_MAX_CONNECTIONS",
        least=1,
        most=1_000_000,
    )
    max_connections_per_client: int = setting(
        0,
        "HTTP connections per address, or per user of this machine; 0: half of max_connections.",
        env="STRATA_MAX_CONNECTIONS_PER_CLIENT",
        least=0,
        most=1_000_000,
    )
    log_limit_mb: int = setting(
        256, "Megabytes of log kept on disk.", env="STRATA_LOG_LIMIT_MB", least=1, most=1_000_000
    )
    metrics_limit_mb: int = setting(
        2_000,
        "Megabytes of metrics of runs kept on disk; beyond that, the oldest are downsampled.",
        env="STRATA_METRICS_LIMIT_MB",
        least=1,
        most=1_000_000,
    )
    log_days: float = setting(
        7.0, "Days for which log lines are kept.", env="STRATA_LOG_DAYS", least=0.001, most=3650
    )
    keep_tasks_days: float = setting(
        30.0,
        "Days for which tasks that have ended are remembered; the newest 100 always.",
        env="STRATA_KEEP_TASKS_DAYS",
        least=0.01,
        most=3650,
    )
    keep_checkpoints_days: float = setting(
        7.0,
        "Days for which checkpoints that were removed or have failed are remembered; those that exist always.",
        env="STRATA_KEEP_CHECKPOINTS_DAYS",
        least=0.01,
        most=3650,
    )
    keep_barriers_days: float = setting(
        1.0,
        "Days for which barriers that have ended are remembered, of the newest 2,000; the newest 100 always.",
        env="STRATA_KEEP_BARRIERS_DAYS",
        least=0.01,
        most=3650,
    )
    keep_values_days: float = setting(
        1.0,
        "Days after which an unused value of a rendezvous is dropped.",
        env="STRATA_KEEP_VALUES_DAYS",
        least=0.01,
        most=3650,
    )
    log_lines_per_second: int = setting(
        500,
        "Log lines that one worker or task may send on average.",
        env="STRATA_LOG_LINES_PER_SECOND",
        least=1,
        most=1_000_000,
    )
    price_per_gpu_hour: float = setting(
        0.0,
        "Price of a GPU-hour (or worker-hour, without GPUs), for `strata cost`. 0: not known.",
        env="STRATA_PRICE_PER_GPU_HOUR",
        least=0,
        most=1e6,
    )
    prices: dict[str, float] = setting(
        dict, "Prices of single runs, as run or pattern = price; the first match counts.", least=0, most=1e6
    )
    currency: str = setting("USD", "Currency of the prices.", env="STRATA_CURRENCY")
    otel_endpoint: str = setting(
        "",
        "OpenTelemetry collector to which metrics are sent, such as http://127.0.0.1:4318.",
        env="STRATA_OTEL_ENDPOINT",
    )
    launcher: str = setting(
        "local",
        "What runs tasks: 'local' (this machine), 'ray' (a Ray cluster), or 'none' (they only wait).",
        env="STRATA_LAUNCHER",
        choices=("local", "ray", "none"),
    )
    ray_address: str = setting(
        "auto", "Address of the Ray cluster, for launcher 'ray'.", env="STRATA_RAY_ADDRESS"
    )
    ray_cpus_per_worker: float = setting(
        1.0,
        "Cores that a worker reserves in the Ray cluster.",
        env="STRATA_RAY_CPUS_PER_WORKER",
        least=0.01,
        most=1024,
    )
    recipes_dir: Path | None = setting(
        None,
        "Folder of additional recipes; 'recipes' in the data directory when not given.",
        env="STRATA_RECIPES_DIR",
    )
    task_workers: int = setting(
        0,
        "Total workers that tasks may run on this machine; 0: one per core, and at least 8.",
        env="STRATA_TASK_WORKERS",
        least=0,
        most=100_000,
    )
    task_gpus: int = setting(
        -1,
        "GPUs of this machine that tasks may use; -1: all.",
        env="STRATA_TASK_GPUS",
        least=-1,
        most=1024,
    )
    task_environment: str = setting(
        "",
        "Further environment variables of the coordinator that tasks inherit, separated by commas: "
        "AWS_*,WANDB_API_KEY; * for all.",
        env="STRATA_TASK_ENVIRONMENT",
    )
    task_stop_timeout: float = setting(
        9.0,
        "Seconds a stopped task has to save and exit before its processes are killed.",
        env="STRATA_TASK_STOP_TIMEOUT",
        least=0.1,
        most=3600,
    )
    token: str = setting(
        "", "Shared secret that callers must present; grants everything.", env="STRATA_TOKEN", secret=True
    )
    tokens: dict[str, str] = setting(
        dict, "Further secrets, as role = token (viewer, worker, operator, admin).", secret=True
    )
    data_roots: tuple[str, ...] = setting(
        (),
        "Folders and buckets (s3://bucket/prefix) that the coordinator reads for callers other than admins, "
        "to count and preview samples. Without any, only admins may.",
        env="STRATA_DATA_ROOTS",
    )
    previews: bool = setting(True, "Whether the API shows samples of datasets.", env="STRATA_PREVIEWS")
    trust_loopback: bool = setting(
        False,
        "Trust every user of this machine, not only the coordinator's own.",
        env="STRATA_TRUST_LOOPBACK",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (), "Further host names at which browsers may reach the coordinator.", env="STRATA_ALLOWED_HOSTS"
    )
    certificate_roles: dict[str, str] = setting(
        dict, "Roles of client certificates, as common name or pattern = role, or role:job."
    )
    tls_cert: Path | None = setting(None, "Server certificate (PEM).", env="STRATA_TLS_CERT")
    tls_key: Path | None = setting(None, "Key of the server certificate (PEM).", env="STRATA_TLS_KEY")
    tls_client_ca: Path | None = setting(
        None, "CA certificate (PEM) of client certificates; enables mutual TLS.", env="STRATA_TLS_CLIENT_CA"
    )

    task_tls_ca: Path | None = setting(
        None,
        "CA certificate with which workers of tasks verify the coordinator; tls_client_ca when not given.",
        env="STRATA_TASK_TLS_CA",
    )
    task_tls_cert: Path | None = setting(
        None, "Client certificate (PEM) of the workers of tasks, for mutual TLS.", env="STRATA_TASK_TLS_CERT"
    )
    task_tls_key: Path | None = setting(None, "Key of that certificate (PEM).", env="STRATA_TASK_TLS_KEY")

    @property
    def limits(self) -> Limits:
        return Limits(
            membership=MembershipLimits(
                heartbeat_timeout_s=self.heartbeat_timeout,
                disconnect_grace_s=self.disconnect_grace,
                max_workers=self.max_workers,
            ),
            barriers=BarrierLimits(timeout_s=self.barrier_timeout),
            presence=PresenceLimits(grace_s=self.agent_grace),
            retention=RetentionLimits(
                tasks_s=self.keep_tasks_days * DAY_S,
                checkpoints_s=self.keep_checkpoints_days * DAY_S,
                barriers_s=self.keep_barriers_days * DAY_S,
                values_s=self.keep_values_days * DAY_S,
            ),
        )

    @property
    def price_list(self) -> PriceList:
        return PriceList(default=self.price_per_gpu_hour, by_run=self.prices, currency=self.currency)

    @property
    def inherited_by_tasks(self) -> tuple[str, ...]:
        return tuple(filter(None, (name.strip() for name in self.task_environment.split(","))))

    @property
    def url_host(self) -> str:
        """The host as addresses write it: IPv6 in brackets."""
        host = self.host.strip("[]")
        return f"[{host}]" if ":" in host else host

    @property
    def advertised_host(self) -> str:
        """Where others reach it, as addresses write it."""
        host = self.advertise.strip("[]")
        return (f"[{host}]" if ":" in host else host) if host else self.url_host

    @property
    def etcd(self) -> EtcdLocation | None:
        """Where the journal is, if it is in etcd. Raises `ValueError` and `OSError`."""
        if not self.journal:
            return None
        return parse_location(
            self.journal,
            user=self.etcd_user,
            password=self.etcd_password,
            ca=self.etcd_ca,
            cert=self.etcd_cert,
            key=self.etcd_key,
        )

    @property
    def secrets(self) -> dict[str, Role]:
        """Role by token."""
        by_token = {token: role for role in ROLES for name, token in self.tokens.items() if name == role}
        return {**by_token, self.token: "admin"} if self.token else by_token

    def named_secrets(self) -> list[tuple[str, str]]:
        named = [(f"tokens.{role}", token) for role, token in self.tokens.items() if token]
        return [("token", self.token), *named] if self.token else named

    @property
    def concealed(self) -> list[str]:
        """What no log line may show."""
        return [token for _, token in self.named_secrets()] + (
            [self.etcd_password] if self.etcd_password else []
        )

    @property
    def private_files(self) -> tuple[Path, ...]:
        """The coordinator's own, which it reads for no caller."""
        keys = [key for key in (self.tls_key, self.task_tls_key, self.etcd_key) if key is not None]
        folder = self.archive.removeprefix("file://")
        folders = [Path(folder).expanduser()] if folder and "://" not in folder else []
        return tuple(path.absolute() for path in (self.data_dir, *folders, *keys))

    @property
    def connections_per_client(self) -> int:
        return self.max_connections_per_client or max(1, self.max_connections // 2)


def read_settings(
    *,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> CoordinatorSettings:
    return read_config(
        CoordinatorSettings,
        section=SECTION,
        file=file,
        flags=flags,
        environ=environ,
        check=_contradictions,
    )


def read_all(
    *, file: Path | None = None, flags: Mapping[str, Any] | None = None
) -> tuple[CoordinatorSettings, NotifySettings]:
    """The settings and where notifications go, or one `ConfigError` for both."""
    found: list[Any] = []
    problems: list[str] = []
    for read in (lambda: read_settings(file=file, flags=flags), lambda: read_notify(file=file)):
        try:
            found.append(read())
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError(problems)
    settings, notify = found
    return settings, notify


def _weakness(token: str, host: str) -> str:
    """What is wrong with a configured token, on an address that other machines reach."""
    if token.startswith(DIGEST_PREFIX):
        digest = token.removeprefix(DIGEST_PREFIX)
        is_digest = len(digest) == 64 and all(c in "0123456789abcdef" for c in digest)
        return "" if is_digest else f"not a digest; write {DIGEST_PREFIX} and 64 hexadecimal digits"
    if is_loopback(host) or len(token) >= TOKEN_CHARACTERS:
        return ""
    return (
        f"shorter than {TOKEN_CHARACTERS} characters, and other machines could guess it; "
        "`python -c 'import secrets; print(secrets.token_urlsafe(24))'` makes a good one"
    )


def _problems_of_journal(s: CoordinatorSettings) -> list[str]:
    problems = []
    try:
        location = s.etcd
    except (ValueError, OSError) as error:
        return [f"journal cannot be used: {error}"]
    if (s.etcd_cert is None) != (s.etcd_key is None):
        problems.append("etcd_cert and etcd_key belong together; set both or neither")
    if bool(s.etcd_user) != bool(s.etcd_password):
        problems.append("etcd_user and etcd_password belong together; set both or neither")
    if location is not None and not s.advertise and s.host.strip("[]") in EVERYWHERE:
        problems.append(
            f"host {s.host} cannot be reached by others: set advertise to the name or address of this machine"
        )
    return problems


def _problems_of_archive(s: CoordinatorSettings) -> list[str]:
    scheme, _, rest = s.archive.rpartition("://")
    if not s.archive or (scheme in ARCHIVE_SCHEMES and rest.strip("/")):
        return []
    if not scheme and os.path.isabs(os.path.expanduser(s.archive)):
        return []
    return [f"archive is '{s.archive}'; write s3://bucket/prefix, gs://…, az://… or an absolute path"]


def _contradictions(s: CoordinatorSettings) -> list[str]:
    problems = [] if s.host else ["host must not be empty; 127.0.0.1 is this machine alone"]
    if s.heartbeat_timeout <= s.heartbeat_interval:
        problems.append(
            f"heartbeat_timeout ({s.heartbeat_timeout:g}) must be longer than heartbeat_interval "
            f"({s.heartbeat_interval:g}), or every worker fails at once"
        )
    ports = {"grpc_port": s.grpc_port, "http_port": s.http_port, "metrics_port": s.metrics_port}
    problems += [
        f"{one} and {other} are both {ports[one]}; give each its own"
        for one, other in combinations(ports, 2)
        if ports[one] == ports[other] and ports[one] > 0
    ]
    problems += [
        f"tokens.{role} is not a role; use {', '.join(sorted(ROLES))}"
        for role in s.tokens
        if role not in ROLES
    ]
    problems += [
        f"certificate_roles.{name} is '{meaning}'; use a role ({', '.join(sorted(ROLES))}), or role:job"
        for name, meaning in s.certificate_roles.items()
        if meaning.partition(":")[0] not in ROLES
    ]
    problems += [
        f"{name} is {problem}" for name, token in s.named_secrets() if (problem := _weakness(token, s.host))
    ]
    problems += problems_of_roots(s.data_roots, s.private_files)
    problems += [f"tokens.{role} is empty; set a token" for role, t in s.tokens.items() if not t]
    problems += [
        f"{one} and {other} share one token; give each role its own"
        for one, other in combinations([*s.tokens, *(["token"] if s.token else [])], 2)
        if s.tokens[one] and s.tokens[one] == s.tokens.get(other, s.token)
    ]
    if (s.task_tls_cert is None) != (s.task_tls_key is None):
        problems.append("task_tls_cert and task_tls_key belong together; set both or neither")
    if (s.tls_cert is None) != (s.tls_key is None):
        problems.append("tls_cert and tls_key belong together; set both or neither")
    if s.tls_client_ca is not None and s.tls_cert is None:
        problems.append("tls_client_ca needs tls_cert and tls_key as well")
    problems += _problems_of_journal(s) + _problems_of_archive(s)
    if s.host and not is_loopback(s.host) and not s.secrets and s.tls_client_ca is None:
        problems.append(
            f"host {s.host} can be reached from other machines: set a token (STRATA_TOKEN) or mutual TLS "
            f"(tls_client_ca), or listen on 127.0.0.1"
        )
    return problems
