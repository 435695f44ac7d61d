"""Every tab of the web page with the real server and small models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qkv
from browsing import Open, expect_text, expected_outcome, launched, needs_chromium, opening, outcome
from qkv.server.service import new_key
from serving import Server, serving

pytestmark = needs_chromium
TEXT = "The cat sees the dog."


@pytest.fixture(scope="module")
def server(tiny: Path, writer: Path) -> Iterator[Server]:
    with serving(f"tiny={tiny}", f"book={writer}", "--workers", 1) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


@pytest.fixture
def opened(browser: Any, server: Server) -> Iterator[Open]:
    with opening(browser, f"{server.url}/") as open_page:
        yield open_page


def test_translate(opened: Open, translator: qkv.Translator) -> None:
    page = opened()
    page.keyboard.type(TEXT)
    best = translator.translate(TEXT, n_best=5)
    expect_text(page, "#target-text", best.text)
    assert f"score {best.score:.2f}".replace("-0.00", "0.00").replace("-", "−") in page.inner_text("#target-about")
    assert page.locator("#flags li").count() == 0
    page.click("#target-others")
    page.wait_for_selector(".choice")
    assert page.locator(".choice").all_inner_texts() == [other.text for other in best.alternatives]
    page.locator('[data-word="0 1"]').click()
    page.wait_for_selector(".choice strong")
    words = translator.alternatives(TEXT, best.text, 1, 4)
    assert page.locator(".choice strong").all_inner_texts() == [word.word for word in words if word.text != best.text]
    page.fill("#source-text", "cat dog " * 3000)
    expect_text(page, "#translate-error", re.compile("more than the server takes at once. 24,000 characters"))


def test_documents(opened: Open, translator: qkv.Translator) -> None:
    page = opened("documents")
    data = f"# The **red** cat.\n\n{TEXT}\n\n    code\n".encode()
    page.set_input_files("#files", files=[{"name": "a.md", "mimeType": "text/markdown", "buffer": data}])
    with page.expect_download() as download:
        page.get_by_role("button", name="Download a.it.md").click()
    heading, rest = Path(download.value.path()).read_text(encoding="utf-8").split("\n", 1)
    assert heading.replace("**", "") == f"# {translator.translate('The red cat.').text}"
    assert heading.count("**") == 2
    assert rest == f"\n{translator.translate(TEXT).text}\n\n    code\n"
    page.set_input_files("#files", files=[{"name": "a.xyz", "mimeType": "text/plain", "buffer": b"The cat."}])
    expect_text(page, "#jobs .error", re.compile("^not a document that can be translated"))


def test_attention_and_what_if(opened: Open, translator: qkv.Translator) -> None:
    page = opened()
    page.fill("#source-text", TEXT)
    page.click("#tab-attention")
    attention = translator.attention(TEXT)
    expect_text(page, "#looked-into", attention.translation)
    page.locator('[data-head="decoder.0.cross.1"]').click()
    page.locator("#heat").focus()
    page.keyboard.press("ArrowDown")
    weight = attention.weights["decoder.0.cross"][1, 1, 0]
    expect_text(page, "#readout", f"{attention.written[1]} attends to {attention.source[0]}: {weight:.4f}")

    page.click("#off-head")
    wanted = translator.what_if(TEXT, heads_off=[("decoder.0.cross", 1)])
    assert (outcome(page, 1), outcome(page, 2)) == (expected_outcome(wanted.before), expected_outcome(wanted.after))
    page.click("#off-layer")
    page.wait_for_selector("#outcome table")
    assert outcome(page, 2) == expected_outcome(translator.what_if(TEXT, heads_off=["decoder.0.cross"]).after)
    page.click("#undo")
    page.get_by_role("button", name="Drop cat").click()
    assert outcome(page, 2) == expected_outcome(translator.what_if(TEXT, drop=[1]).after)
    page.click("#undo")
    page.locator("#force-step").select_option("1")
    page.fill("#force-word", "cane")
    page.press("#force-word", "Enter")
    assert outcome(page, 2) == expected_outcome(translator.what_if(TEXT, force=(1, "cane")).after)


def test_complete(opened: Open, writer: Path) -> None:
    page = opened("complete")
    page.fill("#prompt", "The ")
    expect_text(page, "#next-about", "Most likely next tokens:")
    assert page.locator("#next li").count() == 10
    page.locator("#max-tokens").fill("20")
    page.locator("#temperature").fill("0")
    page.click("#go-on")
    expect_text(page, "#complete-said", "20 tokens: the limit.")
    (best,) = qkv.LanguageModel(writer, device="cpu").complete("The ", max_tokens=20, temperature=0)
    assert page.locator("#written").text_content() == "The " + best.text
    page.locator("#max-tokens").fill("500")
    page.click("#go-on")
    page.wait_for_selector('#written [data-at="2"]')
    page.locator("#stop").evaluate("button => button.click()")  # no effect if the completion has ended
    expect_text(page, "#complete-said", re.compile(r"(Stopped after \d+|500) tokens"))


def test_model(opened: Open, tiny: Path) -> None:
    page = opened("model")
    card = page.locator(".card").first
    card.locator("summary").click()
    title, *_ = (tiny / "card.md").read_text(encoding="utf-8").splitlines()
    assert card.locator(".card-text h3").first.inner_text() == title.removeprefix("# ")
    assert card.locator(".card-text table").count() == 1
    assert "translates from English into Italian" in card.inner_text()
    assert "completes text" in page.locator(".card").nth(1).inner_text()


def test_a_key(browser: Any, tiny: Path, tmp_path: Path, translator: qkv.Translator) -> None:
    key, line = new_key("reader")
    (tmp_path / "keys").write_text(f"{line}\n", encoding="utf-8")
    with (
        serving(f"tiny={tiny}", "--workers", 1, "--keys", tmp_path / "keys") as server,
        opening(browser, f"{server.url}/", lambda: False) as opened,
    ):
        page = opened()
        expect_text(page, "#status", re.compile("An API key is required. Enter a key"))
        page.fill("#key", key)
        page.press("#key", "Enter")
        page.wait_for_selector("#pair option", state="attached")
        page.fill("#source-text", TEXT)
        expect_text(page, "#target-text", translator.translate(TEXT).text)
