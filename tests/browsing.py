"""A page in a real browser, for tests; console errors and requests to other servers fail the test."""

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
    """Headless Chromium."""
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opening(browser: Any, url: str, ready: Callable[[], bool] = lambda: True) -> Iterator[Open]:
    """Yield a function that opens the page at a tab; `ready`: wait for the models. HTTP errors are allowed."""
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
            page.wait_for_selector(".card", state="attached")  # the models are loaded: every tab is ready
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == [], complaints


def expect_text(page: Any, place: str, text: str | re.Pattern[str]) -> None:
    """Wait until an element has this text."""
    playwright.expect(page.locator(place)).to_have_text(text, timeout=1000 * PATIENCE)


def wait_for(page: Any, true: Callable[[], object]) -> None:
    """Poll until a condition holds, while the page keeps running."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "gave up waiting"
        page.wait_for_timeout(20)


def outcome(page: Any, row: int) -> list[str]:
    """Translation, score and log-probability in a row of the what-if table."""
    page.wait_for_selector("#outcome table")
    cells = page.locator(f"#outcome tbody tr:nth-child({row}) td")
    return [cells.nth(0).inner_text().strip(), *(cells.nth(i).inner_text().split()[0] for i in (1, 2))]


def expected_outcome(result: Any) -> list[str]:
    """The expected `outcome` of a result."""
    values = (f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−") for value in (result.score, result.logprob))
    return [result.translation, *values]
