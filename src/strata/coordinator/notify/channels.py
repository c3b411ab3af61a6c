"""How each kind of channel is spoken to: what a notification looks like there, and sending it once.

`send` blocks, with a deadline, and says what became of it: delivered, worth another attempt, or refused for good. Nothing that
it says holds an address or a password. Redirects are not followed: what is signed and secret goes where it was configured to go.

A generic webhook gets the notification as JSON. `Strata-Signature` is `v1=` and the HMAC-SHA256, in hexadecimal, of the
timestamp in `Strata-Timestamp`, a point and the body, under the channel's secret; `Strata-Delivery` names the notification, so
that one that is sent again can be known.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import smtplib
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from typing import Any
from urllib.parse import quote

import strata
from strata.coordinator.notify.settings import Channel
from strata.core.faults.notifications import Notification
from strata.core.telemetry.logtext import Tidy

ATTEMPT_S = 10.0
RETRY_AFTER_MOST_S = 300.0
ANSWER_BYTES = 2_048
TEXT_LIMIT = 1_500
COLOURS = {"error": 0xD13438, "warning": 0xE8A33D, "success": 0x2E9E5B, "info": 0x4C7BD9, "debug": 0x8A8A8A}
SIGNS = {
    "error": "\N{LARGE RED CIRCLE}",
    "warning": "\N{LARGE YELLOW CIRCLE}",
    "success": "\N{LARGE GREEN CIRCLE}",
}
USER_AGENT = f"strata/{strata.__version__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What became of one attempt."""

    error: str = ""
    """Empty: it was delivered."""
    again: bool = False
    """Whether another attempt may succeed."""
    after_s: float = 0.0
    """How long the other side asks to be left alone."""

    @property
    def is_delivered(self) -> bool:
        return not self.error


def send(channel: Channel, notification: Notification, *, dashboard_url: str = "") -> Sent:
    """One attempt."""
    link = _link(notification, dashboard_url)
    if channel.kind == "email":
        sent = _send_mail(channel, notification, link)
    else:
        sent = _post(channel, notification, link)
    return (
        sent
        if sent.is_delivered
        else Sent(error=_safe(channel, sent.error), again=sent.again, after_s=sent.after_s)
    )


def message(channel: Channel, notification: Notification, link: str = "") -> dict[str, Any]:
    """What a webhook of this kind takes."""
    title, text = notification.title, _text(notification)
    sign = SIGNS.get(notification.severity, "")
    match channel.kind:
        case "slack":
            lines = [f"{sign} *{_slack(title)}*", _slack(text)]
            return {"text": "\n".join(lines + ([f"<{link}|Open the run>"] if link else []))}
        case "discord":
            embed = {"title": title[:250], "description": text, "color": COLOURS[notification.severity]}
            # Names of runs come from elsewhere: they must not become mentions.
            return {
                "username": "Strata",
                "embeds": [embed | ({"url": link} if link else {})],
                "allowed_mentions": {"parse": []},
            }
        case "teams":
            body = [
                {
                    "type": "TextBlock",
                    "text": f"{sign} {title}",
                    "weight": "Bolder",
                    "size": "Medium",
                    "wrap": True,
                },
                {"type": "TextBlock", "text": text, "wrap": True},
            ]
            actions = [{"type": "Action.OpenUrl", "title": "Open the run", "url": link}] if link else []
            card = {
                "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
                "type": "AdaptiveCard",
                "version": "1.4",
                "body": body,
                "actions": actions,
            }
            kind = "application/vnd.microsoft.card.adaptive"
            return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}
    return {**asdict(notification), "link": link, "version": 1}


def signature(secret: str, timestamp: str, body: bytes) -> str:
    digest = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256)
    return f"v1={digest.hexdigest()}"


def mail(channel: Channel, notification: Notification, link: str = "") -> EmailMessage:
    letter = EmailMessage()
    letter["Subject"] = f"[strata] {' '.join(notification.title.split())}"[:200]
    letter["From"] = channel.sender
    letter["To"] = ", ".join(channel.to)
    letter["Date"] = formatdate(notification.at)
    letter["Message-ID"] = make_msgid(
        str(notification.id), domain=channel.sender.rpartition("@")[2].strip(">")
    )
    letter["Auto-Submitted"] = "auto-generated"
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(notification.at))
    lines = [notification.title, "", _text(notification), "", f"{when}; rule: {notification.rule}"]
    letter.set_content("\n".join(lines + ([link] if link else [])) + "\n")
    return letter


# --- sending --------------------------------------------------------------------------------------------------


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _post(channel: Channel, notification: Notification, link: str) -> Sent:
    body = json.dumps(message(channel, notification, link), ensure_ascii=False).encode()
    request = urllib.request.Request(channel.url, data=body, method="POST")
    request.add_header("Content-Type", "application/json")
    request.add_header("User-Agent", USER_AGENT)
    if channel.kind == "webhook":
        timestamp = str(int(time.time()))
        request.add_header("Strata-Timestamp", timestamp)
        request.add_header("Strata-Delivery", f"{notification.id}-{int(notification.at * 1000)}")
        if channel.secret:
            request.add_header("Strata-Signature", signature(channel.secret, timestamp, body))
    try:
        with _OPENER.open(request, timeout=ATTEMPT_S) as answer:
            answer.read(ANSWER_BYTES)
            return Sent()
    except urllib.error.HTTPError as error:
        with error:
            return _refused(error)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        name = getattr(reason, "strerror", None) or type(reason).__name__
        is_for_good = isinstance(error, ValueError) and not isinstance(error, OSError)
        return Sent(error=f"the address could not be reached ({name})", again=not is_for_good)


def _refused(error: urllib.error.HTTPError) -> Sent:
    again = error.code in (408, 425, 429) or error.code >= 500
    after = error.headers.get("Retry-After", "") if error.headers else ""
    after_s = min(RETRY_AFTER_MOST_S, float(after)) if after.isascii() and after.isdecimal() else 0.0
    said = http.client.responses.get(error.code, "")
    what = "it answered with a redirect, which is not followed" if 300 <= error.code < 400 else "it refused"
    return Sent(error=f"{what} ({error.code} {said})".replace(" )", ")"), again=again, after_s=after_s)


def _send_mail(channel: Channel, notification: Notification, link: str) -> Sent:
    context = ssl.create_default_context()
    try:
        letter = mail(channel, notification, link)
        if channel.security == "tls":
            server: smtplib.SMTP = smtplib.SMTP_SSL(
                channel.host, channel.port, timeout=ATTEMPT_S, context=context
            )
        else:
            server = smtplib.SMTP(channel.host, channel.port, timeout=ATTEMPT_S)
        with server:
            if channel.security == "starttls":
                server.starttls(context=context)
            if channel.user:
                server.login(channel.user, channel.password)
            refused = server.send_message(letter)
    except smtplib.SMTPRecipientsRefused as error:
        codes = [code for code, _ in error.recipients.values()]
        return Sent(
            error=f"the mail server rejected all recipients ({codes[0] if codes else '?'})",
            again=all(c < 500 for c in codes),
        )
    except smtplib.SMTPResponseException as error:
        said = (
            error.smtp_error.decode(errors="replace")
            if isinstance(error.smtp_error, bytes)
            else error.smtp_error
        )
        return Sent(
            error=f"the mail server refused ({error.smtp_code} {said})", again=400 <= error.smtp_code < 500
        )
    except smtplib.SMTPNotSupportedError as error:
        return Sent(error=f"the mail server does not support the configuration: {error}")
    except (smtplib.SMTPException, OSError) as error:
        name = getattr(error, "strerror", None) or type(error).__name__
        return Sent(error=f"the mail server could not be reached ({name})", again=True)
    except ValueError as error:
        return Sent(error=f"the mail could not be written: {error}")
    if refused:
        return Sent(error=f"{len(refused)} of {len(channel.to)} recipients were rejected")
    return Sent()


# --- texts ----------------------------------------------------------------------------------------------------


def _text(notification: Notification) -> str:
    held = notification.held_back
    parts = (
        notification.text,
        f"What to do: {notification.next_step}" if notification.next_step else "",
        f"{held} more of this run {'was' if held == 1 else 'were'} held back." if held else "",
    )
    text = "\n".join(filter(None, parts))
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 1] + "…"


def _slack(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _link(notification: Notification, dashboard_url: str) -> str:
    if not dashboard_url:
        return ""
    return f"{dashboard_url}/#/runs/{quote(notification.run, safe='')}" if notification.run else dashboard_url


def _safe(channel: Channel, text: str) -> str:
    return Tidy(channel.secrets)(text)[:300]
