"""Which user owns the other end of a loopback connection: the kernel's own answer, over `sock_diag`.

The kernel is asked about exactly one socket, by both of its addresses, so the answer takes microseconds and cannot be about
a connection that used the same port before. Whatever is not certain is None: a connection that has ended meanwhile, a peer
that is not on this machine, a user of another user namespace (whom the kernel shows as the overflow user), a kernel
without `sock_diag`.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST = 1
EVERY_STATE = 0xFFFFFFFF
NO_COOKIE = 0xFFFFFFFF
TIMEOUT_S = 1.0
_HEADER = struct.Struct("=LHHLL")
_REQUEST = struct.Struct("=BBBxL")
_SOCKET_ID = struct.Struct("!HH16s16s")
_INTERFACE_AND_COOKIE = struct.Struct("=LLL")
_OWNER = struct.Struct("=LL")
_IDENTITY_AT = _HEADER.size + 4
_OWNER_AT = _IDENTITY_AT + _SOCKET_ID.size + _INTERFACE_AND_COOKIE.size + 12
"""Behind the identity come a timer and two queues; then the user's id and the socket's inode."""

Address = tuple[str, int]


@lru_cache(maxsize=1_024)
def is_loopback(host: str) -> bool:
    try:
        return _parsed(host).is_loopback
    except ValueError:
        return host == "localhost"


@lru_cache(maxsize=4_096)
def parse_grpc_peer(peer: str) -> Address | None:
    """gRPC's `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return (host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") and port.isdecimal() else None


class PeerOwners:
    """Asks the kernel over one socket. Not for several threads."""

    def __init__(self) -> None:
        self._kernel: socket.socket | None = None
        self._asked = 0
        self._overflow_uid = _overflow_uid()

    def owner_of(self, peer: Address, ours: Address) -> int | None:
        """The user id behind a connection from `peer` to `ours`, both on this machine's loopback; None: unknown."""
        if not (is_loopback(peer[0]) and is_loopback(ours[0])):
            return None
        try:
            uid = self._ask(peer, ours)
        except (OSError, ValueError, struct.error):
            self.close()  # Whatever it may still answer is not about the next question.
            return None
        return None if uid == self._overflow_uid else uid

    def close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def _ask(self, peer: Address, ours: Address) -> int | None:
        source, target = _parsed(peer[0]), _parsed(ours[0])
        if source.version != target.version:
            return None
        family = socket.AF_INET if source.version == 4 else socket.AF_INET6
        # Seen from the peer: it is its socket that we ask about.
        identity = _SOCKET_ID.pack(peer[1], ours[1], source.packed, target.packed)
        body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, EVERY_STATE)
        body += identity + _INTERFACE_AND_COOKIE.pack(0, NO_COOKIE, NO_COOKIE)
        self._asked = (self._asked + 1) & 0x7FFFFFFF
        size = _HEADER.size + len(body)
        answer = self._exchange(_HEADER.pack(size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, self._asked, 0) + body)
        _, kind, _, number, _ = _HEADER.unpack_from(answer)
        if kind != SOCK_DIAG_BY_FAMILY or number != self._asked:
            return None  # There is no such socket, or we may not know.
        if answer[_IDENTITY_AT : _IDENTITY_AT + 4] != identity[:4]:
            return None  # The ports; addresses may be written the IPv6 way, as gRPC's sockets have them.
        uid, inode = _OWNER.unpack_from(answer, _OWNER_AT)
        # A socket that its process has closed has no owner any more, and the kernel says 0: that is not root.
        return int(uid) if inode else None

    def _exchange(self, message: bytes) -> bytes:
        if self._kernel is None:
            kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
            self._kernel = socket.socket(socket.AF_NETLINK, kind, NETLINK_SOCK_DIAG)
            self._kernel.settimeout(TIMEOUT_S)
        self._kernel.sendto(message, (0, 0))
        return self._kernel.recv(4096)


@lru_cache(maxsize=1_024)
def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _overflow_uid() -> int:
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534
