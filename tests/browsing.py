"""A page in a real browser, for tests: it may neither complain nor ask anybody but its own server."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from conftest import PATIENCE

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'qkv[test]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")

Open = Callable[..., Any]


@contextmanager
def launched() -> Iterator[Any]:
    """Chromium, without a window."""
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opening(browser: Any, url: str, ready: Callable[[], bool] = lambda: True) -> Iterator[Open]:
    """A function that opens the page at a tab; where it is `ready`, it is waited for. A refusal is no complaint."""
    contexts, complaints = [], []

    def open_page(tab: str = "translate", **options: Any) -> Any:
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}))
        page = contexts[-1].new_page()
        page.set_default_timeout(1000 * PATIENCE)
        page.on("console", lambda m: "Failed to load resource" in m.text or complaints.append(m.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: r.url.startswith((url, "data:", "blob:")) or complaints.append(r.url))
        page.goto(f"{url}#{tab}")
        page.wait_for_selector(f"#panel-{tab}:not([hidden])")
        if ready():
            page.wait_for_selector(".card", state="attached")  # the models are known: every tab is ready
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def shows(page: Any, place: str, text: str | re.Pattern[str]) -> None:
    """Wait until a place has this text."""
    playwright.expect(page.locator(place)).to_have_text(text, timeout=1000 * PATIENCE)


def wait_for(page: Any, true: Callable[[], object]) -> None:
    """Poll until a condition holds, while the page goes on."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "gave up waiting"
        page.wait_for_timeout(20)


def outcome(page: Any, row: int) -> list[str]:
    """Of a what-if: the translation, score and log-probability of a row, without the change beside them."""
    page.wait_for_selector("#outcome table")
    cells = page.locator(f"#outcome tbody tr:nth-child({row}) td")
    return [cells.nth(0).inner_text().strip(), *(cells.nth(i).inner_text().split()[0] for i in (1, 2))]


def told(found: Any) -> list[str]:
    """The same, as the page should tell it."""
    values = (f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−") for value in (found.score, found.logprob))
    return [found.translation, *values]
