"""Making the clients that talk to S3, Google Cloud Storage and Azure.

Credentials are found where each provider's own tools find them: the environment, the AWS profile files written
by `aws configure`, a role of the machine. Plain HTTP is allowed to loopback only, unless asked for. A client
makes no request before its first use.
"""

from __future__ import annotations

import configparser
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from strata.errors import MissingDependency
from strata.stores.protocol import Misconfigured, NoCredentials


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """What differs from one kind of object storage to the next."""

    tier: str
    scheme: str
    permissions: Mapping[str, str]
    """Operation (read, write, list, delete) → what its owner must be allowed."""
    credentials_hint: str
    endpoint_variables: tuple[str, ...] = ()
    """Of the environment, which the client library reads by itself; the first that is set counts."""

    @property
    def endpoint_setting(self) -> str:
        """Where a user says it."""
        return self.endpoint_variables[-1] if self.endpoint_variables else "endpoint"


S3 = Provider(
    tier="S3",
    scheme="s3",
    permissions={
        "read": "s3:GetObject and s3:ListBucket",  # Without the second a missing key is answered with 403.
        "write": "s3:PutObject",
        "list": "s3:ListBucket",
        "delete": "s3:DeleteObject",
    },
    credentials_hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, run 'aws configure', or attach an IAM role.",
    endpoint_variables=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
)
GCS = Provider(
    tier="GCS",
    scheme="gs",
    permissions={
        "read": "storage.objects.get",
        "write": "storage.objects.create and storage.objects.delete",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
    credentials_hint="Set GOOGLE_APPLICATION_CREDENTIALS to a service account file, or attach a service account.",
    endpoint_variables=("GOOGLE_BASE_URL",),
)
AZURE = Provider(
    tier="AZURE",
    scheme="az",
    permissions={
        "read": "the role Storage Blob Data Reader",
        "write": "the role Storage Blob Data Contributor",
        "list": "the role Storage Blob Data Reader",
        "delete": "the role Storage Blob Data Contributor",
    },
    credentials_hint="Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or attach a managed identity.",
    endpoint_variables=("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
)

FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 5.0
"""Between two attempts, the client's and the store's own."""

PROVIDERS = {"s3": S3, "s3a": S3, "gs": GCS, "gcs": GCS, "az": AZURE, "azure": AZURE}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How to reach one bucket. `config` goes to the client library as it is (`region`, `endpoint`, keys)."""

    provider: Provider
    bucket: str
    connect_timeout_s: float
    request_timeout_s: float
    max_retries: int
    retry_budget_s: float
    config: Mapping[str, Any] = field(repr=False)  # It may hold secrets.


def make_client(settings: ClientSettings) -> Any:
    """An obstore client, or the reason why there cannot be one."""
    try:
        from obstore import store as obstore
    except ImportError as error:
        raise MissingDependency("obstore", extra="s3", feature="Object storage") from error
    provider = settings.provider
    make: Any
    if provider is S3:
        make, config = obstore.S3Store, _s3_config(settings)
    elif provider is GCS:
        make, config = obstore.GCSStore, dict(settings.config)
    else:
        make, config = obstore.AzureStore, dict(settings.config)
    allow_http = config.pop("allow_http", False) or _speaks_plain_http(provider, config)
    try:
        return make(
            settings.bucket,
            config=config,
            client_options={
                "allow_http": allow_http,
                "connect_timeout": timedelta(
                    seconds=min(settings.connect_timeout_s, settings.request_timeout_s)
                ),
                "timeout": timedelta(seconds=settings.request_timeout_s),
            },
            retry_config={
                "max_retries": settings.max_retries,
                "retry_timeout": timedelta(seconds=settings.retry_budget_s),
                "backoff": {
                    "init_backoff": timedelta(seconds=FIRST_DELAY_S),
                    "max_backoff": timedelta(seconds=LONGEST_DELAY_S),
                    "base": 2.0,
                },
            },
        )
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise Misconfigured(
            f"Could not set up {provider.scheme}://{settings.bucket}: {reason}",
            tier=provider.tier,
            key="",
            hint="Check the bucket's name and the options given.",
            reason=reason,
        ) from error


def _s3_config(settings: ClientSettings) -> dict[str, Any]:
    config = {**_aws_profile(settings.config), **settings.config}
    # One key at a time is deleted here, and not every S3-compatible server knows the bulk call.
    config.setdefault("disable_bulk_delete", True)
    known = bool(config.get("access_key_id") or config.get("skip_signature"))
    if not known and not _aws_credentials_in_environment() and _is_true("AWS_EC2_METADATA_DISABLED"):
        raise no_credentials(S3, settings.bucket, key="")
    return config


def no_credentials(provider: Provider, bucket: str, *, key: str) -> NoCredentials:
    return NoCredentials(
        f"NoCredentialsError: there are no credentials for {provider.scheme}://{bucket}.",
        tier=provider.tier,
        key=key,
        hint=provider.credentials_hint,
        reason="NoCredentialsError",
    )


def _aws_credentials_in_environment() -> bool:
    names = (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_SKIP_SIGNATURE",
    )
    return any(os.environ.get(name) for name in names)


def _aws_profile(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `aws configure` has written, as far as neither the caller nor the environment says otherwise."""
    profile = os.environ.get("AWS_PROFILE", "default")
    found: dict[str, Any] = {}
    secrets = _ini_section(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), profile)
    if (
        not _aws_credentials_in_environment()
        and "access_key_id" not in given
        and "aws_access_key_id" in secrets
    ):
        found["access_key_id"] = secrets["aws_access_key_id"]
        found["secret_access_key"] = secrets.get("aws_secret_access_key", "")
        if "aws_session_token" in secrets:
            found["session_token"] = secrets["aws_session_token"]
    if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        section = profile if profile == "default" else f"profile {profile}"
        settings = _ini_section(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"), section)
        if "region" in settings:
            found["region"] = settings["region"]
    return found


def _ini_section(path: str, section: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(Path(path).expanduser(), encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError, OSError, RuntimeError):
        return {}
    return dict(parser[section]) if parser.has_section(section) else {}


def _speaks_plain_http(provider: Provider, config: Mapping[str, Any]) -> bool:
    """Whether the endpoint is plain HTTP and may be."""
    endpoint = str(config.get("endpoint") or config.get("base_url") or "")
    for name in provider.endpoint_variables:
        endpoint = endpoint or os.environ.get(name, "")
    try:
        parts = urlsplit(endpoint)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        parts, host = urlsplit(""), ""
    if endpoint and (parts.scheme not in ("http", "https") or not host):
        raise Misconfigured(
            f"The endpoint {endpoint!r} is not a URL.",
            tier=provider.tier,
            key="",
            hint=f"Write {provider.endpoint_setting}=https://host:port.",
        )
    if parts.scheme != "http":
        return False
    if _is_loopback(host) or _is_true("AWS_ALLOW_HTTP"):
        return True
    raise Misconfigured(
        f"The endpoint {endpoint} would send data and signatures unencrypted to another machine.",
        tier=provider.tier,
        key="",
        hint="Use https, or set AWS_ALLOW_HTTP=true if the network is trusted.",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")
