"""Where the coordinator is: from an argument, or from the environment."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

DEFAULT_ADDRESS = "127.0.0.1:50051"


def coordinator_address(given: str | None) -> str:
    """`host:port` from 'http://host:port' or 'host:port', from COORDINATOR_ADDR, or COORDINATOR_URL."""
    text = _text(given)
    try:
        parts = urlsplit(text if "//" in text else f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"'{text}' is not a coordinator address: {error}; write host:port") from None
    if parts.scheme not in ("", "http", "grpc", "https") or not host:
        raise ValueError(f"'{text}' is not a coordinator address; write host:port or http://host:port")
    return f"{f'[{host}]' if ':' in host else host}:{port or 50051}"


def is_secure(given: str | None) -> bool:
    """Whether the address asks for TLS: 'https://host:port'."""
    return _text(given).lower().startswith("https://")


def _text(given: str | None) -> str:
    text = given or os.environ.get("COORDINATOR_ADDR") or os.environ.get("COORDINATOR_URL") or DEFAULT_ADDRESS
    return text.strip()
