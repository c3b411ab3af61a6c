"""Where notifications go and which rules raise them: the `[notify]` table of the coordinator's configuration, and the environment.

    [notify]
    dashboard_url = "https://strata.example.org"

    [notify.rules]
    throughput = 20          # a threshold
    slow_rank = false        # not at all

    [notify.channels.team]
    kind = "slack"
    url = "$SLACK_WEBHOOK_URL"
    runs = ["llm-*"]
    rules = ["stopped", "loss"]

A text that begins with `$` names an environment variable. Without a file `STRATA_NOTIFY` has channels as addresses with commas
between (`slack+https://…`, `webhook+https://…`, `smtp://user:password@host:587?from=…&to=…`), and `STRATA_NOTIFY_RULES` rules
(`throughput=20,slow_rank=off`). What is secret is neither printed nor part of any message.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, cast, get_args
from urllib.parse import parse_qs, unquote, urlsplit

from strata.config import ConfigError, environment, read_section
from strata.coordinator.auth.peers import is_loopback
from strata.core.faults.notifications import RULES, Notification, Rule, default_rules
from strata.validation import Schema, check, nearest

SECTION = "notify"
CHANNELS_LIMIT = 20
Kind = Literal["slack", "teams", "discord", "webhook", "email"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Security = Literal["starttls", "tls", "none"]
SMTP_PORTS: dict[Security, int] = {"starttls": 587, "tls": 465, "none": 25}


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    name: str
    kind: Kind
    url: str = field(default="", repr=False)
    """Of a webhook: anyone who knows it may post there."""
    secret: str = field(default="", repr=False)
    """Signs what a generic webhook is sent."""
    host: str = ""
    port: int = 0
    security: Security = "starttls"
    user: str = ""
    password: str = field(default="", repr=False)
    sender: str = ""
    to: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    """Only these; all when empty."""
    runs: tuple[str, ...] = ()
    """Patterns of runs; all when empty."""

    @property
    def address(self) -> str:
        """Where it leads, without what is secret about it."""
        if self.kind == "email":
            return f"{', '.join(self.to)} by {self.host}:{self.port}"
        parts = urlsplit(self.url)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname}{port}/…"

    @property
    def secrets(self) -> tuple[str, ...]:
        path = urlsplit(self.url).path.strip("/")
        return tuple(filter(None, (self.url, self.secret, self.password, path if len(path) > 8 else "")))

    def wants(self, notification: Notification) -> bool:
        if notification.rule == "test":
            return True
        run = notification.run
        return (not self.rules or notification.rule in self.rules) and (
            not run or not self.runs or any(fnmatchcase(run, pattern) for pattern in self.runs)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifySettings:
    channels: tuple[Channel, ...] = ()
    rules: Mapping[Rule, float] = field(default_factory=default_rules)
    """Thresholds of the rules that count."""
    dashboard_url: str = ""
    """Where people find the dashboard: notifications link there."""

    @property
    def secrets(self) -> list[str]:
        return [secret for channel in self.channels for secret in channel.secrets]


_TEXT = {"type": "string", "minLength": 1, "maxLength": 2_048}
_SECRET = {"type": "secret", "minLength": 1, "maxLength": 4_096}
_TEXTS = {"type": "array", "items": _TEXT, "maxItems": 100}
_OF_ALL = {"kind": {"type": "string", "enum": list(KINDS)}, "runs": _TEXTS, "rules": _TEXTS}
_OF_KIND: dict[Kind, tuple[dict[str, Schema], list[str]]] = {
    "slack": ({"url": _SECRET}, ["url"]),
    "teams": ({"url": _SECRET}, ["url"]),
    "discord": ({"url": _SECRET}, ["url"]),
    "webhook": ({"url": _SECRET, "secret": _SECRET}, ["url"]),
    "email": (
        {
            "host": _TEXT,
            "port": {"type": "integer", "minimum": 1, "maximum": 65_535},
            "security": {"type": "string", "enum": list(get_args(Security))},
            "user": _TEXT,
            "password": _SECRET,
            "from": _TEXT,
            "to": _TEXTS,
        },
        ["host", "from", "to"],
    ),
}
"""What each kind takes, and what it needs."""


def read_notify(*, file: Path | None = None, environ: Mapping[str, str] | None = None) -> NotifySettings:
    """Raises one `ConfigError` with everything that is wrong."""
    problems: list[str] = []
    variables = environment() if environ is None else environ
    table = read_section(file, SECTION, problems) if file is not None else {}
    where = f"{SECTION}" if file is None else f"{SECTION} in {file}"
    for key in table.keys() - {"channels", "rules", "dashboard_url"}:
        known = ("channels", "rules", "dashboard_url")
        problems.append(f"{SECTION}.{key} in {file} is not a known key; {nearest(key, known)}")
    dashboard_url = table.get("dashboard_url", "")
    if not isinstance(dashboard_url, str) or urlsplit(dashboard_url).scheme not in ("", "http", "https"):
        problems.append(f"{where}: dashboard_url must be an address such as https://strata.example.org")
        dashboard_url = ""
    rules = _rules(table.get("rules", {}), where, problems)
    text = variables.get("STRATA_NOTIFY_RULES", "")
    rules = _rules(_rules_of(text, problems), "STRATA_NOTIFY_RULES", problems, rules)
    channels = _channels(table.get("channels", {}), where, variables, problems)
    channels += _from_environment(variables, {channel.name for channel in channels}, problems)
    if len(channels) > CHANNELS_LIMIT:
        problems.append(f"{where}: there are {len(channels)} channels; at most {CHANNELS_LIMIT} are allowed")
    if problems:
        raise ConfigError(problems)
    return NotifySettings(channels=tuple(channels), rules=rules, dashboard_url=dashboard_url.rstrip("/"))


# --- rules ----------------------------------------------------------------------------------------------------


def _rules(
    given: Any, where: str, problems: list[str], base: dict[Rule, float] | None = None
) -> dict[Rule, float]:
    rules = default_rules() if base is None else dict(base)
    if not isinstance(given, dict):
        problems.append(f"{where}: rules must be a table: [notify.rules]")
        return rules
    for name, value in given.items():
        if name not in RULES:
            problems.append(f"{where}: '{name[:64]}' is not a rule; {nearest(name, RULES)}")
            continue
        rule = cast(Rule, name)
        about = RULES[rule]
        if value is False:
            rules.pop(rule, None)
        elif value is True:
            rules.setdefault(rule, about.default or 0.0)
        elif about.default is None:
            problems.append(f"{where}: the rule {rule} has no threshold; it is true or false")
        elif not isinstance(value, int | float) or not about.least <= value <= about.most:
            problems.append(
                f"{where}: the rule {rule} must be true, false or between {about.least:g} and {about.most:g} "
                f"({about.unit}), not {value!r}"
            )
        else:
            rules[rule] = float(value)
    return rules


def _rules_of(text: str, problems: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, is_said, value = (word.strip() for word in part.partition("="))
        words = {"on": True, "true": True, "off": False, "false": False}
        if not is_said or value.lower() in words:
            found[name] = words.get(value.lower(), True)
            continue
        try:
            found[name] = float(value)
        except ValueError:
            problems.append(f"STRATA_NOTIFY_RULES: '{part[:64]}' is none of name=on, name=off, name=number")
    return found


# --- channels -------------------------------------------------------------------------------------------------


def _channels(given: Any, where: str, variables: Mapping[str, str], problems: list[str]) -> list[Channel]:
    if not isinstance(given, dict):
        problems.append(f"{where}: channels must be tables: [notify.channels.NAME]")
        return []
    found = []
    for name, table in given.items():
        at = f"{where}: channels.{name}"
        channel = _channel(str(name), table, at, variables, problems)
        if channel is not None:
            found.append(channel)
    return found


def _channel(
    name: str, table: Any, at: str, variables: Mapping[str, str], problems: list[str]
) -> Channel | None:
    if not isinstance(table, dict) or table.get("kind") not in KINDS:
        problems.append(f"{at}.kind must be one of {', '.join(KINDS)}")
        return None
    kind: Kind = table["kind"]
    own, needed = _OF_KIND[kind]
    schema = {"type": "object", "properties": {**_OF_ALL, **own}, "required": ["kind", *needed]}
    wrong = [str(problem) for problem in check(schema, table, at)]
    values = {key: _value(value, f"{at}.{key}", variables, wrong) for key, value in table.items()}
    if not wrong:
        wrong += _wrong_rules(values.get("rules", ()), at)
        wrong += _wrong_mail(values, at) if kind == "email" else _wrong_url(kind, values["url"], at)
    if wrong:
        problems += wrong
        return None
    security: Security = values.get("security") or ("tls" if values.get("port") == 465 else "starttls")
    return Channel(
        name=name,
        kind=kind,
        url=values.get("url", ""),
        secret=values.get("secret", ""),
        host=values.get("host", ""),
        port=values.get("port") or (SMTP_PORTS[security] if kind == "email" else 0),
        security=security,
        user=values.get("user", ""),
        password=values.get("password", ""),
        sender=values.get("from", ""),
        to=tuple(values.get("to", ())),
        rules=tuple(values.get("rules", ())),
        runs=tuple(values.get("runs", ())),
    )


def _value(value: Any, at: str, variables: Mapping[str, str], problems: list[str]) -> Any:
    """The value, or that of the environment variable it names."""
    if not isinstance(value, str) or not value.startswith("$"):
        return value
    named = variables.get(value[1:]) or os.environ.get(value[1:])
    if not named:
        problems.append(f"{at}: the environment variable {value[1:][:64]} is not set")
        return "unset"
    return named


def _wrong_rules(rules: Any, at: str) -> list[str]:
    return [
        f"{at}.rules: '{rule[:64]}' is not a rule; {nearest(rule, RULES)}"
        for rule in rules
        if rule not in RULES
    ]


def _wrong_url(kind: Kind, url: str, at: str) -> list[str]:
    # What is wrong is said without the address: it is a secret.
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return [f"{at}.url is not an address"]
    if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
        return [f"{at}.url must be an address that begins with https:// (what was given is not shown)"]
    if parts.scheme == "http" and kind != "webhook" and not is_loopback(host):
        return [f"{at}.url must begin with https://: without TLS, others could read it on the way to {host}"]
    return []


def _wrong_mail(values: Mapping[str, Any], at: str) -> list[str]:
    wrong = []
    if not values["to"]:
        wrong.append(f"{at}.to must name at least one recipient")
    wrong += [
        f"{at}: '{address[:64]}' is not an e-mail address"
        for address in (values["from"], *values["to"])
        if "@" not in address or not address.isprintable()
    ]
    if ("user" in values) != ("password" in values):
        wrong.append(f"{at}: user and password belong together; set both or neither")
    if values.get("password") and values.get("security") == "none" and not is_loopback(values["host"]):
        wrong.append(f'{at}: a password is not sent without TLS; use security = "starttls" or "tls"')
    return wrong


def _from_environment(variables: Mapping[str, str], taken: set[str], problems: list[str]) -> list[Channel]:
    found: list[Channel] = []
    for number, text in enumerate(variables.get("STRATA_NOTIFY", "").split(","), 1):
        if not text.strip():
            continue
        at = f"STRATA_NOTIFY, address {number}"
        table = _table_of(text.strip(), variables)
        if table is None:
            problems.append(
                f"{at} is none of slack+https://…, teams+https://…, discord+https://…, webhook+https://…, "
                "smtp://user:password@host:port?from=…&to=… (what was given is not shown)"
            )
            continue
        name = str(table["kind"])
        while name in taken:
            name = f"{table['kind']}-{len(taken) + 1}"
        taken.add(name)
        channel = _channel(name, table, at, variables, problems)
        if channel is not None:
            found.append(channel)
    return found


def _table_of(text: str, variables: Mapping[str, str]) -> dict[str, Any] | None:
    kind, plus, url = text.partition("+")
    if plus and kind in KINDS and kind != "email":
        signed = (
            {"secret": secret}
            if (secret := variables.get("STRATA_NOTIFY_SECRET")) and kind == "webhook"
            else {}
        )
        return {"kind": kind, "url": url, **signed}
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme not in ("smtp", "smtps") or not host:
        return None
    asked = parse_qs(parts.query)
    table: dict[str, Any] = {
        "kind": "email",
        "host": host,
        "from": asked.get("from", [""])[0],
        "to": [each for part in asked.get("to", []) for each in part.split(";")],
        "security": asked.get("security", ["tls" if parts.scheme == "smtps" else "starttls"])[0],
    }
    if port is not None:
        table["port"] = port
    if parts.username is not None:
        table |= {"user": unquote(parts.username), "password": unquote(parts.password or "")}
    return table
