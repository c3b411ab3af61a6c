"""TLS for those who call a coordinator: workers, agents and the command line.

`STRATA_TLS_CA` is the authority the coordinator's certificate comes from; setting it asks for TLS, and so does an
https:// address, which without it is checked against the system's authorities. `STRATA_TLS_CERT` and
`STRATA_TLS_KEY` are the caller's own, where the coordinator wants to see one.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import grpc

from strata.errors import StrataError

VARIABLES = ("STRATA_TLS_CA", "STRATA_TLS_CERT", "STRATA_TLS_KEY")


class TlsError(StrataError):
    """A certificate or key cannot be used."""

    code = "tls"


def channel_credentials(*, secure: bool) -> grpc.ChannelCredentials | None:
    """For a gRPC channel; None where the coordinator is spoken to in the clear."""
    authority, own = _from_environment()
    if not secure and authority is None:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read(authority) if authority is not None else None,
        private_key=_read(own[1]) if own is not None else None,
        certificate_chain=_read(own[0]) if own is not None else None,
    )


def ssl_context() -> ssl.SSLContext:
    """For https:// calls."""
    authority, own = _from_environment()
    try:
        context = ssl.create_default_context(cafile=authority)
        if own is not None:
            context.load_cert_chain(*own)
    except (OSError, ssl.SSLError) as error:
        raise TlsError(
            f"STRATA_TLS_CA, STRATA_TLS_CERT or STRATA_TLS_KEY cannot be used: {error}.",
            hint="Each must name a readable PEM file.",
        ) from error
    return context


def _from_environment() -> tuple[Path | None, tuple[Path, Path] | None]:
    authority, cert, key = (
        Path(value).expanduser() if (value := os.environ.get(name)) else None for name in VARIABLES
    )
    if cert is None or key is None:
        if cert is not key:
            raise TlsError("STRATA_TLS_CERT and STRATA_TLS_KEY belong together.", hint="Set both or neither.")
        return authority, None
    return authority, (cert, key)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(
            f"{path} cannot be read: {error.strerror}.",
            hint="STRATA_TLS_CA, STRATA_TLS_CERT and STRATA_TLS_KEY each name a PEM file.",
        ) from error
