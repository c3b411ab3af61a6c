"""Notifications of a real coordinator arrive at real servers, signed, once, and without telling a secret."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata import TrainingOrchestrator
from strata.config import ConfigError
from strata.coordinator.notify.channels import mail, message, send
from strata.coordinator.notify.notifier import QUEUED_LIMIT, _Outbox
from strata.coordinator.notify.settings import Channel, read_notify
from strata.core.faults.failures import Failure
from strata.core.faults.notifications import Notification
from strata.core.messages import JobId, ReportFailure
from strata.rpc import coordinator_pb2 as pb
from strata.rpc.cas import CoordinatorCasClient
from strata.worker.outbox import MetricOutbox
from tests.cli.running import strata
from tests.service.clients import EventStream
from tests.service.receivers import MailServer, Posted, Webhooks
from tests.support import Coordinator, eventually

PASSWORD, SIGNING = "a-password-of-nobody", "a-secret-that-signs"
PATHS = {
    "slack": "/services/T00/B00/slacksecret",
    "teams": "/teams-secret",
    "discord": "/api/webhooks/1/dsecret",
}
SECRETS = (PASSWORD, SIGNING, *PATHS.values(), "webhook-secret-path")

NOTICE = Notification(
    id=7,
    rule="loss",
    run="llm <&> @everyone",
    subject="",
    state="raised",
    severity="error",
    title="llm <&> @everyone: the loss is NaN",
    text="At step 7.",
    next_step="Stop it.",
    at=1_700_000_000.0,
    held_back=2,
)


@pytest.fixture(scope="module")
def webhooks() -> Iterator[Webhooks]:
    server = Webhooks()
    yield server
    server.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "certs"
    assert (
        strata("certs", "init", "--host", "127.0.0.1", "--host", "localhost", "--dir", str(folder)).code == 0
    )
    return folder


@pytest.fixture(scope="module")
def mail_server(certificates: Path) -> Iterator[MailServer]:
    pair = (certificates / "coordinator.pem", certificates / "coordinator.key")
    server = MailServer(certificate=pair, password=PASSWORD)
    yield server
    server.close()


@pytest.fixture(scope="module")
def coordinator(
    tmp_path_factory: pytest.TempPathFactory, webhooks: Webhooks, mail_server: MailServer, certificates: Path
) -> Iterator[Coordinator]:
    folder = tmp_path_factory.mktemp("notify")
    config = folder / "strata.toml"
    config.write_text(
        f"""
        [notify]
        dashboard_url = "https://strata.example.org/"
        [notify.rules]
        throughput = 20
        disk = false
        [notify.channels.team]
        kind = "slack"
        url = "{webhooks.url}{PATHS["slack"]}"
        [notify.channels.cards]
        kind = "teams"
        url = "{webhooks.url}{PATHS["teams"]}"
        runs = ["other-*"]
        [notify.channels.chat]
        kind = "discord"
        url = "{webhooks.url}{PATHS["discord"]}"
        rules = ["stopped"]
        [notify.channels.ops]
        kind = "webhook"
        url = "{webhooks.url}/webhook-secret-path"
        secret = "$OPS_SECRET"
        [notify.channels.mail]
        kind = "email"
        host = "localhost"
        port = {mail_server.port}
        user = "strata"
        password = "$MAIL_PASSWORD"
        from = "strata@example.org"
        to = ["one@example.org", "two@example.org"]
        """
    )
    env = {
        "STRATA_HEARTBEAT_INTERVAL": "0.1",
        "OPS_SECRET": SIGNING,
        "MAIL_PASSWORD": PASSWORD,
        "SSL_CERT_FILE": str(certificates / "ca.pem"),
        "STRATA_NOTIFY_RULES": "throughput=25,goodput=off",
        "STRATA_LOG": "debug",
    }
    server = Coordinator(folder / "coordinator", "--config", str(config), env=env).start()
    yield server
    assert server.stop() == 0
    output = "".join(server.output)
    assert "Traceback" not in output, output
    for secret in SECRETS:
        assert secret not in output
        for path in server.data_dir.rglob("*"):
            assert path.is_dir() or secret.encode() not in path.read_bytes(), path


def verified(posted: Posted) -> dict[str, Any]:
    """What a receiver should do: the signature counts for the timestamp and the very bytes."""
    signed = f"{posted.headers['strata-timestamp']}.".encode() + posted.body
    wanted = hmac.new(SIGNING.encode(), signed, hashlib.sha256).hexdigest()
    assert hmac.compare_digest(posted.headers["strata-signature"], f"v1={wanted}")
    assert abs(time.time() - int(posted.headers["strata-timestamp"])) < 600
    return posted.json


def of_ops(posted: Posted) -> bool:
    return posted.path == "/webhook-secret-path"


def test_a_test_reaches_every_kind_of_channel(
    coordinator: Coordinator, webhooks: Webhooks, mail_server: MailServer
) -> None:
    ran = strata("notify", "test", "--api", coordinator.url)
    assert ran.code == 0, ran
    names = {"team (slack)", "cards (teams)", "chat (discord)", "ops (webhook)", "mail (email)"}
    assert {line.partition(":")[0] for line in ran.out.splitlines()} == names
    assert ran.out.count("delivered") == 5
    found = {posted.path: posted for posted in (webhooks.wait() for _ in range(4))}
    title = "A test notification of Strata"
    assert title in found[PATHS["slack"]].json["text"]
    assert found[PATHS["discord"]].json["embeds"][0]["title"] == title
    card = found[PATHS["teams"]].json["attachments"][0]["content"]
    assert title in card["body"][0]["text"]
    assert card["type"] == "AdaptiveCard"
    told = verified(found["/webhook-secret-path"])
    assert (told["rule"], told["title"], told["version"]) == ("test", title, 1)
    letter = mail_server.wait()
    assert letter.encrypted
    assert letter.signed_in == "strata"
    assert len(letter.to) == 2
    assert "Subject: [strata] A test notification of Strata" in letter.text
    assert strata("notify", "test", "ops", "--api", coordinator.url).code == 0
    assert verified(webhooks.wait())["rule"] == "test"


def test_a_channel_that_is_not_there_is_named_with_those_that_are(coordinator: Coordinator) -> None:
    ran = strata("notify", "test", "nobody", "--api", coordinator.url)
    assert ran.code == 1
    assert "nobody" in ran.err
    assert "team, cards, chat, ops, mail" in ran.err


def test_channels_and_rules_are_shown_without_secrets(coordinator: Coordinator) -> None:
    shown = coordinator.get("/api/notifications/channels")
    rules = {rule["name"]: rule for rule in shown["rules"]}
    assert (rules["throughput"]["threshold"], rules["throughput"]["unit"]) == (25.0, "percent")
    assert [name for name, rule in rules.items() if not rule["enabled"]] == ["disk", "goodput"]
    listed = strata("notify", "ls", "--api", coordinator.url)
    assert listed.code == 0
    assert "one@example.org, two@example.org by localhost:" in listed.out
    assert "no checkpoint for this many times" in listed.out
    for secret in SECRETS:
        assert secret not in json.dumps(shown) + listed.out


def report(worker: TrainingOrchestrator, step: int, loss: float) -> None:
    worker.heartbeat(step, 0, state="training", metrics={"loss": loss})


def test_a_loss_of_heartbeats_that_is_nan_is_notified_everywhere_and_so_is_its_end(
    coordinator: Coordinator, webhooks: Webhooks, mail_server: MailServer
) -> None:
    with (
        EventStream(coordinator.http_port) as events,
        TrainingOrchestrator(coordinator.address, job_id="llm") as worker,
    ):
        worker.register_worker("llm-rank0")
        report(worker, 41, math.nan)
        told = verified(webhooks.wait(of_ops))
        assert (told["rule"], told["run"], told["state"], told["severity"]) == (
            "loss",
            "llm",
            "raised",
            "error",
        )
        assert told["title"] == "llm: the loss is NaN"
        assert told["link"] == "https://strata.example.org/#/runs/llm"
        seen = events.wait_for("notification").data
        assert seen == {key: told[key] for key in seen}
        assert "llm: the loss is NaN" in mail_server.wait().text
        report(worker, 42, 2.0)
        assert verified(webhooks.wait(of_ops))["title"] == "llm: the loss is back to normal"
        mail_server.wait()
    newest = coordinator.get("/api/notifications?run=llm")
    assert [each["state"] for each in newest] == ["resolved", "raised"]
    assert coordinator.get("/api/notifications?run=nobody") == []
    (line,) = coordinator.get("/api/logs?q=the%20loss%20is%20NaN")
    assert line["level"] == "warn"
    assert "the loss is NaN" in strata("notify", "history", "--api", coordinator.url).out
    assert 'strata_notifications_total{outcome="sent"}' in coordinator.call("GET", "/metrics")[1].decode()


def test_a_logged_loss_that_is_infinite_is_notified_with_its_step(
    coordinator: Coordinator, webhooks: Webhooks
) -> None:
    with TrainingOrchestrator(coordinator.address, job_id="logs") as worker:
        worker.register_worker("logs-rank0")
        outbox = MetricOutbox(generation=1, started_ms=5, resumed_step=0)
        losses = [2.0] * 500 + [math.inf] + [math.inf] * 20
        values = b"".join(map(_double, losses))
        steps = list(range(len(losses)))
        outbox.put(pb.MetricRows(names=["train/loss"], steps=steps, times=[1.0] * len(losses), values=values))
        worker.send_metrics(outbox)
        told = verified(webhooks.wait(lambda posted: of_ops(posted) and posted.json["run"] == "logs"))
        assert told["title"] == "logs: the loss is infinite"
        assert "step 500" in told["text"]


def _double(value: float) -> bytes:
    import struct

    return struct.pack("<d", value)


def stop(coordinator: Coordinator, run: str, failure: Failure) -> None:
    """As the agent of a launch does."""
    client = CoordinatorCasClient(coordinator.address, timeout_s=30)
    command = ReportFailure(
        failures=(failure,), launch="", job_id=JobId(run), decision="stop", reason="it came back"
    )
    client.report_failure(command)
    client.close()


def test_a_run_that_its_agent_stops_is_notified_to_those_who_asked_for_it(
    coordinator: Coordinator, webhooks: Webhooks
) -> None:
    stop(coordinator, "crash", Failure(rank=3, host="b", pid=812, at_s=time.time(), exit_code=-11))
    posted = webhooks.wait(lambda posted: posted.path == PATHS["discord"])
    (embed,) = posted.json["embeds"]
    assert embed["title"] == "crash has stopped"
    assert "rank 3 (b, pid 812) was killed by SIGSEGV" in embed["description"]
    assert "it came back" in embed["description"]


def test_what_is_not_taken_is_sent_again_and_what_is_refused_is_not(
    coordinator: Coordinator, webhooks: Webhooks
) -> None:
    def channel() -> dict[str, Any]:
        found: dict[str, Any] = next(
            each
            for each in coordinator.get("/api/notifications/channels")["channels"]
            if each["name"] == "chat"
        )
        return found

    eventually(
        lambda: not sum(c["waiting"] for c in coordinator.get("/api/notifications/channels")["channels"]),
        within_s=60,
    )
    before = channel()
    webhooks.answers += [(503, {"Retry-After": "0"}), (500, {}), (429, {"Retry-After": "0"})]
    stop(coordinator, "again", Failure(rank=0, host="c", pid=1, at_s=time.time(), exit_code=1))
    webhooks.wait(
        lambda posted: posted.path == PATHS["discord"] and "again" in posted.json["embeds"][0]["title"]
    )
    webhooks.answers.clear()
    eventually(lambda: channel()["sent"] == before["sent"] + 1, within_s=60)
    assert channel()["last_error"] == ""
    eventually(
        lambda: not sum(c["waiting"] for c in coordinator.get("/api/notifications/channels")["channels"]),
        within_s=60,
    )
    webhooks.answers += [(404, {})] * 10
    stop(coordinator, "refused", Failure(rank=0, host="c", pid=1, at_s=time.time(), exit_code=1))
    eventually(lambda: channel()["failed"] == before["failed"] + 1, within_s=60)
    webhooks.answers.clear()
    assert channel()["last_error"] == "it refused (404 Not Found)"
    assert "was not notified that refused has stopped" in str(
        coordinator.get("/api/logs?q=was%20not%20notified")
    )


def test_a_restart_keeps_what_was_sent_and_sends_nothing_twice(
    coordinator: Coordinator, webhooks: Webhooks
) -> None:
    with TrainingOrchestrator(coordinator.address, job_id="kept") as worker:
        worker.register_worker("kept-rank0")
        report(worker, 1, math.nan)
        first = verified(webhooks.wait(lambda posted: of_ops(posted) and posted.json["run"] == "kept"))
        eventually(lambda: b'"run": "kept"' in _note(coordinator), within_s=60)
        coordinator.kill()
        coordinator.start()
        assert first["id"] in [each["id"] for each in coordinator.get("/api/notifications?run=kept")]
        report(worker, 2, math.nan)
        eventually(lambda: coordinator.get("/api/workers"), within_s=30)
        report(worker, 3, 1.0)
        told = verified(webhooks.wait(lambda posted: of_ops(posted) and posted.json["run"] == "kept"))
        assert told["state"] == "resolved"
        assert told["id"] > first["id"]


def _note(coordinator: Coordinator) -> bytes:
    import sqlite3
    from contextlib import closing

    path = coordinator.data_dir / "logs.sqlite"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as db:
        row = db.execute("SELECT value FROM notes WHERE key = 'notifications'").fetchone()
    return bytes(row[0]) if row is not None else b""


# --- without a coordinator ------------------------------------------------------------------------------------


def test_messages_call_nobody_and_hold_no_markup_of_others() -> None:
    link = "https://s/#/runs/x"
    slack = message(Channel(name="a", kind="slack", url="http://h/x"), NOTICE, link)
    assert "*llm &lt;&amp;&gt; @everyone: the loss is NaN*" in slack["text"]
    discord = message(Channel(name="a", kind="discord", url="http://h/x"), NOTICE, link)
    assert discord["allowed_mentions"] == {"parse": []}
    assert "2 more of this run were held back." in discord["embeds"][0]["description"]
    letter = mail(
        Channel(name="a", kind="email", sender="a@b", to=("c@d",)), replace(NOTICE, title="two\nlines")
    )
    assert letter["Subject"] == "[strata] two lines"


def test_a_server_that_sends_elsewhere_is_not_followed() -> None:
    webhooks = Webhooks()  # The coordinator may still be sending to the other one, and would take the answer.
    webhooks.answers.append((302, {"Location": f"{webhooks.url}/elsewhere"}))
    try:
        sent = send(Channel(name="a", kind="webhook", url=f"{webhooks.url}/here"), NOTICE)
    finally:
        webhooks.close()
    assert sent.error == "it answered with a redirect, which is not followed (302 Found)"
    assert not sent.again


def test_a_wrong_password_is_reported_without_it(
    mail_server: MailServer, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    channel = Channel(
        name="a",
        kind="email",
        host="localhost",
        port=mail_server.port,
        user="strata",
        password="wrong-password",
        sender="a@b",
        to=("c@d",),
    )
    sent = send(channel, NOTICE)
    assert sent.error == "the mail server refused (535 not you, strata with [redacted])"
    assert not sent.again


def test_a_mail_server_without_tls_gets_neither_password_nor_mail() -> None:
    server = MailServer(password=PASSWORD)
    try:
        channel = Channel(
            name="a",
            kind="email",
            host="localhost",
            port=server.port,
            user="u",
            password=PASSWORD,
            sender="a@b",
            to=("c@d",),
        )
        assert "STARTTLS" in send(channel, NOTICE).error
        assert server.letters.empty()
    finally:
        server.close()


def test_a_port_where_nobody_listens_is_worth_another_attempt() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/secret-path"
        sent = send(Channel(name="a", kind="webhook", url=url), NOTICE)
    assert sent.error == "the address could not be reached (Connection refused)"
    assert sent.again


def test_a_channel_that_hangs_holds_nobody_up_and_drops_the_oldest() -> None:
    outcomes: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = Channel(name="a", kind="webhook", url=f"http://127.0.0.1:{silent.getsockname()[1]}/x")
        outbox = _Outbox(channel, "", outcomes.append)
        for number in range(3 * QUEUED_LIMIT):
            outbox.put(replace(NOTICE, id=number))
        silent.settimeout(60)
        connection, _ = silent.accept()  # It takes what is sent there, and never answers.
        shown = outbox.view()
        assert (shown.waiting, shown.dropped) == (QUEUED_LIMIT, 2 * QUEUED_LIMIT)
        assert outcomes == ["dropped"] * 2 * QUEUED_LIMIT
        outbox.begin_to_close(time.monotonic())
        connection.close()
    outbox.join(time.monotonic() + 60)


def test_what_is_counted_as_given_up_has_been_logged() -> None:
    """Whoever sees the count finds the reason in the log."""
    counted: list[int] = []
    webhooks = Webhooks()
    watch = logging.Handler(logging.ERROR)
    watch.emit = lambda record: counted.append(outbox.view().failed)  # type: ignore[method-assign]
    outbox = _Outbox(
        Channel(name="a", kind="webhook", url=f"{webhooks.url}/refused"), "", lambda outcome: None
    )
    webhooks.answers.append((404, {}))
    log = logging.getLogger("strata.coordinator.notify")
    log.addHandler(watch)
    try:
        outbox.put(NOTICE)
        eventually(lambda: outbox.view().failed == 1, within_s=60)
    finally:
        log.removeHandler(watch)
        outbox.begin_to_close(time.monotonic())
        outbox.join(time.monotonic() + 60)
        webhooks.close()
    assert counted == [0]


BAD = {
    "nothing": ("[notify]\nchanels = 1", "did you mean 'channels'?"),
    "kind": ('[notify.channels.a]\nkind = "slak"', "channels.a.kind must be one of slack, teams"),
    "no url": ('[notify.channels.a]\nkind = "slack"', "channels.a.url is missing"),
    "url": (
        '[notify.channels.a]\nkind = "slack"\nurl = "hunter2"',
        "must be an address that begins with https://",
    ),
    "plain": (
        '[notify.channels.a]\nkind = "slack"\nurl = "http://h.example/hunter2"',
        "others could read it",
    ),
    "key": (
        '[notify.channels.a]\nkind = "slack"\nurl = "https://h/hunter2"\nsecret = "x"',
        "is not a known key",
    ),
    "number": ('[notify.channels.a]\nkind = "slack"\nurl = 5', "must be text"),
    "variable": ('[notify.channels.a]\nkind = "slack"\nurl = "$NOT_SET"', "variable NOT_SET is not set"),
    "rule": ("[notify.rules]\nthroughputs = 3", "did you mean 'throughput'?"),
    "threshold": ("[notify.rules]\nthroughput = 300", "between 1 and 99 (percent)"),
    "on": ("[notify.rules]\nstopped = 3", "has no threshold"),
    "of channel": (
        '[notify.channels.a]\nkind = "slack"\nurl = "https://h/hunter2"\nrules = ["los"]',
        "did you mean 'loss'?",
    ),
    "mail": (
        '[notify.channels.a]\nkind = "email"\nhost = "h"\nfrom = "x"\nto = ["y@z"]',
        "not an e-mail address",
    ),
    "password": (
        '[notify.channels.a]\nkind = "email"\nhost = "h"\nfrom = "x@y"\nto = ["y@z"]\nuser = "u"\n'
        'password = "hunter2"\nsecurity = "none"',
        "not sent without TLS",
    ),
    "half": (
        '[notify.channels.a]\nkind = "email"\nhost = "h"\nfrom = "x@y"\nto = ["y@z"]\npassword = "hunter2"',
        "belong together",
    ),
    "toml": ("[notify", "is not valid TOML"),
    "table": ("notify = 3", "must be a table"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_with_its_place_and_without_secrets(name: str, tmp_path: Path) -> None:
    text, words = BAD[name]
    file = tmp_path / "strata.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_notify(file=file, environ={})
    assert words in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"STRATA_NOTIFY": "https://hooks/hunter2"}, "is none of slack+https://"),
        ({"STRATA_NOTIFY": "smtp://u:hunter2@h"}, "from must not be empty"),
        ({"STRATA_NOTIFY": "slack+ftp://hunter2"}, "must be an address"),
        ({"STRATA_NOTIFY_RULES": "loss=often"}, "name=number"),
        ({"STRATA_NOTIFY_RULES": "los=3"}, "did you mean 'loss'?"),
    ],
)
def test_the_environment_is_checked_too(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_notify(environ=variables)
    assert words in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_the_environment_alone_is_enough() -> None:
    found = read_notify(
        environ={
            "STRATA_NOTIFY": "slack+https://h/a, slack+https://h/b,webhook+http://in.cluster:9/c,"
            "smtp://me:pass%40word@mail.example:2525?from=a@b&to=c@d;e@f",
            "STRATA_NOTIFY_SECRET": "signs",
            "STRATA_NOTIFY_RULES": "slow_rank=off, loss=8",
        }
    )
    first, second, hook, letter = found.channels
    assert (first.name, second.name, hook.name, letter.name) == ("slack", "slack-2", "webhook", "email")
    assert hook.secret == "signs"
    assert (letter.port, letter.password, letter.to) == (2525, "pass@word", ("c@d", "e@f"))
    assert found.rules["loss"] == 8.0
    assert "slow_rank" not in found.rules
    assert "signs" not in repr(found)
    assert "pass@word" not in repr(found)


def test_a_coordinator_without_channels_says_how_to_make_one(tmp_path: Path) -> None:
    server = Coordinator(tmp_path / "coordinator").start()
    try:
        ran = strata("notify", "test", "--api", server.url)
        assert ran.code == 1
        assert "[notify.channels.NAME]" in ran.err
        assert "No channels" in strata("notify", "ls", "--api", server.url).out
    finally:
        server.stop()


def test_a_coordinator_with_a_wrong_channel_does_not_start_and_says_all_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "strata.toml"
    file.write_text('[coordinator]\nhttp_port = -4\n[notify.channels.a]\nkind = "slack"\nurl = "hunter2"')
    ran = strata("serve", "--config", str(file))
    assert ran.code == 2
    assert "The configuration has 2 problems" in ran.err
    assert "hunter2" not in ran.err
