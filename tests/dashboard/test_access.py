"""Everyone can use it: axe finds nothing serious on any view, in either theme, live or simulated."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.dashboard.browser import VIEWS, Browser, BrowserError
from tests.support import eventually

pytestmark = pytest.mark.browser


@pytest.mark.timeout(900)
@pytest.mark.parametrize("width", [1440, 390])
def test_no_view_has_a_serious_violation_in_either_theme(page: Browser, width: int) -> None:
    """Everything in the dark; what depends on the theme, in the light as well."""
    found = {}
    page.size(width, 900)
    for view in (*VIEWS, "/runs/gpt-small", "/no-such-page"):
        page.theme(dark=True)
        page.open(f"{view}?demo")
        page.see("Simulated data.", exact=True)
        page.see(role="heading", nth=0)
        page.until("document.querySelectorAll('main .skeleton').length === 0")
        serious = page.serious()
        page.theme(dark=False)
        serious += page.serious(["color-contrast", "link-in-text-block"])
        if serious:
            found[view] = serious
        assert page.violations() == [], f"the policy of the page forbids something on {view}"
    page.size(1440, 900)
    assert found == {}


def test_dialogs_have_no_serious_violation(page: Browser) -> None:
    for address in (
        "/runs?demo&start=1",
        "/data?demo&register=1",
        "/runs/gpt-small?demo&task=task-7f3a91c2",
        "/incidents?demo&incident=1",
        "/workers?demo&worker=gpt-small-rank0",
    ):
        page.open(address)
        page.see(role="dialog")
        assert page.serious() == [], address
        assert page.violations() == [], address


def test_every_view_is_reached_by_keyboard(page: Browser) -> None:
    page.open("/?demo")
    page.see(role="heading", nth=0)
    page.press("Control+k")
    page.see(role="dialog")
    assert page.violations() == []
    page.press("Escape")
    page.miss(role="dialog")

    def goes_to_logs() -> bool:
        """On a busy machine the page may see the second key too long after the first."""
        page.press("g", "l")
        with suppress(BrowserError):
            page.see(role="heading", name="Logs", within_s=10)
            return True
        return False

    eventually(goes_to_logs, within_s=60)
    page.press("/")
    assert page.evaluate("document.activeElement?.getAttribute('type')") == "search"
    page.press("Escape")
    # Once the newest lines are in view, the keys move up from there.
    page.until(
        "[...document.querySelectorAll('[role=log]:has([data-row])')]"
        ".some(log => log.scrollTop + log.clientHeight > log.scrollHeight - 24)"
    )
    page.press("k")
    page.until("document.activeElement?.matches('[role=log] [data-row]')")
    page.see(role="button", name="Resume")
    last = page.evaluate("document.activeElement.dataset.index")
    page.press("k")
    page.until(f"document.activeElement.dataset.index === '{int(last) - 1}'")
    page.press("Enter")
    page.see(role="dialog", name="Log line")
    page.press("Escape")
    page.miss(role="dialog")
    page.press("?")
    page.see(role="dialog", name="Keyboard shortcuts")
