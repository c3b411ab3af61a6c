"""The test browser distinguishes errors of the page from lost connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.dashboard.browser import Browser

pytestmark = pytest.mark.browser

LOST = {
    "/nothing": b"",
    "/half": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nnot all of it",
    "/part": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\nnot all of it",
    "/refused": b"HTTP/1.1 422 Unprocessable\r\nContent-Length: 0\r\n\r\n",
}
"""Responses of a server that dies while responding; and an error response."""


class Ending(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        empty = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 0\r\n\r\n"
        self.wfile.write(LOST.get(self.path, empty))
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def ending(page: Browser) -> Iterator[Browser]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Ending) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.base = f"http://127.0.0.1:{server.server_port}"
        page.open("/")
        yield page
        server.shutdown()


@pytest.mark.parametrize("path", LOST)
def test_a_lost_connection_is_not_the_pages_fault(ending: Browser, path: str) -> None:
    assert ending.evaluate(f"fetch('{path}').then(r => r.ok && r.text()).then(Boolean, () => false)") is False
    assert ending.complaints() == []


def test_other_console_errors_are_the_pages_fault(ending: Browser) -> None:
    ending.evaluate("console.error('net::ERR_CONNECTION_RESET is only a word here')")
    ending.evaluate("new Promise(done => setTimeout(() => { done(null); throw Error('thrown') }))")
    ending.settle()
    assert ending.complaints() == ["net::ERR_CONNECTION_RESET is only a word here", "uncaught: thrown"]
