"""What AWS, GCP and Azure announce, as their metadata services answer: a notice is found, and nothing else is taken for one."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from strata.agent.notices import (
    Announced,
    NoticeWatch,
    Provider,
    Unanswered,
    chosen,
    from_aws,
    from_azure,
    from_gcp,
)

NOW_S = 1_800_000_000.0  # 2027-01-15T08:00:00Z
AWS = "/latest/meta-data/spot/instance-action"
GCP = "/computeMetadata/v1/instance/preempted"
GCP_EVENT = "/computeMetadata/v1/instance/maintenance-event"
AZURE = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class Asked:
    """Answers by path; what is not there is a 404."""

    def __init__(self, **_: str) -> None:
        self.answers: dict[str, str] = {}
        self.headers: dict[str, dict[str, str]] = {}

    def __call__(self, path: str, headers: dict[str, str], method: str) -> str | None:
        self.headers[path] = headers
        return "token" if method == "PUT" else self.answers.get(path)


def test_aws_says_when_a_spot_instance_is_taken_back() -> None:
    asked = Asked()
    assert from_aws(asked, NOW_S) is None
    asked.answers[AWS] = json.dumps({"action": "terminate", "time": "2027-01-15T08:02:00Z"})
    assert from_aws(asked, NOW_S) == Announced(
        reason="AWS reclaims this spot instance (terminate)", within_s=120.0
    )
    assert asked.headers[AWS] == {"X-aws-ec2-metadata-token": "token"}
    for damaged in ("no json", "[]"):
        asked.answers[AWS] = damaged
        with pytest.raises(Unanswered):
            from_aws(asked, NOW_S)


def test_gcp_says_that_an_instance_is_preempted_or_stopped_and_not_when() -> None:
    asked = Asked()
    asked.answers = {GCP: "FALSE\n", GCP_EVENT: "NONE"}
    assert from_gcp(asked, NOW_S) is None
    asked.answers[GCP_EVENT] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert from_gcp(asked, NOW_S) is None
    asked.answers[GCP_EVENT] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert from_gcp(asked, NOW_S) == Announced(
        reason="GCP stops this instance for maintenance", within_s=60.0
    )
    asked.answers[GCP] = "TRUE"
    assert from_gcp(asked, NOW_S) == Announced(reason="GCP preempts this instance", within_s=30.0)
    assert asked.headers[GCP] == {"Metadata-Flavor": "Google"}


def test_azure_announces_events_of_this_machine_and_of_others() -> None:
    asked = Asked()
    asked.answers[AZURE_NAME] = "vm-1"

    def event(kind: str, machine: str, at: str) -> dict[str, object]:
        return {"EventType": kind, "Resources": [machine], "NotBefore": at}

    asked.answers[AZURE] = json.dumps({"Events": [event("Freeze", "vm-1", ""), event("Preempt", "vm-2", "")]})
    assert from_azure(asked, NOW_S) is None
    asked.answers[AZURE] = json.dumps(
        {
            "Events": [
                event("Reboot", "vm-1", "Fri, 15 Jan 2027 08:15:00 GMT"),
                event("Preempt", "vm-1", ""),
            ]
        }
    )
    assert from_azure(asked, NOW_S) == Announced(
        reason="Azure announces Preempt of this machine", within_s=30.0
    )
    asked.answers[AZURE] = json.dumps({"Events": [event("Reboot", "vm-1", "Fri, 15 Jan 2027 08:15:00 GMT")]})
    found = from_azure(asked, NOW_S)
    assert found is not None
    assert found.within_s == 900.0
    assert asked.headers[AZURE] == {"Metadata": "true"}


# --- over a real connection ---------------------------------------------------------------------------------------


class Server(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.answers: dict[str, tuple[int, str]] = {}
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()


class _Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        status, text = self.server.answers.get(self.path, (404, ""))
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
        self.server.asked.put(self.path)

    do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=found.serve_forever, args=(0.02,))
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.mark.parametrize(
    ("provider", "path", "text"),
    [
        ("gcp", GCP, "TRUE"),
        ("azure", AZURE, json.dumps({"Events": [{"EventType": "Preempt", "NotBefore": ""}]})),
        ("aws", AWS, json.dumps({"action": "stop"})),
    ],
)
def test_a_notice_is_announced_once_after_errors_and_silence(
    server: Server, provider: Provider, path: str, text: str
) -> None:
    announced: queue.SimpleQueue[tuple[str, Announced]] = queue.SimpleQueue()
    server.answers[path] = (500, "not now")
    watch = NoticeWatch(
        provider,
        lambda source, found: announced.put((source, found)),
        endpoint=f"http://127.0.0.1:{server.server_port}/",
        every_s=0.02,
    )
    try:
        for _ in range(3):
            server.asked.get(timeout=30)
        del server.answers[path]
        server.asked.get(timeout=30)
        server.answers[path] = (200, text)
        source, found = announced.get(timeout=30)
        assert source == provider
        assert 0 < found.within_s <= 120
    finally:
        watch.close()
    assert announced.empty()


def test_who_is_asked_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_NOTICES", "off")
    assert chosen() is None
    monkeypatch.setenv("STRATA_NOTICES", "Azure")
    assert chosen() == "azure"
    monkeypatch.setenv("STRATA_NOTICES", "oracle")
    with pytest.raises(ValueError, match="write aws, gcp, azure, auto or off"):
        chosen()
