"""`strata dashboard-link`: a full link on standard output, and refusals in a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import strata
from tests.support import Coordinator

ADMIN, VIEWER = "an-admin-token-of-some-length-0001", "a-viewer-token-of-some-length-0001"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    folder: Path = tmp_path_factory.mktemp("guarded")
    config = folder / "strata.toml"
    config.write_text(f'[coordinator.tokens]\nviewer = "{VIEWER}"\n')
    config.chmod(0o600)
    server = Coordinator(folder / "data", "--config", str(config), env={"STRATA_TOKEN": ADMIN}).start()
    yield server
    server.stop()


def redeem(server: Coordinator, link: str) -> tuple[int, dict[str, object]]:
    status, said = server.post("/api/session", {"code": link.partition("#code=")[2]})
    return status, said


def test_a_link_signs_in_once_with_the_role_it_was_made_for(
    guarded: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_TOKEN", ADMIN)
    ran = strata("dashboard-link", "--role", "operator", "--api", f"{guarded.url}/")
    assert ran.code == 0
    assert "as operator, once, within 10 min" in ran.err
    link = ran.out.strip()
    assert link.startswith(f"{guarded.url}/sign-in#code=")
    status, said = redeem(guarded, link)
    assert (status, said["role"]) == (200, "operator")
    assert redeem(guarded, link)[0] == 401


def test_a_link_is_a_viewers_unless_said_otherwise(
    guarded: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_TOKEN", ADMIN)
    made = json.loads(strata("dashboard-link", "--api", guarded.url, "--json").out)
    assert (made["role"], made["expires_in_s"]) == ("viewer", 600)
    assert redeem(guarded, made["link"])[1]["role"] == "viewer"


def test_nobody_makes_a_link_for_more_than_they_may(
    guarded: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_TOKEN", VIEWER)
    assert strata("dashboard-link", "--api", guarded.url).code == 0
    ran = strata("dashboard-link", "--role", "admin", "--api", guarded.url)
    assert (ran.code, ran.out) == (1, "")
    assert "the call needs admin" in ran.err
    monkeypatch.setenv("STRATA_TOKEN", "")
    ran = strata("dashboard-link", "--api", guarded.url)
    assert (ran.code, ran.out) == (1, "")
    assert "A token is required." in ran.err
