"""Signing in to a coordinator that requires a token: with a token, by a link, signing out; and what each role may do."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import strata
from tests.dashboard.browser import Browser
from tests.support import Coordinator, eventually

pytestmark = pytest.mark.browser

ADMIN = "the-admin-token-of-this-test-0123456789"
TITLE = "Sign in to Strata"
GUESS = """(async () => {
    const headers = {'Content-Type': 'application/json'};
    for (let n = 0; n < 1000; n += 1) {
        const body = JSON.stringify({token: `guess ${n}`});
        if ((await fetch('/api/session', {method: 'POST', headers, body})).status === 429) break;
    }
    document.querySelector('form').requestSubmit();
})()"""
"""Until the rate limit; then once more, in the form."""


@pytest.fixture(scope="module")
def guarded(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path_factory.mktemp("guarded") / "data", env={"STRATA_TOKEN": ADMIN}).start()
    yield server
    server.stop()


@pytest.fixture
def visitor(page: Browser, guarded: Coordinator) -> Iterator[Browser]:
    """A browser that is not signed in."""
    page.base = guarded.url
    yield page
    page.size(1440, 900)
    page.open("/sign-in")
    page.evaluate("fetch('/api/session', {method: 'DELETE'}).then(r => r.status)")


def token(server: Coordinator, role: str, **more: str) -> dict[str, Any]:
    status, made = server.post("/api/tokens", {"name": "ci", "role": role, **more}, token=ADMIN)
    assert status == 201
    return dict(made)


def sign_in(page: Browser, secret: str, path: str = "/") -> None:
    page.open(path)
    page.see(role="heading", name=TITLE)
    page.fill("Token", secret)
    page.click("button", "Sign in", exact=True)
    page.miss(role="heading", name=TITLE)


def test_a_token_opens_the_requested_page_and_no_script_can_read_it(visitor: Browser) -> None:
    visitor.open("/incidents?state=open")
    visitor.see("A token is required.")
    assert visitor.evaluate("document.activeElement.type") == "password"
    assert visitor.serious() == []
    visitor.fill("Token", "not-a-token-that-anybody-has-ever-had")
    visitor.press("Enter")
    visitor.see("This token is not valid here.", css="[role=alert]")
    visitor.fill("Token", ADMIN)
    visitor.press("Enter")
    visitor.see(role="heading", name="Incidents", exact=True)
    assert visitor.url.endswith("/incidents?state=open")
    visitor.see(role="link", name="Signed in: configured admin token admin")
    kept = visitor.evaluate("JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}])")
    assert json.loads(kept)[0] == ""
    assert ADMIN not in kept
    # The event stream uses the cookie as well.
    visitor.see("Live", css="nav *")
    visitor.click("button", "Sign out", exact=True)
    visitor.see(role="heading", name=TITLE)
    assert visitor.evaluate("fetch('/api/session').then(r => r.status)") == 401


def test_a_link_signs_in_once_and_leaves_the_address_bar(
    visitor: Browser, guarded: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_TOKEN", ADMIN)
    link = strata("dashboard-link", "--api", guarded.url).out.strip().removeprefix(guarded.url)
    code = link.partition("#code=")[2]
    assert code
    visitor.open(link)
    visitor.see(role="link", name="Signed in: link of configured admin token viewer")
    visitor.see(role="heading", name="Overview")
    assert visitor.url == f"{guarded.url}/"
    visitor.click("button", "Sign out", exact=True)
    visitor.see(role="heading", name=TITLE)
    # The same page: only the fragment changes.
    visitor.open("/sign-in")
    visitor.see(role="heading", name=TITLE)
    visitor.evaluate(f"location.hash = 'code={code}'")
    visitor.see("This link has been used, or is older than ten minutes.", css="[role=alert]")
    assert code not in visitor.url
    assert visitor.evaluate("fetch('/api/session').then(r => r.status)") == 401


def test_a_viewer_cannot_change_anything_and_sees_why(visitor: Browser, guarded: Coordinator) -> None:
    sign_in(visitor, token(guarded, "viewer")["token"], "/tasks?start=1")
    visitor.see(css="header button[aria-disabled=true]", text="Start task")
    why = "document.querySelector('header button[aria-disabled]').title"
    assert visitor.evaluate(why) == "Requires the operator role; you are signed in as viewer."
    visitor.evaluate("document.querySelector('header button[aria-disabled]').click()")
    visitor.settle()
    assert visitor.count(role="dialog") == 0
    visitor.open("/data?register=1")
    visitor.see(css="header button[aria-disabled=true]", text="Register dataset")
    assert visitor.count(role="dialog") == 0
    visitor.open("/settings")
    visitor.see("viewer: read-only access.")
    assert visitor.count(role="heading", name="Tokens") == 0
    start = "fetch('/api/tasks', {method: 'POST', body: '{}', headers: {'Content-Type': 'application/json'}})"
    assert visitor.evaluate(f"{start}.then(r => r.status)") == 403


def test_an_operator_can_make_changes_but_sees_no_tokens(visitor: Browser, guarded: Coordinator) -> None:
    sign_in(visitor, token(guarded, "operator")["token"], "/tasks?start=1")
    visitor.see(role="dialog", name="Start task")
    visitor.open("/settings")
    visitor.see(role="heading", name="Access")
    assert visitor.count(role="heading", name="Tokens") == 0


def test_a_revoked_token_signs_out_and_nothing_stays_on_the_page(
    visitor: Browser, guarded: Coordinator
) -> None:
    made = token(guarded, "viewer")
    sign_in(visitor, made["token"], "/settings")
    visitor.see(role="heading", name="Connection")
    assert guarded.call("DELETE", f"/api/tokens/{made['id']}", token=ADMIN)[0] == 204
    visitor.see("Your session has ended")
    assert visitor.count(role="heading", name="Connection") == 0
    visitor.fill("Token", ADMIN)
    visitor.press("Enter")
    visitor.see(role="heading", name="Connection")


def test_an_admin_creates_and_revokes_a_token_and_reads_the_audit_log(
    visitor: Browser, guarded: Coordinator, tmp_path: Path
) -> None:
    sign_in(visitor, ADMIN, "/settings")
    visitor.click("button", "Create token")
    visitor.fill("Name", "nightly")
    visitor.choose("Role", "operator")
    visitor.click("button", "Create", exact=True)
    visitor.see("Copy the token now.")
    assert visitor.serious() == []
    secret = visitor.evaluate("document.querySelector('[role=dialog] input').value")
    visitor.click("button", "Copy", exact=True)
    visitor.see(css="[role=dialog] [role=status]", text="C")
    assert guarded.call("GET", "/api/session", token=secret)[1]["role"] == "operator"
    visitor.click("button", "Done", exact=True)
    visitor.see(css="[aria-label=Tokens] [role=row]", text="nightly")
    assert secret not in visitor.evaluate("document.documentElement.outerHTML")
    visitor.click("button", "Revoke nightly")
    visitor.see(role="dialog", name="Revoke nightly?")
    visitor.click("button", "Revoke token", exact=True)
    visitor.miss(css="[aria-label=Tokens] [role=row]", text="nightly")
    assert guarded.call("GET", "/api/session", token=secret)[0] == 401
    visitor.fill("Search audit log", "/api/tokens/{token_id}")
    visitor.see(css="[aria-label='Audit log'] [role=row]", text="DELETE /api/tokens/{token_id}")
    visitor.miss(css="[aria-label='Audit log'] [role=row]", text="POST /api/tokens")
    saved = tmp_path / "audit.jsonl"
    assert visitor.download(saved, "button", "Export").startswith("strata-audit-log-")
    entries = [json.loads(line) for line in saved.read_text().splitlines()]
    assert entries
    assert all(entry["action"] == "DELETE /api/tokens/{token_id}" for entry in entries)
    assert visitor.serious() == []


def test_a_session_bound_to_a_job_sees_only_that_job_and_why(visitor: Browser, guarded: Coordinator) -> None:
    task = guarded.post("/api/tasks", {"name": "mine", "type": "training"}, token=ADMIN)[1]["task_id"]
    made = token(guarded, "viewer", job_id=task)
    sign_in(visitor, made["token"], "/workers")
    visitor.see(f"You are signed in for job {task} only")
    assert visitor.serious() == []
    visitor.click("link", "Open the job")
    visitor.see(role="heading", name="mine")
    visitor.see("are all you can see")
    visitor.see("No log lines.")
    assert visitor.serious() == []
    visitor.open("/")
    visitor.see(role="heading", name="mine")
    visitor.click("link", "Logs", exact=True)
    visitor.see(role="heading", name="Logs")
    visitor.see("No log lines yet")
    assert visitor.texts(css="nav[aria-label=Views] a[title]")[:3] == ["Runs", "Logs", "Settings"]
    # It never requested what it may not see.
    refused = guarded.call("GET", f"/api/audit-log?q={made['id']}", token=ADMIN)[1]
    assert [entry for entry in refused if entry["outcome"] == "refused"] == []


def test_a_narrow_page_signs_in_without_scrolling_sideways(visitor: Browser) -> None:
    visitor.size(390, 844)
    wide = "document.documentElement.scrollWidth > 390 || document.querySelector('main').scrollWidth > 390"
    visitor.open("/settings")
    visitor.see(role="heading", name=TITLE)
    assert visitor.evaluate(wide) is False
    sign_in(visitor, ADMIN, "/settings")
    visitor.see(role="heading", name="Audit log")
    assert visitor.evaluate(wide) is False
    visitor.click("button", "Sign out", exact=True)
    visitor.see(role="heading", name=TITLE)


def test_guessing_tokens_is_rate_limited(page: Browser, tmp_path: Path) -> None:
    server = Coordinator(tmp_path / "coordinator", env={"STRATA_TOKEN": ADMIN}).start()
    try:
        page.base = server.url
        page.open("/")

        def is_refused() -> bool:
            """One wrong token a second is looked at: that in the form as well, where it comes late."""
            page.fill("Token", "another guess")
            page.evaluate(GUESS)
            page.see(css="[role=alert]")
            return "Too many wrong tokens came from this address." in page.text(css="[role=alert]")

        eventually(is_refused, within_s=90)
        page.leave()
    finally:
        server.stop()


def test_the_user_who_started_the_coordinator_needs_no_sign_in(page: Browser, watched: Coordinator) -> None:
    page.open("/settings")
    user = pwd.getpwuid(os.getuid()).pw_name
    page.see(role="link", name=f"Signed in: user {user} (uid {os.getuid()}) admin")
    page.see("This connection needs no sign-in.")
    assert page.count(role="button", name="Sign out") == 0
    page.open("/sign-in")
    page.click("link", "Open the dashboard")
    page.see(role="heading", name="Overview")
