"""The `etcd` rendezvous back end, through etcd's v3 API.

Several endpoints may be given, separated by commas; a silent one is passed over (`strata.etcd`). All
keys hang on leases, so that what a run leaves behind goes away by itself.

`--rdzv-conf` options beside the usual ones: `protocol` (http, https), `ca_cert`, `ssl_cert`, `ssl_cert_key`,
`read_timeout` (seconds per request, 2), `ttl` (seconds that keys outlive their last writer, 7200).
"""

from __future__ import annotations

import ssl
import threading
import time
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from strata.etcd import (
    DEFAULT_PORT,
    DEFAULT_TIMEOUT_S,
    EtcdAddress,
    EtcdClient,
    LeaseLost,
    decode,
    encode,
    tls_context,
)
from strata.rendezvous.cas import Token
from strata.rendezvous.handler import CasRendezvousHandler, create_cas_handler

DEFAULT_TTL_S = 7200


class EtcdCasClient:
    """Compare-and-swap on etcd keys. Safe to use from several threads."""

    def __init__(
        self,
        endpoints: list[tuple[str, int]],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        ttl_s: int = DEFAULT_TTL_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._client = EtcdClient(EtcdAddress(endpoints=tuple(endpoints), tls=tls), timeout_s=timeout_s)
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._lease: tuple[str, float] | None = None

    def get(self, key: str) -> tuple[bytes, Token] | None:
        return _only(self._client.post("kv/range", {"key": encode(key)}))

    def cas(
        self, key: str, value: bytes, expected_token: Token | None, *, soft: bool = False
    ) -> tuple[bool, bytes | None, Token | None]:
        compare: dict[str, Any] = {"key": encode(key), "result": "EQUAL", "target": "MOD"}
        compare["mod_revision"] = expected_token or "0"  # An absent key was last modified at revision 0.
        with self._lock:
            try:
                answer = self._swap(key, value, compare)
            except LeaseLost:
                self._lease = None
                answer = self._swap(key, value, compare)
        if answer.get("succeeded"):
            return True, value, str(answer["header"]["revision"])
        found = _only(answer["responses"][0]["response_range"])
        return (False, None, None) if found is None else (False, *found)

    def close(self) -> None:
        self._client.close()

    def _swap(self, key: str, value: bytes, compare: dict[str, Any]) -> dict[str, Any]:
        put = {"key": encode(key), "value": encode(value), "lease": self._live_lease()}
        return self._client.post(
            "kv/txn",
            {
                "compare": [compare],
                "success": [{"request_put": put}],
                "failure": [{"request_range": {"key": encode(key)}}],
            },
        )

    def _live_lease(self) -> str:
        """A lease with at least half its life ahead. An old one is left to run out, with what no one wrote since."""
        now_s = time.monotonic()
        if self._lease is None or now_s - self._lease[1] > self._ttl_s / 2:
            granted = self._client.post("lease/grant", {"TTL": str(self._ttl_s)})
            self._lease = (str(granted["ID"]), now_s)
        return self._lease[0]


def create_etcd_v3_handler(params: RendezvousParameters) -> CasRendezvousHandler:
    """What `torchrun --rdzv-backend=etcd` calls."""
    endpoints = [parse_rendezvous_endpoint(part, DEFAULT_PORT) for part in params.endpoint.split(",")]
    client = EtcdCasClient(
        endpoints,
        timeout_s=float(params.get("read_timeout", DEFAULT_TIMEOUT_S)),
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
    return tls_context(params.get("ca_cert"), params.get("ssl_cert"), params.get("ssl_cert_key"))


def _only(answer: dict[str, Any]) -> tuple[bytes, Token] | None:
    """The one key of a range answer. The gateway leaves out what is empty, so a missing value is an empty one."""
    for found in answer.get("kvs", ()):
        return decode(found.get("value", "")), str(found["mod_revision"])
    return None
