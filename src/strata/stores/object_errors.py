"""What an object store's refusal means, and what its reader should do about it.

Only codes and messages of the answer are passed on, never whole request lines: those may carry signatures.
"""

from __future__ import annotations

import re

from strata.stores.object_clients import Provider, no_credentials
from strata.stores.protocol import AccessDenied, Misconfigured, NotFound, StoreError, Unavailable

_CODE = re.compile(r"<Code>\s*([^<]{1,100}?)\s*</Code>|\(code: (\w+)\)")
_MESSAGE = re.compile(r"<Message>\s*([^<]{1,300}?)\s*</Message>")
_STATUS = re.compile(r"status code: (\d{3})")
_QUERY = re.compile(r"\?\S*")

_BAD_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "RequestTimeTooSkewed",
    "AuthenticationFailed",
}
_BAD_BUCKET = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"}
_BAD_REGION = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
_WHERE_CREDENTIALS_COME_FROM = (
    "/latest/api/token",
    "/latest/meta-data/",
    "/computeMetadata/",
    "/metadata/identity/",
)


def explain(error: BaseException, *, provider: Provider, bucket: str, key: str, operation: str) -> StoreError:
    """The typed error for what the client library raised while it did `operation`: read, write, list, delete."""
    text = str(error).partition("\n\nDebug source")[0]
    code = next((a or b for a, b in _CODE.findall(text)), "")
    message = next(iter(_MESSAGE.findall(text)), "")
    status = next((int(found) for found in _STATUS.findall(text)), 0)
    kind = type(error).__name__
    place = f"{provider.scheme}://{bucket}"
    failed = f"Could not {operation} '{key}'" if key else f"Could not {operation} values"
    cause = ": ".join(
        part for part in (code or (f"HTTP {status}" if status else ""), message.rstrip(".")) if part
    )

    def made(cls: type[StoreError], why: str, hint: str, reason: str = "") -> StoreError:
        return cls(
            f"{failed} in {place}: {why}", tier=provider.tier, key=key, hint=hint, reason=reason or why
        )

    if any(source in text for source in _WHERE_CREDENTIALS_COME_FROM):
        return no_credentials(provider, bucket, key=key)
    if code in _BAD_BUCKET:
        how = f"Create it (aws s3 mb {place})" if provider.tier == "S3" else "Create it"
        return Misconfigured(
            f"{place} cannot be used: {cause}.",
            tier=provider.tier,
            key=key,
            hint=f"{how}, or correct its name.",
            reason=code,
        )
    if code in _BAD_REGION or status == 301 or "LOCATION" in text:
        why = f"{cause or 'redirected'}: the bucket is in another region."
        return made(Misconfigured, why, "Set AWS_REGION to the region of the bucket.", code or "wrong region")
    if code in _BAD_CREDENTIALS:
        why = f"AccessDenied ({cause})."
        return made(
            AccessDenied, why, f"The credentials are wrong or expired. {provider.credentials_hint}", code
        )
    if (
        status in (401, 403)
        or code == "AccessDenied"
        or kind in ("PermissionDeniedError", "UnauthenticatedError")
    ):
        missing = provider.permissions[operation]
        why = f"AccessDenied ({cause or 'refused'}); missing permission: {missing}."
        hint = f"Allow {missing} on {place} and {place}/*, and check that the credentials are the right ones."
        return made(AccessDenied, why, hint, f"AccessDenied; missing permission: {missing}")
    if isinstance(error, FileNotFoundError):
        return made(NotFound, "it does not exist.", "", "not found")
    if status >= 500 or status in (408, 429):
        hint = "The service is failing or throttling requests: try again later."
        return made(Unavailable, f"{cause} for longer than the retry budget.", hint, cause)
    if status == 0 and kind in ("GenericError", "EOFError"):
        why = _short(text)
        return made(
            Unavailable,
            why,
            f"Check the endpoint ({provider.endpoint_setting}), the network and the service.",
            why,
        )
    return made(StoreError, f"{cause or _short(text)}.", "")


def _short(text: str) -> str:
    line = _QUERY.sub("", text.partition("\n")[0])
    return line if len(line) <= 300 else f"{line[:297]}..."
