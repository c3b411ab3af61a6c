"""Where the coordinator is, or several are: from an argument, or from the environment."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_PORT = 50051


def coordinator_address(given: str | None) -> str:
    """`host:port` from 'http://host:port' or 'host:port', from COORDINATOR_ADDR, or COORDINATOR_URL. Of several, between commas,
    all of them the same way."""
    texts = _texts(given)
    if len({_is_https(text) for text in texts}) > 1:
        raise ValueError(
            f"'{','.join(texts)}' is not a coordinator address: some use TLS and some do not; write https:// "
            "before each, or before none"
        )
    return ",".join(_address(text) for text in texts)


def split_addresses(address: str) -> tuple[str, ...]:
    """The single addresses of what `coordinator_address` has returned."""
    return tuple(address.split(","))


def is_secure(given: str | None) -> bool:
    """Whether the address asks for TLS: 'https://host:port'."""
    return any(_is_https(text) for text in _texts(given))


def _address(text: str) -> str:
    try:
        parts = urlsplit(text if "//" in text else f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"'{text}' is not a coordinator address: {error}; write host:port") from None
    if parts.scheme not in ("", "http", "grpc", "https") or not host or any(map(str.isspace, host)):
        raise ValueError(f"'{text}' is not a coordinator address; write host:port or http://host:port")
    return f"{f'[{host}]' if ':' in host else host}:{port or DEFAULT_PORT}"


def _is_https(text: str) -> bool:
    return text.lower().startswith("https://")


def _texts(given: str | None) -> list[str]:
    text = given or os.environ.get("COORDINATOR_ADDR") or os.environ.get("COORDINATOR_URL") or DEFAULT_ADDRESS
    if texts := [each.strip() for each in text.split(",") if each.strip()]:
        return texts
    raise ValueError(f"'{text}' is not a coordinator address; write host:port")
