"""The web page in a real browser, with a stub server that can refuse and delay requests.

Translations, attention and documents come from a real model; completions are invented.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import qkv
from browsing import Open, expect_text, expected_outcome, launched, needs_chromium, opening, outcome, wait_for
from conftest import PATIENCE
from qkv.documents import FORMATS, Document, read_document
from qkv.explain import attention_maps

pytestmark = needs_chromium

PAGE = Path(qkv.__file__).parent / "server" / "page"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css"}
KEY = "a key"
WORDS = [" runs", " and", " the", " dog", " sees", " a", " cat", ".", "\n", " End"]

Answer = tuple[int, Any]


class Stub:
    """State and responses of the stub server; a test may change them."""

    def __init__(self, translator: qkv.Translator) -> None:
        self.translator = translator
        self.lock = threading.Lock()  # the model is not thread-safe
        self.requests: list[tuple[str, Any]] = []
        self.details: dict[str, Any] = {}
        self.refusals: dict[str, list[tuple[int, str, dict[str, str]]]] = {}
        self.held: dict[str, threading.Event] = {}  # texts with a response that waits for the event
        self.key = ""
        self.url = ""
        self.pace = 0.0  # seconds between two tokens
        self.documents: dict[str, tuple[Document, list[str]]] = {}
        self.models: list[dict[str, Any]] = [
            {"name": "tiny", "does": "translate", "source": "en", "targets": ["it"], "parameters": 12345}
            | {
                "kind": "transformer",
                "card": "# tiny\n\n- model: **small**\n\n| a | b |\n|---|---|\n| 1 | `x` |\n",
                "scores": {"bleu": 99.123},
            },
            {"name": "book", "does": "complete", "kind": "decoder", "parameters": 678, "scores": {}},
        ]

    def settings(self) -> Any:
        return {
            "keyRequired": bool(self.key),
            "charLimit": 500,
            "supportedFilesFormat": [f".{suffix}" for suffix in FORMATS],
        }

    def translate(self, asked: Any) -> Any:
        if asked["q"] in self.held:
            self.held[asked["q"]].wait(PATIENCE)
        with self.lock:
            lines = [self.translator.translate(q, n_best=asked["alternatives"] + 1) for q in asked["q"].split("\n")]
        first = lines[0]
        details = {"score": first.score, "logprob": first.logprob, "truncated": False, "looped": False}
        details |= {"length_ratio": first.length_ratio} | self.details
        others = [other.text for other in first.alternatives]
        text = "\n".join(line.text for line in lines)
        return {"translatedText": text, "alternatives": others, "details": details}

    def alternatives(self, asked: Any) -> Any:
        with self.lock:
            words = self.translator.alternatives(asked["source"], asked["target"], asked["position"], asked["n"])
        return {"words": [vars(word) for word in words]}

    def attention(self, asked: Any) -> Any:
        with self.lock:
            changed = asked.get("without") or asked.get("force") or asked.get("drop")
            attention = self.translator.attention(asked["text"]).drawn()
            return attention | {"what_if": self.what_if(asked) if changed else None}

    def what_if(self, asked: Any) -> Any:
        heads = [one if isinstance(one, str) else tuple(one) for one in asked.get("without", [])]
        force = tuple(asked["force"]) if asked.get("force") else None
        return self.translator.what_if(
            asked["text"], heads_off=heads, force=force, drop=asked.get("drop", [])
        ).to_dict()

    def upload(self, name: str, data: bytes) -> Any:
        document = read_document(name, data)
        with self.lock:
            translated = [each.text for each in self.translator.translate(document.segments)]
        self.documents[name] = document, translated
        return {"id": name, "total": len(document.segments)}


class Handler(BaseHTTPRequestHandler):
    stub: Stub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        name = Path(path).name
        folder = attention_maps.PAGE if path.startswith("/page/explorer/") else PAGE
        if path == "/":
            name, folder = "index.html", PAGE
        if path == "/" or path.startswith("/page/"):
            self.answer(200, (folder / name).read_bytes(), TYPES[Path(name).suffix])
        elif path == "/frontend/settings":
            self.answer(200, self.stub.settings())
        elif not self.refused(path):
            self.answer(*self.lookup(path))

    def lookup(self, path: str) -> Answer:
        if path == "/models":
            return 200, {"models": self.stub.models}
        _, _, name, *rest = path.split("/")
        document, translated = self.stub.documents[name]
        if rest:
            return 200, document.build(translated)
        return 200, {"state": "done", "done": len(translated), "total": len(translated)}

    def do_POST(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked = body if path == "/documents" else json.loads(body)
        self.stub.requests.append((path, asked))
        if self.refused(path):
            return
        try:
            if path == "/documents":
                self.answer(200, self.stub.upload(query["name"][0], body))
            elif path == "/v1/completions":
                self.complete(asked)
            else:
                self.answer(200, getattr(self.stub, path[1:])(asked))
        except qkv.core.errors.UsageError as error:
            self.answer(422, {"error": str(error)})

    def refused(self, path: str) -> bool:
        if self.stub.key and self.headers["Authorization"] != f"Bearer {self.stub.key}":
            self.answer(403, {"error": "An API key is required"})
            return True
        if waiting := self.stub.refusals.get(path):
            status, said, headers = waiting.pop(0)
            self.answer(status, {"error": {"message": said} if path.startswith("/v1") else said}, **headers)
            return True
        return False

    def complete(self, asked: Any) -> None:
        words = WORDS * 100
        top = {word: math.log(2.0**-i) for i, word in enumerate(WORDS, 1)}
        choices = [
            {"text": word, "finish_reason": "length" if number == asked["max_tokens"] else None}
            | {"logprobs": {"tokens": [word], "token_logprobs": [top[word]], "top_logprobs": [top]}}
            for number, word in enumerate(words[: asked["max_tokens"]], 1)
        ]
        if not asked.get("stream"):
            self.answer(200, {"choices": choices})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for choice in choices:
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            self.wfile.flush()
            time.sleep(self.stub.pace)
        self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, status: int, plain: Any, kind: str = "application/json", **headers: str) -> None:
        data = plain if isinstance(plain, bytes) else json.dumps(plain).encode()
        self.send_response(status)
        for name, value in {"Content-Security-Policy": POLICY, "Content-Type": kind, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the page aborted the request
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


# ---- the browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


@pytest.fixture
def stub(translator: qkv.Translator) -> Iterator[Stub]:
    stub = Stub(translator)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"stub": stub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_port}/"
    yield stub
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def opened(browser: Any, stub: Stub) -> Iterator[Open]:
    with opening(browser, stub.url, lambda: not stub.key and "/models" not in stub.refusals) as open_page:
        yield open_page


# ---- translate -------------------------------------------------------------------------------------------------------


def test_a_pause_in_typing_sends_the_text(opened: Open, stub: Stub) -> None:
    page = opened()
    page.wait_for_selector("#source-text:focus")
    assert page.locator("#pair").inner_text().strip() == "English → Italian"
    page.clock.install(time=0)
    page.clock.pause_at(1000)
    page.keyboard.type("The cat sees the dog.")
    page.clock.run_for(200)
    assert stub.requests == []
    page.clock.run_for(200)
    expect_text(page, "#target-text", stub.translator.translate("The cat sees the dog.").text)
    assert [question["q"] for _, question in stub.requests] == ["The cat sees the dog."]
    assert "21 of 500 characters" in page.locator("#source-count").inner_text()
    assert "score" in page.locator("#target-about").inner_text()


def test_an_old_response_never_replaces_a_newer_one(opened: Open, stub: Stub) -> None:
    held = stub.held["The big house."] = threading.Event()

    def asked() -> int:
        return [question["q"] for _, question in stub.requests].count("The big house.")

    page = opened()
    page.fill("#source-text", "The big house.")
    wait_for(page, lambda: asked() == 1)
    page.fill("#source-text", "A good day.")
    wanted = stub.translator.translate("A good day.").text
    expect_text(page, "#target-text", wanted)
    held.set()
    page.wait_for_timeout(500)  # long enough for the old response to arrive
    assert page.locator("#target-text").inner_text() == wanted
    held.clear()
    page.fill("#source-text", "The big house.")
    wait_for(page, lambda: asked() == 2)
    page.click("#source-clear")
    held.set()
    page.wait_for_timeout(500)
    assert page.locator("#target-text").inner_text() == ""


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        ({"truncated": True}, "cut off"),
        ({"looped": True}, "loop"),
        ({"length_ratio": 5.0}, "5.0 times as long"),
        ({"length_ratio": 0.1}, "may be missing"),
        ({"flags": ["omission"]}, "may be missing"),
        ({"flags": ["protected"]}, "doubtful place"),
    ],
)
def test_warnings_are_shown(detail: dict[str, Any], said: str, opened: Open, stub: Stub) -> None:
    stub.details = detail
    page = opened()
    page.fill("#source-text", "The cat.")
    expect_text(page, "#flags", re.compile(said))


def test_alternatives_of_the_text_and_of_a_word(opened: Open, stub: Stub) -> None:
    page = opened()
    page.fill("#source-text", "The cat sees the dog.")
    first = stub.translator.translate("The cat sees the dog.", n_best=5)
    expect_text(page, "#target-text", first.text)
    page.click("#target-others")
    page.wait_for_selector(".choice")
    others = [other.text for other in first.alternatives]
    assert page.locator(".choice").all_inner_texts() == [text for text in dict.fromkeys(others) if text != first.text]
    page.locator(".choice").first.click()
    assert page.locator("#target-text").inner_text() == others[0]
    assert not page.locator("#others").is_visible()
    page.locator('[data-word="0 1"]').click()
    page.wait_for_selector(".choice")
    words = stub.translator.alternatives("The cat sees the dog.", others[0], 1, 4)
    assert page.locator(".choice strong").all_inner_texts() == [word.word for word in words if word.text != others[0]]
    assert page.locator("#other-word").input_value() == "0 1"
    page.locator("#other-word").select_option(label="the whole text")  # the same by keyboard
    page.wait_for_selector(".choice:not(:has(strong))")


def test_another_word_changes_its_own_line_only(opened: Open, stub: Stub) -> None:
    page = opened()
    lines = ["The cat sees the dog.", "", "One good day."]
    page.fill("#source-text", "\n".join(lines))
    translated = stub.translate({"q": "\n".join(lines), "alternatives": 0})["translatedText"].split("\n")
    expect_text(page, "#target-text", "\n".join(translated))
    page.locator('[data-word="2 1"]').click()
    page.wait_for_selector(".choice")
    words = stub.translator.alternatives(lines[2], translated[2], 1, 4)
    wanted = next(word.text for word in words if word.text != translated[2])
    page.locator(".choice").first.click()
    assert page.locator("#target-text").text_content() == "\n".join([*translated[:2], wanted])


def test_copy(opened: Open, stub: Stub) -> None:
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    page.fill("#source-text", "A good day.")
    expect_text(page, "#target-text", stub.translator.translate("A good day.").text)
    page.click("#target-copy")
    expect_text(page, "#target-copy", "Copied")
    assert page.evaluate("navigator.clipboard.readText()") == stub.translator.translate("A good day.").text


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "said", "shown"),
    [
        (413, "9 characters, and at most 5 are taken", "more than the server takes at once. 9 characters"),
        (422, "q: too strange", "q: too strange"),
        (500, "", "The server failed (500)"),
        (504, "not done within 60 s", "did not finish in time"),
    ],
)
def test_errors_are_shown_in_words(status: int, said: str, shown: str, opened: Open, stub: Stub) -> None:
    stub.refusals["/translate"] = [(status, said, {})]
    page = opened()
    page.fill("#source-text", "The cat.")
    expect_text(page, "#translate-error", re.compile(re.escape(shown)))
    page.fill("#source-text", "The dog.")
    expect_text(page, "#target-text", stub.translator.translate("The dog.").text)
    assert page.locator("#translate-error").inner_text() == ""


@pytest.mark.parametrize(("status", "shown"), [(429, "busy"), (503, "loading or about to stop")])
def test_requests_to_a_busy_server_are_repeated(status: int, shown: str, opened: Open, stub: Stub) -> None:
    stub.refusals["/translate"] = [(status, "", {"Retry_After": "1"})]
    page = opened()
    page.fill("#source-text", "The cat.")
    expect_text(page, "#translate-error", re.compile(f"{shown}.*in 1 s"))
    expect_text(page, "#target-text", stub.translator.translate("The cat.").text)


def test_the_page_waits_for_a_loading_server(opened: Open, stub: Stub) -> None:
    stub.refusals["/models"] = [(503, "", {"Retry_After": "1"})]
    page = opened()
    expect_text(page, "#status", re.compile("loading"))
    page.wait_for_selector("#pair option", state="attached")
    assert page.locator("#status").inner_text() == ""


def test_a_required_key_is_kept_in_memory_only(opened: Open, stub: Stub) -> None:
    stub.key = KEY
    page = opened()
    expect_text(page, "#status", re.compile("An API key is required. Enter a key"))
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    page.wait_for_selector("#pair option", state="attached")
    page.fill("#source-text", "The cat.")
    expect_text(page, "#target-text", stub.translator.translate("The cat.").text)
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    assert KEY not in page.url


# ---- documents -------------------------------------------------------------------------------------------------------


def test_documents_are_translated_and_downloaded(opened: Open, stub: Stub, tmp_path: Path) -> None:
    page = opened("documents")
    data = b"# The cat\n\nThe **dog** sees the cat.\n\n    code\n"
    page.set_input_files("#files", files=[{"name": "a.md", "mimeType": "text/plain", "buffer": data}])
    with page.expect_download() as download:
        page.get_by_role("button", name="Download a.it.md").click()
    assert download.value.suggested_filename == "a.it.md"
    document = read_document("a.md", data)
    wanted = document.build([result.text for result in stub.translator.translate(document.segments)])
    assert Path(download.value.path()).read_bytes() == wanted
    assert page.evaluate("(bar => bar.value / bar.max)(document.querySelector('progress'))") == 1
    expect_text(page, "#jobs-said", "a.md is translated.")


def test_an_unreadable_document_shows_its_error(opened: Open, stub: Stub) -> None:
    page = opened("documents")
    stub.refusals["/documents"] = [(429, "", {"Retry_After": "1"})]  # repeated
    page.set_input_files("#files", files=[{"name": "a.xyz", "mimeType": "text/plain", "buffer": b"The cat."}])
    expect_text(page, "#jobs .error", re.compile("^not a document that can be translated"))


def test_documents_can_be_dropped(opened: Open) -> None:
    page = opened("documents")
    page.wait_for_selector("#document-pair option", state="attached")
    page.evaluate("""() => {
        const dropped = new DataTransfer();
        dropped.items.add(new File(["The cat."], "b.txt"));
        document.getElementById("drop").dispatchEvent(new DragEvent("drop", { dataTransfer: dropped, bubbles: true }));
    }""")
    page.get_by_role("button", name="Download b.it.txt").wait_for()


# ---- attention -------------------------------------------------------------------------------------------------------


def test_the_explorer_shows_the_current_sentence(opened: Open, stub: Stub) -> None:
    page = opened()
    page.fill("#source-text", "The cat sees the dog.")
    page.click("#tab-attention")
    page.wait_for_selector("#grid .head")
    attention = stub.translator.attention("The cat sees the dog.")
    assert page.locator("#looked-into").inner_text() == attention.translation
    page.locator('[data-head="decoder.0.cross.1"]').click()
    page.locator("#heat").focus()
    page.keyboard.press("ArrowDown")
    weight = attention.weights["decoder.0.cross"][1, 1, 0]
    expect_text(page, "#readout", f"{attention.written[1]} attends to {attention.source[0]}: {weight:.4f}")
    page.locator("#on").click()
    assert f"writes {attention.written[1]}" in page.locator("#step-about").inner_text()
    page.locator("#tree button.best").first.wait_for()
    page.fill("#look-text", "A good day.")
    page.press("#look-text", "Enter")
    expect_text(page, "#looked-into", stub.translator.translate("A good day.").text)
    assert page.locator('[data-head="decoder.0.cross.1"]').get_attribute("aria-pressed") == "true"  # as before


def test_what_if_shows_its_effect_on_the_translation(opened: Open, stub: Stub) -> None:
    text = "The cat sees the dog."
    page = opened()
    page.fill("#source-text", text)
    page.click("#tab-attention")
    page.wait_for_selector("#grid .head")
    page.locator('[data-head="decoder.0.cross.0"]').click()
    page.click("#off-head")
    wanted = stub.translator.what_if(text, heads_off=[("decoder.0.cross", 0)])
    assert (outcome(page, 1), outcome(page, 2)) == (expected_outcome(wanted.before), expected_outcome(wanted.after))
    assert "off" in (page.locator('[data-head="decoder.0.cross.0"]').get_attribute("class") or "")
    page.click("#off-layer")
    expect_text(page, "#changes-list", "without decoder.0.cross")
    page.wait_for_selector("#outcome table")
    assert outcome(page, 2) == expected_outcome(stub.translator.what_if(text, heads_off=["decoder.0.cross"]).after)
    page.click("#undo")
    assert not page.locator("#outcome").is_visible()

    page.get_by_role("button", name="Drop cat").click()
    wanted = stub.translator.what_if(text, drop=[1])
    assert outcome(page, 2) == expected_outcome(wanted.after)
    before, after = (set(re.findall(r"\w+", outcome.translation)) for outcome in (wanted.before, wanted.after))
    lost = before - after
    assert lost
    assert lost <= set(page.locator("#outcome tbody tr:nth-child(1) mark").all_inner_texts())
    page.click("#undo")

    page.locator("#candidates button").first.click()
    steps = stub.translator.attention(text).steps
    assert steps is not None
    other = next(each for each in steps[0]["candidates"] if each["token"] not in (steps[0]["chosen"], "</s>"))
    wanted = stub.translator.what_if(text, force=(0, other["id"]))
    assert outcome(page, 2) == expected_outcome(wanted.after)
    assert stub.requests[-1][1]["force"] == [0, other["id"]]
    page.locator("#force-step").select_option("1")
    page.fill("#force-word", "cane")
    page.press("#force-word", "Enter")
    expect_text(page, "#changes-list", "cane at step 2")
    page.wait_for_selector("#outcome table")
    assert outcome(page, 2) == expected_outcome(stub.translator.what_if(text, force=(1, "cane")).after)


def test_a_failed_explanation_shows_its_error(opened: Open) -> None:
    page = opened("attention")
    expect_text(page, "#attention-said", re.compile("Write a sentence"))
    page.fill("#look-text", "The cat sees the dog. " * 20)
    page.press("#look-text", "Enter")
    expect_text(page, "#attention-error", re.compile("the text is translated in 20 pieces"))
    page.fill("#look-text", "the cat sees " * 20)
    page.press("#look-text", "Enter")
    expect_text(page, "#attention-error", re.compile("the text is translated in [0-9]+ pieces"))


# ---- complete --------------------------------------------------------------------------------------------------------


def test_completions_stream_with_likely_alternatives(opened: Open) -> None:
    page = opened("complete")
    page.fill("#prompt", "The cat")
    expect_text(page, "#next-about", "Most likely next tokens:")
    assert page.locator("#next li").first.inner_text().split() == ["▁runs", "50", "%"]
    page.locator("#max-tokens").fill("10")
    page.click("#go-on")
    expect_text(page, "#complete-said", "10 tokens: the limit.")
    assert page.locator("#written").text_content() == "The cat" + "".join(WORDS)
    assert page.locator("#next li").count() == 10
    assert page.locator("#next .chosen").inner_text().split()[0] == "▁End"
    page.locator("#token-at").focus()
    page.keyboard.press("Home")
    expect_text(page, "#next-about", "▁runs was chosen, with probability 50 %.")
    page.locator('#written [data-at="1"]').hover()
    expect_text(page, "#token-number", "2 of 10")


def test_a_completion_can_be_stopped(opened: Open, stub: Stub) -> None:
    stub.pace = 0.2
    page = opened("complete")
    page.locator("#max-tokens").fill("500")
    page.click("#go-on")
    page.wait_for_selector('#written [data-at="2"]')
    page.click("#stop")
    expect_text(page, "#complete-said", re.compile(r"Stopped after \d+ tokens."))
    written = page.locator("#written").text_content()
    page.wait_for_timeout(600)
    assert page.locator("#written").text_content() == written


def test_sampling_options_are_sent(opened: Open, stub: Stub) -> None:
    page = opened("complete")
    page.locator("#temperature").fill("1.5")
    page.locator("#top-p").fill("0.5")
    page.locator("#max-tokens").fill("20")
    page.click("#go-on")
    expect_text(page, "#complete-said", re.compile("20 tokens"))
    sent = stub.requests[-1][1]
    assert (sent["temperature"], sent["top_p"], sent["max_tokens"], sent["stream"]) == (1.5, 0.5, 20, True)
    stub.refusals["/v1/completions"] = [(413, "20 tokens, and at most 5 are taken", {})]
    page.click("#go-on")
    expect_text(page, "#complete-error", re.compile("20 tokens, and at most 5"))


# ---- everybody can use it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["translation model", "language model"])
def test_a_tab_without_its_model_shows_a_message(missing: str, opened: Open, stub: Stub) -> None:
    stub.models = stub.models[1:] if missing == "translation model" else stub.models[:1]
    tabs = ["translate", "documents", "attention"] if missing == "translation model" else ["complete"]
    page = opened(tabs[0])
    for tab in tabs:
        page.click(f"#tab-{tab}")
        expect_text(page, f"#panel-{tab} .none", re.compile(f"No {missing} is loaded"))
        assert not page.locator(f"#panel-{tab} .work").is_visible()


def test_tabs_work_by_keyboard(opened: Open) -> None:
    page = opened()
    page.locator("#tab-translate").focus()
    for key, tab in (
        ("ArrowRight", "documents"),
        ("End", "model"),
        ("ArrowRight", "translate"),
        ("ArrowLeft", "model"),
    ):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.id") == f"tab-{tab}"
        assert page.locator("[role=tab][aria-selected=true]").get_attribute("id") == f"tab-{tab}"
        assert page.locator("[role=tabpanel]:visible").get_attribute("id") == f"panel-{tab}"
    page.reload()
    page.wait_for_selector("#panel-model:not([hidden])")  # the URL contains the tab


def test_controls_are_labelled_and_changes_announced(opened: Open) -> None:
    page = opened()
    page.fill("#source-text", "The cat sees the dog.")
    page.click("#tab-attention")
    page.wait_for_selector("#grid .head")
    nameless = """[...document.querySelectorAll('button, input, select, textarea')].filter(e => !e.hidden &&
        !e.getAttribute('aria-label') && !e.textContent.trim() && !e.labels?.length && !e.closest('[hidden]'))
        .map(e => e.outerHTML)"""
    assert page.evaluate(nameless) == []
    for place in ("#target-text", "#flags", "#jobs-said", "#outcome", "#next-about"):
        assert page.locator(place).get_attribute("aria-live") == "polite"
    for place in ("#translate-error", "#attention-error", "#complete-error", "#status"):
        assert page.locator(place).get_attribute("role") == "alert"
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    assert page.evaluate("[...document.querySelectorAll('label[for]')].every(l => document.getElementById(l.htmlFor))")


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_overflows_the_viewport(width: int, opened: Open) -> None:
    page = opened(viewport={"width": width, "height": 800})
    page.fill("#source-text", "The cat sees the dog.")
    for tab in ("documents", "attention", "complete", "model", "translate"):
        page.click(f"#tab-{tab}")
        if tab == "attention":
            page.wait_for_selector("#grid .head")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, tab


def test_light_and_dark(opened: Open) -> None:
    page = opened(color_scheme="light")
    colours = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    light = page.evaluate(colours)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(colours)
    assert light[0] != dark[0]
    assert light[1] != dark[1]


def test_the_model_tab_describes_models_and_requests(opened: Open, stub: Stub) -> None:
    page = opened("model")
    page.wait_for_selector(".card")
    text = page.locator("#models").inner_text()
    for fact in ("translates from English into Italian", "12,345 parameters", "BLEU 99.12", "completes text"):
        assert fact in text
    assert f"curl {stub.url}translate" in text
    assert "At most 500 characters" in text
    page.locator(".card summary").click()
    assert page.locator(".card-text td code").inner_text() == "x"


def test_models_are_requested_again_after_loading(opened: Open, stub: Stub) -> None:
    size = stub.models[0].pop("parameters")
    page = opened()
    page.wait_for_selector("#pair option", state="attached")
    stub.models[0]["parameters"] = size
    page.click("#tab-model")
    expect_text(page, ".card >> nth=0", re.compile("12,345 parameters"))


def test_the_page_loads_nothing_from_other_sites() -> None:
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert path.suffix != ".html" or not re.search(r"\sstyle=|\son\w+=|<script>|<style", text), path
