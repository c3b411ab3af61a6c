"""Checks of how this machine and the others reach each other."""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from strata.diagnostics.report import CheckResult, Targets, Verdict
from strata.environment import unread

TIMEOUT_S = 2.0
SKEW_WARN_S, SKEW_FAIL_S = 2.0, 30.0
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def unread_variables(_: Targets) -> Iterator[CheckResult]:
    sentences = unread()
    yield CheckResult(
        name="variables",
        verdict="warn" if sentences else "ok",
        found="; ".join(sentences)
        or "Strata reads every environment variable that looks like one of its own",
        fix="Correct the names, or unset them." if sentences else "",
    )


def torchrun_environment(_: Targets) -> Iterator[CheckResult]:
    values = {name: os.environ[name] for name in TORCHRUN_VARIABLES if os.environ.get(name)}
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    if not values:
        yield CheckResult(
            name="environment",
            verdict="skip",
            found="not under torchrun: RANK, WORLD_SIZE and MASTER_ADDR are not set",
        )
        return
    missing = [name for name in TORCHRUN_VARIABLES if name not in values]
    numbers = {name: values[name] for name in values if name != "MASTER_ADDR" and not values[name].isdigit()}
    if missing or numbers:
        wrong = f"missing {missing}" if missing else f"not numbers: {numbers}"
        yield CheckResult(
            name="environment",
            verdict="fail",
            found=f"{shown}; {wrong}",
            fix="Left over from an earlier shell? unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT; "
            "torchrun sets all of them.",
        )
        return
    if int(values["RANK"]) >= int(values["WORLD_SIZE"]):
        yield CheckResult(
            name="environment",
            verdict="fail",
            found=f"{shown}; the rank is outside the world size",
            fix="Use torchrun.",
        )
        return
    yield CheckResult(name="environment", verdict="ok", found=shown)
    address = f"{values['MASTER_ADDR']}:{values['MASTER_PORT']}"
    problem = _connect(values["MASTER_ADDR"], int(values["MASTER_PORT"]))
    yield CheckResult(
        name="master address",
        verdict="fail" if problem else "ok",
        found=f"{address}: {problem or 'answers'}",
        fix=f"It must be the node of rank 0 (hostname -I there), with no firewall between: nc -zv {address.replace(':', ' ')}"
        if problem
        else "",
    )


def host_name(_: Targets) -> Iterator[CheckResult]:
    """torchrun tells other nodes to come to this machine's full name."""
    name = socket.getfqdn()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError as error:
        yield CheckResult(
            name="host name",
            verdict="fail",
            found=f"'{name}' has no address: {error}",
            fix="Other nodes cannot find this one; add it to /etc/hosts or DNS, or use torchrun --local-addr=IP",
        )
        return
    local = all(address.startswith("127.") or address == "::1" for address in addresses)
    yield CheckResult(
        name="host name",
        verdict="warn" if local else "ok",
        found=f"'{name}' is {', '.join(addresses)}",
        fix="Only this machine can use that address; with several nodes use torchrun --local-addr=IP"
        if local
        else "",
    )


def network_cards(_: Targets) -> Iterator[CheckResult]:
    cards = [name for _, name in socket.if_nameindex()]
    chosen = {
        name: os.environ[name]
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        if os.environ.get(name)
    }
    for variable, value in chosen.items():
        # NCCL takes a list of prefixes; "^" excludes and "=" asks for an exact name.
        wanted = [part.lstrip("=") for part in value.split(",") if not value.startswith("^")]
        if wanted and not any(card.startswith(part) for part in wanted for card in cards):
            yield CheckResult(
                name="network cards",
                verdict="fail",
                found=f"{variable}={value}, but this machine has {', '.join(cards)}",
                fix=f"Choose one of them: {variable}={next((c for c in cards if c != 'lo'), 'lo')}",
            )
            return
    several = [card for card in cards if card != "lo"]
    yield CheckResult(
        name="network cards",
        verdict="ok",
        found=", ".join(cards) + (f" ({', '.join(f'{k}={v}' for k, v in chosen.items())})" if chosen else ""),
        fix="If the nodes do not find each other: NCCL_SOCKET_IFNAME=CARD GLOO_SOCKET_IFNAME=CARD"
        if len(several) > 1 and not chosen
        else "",
    )


def ports(targets: Targets) -> Iterator[CheckResult]:
    for port in targets.ports or Targets.DEFAULT_PORTS:
        name = f"port {port}"
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                problem = None
            except OSError as error:
                problem = error
        if problem is None:
            yield CheckResult(name=name, verdict="ok", found="free")
        elif problem.errno != errno.EADDRINUSE:
            yield CheckResult(
                name=name,
                verdict="fail",
                found=f"cannot be used: {problem.strerror}",
                fix="Ports below 1024 need privileges; choose another.",
            )
        else:
            pid, command = _owner(port)
            if "strata" in command and "serve" in command:
                yield CheckResult(name=name, verdict="ok", found=f"held by the coordinator (process {pid})")
                continue
            who = f"process {pid}: {command[:80]}" if pid else "a process that only its owner or root may see"
            yield CheckResult(
                name=name,
                verdict="fail" if targets.ports else "warn",
                found=f"Address already in use, by {who}",
                fix=f"Stop it if it is stale (lsof -i :{port}), or choose another port: torchrun --master-port, "
                "strata serve --grpc-port / --http-port",
            )


def etcd(targets: Targets) -> Iterator[CheckResult]:
    endpoint = targets.etcd or Targets.DEFAULT_ETCD
    try:
        health = json.loads(_get(f"http://{endpoint}/health")[0])
        version = json.loads(_get(f"http://{endpoint}/version")[0]).get("etcdserver", "?")
    except (OSError, http.client.HTTPException, ValueError) as error:
        yield CheckResult(
            name="etcd",
            verdict="fail" if targets.etcd else "skip",
            found=f"Failed to connect to etcd at {endpoint}: {_reason(error)}",
            fix="Start one: ./scripts/start_etcd.sh start; or do without: --rdzv-backend=strata",
        )
        return
    healthy = str(health.get("health")).lower() == "true"
    v2 = _answers(f"http://{endpoint}/v2/keys/")
    yield CheckResult(
        name="etcd",
        verdict="ok" if healthy else "fail",
        found=f"{endpoint}: {'healthy' if healthy else 'not healthy'}, version {version}, "
        f"v2 API {'on' if v2 else 'off (use --rdzv-backend=etcd, not etcd-v2)'}",
        fix=""
        if healthy
        else "See its log: ./scripts/start_etcd.sh logs; a cluster needs a majority of its members",
    )


def coordinator(targets: Targets) -> Iterator[CheckResult]:
    """Of several it is enough that one answers."""
    named = bool(targets.coordinator or targets.api)
    addresses = _split(targets.coordinator or Targets.DEFAULT_COORDINATOR)
    problems = {address: _connection_problem(address) for address in addresses}
    away = sum(problem is not None for problem in problems.values())
    yield CheckResult(
        name="coordinator (gRPC)",
        verdict=_verdict(away, len(addresses), named=named),
        found="; ".join(f"{address}: {problem or 'answers'}" for address, problem in problems.items()),
        fix="Start it: strata serve; or pass its address: --coordinator HOST:50051 (COORDINATOR_ADDR)"
        if away
        else "",
    )
    found: dict[str, str] = {}
    wrong = ""
    headers: dict[str, str] = {}
    asked_s = answered_s = 0.0
    apis = [api.rstrip("/") for api in _split(targets.api or Targets.DEFAULT_API)]
    for api in apis:
        began_s = time.time()
        try:
            body, given = _get(f"{api}/api/health")
            status = json.loads(body).get("status")
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            found[api] = _reason(error)
            continue
        found[api] = f"{status}{', standby' if given.get('strata-role') == 'standby' else ''}"
        if status != "ok":
            wrong = "Another server answers there; pass the coordinator's address with --api"
        asked_s, answered_s, headers = began_s, time.time(), given
    silent = sum(1 for text in found.values() if not text.startswith("ok"))
    yield CheckResult(
        name="coordinator (HTTP)",
        verdict="fail" if wrong else _verdict(silent, len(apis), named=named),
        found="; ".join(f"{api}: {text}" for api, text in found.items()),
        fix=wrong
        or (
            "Start it: strata serve; or pass its address: --api http://HOST:3000 (COORDINATOR_URL)"
            if silent
            else ""
        ),
    )
    if "date" in headers:
        yield clock(headers["date"], asked_s, answered_s)


def _split(addresses: str) -> list[str]:
    return [each.strip() for each in addresses.split(",") if each.strip()] or [addresses]


def _verdict(away: int, of: int, *, named: bool) -> Verdict:
    if not away:
        return "ok"
    if away < of:
        return "warn"
    return "fail" if named else "skip"


def _connection_problem(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    return _connect(host.strip("[]") or "127.0.0.1", int(port)) if port.isdigit() else "is not HOST:PORT"


def clock(date: str, asked_s: float, answered_s: float) -> CheckResult:
    """The server's clock against ours, as far as a slow answer does not explain it: it was read at some moment between
    the question and the answer. Its header counts whole seconds, so a second either way is nothing."""
    theirs_s = parsedate_to_datetime(date).timestamp() + 0.5
    skew_s = theirs_s - (asked_s + answered_s) / 2
    off = max(0.0, abs(skew_s) - (answered_s - asked_s) / 2)
    return CheckResult(
        name="clock",
        verdict="fail" if off > SKEW_FAIL_S else "warn" if off > SKEW_WARN_S else "ok",
        found=f"{off:.1f} s {'behind' if skew_s > 0 else 'ahead of'} the coordinator"
        if off > 1
        else "as the coordinator's",
        fix="Logs will not line up, and TLS or S3 signatures may be refused; switch on NTP (timedatectl set-ntp true)"
        if off > SKEW_WARN_S
        else "",
    )


def _get(url: str) -> tuple[bytes, dict[str, str]]:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("only http and https addresses can be checked")
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return answer.read(1 << 20), {name.lower(): value for name, value in answer.headers.items()}


def _answers(url: str) -> bool:
    try:
        _get(url)
    except (OSError, http.client.HTTPException):
        return False
    return True


def _connect(host: str, port: int) -> str | None:
    """What keeps a connection from being made; None if nothing does."""
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except OSError as error:
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    cause = (
        error.reason
        if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError)
        else error
    )
    if isinstance(cause, TimeoutError):
        return f"no answer within {TIMEOUT_S:g} s"
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


def _owner(port: int) -> tuple[int | None, str]:
    """Who listens on a port, as far as we may know."""
    import psutil

    try:
        for connection in psutil.net_connections(kind="tcp"):
            local: tuple[object, ...] = connection.laddr
            if connection.status == psutil.CONN_LISTEN and local[1:2] == (port,) and connection.pid:
                return connection.pid, " ".join(psutil.Process(connection.pid).cmdline())
    except psutil.Error:
        pass
    return None, ""
