"""The `etcd` rendezvous back end, through etcd's v3 API.

Speaks to the JSON gateway that every etcd since 3.4 serves on its client port, over plain HTTP or TLS, with the
standard library alone. Several endpoints may be given, separated by commas; a silent one is passed over. All
keys hang on leases, so that what a run leaves behind goes away by itself.

`--rdzv-conf` options beside the usual ones: `protocol` (http, https), `ca_cert`, `ssl_cert`, `ssl_cert_key`,
`read_timeout` (seconds per request, 2), `ttl` (seconds that keys outlive their last writer, 7200).
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from base64 import b64decode, b64encode
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from strata.rendezvous.cas import Token
from strata.rendezvous.handler import CasRendezvousHandler, create_cas_handler

DEFAULT_PORT = 2379
DEFAULT_REQUEST_TIMEOUT_S = 2.0
DEFAULT_TTL_S = 7200
FAILURES = (OSError, http.client.HTTPException, ValueError)  # ValueError: the answer was no JSON


class EtcdCasClient:
    """Compare-and-swap on etcd keys. Safe to use from several threads."""

    def __init__(
        self,
        endpoints: list[tuple[str, int]],
        *,
        timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S,
        ttl_s: int = DEFAULT_TTL_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._timeout_s = timeout_s
        self._ttl_s = ttl_s
        self._tls = tls
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._lease: tuple[str, float] | None = None

    def get(self, key: str) -> tuple[bytes, Token] | None:
        with self._lock:
            return _only(self._post("kv/range", {"key": _encode(key)}))

    def cas(
        self, key: str, value: bytes, expected_token: Token | None, *, soft: bool = False
    ) -> tuple[bool, bytes | None, Token | None]:
        compare: dict[str, Any] = {"key": _encode(key), "result": "EQUAL", "target": "MOD"}
        compare["mod_revision"] = expected_token or "0"  # An absent key was last modified at revision 0.
        with self._lock:
            try:
                answer = self._swap(key, value, compare)
            except _LeaseLost:
                self._lease = None
                answer = self._swap(key, value, compare)
        if answer.get("succeeded"):
            return True, value, str(answer["header"]["revision"])
        found = _only(answer["responses"][0]["response_range"])
        return (False, None, None) if found is None else (False, *found)

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _swap(self, key: str, value: bytes, compare: dict[str, Any]) -> dict[str, Any]:
        put = {"key": _encode(key), "value": b64encode(value).decode(), "lease": self._live_lease()}
        return self._post(
            "kv/txn",
            {
                "compare": [compare],
                "success": [{"request_put": put}],
                "failure": [{"request_range": {"key": _encode(key)}}],
            },
        )

    def _live_lease(self) -> str:
        """A lease with at least half its life ahead. An old one is left to run out, with what no one wrote since."""
        now_s = time.monotonic()
        if self._lease is None or now_s - self._lease[1] > self._ttl_s / 2:
            granted = self._post("lease/grant", {"TTL": str(self._ttl_s)})
            self._lease = (str(granted["ID"]), now_s)
        return self._lease[0]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask over the kept connection, if there is one, then each endpoint anew."""
        text = json.dumps(body)
        if self._connection is not None:
            try:
                return self._ask(self._connection, path, text)
            except FAILURES:
                self._disconnect()  # The server may have closed it while idle, which shows only in use.
        problems = []
        for _ in self._endpoints:
            host, port = self._endpoints[0]
            try:
                self._connection = self._connect(host, port)
                return self._ask(self._connection, path, text)
            except FAILURES as error:
                problems.append(f"{host}:{port}: {str(error) or type(error).__name__}")
                self._disconnect()
                self._endpoints = [*self._endpoints[1:], self._endpoints[0]]
        raise ConnectionError("; ".join(problems))

    def _connect(self, host: str, port: int) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls)

    def _ask(self, connection: http.client.HTTPConnection, path: str, body: str) -> dict[str, Any]:
        connection.request("POST", f"/v3/{path}", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        if response.status == 200:
            answer: dict[str, Any] = json.loads(data)
            return answer
        text = data.decode(errors="replace").strip()
        if "lease not found" in text:
            raise _LeaseLost
        if response.status == 404:
            raise ConnectionError("this server has no etcd v3 JSON gateway (etcd 3.4 or later is needed)")
        raise ConnectionError(f"HTTP {response.status} {text[:200]}")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _LeaseLost(Exception):
    """The lease ran out, or the server lost it. No connection problem: the next request brings a new one."""


def create_etcd_v3_handler(params: RendezvousParameters) -> CasRendezvousHandler:
    """What `torchrun --rdzv-backend=etcd` calls."""
    endpoints = [parse_rendezvous_endpoint(part, DEFAULT_PORT) for part in params.endpoint.split(",")]
    client = EtcdCasClient(
        endpoints,
        timeout_s=float(params.get("read_timeout", DEFAULT_REQUEST_TIMEOUT_S)),
        ttl_s=int(params.get("ttl", DEFAULT_TTL_S)),
        tls=_tls_context(params),
    )
    names = ",".join(f"{host}:{port}" for host, port in endpoints)

    def unreachable(error: Exception) -> str:
        return (
            f"Failed to connect to etcd at {names} ({error}). Start one with ./scripts/start_etcd.sh start, or check it: "
            f"curl http://{endpoints[0][0]}:{endpoints[0][1]}/health"
        )

    return create_cas_handler(client, params, unreachable=unreachable)


def _tls_context(params: RendezvousParameters) -> ssl.SSLContext | None:
    protocol = str(params.get("protocol", "http")).strip().lower()
    if protocol == "http":
        return None
    if protocol != "https":
        raise ValueError(f"The rendezvous option 'protocol' must be http or https, not {protocol!r}.")
    context = ssl.create_default_context(cafile=params.get("ca_cert"))
    if params.get("ssl_cert"):
        context.load_cert_chain(params.get("ssl_cert"), params.get("ssl_cert_key"))
    return context


def _encode(key: str) -> str:
    return b64encode(key.encode()).decode()


def _only(answer: dict[str, Any]) -> tuple[bytes, Token] | None:
    """The one key of a range answer. The gateway leaves out what is empty, so a missing value is an empty one."""
    for found in answer.get("kvs", ()):
        return b64decode(found.get("value", "")), str(found["mod_revision"])
    return None
