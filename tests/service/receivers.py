"""Where notifications arrive in tests: a real HTTP server and a real SMTP server, each on a free port of this machine."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Posted:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


class Webhooks:
    """Answers 200, unless `answers` says otherwise for the next calls."""

    def __init__(self) -> None:
        self.posted: Queue[Posted] = Queue()
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.calls = 0
        webhooks = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                webhooks.calls += 1
                status, headers = webhooks.answers.pop(0) if webhooks.answers else (200, {})
                if status == 200:
                    found = {name.lower(): value for name, value in self.headers.items()}
                    webhooks.posted.put(Posted(path=self.path, headers=found, body=body))
                self.send_response(status)
                for name, value in {"Content-Length": "0", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def wait(self, wanted: Callable[[Posted], bool] = lambda posted: True) -> Posted:
        while True:
            found = self.posted.get(timeout=WAIT_S)
            if wanted(found):
                return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@dataclass
class Letter:
    sender: str = ""
    to: list[str] = field(default_factory=list)
    text: str = ""
    encrypted: bool = False
    signed_in: str = ""


class MailServer:
    """As much of SMTP as a sender needs: STARTTLS where there is a certificate, AUTH PLAIN, one letter after the other."""

    def __init__(self, *, certificate: tuple[Path, Path] | None = None, password: str = "") -> None:
        self.letters: Queue[Letter] = Queue()
        self._password = password
        self._context: ssl.SSLContext | None = None
        if certificate is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(*certificate)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wait(self) -> Letter:
        return self.letters.get(timeout=WAIT_S)

    def close(self) -> None:
        self._listener.close()
        with socket.socket() as probe:  # `accept` may not notice that its socket was closed.
            probe.settimeout(1)
            probe.connect_ex(("127.0.0.1", self.port))
        self._thread.join(10)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                self._talk(connection)
            except OSError:
                pass
            finally:
                connection.close()

    def _talk(self, connection: socket.socket) -> None:
        connection.settimeout(30)
        letter = Letter()
        lines = connection.makefile("rb")

        def say(*answers: str) -> None:
            connection.sendall("".join(f"{answer}\r\n" for answer in answers).encode())

        say("220 ready")
        while line := lines.readline():
            verb, _, rest = line.decode().strip().partition(" ")
            match verb.upper():
                case "EHLO" | "HELO":
                    offers = ["STARTTLS"] if self._context is not None and not letter.encrypted else []
                    offers += ["AUTH PLAIN"] if self._password else []
                    say(*[f"250-{offer}" for offer in ("localhost", *offers)], "250 OK")
                case "STARTTLS" if self._context is not None:
                    say("220 go ahead")
                    connection = self._context.wrap_socket(connection, server_side=True)
                    lines = connection.makefile("rb")
                    letter.encrypted = True
                case "AUTH":
                    _, user, password = base64.b64decode(rest.partition(" ")[2]).decode().split("\0")
                    if password != self._password:
                        say(f"535 not you, {user} with {password}")
                    else:
                        letter.signed_in = user
                        say("235 welcome")
                case "MAIL":
                    letter.sender = rest
                    say("250 OK")
                case "RCPT":
                    letter.to.append(rest)
                    say("250 OK")
                case "DATA":
                    say("354 go ahead")
                    text = []
                    while (line := lines.readline()) != b".\r\n":
                        text.append(line.decode())
                    letter.text = "".join(text)
                    self.letters.put(letter)
                    say("250 taken")
                case "QUIT":
                    say("221 bye")
                    return
                case _:
                    say("502 what?")
