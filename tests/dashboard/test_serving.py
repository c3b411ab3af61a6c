"""The coordinator serves the dashboard's files, and only those, with correct headers."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from strata.coordinator.http.dashboard import BUILT, VIEWS, Dashboard
from tests.dashboard.browser import VIEWS as PATHS
from tests.dashboard.browser import Browser, build_dashboard
from tests.support import Coordinator
from tests.support_programs import ROOT


def ask(
    server: Coordinator, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    try:
        connection.request(
            method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_the_build_is_served_from_where_it_is_put() -> None:
    assert build_dashboard.BUILT == BUILT


def test_every_view_is_the_application_and_nothing_else_is(watched: Coordinator) -> None:
    index = ask(watched, "/")[2]
    assert b'<div id="root">' in index
    for path in (*PATHS, "/runs/some-job", "/workers?worker=a"):
        status, headers, body = ask(watched, path)
        assert (status, body) == (200, index), path
        assert headers["content-type"].startswith("text/html")
        assert headers["cache-control"] == "no-cache"
    for path in ("/api/nothing", "/api/run", "/nothing", "/assets/none.js", "/index.html/x", "/../setup.py"):
        status, headers, body = ask(watched, path)
        assert status == 404, path
        assert json.loads(body)["code"] == "not_found"
    assert ask(watched, "/api/tasks/x/stop")[0] == 405
    assert ask(watched, "/", "POST")[0] in (404, 405)


def test_bundles_are_immutable_and_compressed(watched: Coordinator) -> None:
    index = ask(watched, "/")[2].decode()
    bundles = re.findall(r'(?:src|href)="(/assets/[^"]+)"', index)
    assert any(path.endswith(".js") for path in bundles)
    assert any(path.endswith(".css") for path in bundles)
    for path in bundles:
        status, headers, plain = ask(watched, path)
        assert status == 200
        assert "immutable" in headers["cache-control"]
        _, packed_headers, packed = ask(watched, path, Accept_Encoding="gzip")
        assert packed_headers["content-encoding"] == "gzip"
        assert packed_headers["vary"] == "Accept-Encoding"
        assert gzip.decompress(packed) == plain
        assert len(packed) < len(plain)
        assert ask(watched, path, If_None_Match=headers["etag"])[0] == 304
        assert ask(watched, path, "HEAD")[2] == b""


def test_all_scripts_together_are_small(built: Path) -> None:
    packed = {path.name: len(gzip.compress(path.read_bytes(), 9)) for path in built.rglob("*.js")}
    assert packed
    assert sum(packed.values()) <= 300_000
    first = set(re.findall(r'(?:src|href)="/assets/([^"]+\.js)"', (built / "index.html").read_text()))
    plot = {name for name in packed if name.startswith("Plot-")}  # The overview has charts.
    assert first
    assert plot
    assert not plot & first
    assert sum(packed[name] for name in first | plot) <= 180_000


def test_no_page_has_inline_scripts_or_styles_or_loads_from_elsewhere(watched: Coordinator) -> None:
    _, headers, body = ask(watched, "/")
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["style-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    scripts = re.findall(r"<script\b[^>]*>(.*?)</script>", body.decode(), re.DOTALL)
    assert scripts
    assert all(not inside.strip() for inside in scripts)
    assert not re.search(r'(?:src|href)="(?:https?:)?//', body.decode())


def test_files_need_no_token_and_data_does(built: Path, tmp_path: Path) -> None:
    server = Coordinator(tmp_path / "coordinator", env={"STRATA_TOKEN": "secret"}).start()
    try:
        assert ask(server, "/")[0] == 200
        assert ask(server, "/logs")[0] == 200
        for path in ("/api/dashboard", "/metrics", "/openapi.json", "/docs", "/nothing"):
            assert ask(server, path)[0] == 401, path
    finally:
        server.stop()


def test_without_a_build_the_page_says_how_to_make_one(tmp_path: Path) -> None:
    api = Starlette(routes=[Route("/api/health", lambda request: PlainTextResponse("ok"))])
    client = TestClient(Dashboard(api, tmp_path / "nothing"))
    assert "make setup" in client.get("/").text
    assert client.get("/api/health").text == "ok"
    assert client.get("/logs").status_code == 404


def test_views_of_the_application_are_known_to_the_server() -> None:
    router = (ROOT / "dashboard" / "src" / "router.tsx").read_text()
    routes = {path.split("/")[1] for path in re.findall(r'path: "(/[^"]*)"', router)}
    assert routes - {""} == set(VIEWS)


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(120)
def test_a_page_in_development_shows_and_changes_the_coordinator_it_is_given(
    page: Browser, watched: Coordinator, program: Callable[[str], str]
) -> None:
    npx = program("npx")
    command = [npx, "--no-install", "vite", "--host", "127.0.0.1"]
    server = subprocess.Popen(
        command,
        cwd=build_dashboard.SOURCES,
        env={
            **build_dashboard.environment(Path(npx).parent),
            "VITE_API_URL": f"{watched.url}/api",
            "NO_COLOR": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    try:
        found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in server.stdout)
        page.base = next(match[0] for match in found if match)
        page.open("/data?register=1")
        page.see("Live", css="nav *", within_s=60)
        for label, text in {"ID": "from-development", "Path": "/data/x", "Samples": "10"}.items():
            page.fill(label, text)
        page.click("button", "Register", exact=True)
        page.miss(role="dialog")
        assert "from-development" in [dataset["id"] for dataset in watched.get("/api/datasets")]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)
        server.stdout.close()


@pytest.mark.timeout(300)
def test_a_wheel_holds_the_dashboard(built: Path, tmp_path: Path) -> None:
    (tmp_path / "egg").mkdir()
    elsewhere = tmp_path / "setup.cfg"
    elsewhere.write_text(f"[build]\nbuild_base = {tmp_path}/build\n[egg_info]\negg_base = {tmp_path}/egg\n")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    environment = {**os.environ, "DIST_EXTRA_CONFIG": str(elsewhere)}
    subprocess.run([*command, "-w", str(tmp_path), str(ROOT)], check=True, timeout=280, env=environment)
    (wheel,) = tmp_path.glob("strata_runtime-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "strata/dashboard/index.html" in names
    assert any(re.fullmatch(r"strata/dashboard/assets/index-[\w-]+\.js", name) for name in names)
    assert not any("node_modules" in name for name in names)
