"""What the cloud of a machine announces about it: spot instances that are taken back, and maintenance, as its metadata service says.

An agent asks every few seconds, on a thread of its own, where it runs on such a cloud (`detect`) or is asked to (`STRATA_NOTICES`). Each
provider has one small function from what was answered to when the machine goes; nothing but a documented answer counts as a notice.

| provider | asked | a notice is |
|---|---|---|
| AWS | `/latest/meta-data/spot/instance-action`, with a session token | `{"action": "terminate", "time": …}`; 404 until then |
| GCP | `/computeMetadata/v1/instance/preempted`, and `maintenance-event` | `TRUE`: 30 s; `TERMINATE_ON_HOST_MAINTENANCE`: 60 s |
| Azure | `/metadata/scheduledevents` | an event `Preempt`, `Terminate`, `Reboot` or `Redeploy` that concerns this machine, with `NotBefore` |

A provider that does not answer is asked again, less and less often; what is asked never leaves the machine's link. Needs no torch.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal

from strata.backoff import Backoff

log = logging.getLogger("strata.rendezvous")

NOTICES_VARIABLE = "STRATA_NOTICES"
"""aws, gcp or azure; `auto` (the default) where this machine is one of theirs; `off`."""
ENDPOINT_VARIABLE = "STRATA_METADATA_URL"
"""Of the metadata service, where it is not the provider's."""

POLL_S = 2.0
ANSWER_S = 2.0
LONGEST_PAUSE_S = 60.0
AT_ONCE_S = 30.0
"""What GCP gives after it has said that an instance is preempted, and what is left where no time is said."""
MAINTENANCE_S = 60.0
ANSWER_BYTES = 1 << 20
TOKEN_S = 21_600

Provider = Literal["aws", "gcp", "azure"]
PROVIDERS: tuple[Provider, ...] = ("aws", "gcp", "azure")
ENDPOINTS: dict[Provider, str] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
AZURE_GOES = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
DMI = Path("/sys/class/dmi/id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    reason: str
    within_s: float


class Unanswered(Exception):
    """The metadata service did not answer, or not in a way that can be understood."""


Ask = Callable[[str, dict[str, str], str], str | None]
"""The answer to (path, headers, method); None where there is nothing (404)."""


def from_aws(ask: Ask, now_s: float) -> Announced | None:
    token = ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}, "PUT")
    headers = {"X-aws-ec2-metadata-token": token} if token else {}
    answer = ask("/latest/meta-data/spot/instance-action", headers, "GET")
    if answer is None:
        return None
    said = _object(answer)
    action = str(said.get("action", "terminate"))
    return Announced(
        reason=f"AWS reclaims this spot instance ({action})",
        within_s=_until(said.get("time"), now_s, default_s=120.0),
    )


def from_gcp(ask: Ask, now_s: float) -> Announced | None:
    headers = {"Metadata-Flavor": "Google"}
    if (ask("/computeMetadata/v1/instance/preempted", headers, "GET") or "").strip() == "TRUE":
        return Announced(reason="GCP preempts this instance", within_s=AT_ONCE_S)
    event = (ask("/computeMetadata/v1/instance/maintenance-event", headers, "GET") or "").strip()
    if event == "TERMINATE_ON_HOST_MAINTENANCE":
        return Announced(reason="GCP stops this instance for maintenance", within_s=MAINTENANCE_S)
    return None


def from_azure(ask: Ask, now_s: float) -> Announced | None:
    answer = ask("/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}, "GET")
    if answer is None:
        return None
    events = _object(answer).get("Events", [])
    own = _azure_name(ask)
    coming = [
        Announced(
            reason=f"Azure announces {event['EventType']} of this machine",
            within_s=_until(event.get("NotBefore"), now_s, default_s=AT_ONCE_S),
        )
        for event in (events if isinstance(events, list) else [])
        if isinstance(event, dict)
        and event.get("EventType") in AZURE_GOES
        and (own is None or own in event.get("Resources", []))
    ]
    return min(coming, key=lambda one: one.within_s, default=None)


def _azure_name(ask: Ask) -> str | None:
    answer = ask(
        "/metadata/instance/compute/name?api-version=2021-02-01&format=text", {"Metadata": "true"}, "GET"
    )
    return answer.strip() if answer else None


READERS: dict[Provider, Callable[[Ask, float], Announced | None]] = {
    "aws": from_aws,
    "gcp": from_gcp,
    "azure": from_azure,
}


def _object(answer: str) -> dict[str, Any]:
    try:
        said = json.loads(answer)
    except ValueError as error:
        raise Unanswered(f"not JSON: {error}") from None
    if not isinstance(said, dict):
        raise Unanswered("not a JSON object")
    return said


def _until(when: object, now_s: float, *, default_s: float) -> float:
    """Seconds until a time that is written as ISO 8601 or as in HTTP."""
    if not isinstance(when, str) or not when.strip():
        return default_s
    at: datetime | None = None
    with suppress(ValueError):
        at = datetime.fromisoformat(when.replace("Z", "+00:00"))
    if at is None:
        with suppress(ValueError, TypeError):
            at = parsedate_to_datetime(when)
    if at is None:
        return default_s
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return max(0.0, at.timestamp() - now_s)


def detect() -> Provider | None:
    """Whose machine this is, as its firmware says."""
    said = " ".join(
        _first_line(DMI / name) for name in ("sys_vendor", "bios_vendor", "product_name", "chassis_asset_tag")
    )
    if "Amazon EC2" in said:
        return "aws"
    if "Google" in said:
        return "gcp"
    if "7783-7084-3265-9085-8269-3286-77" in said:  # The asset tag of every machine of Azure.
        return "azure"
    return None


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def chosen() -> Provider | None:
    """By the environment, or by what this machine is. Raises `ValueError` with what may be written."""
    asked = os.environ.get(NOTICES_VARIABLE, "auto").strip().lower() or "auto"
    if asked == "off":
        return None
    if asked == "auto":
        return detect()
    for provider in PROVIDERS:
        if asked == provider:
            return provider
    raise ValueError(f"{NOTICES_VARIABLE}={asked}: write aws, gcp, azure, auto or off.")


class NoticeWatch:
    """Asks until a notice has come; `announce` is called with it once, on this thread."""

    def __init__(
        self,
        provider: Provider,
        announce: Callable[[str, Announced], None],
        *,
        endpoint: str = "",
        every_s: float = POLL_S,
    ) -> None:
        self.provider = provider
        self._announce = announce
        self._endpoint = (endpoint or ENDPOINTS[provider]).rstrip("/")
        self._every_s = every_s
        self._closing = threading.Event()
        # The metadata service is on this machine's link: what the environment says of proxies is not for it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._thread = threading.Thread(target=self._run, name="strata-notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2 * ANSWER_S)

    def _run(self) -> None:
        backoff = Backoff(first_s=self._every_s, longest_s=LONGEST_PAUSE_S)
        while not self._closing.is_set():
            try:
                found = READERS[self.provider](self._ask, time.time())
            except Unanswered as error:
                log.debug("the metadata service of %s does not answer: %s", self.provider, error)
                self._closing.wait(max(self._every_s, backoff.pause_s() or 0.0))
                continue
            backoff.worked()
            if found is not None:
                self._announce(self.provider, found)
                return
            self._closing.wait(self._every_s)

    def _ask(self, path: str, headers: dict[str, str], method: str) -> str | None:
        request = urllib.request.Request(self._endpoint + path, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=ANSWER_S) as answer:
                body: bytes = answer.read(ANSWER_BYTES)
            return body.decode(errors="replace")
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
                raise Unanswered(f"status {error.code}") from None
        except (OSError, ValueError) as error:
            raise Unanswered(str(error)) from None


def watch(coordinator: str) -> NoticeWatch | None:
    """Of this machine, for its agent, where there is anything to ask. `coordinator` is HOST:PORT, or empty. Raises `ValueError` for a
    setting that means nothing."""
    from strata.agent.leaving import LEAVING

    provider = chosen()
    if provider is None:
        return None

    def announce(source: str, found: Announced) -> None:
        if coordinator:  # Nothing waits for it: the run leaves at once.
            threading.Thread(
                target=_tell, args=(coordinator, source, found), name="strata-announce", daemon=True
            ).start()
        LEAVING.notice(source=source, reason=found.reason, within_s=found.within_s)

    return NoticeWatch(provider, announce, endpoint=os.environ.get(ENDPOINT_VARIABLE, ""))


def _tell(coordinator: str, source: str, found: Announced) -> None:
    """The machine is drained from now on, for all its runs."""
    from strata.agent.leaving import call_limit_s
    from strata.rpc.cas import CoordinatorCasClient

    client = CoordinatorCasClient(coordinator, timeout_s=call_limit_s(found.within_s))
    try:
        client.announce_drain(
            socket.gethostname(), within_s=found.within_s, reason=found.reason, source=source
        )
    except ConnectionError as error:
        log.warning("the coordinator could not be notified that this machine shuts down: %s", error)
    finally:
        client.close()
