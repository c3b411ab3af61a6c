"""`/docs`: the OpenAPI document as one plain page. No script, nothing loaded from elsewhere: it works without the
internet, and under the same policy as the dashboard."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from strata.coordinator.http.dashboard import SECURITY_HEADERS

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { overflow: auto; padding: .75rem; background: color-mix(in oklab, currentColor 7%, transparent); border-radius: 6px; }
details { border-top: 1px solid color-mix(in oklab, currentColor 20%, transparent); padding: .5rem 0; }
summary { cursor: pointer; }
summary b { display: inline-block; min-width: 4rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem 1rem .15rem 0; vertical-align: top; }
""".strip()


router = APIRouter()

_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS = {
    **SECURITY_HEADERS,
    "Content-Security-Policy": SECURITY_HEADERS["Content-Security-Policy"].replace(
        "style-src 'self'", f"style-src 'sha256-{_STYLE_HASH}'"
    ),
}
"""The dashboard's policy, which lets this very style through and no other."""


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse(render(request.app.openapi()), headers=HEADERS)


def render(document: Mapping[str, Any]) -> str:
    about = document["info"]
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, call in methods.items():
            tag = (call.get("tags") or ["other"])[0]
            by_tag.setdefault(tag, []).append(_call(method, path, call))
    body = "".join(
        f"<h2 id='{escape(tag)}'>{escape(tag)}</h2>{''.join(calls)}" for tag, calls in by_tag.items()
    )
    schemas = "".join(
        _folded(f"<code id='{escape(name)}'>{escape(name)}</code>", _json(schema))
        for name, schema in sorted(document["components"]["schemas"].items())
    )
    title = f"{about['title']} {about['version']}"
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        f"<meta name='viewport' content='width=device-width'><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{escape(about.get('description', ''))} For programs: "
        f"<a href='/openapi.json'>/openapi.json</a>.</p>{body}<h2>Schemas</h2>{schemas}</body></html>"
    )


def _call(method: str, path: str, call: Mapping[str, Any]) -> str:
    inside = "".join(_details(call))
    said = escape(call.get("description") or call.get("summary") or "")
    return _folded(f"<b>{escape(method.upper())}</b> <code>{escape(path)}</code> {said}", inside)


def _details(call: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        f"<tr><td><code>{escape(p['name'])}</code></td><td>{escape(p['in'])}{', required' if p.get('required') else ''}"
        f"</td><td>{escape(p.get('description', ''))} <code>{escape(json.dumps(p['schema']))}</code></td></tr>"
        for p in call.get("parameters", [])
    ]
    if rows:
        yield f"<h4>Parameters</h4><table>{''.join(rows)}</table>"
    for kind, content in call.get("requestBody", {}).get("content", {}).items():
        yield f"<h4>Body ({escape(kind)})</h4>{_schema(content.get('schema', {}))}"
    answers = "".join(
        f"<tr><td><code>{escape(status)}</code></td><td>{escape(answer.get('description', ''))}</td><td>"
        + "".join(_schema(content.get("schema", {})) for content in answer.get("content", {}).values())
        + "</td></tr>"
        for status, answer in call["responses"].items()
    )
    yield f"<h4>Answers</h4><table>{answers}</table>"


def _schema(schema: Mapping[str, Any]) -> str:
    """A name that is described below, or the schema itself."""
    inner = schema.get("items", schema) if schema.get("type") == "array" else schema
    if set(inner) == {"$ref"}:
        name = escape(str(inner["$ref"]).rpartition("/")[2])
        return f"{'list of ' if inner is not schema else ''}<a href='#{name}'>{name}</a>"
    return _json(schema) if schema else ""


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"


def _folded(head: str, inside: str) -> str:
    return f"<details><summary>{head}</summary>{inside}</details>"
