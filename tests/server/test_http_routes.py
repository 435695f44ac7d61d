"""Every route over HTTP, against the results of the Python API."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

import qkv
from conftest import PATIENCE, sentences
from qkv import cli
from serving import FORM, JSON, Server, documented, serving

LINES = [source for source, _ in sentences(40, seed=9)]


@pytest.fixture(scope="module")
def server(tiny: Path, writer: Path) -> Iterator[Server]:
    with serving(f"tiny={tiny}", f"book={writer}", "--workers", 1, "--max-characters", 3000) as running:
        yield running


# ---- LibreTranslate --------------------------------------------------------------------------------------------------


def test_a_list_of_texts_is_translated_as_offline(server: Server, translator: qkv.Translator) -> None:
    texts = [*LINES, "", "  ", "\n", f"{LINES[0]}\n\n{LINES[1]}", " ".join(LINES[:8])]
    translated = server.translate(texts)
    assert translated == [each.text for each in translator.translate(texts)]
    assert translated[len(LINES) : len(LINES) + 3] == ["", "  ", "\n"]


def test_alternatives_are_the_n_best(server: Server, translator: qkv.Translator) -> None:
    body = {"q": [LINES[0], ""], "source": "auto", "target": "it", "alternatives": 2}
    response = server.request("/translate", body).json
    best = translator.translate(LINES[0], n_best=3)
    assert response["translatedText"] == [best.text, ""]
    assert response["alternatives"] == [[other.text for other in best.alternatives], []]
    assert [each["language"] for each in response["detectedLanguage"]] == ["en", "en"]


def test_alternatives_of_several_pieces(server: Server, translator: qkv.Translator) -> None:
    """Also if one of them is blank; of HTML they combine those of its sentences."""
    for text in (f"{LINES[0]}\n***\n{LINES[1]}", "***", " "):
        body = {"q": text, "source": "en", "target": "it", "alternatives": 5}
        response, expected = server.request("/translate", body).json, translator.translate(text, n_best=6)
        details = response["details"]
        assert response["alternatives"] == [each.text for each in expected.alternatives]
        assert details["score"] == pytest.approx(expected.score, abs=1e-3)
        assert (details["finish_reason"], details["flags"]) == (expected.finish_reason, [])
        spans = [(tuple(each["source"]), tuple(each["target"])) for each in details["pieces"]]
        assert spans == [(each.source, each.target) for each in expected.pieces]
    html = {"q": f"<p>{' '.join(LINES[:2])}</p>", "source": "en", "target": "it", "alternatives": 3, "format": "html"}
    expected = translator.translate(" ".join(LINES[:2]), n_best=4)
    others = [f"<p>{each.text}</p>" for each in expected.alternatives]
    assert server.request("/translate", html).json["alternatives"] == others


def test_details_equal_those_of_the_translation(server: Server, translator: qkv.Translator) -> None:
    texts = [LINES[0], "", " ".join(LINES[:8]), "cat " * 30]
    for form in ("text", "html"):
        body = {"q": texts, "source": "en", "target": "it", "format": form}
        for details, text in zip(server.request("/translate", body).json["details"], texts, strict=True):
            expected = translator.translate(text.strip())
            assert details.pop("finish_reason") == expected.finish_reason
            assert details.pop("flags") == [flag for flag in expected.flags if flag != "blank"]
            assert len(details.pop("pieces")) == (len(expected.pieces) if form == "text" and text else 0)
            assert (details.pop("truncated"), details.pop("looped")) == (expected.truncated, expected.looped)
            wanted = {name: getattr(expected, name) for name in ("score", "logprob", "length_ratio")}
            assert details == pytest.approx(wanted, abs=1e-3)
    one = server.request("/translate", {"q": LINES[0], "source": "en", "target": "it"}).json["details"]
    assert one["score"] == pytest.approx(translator.translate(LINES[0]).score, abs=1e-3)
    tagged = server.request(
        "/translate", {"q": "<p>The <b>red</b> cat.", "source": "en", "target": "it", "format": "html"}
    )
    expected = translator.translate("The red cat.")
    assert tagged.json["details"]["logprob"] == pytest.approx(expected.logprob, abs=1e-3)
    assert tagged.json["details"]["length_ratio"] == pytest.approx(expected.length_ratio)


def test_every_sentence_is_translated_by_itself(server: Server, translator: qkv.Translator) -> None:
    """On each route that translates text, also between tags and in documents."""
    text = f"{LINES[0]} {LINES[1]}  {LINES[2]}"
    one, two, three = (each.text for each in translator.translate(LINES[:3]))
    expected = f"{one} {two}  {three}"
    assert server.translate(text) == expected
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    assert server.request("/v1/chat/completions", body).json["choices"][0]["message"]["content"] == expected
    first, last = LINES[0].split(maxsplit=1)
    marked = f"<p><b>{first}</b> {last} {LINES[1]}  <i>{LINES[2]}</i></p>"
    html = server.translate(marked, format="html")
    assert re.sub("<[^>]*>", "", html) == expected
    assert html.endswith(f" {two}  <i>{three}</i></p>")
    assert "<b>" in html[: html.index(two)]
    for name, document in (("a.txt", text), ("a.md", f"**{first}** {last} {LINES[1]} {LINES[2]}\n")):
        place = f"/documents/{server.request(f'/documents?name={name}&target=it', document.encode()).json['id']}"
        server.until(lambda place=place: server.request(place).json["state"] != "running")
        written = server.request(f"{place}/file").data.decode()
        assert written.replace("**", "").rstrip() == f"{one} {two} {three}"  # a segment has single spaces
        assert name == "a.txt" or written.index("**") < written.index(two)


def test_forms_and_json_give_the_same_response(server: Server) -> None:
    plain = {"q": LINES[1], "source": "en", "target": "it", "alternatives": "1"}
    form = server.request("/translate", urlencode(plain).encode(), headers=FORM)
    parts = "".join(f'--x\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n' for k, v in plain.items())
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    other = server.request("/translate", f"{parts}--x--\r\n".encode(), headers=headers)
    assert form.json == other.json == server.request("/translate", plain).json
    assert len(form.json["alternatives"]) == 1


def test_html_keeps_its_tags(server: Server, translator: qkv.Translator) -> None:
    whole = "<html><!-- a <b> --><style>p { x: 1 }</style><p class='x'>The <b>red</b> cat.</p> <br>\n<i>Two"
    translated = server.translate(whole, format="html")
    for kept in ("<!-- a <b> -->", "<style>p { x: 1 }</style>", "<p class='x'>", "</p> <br>\n<i>", "<html>"):
        assert kept in translated
    inner = translated.split("<p class='x'>")[1].split("</p>")[0]
    assert inner.count("<b>") == inner.count("</b>") == 1
    assert inner.replace("<b>", "").replace("</b>", "") == translator.translate("The red cat.").text
    assert translated.endswith("<i>" + translator.translate("Two").text)  # an unclosed tag keeps its place


def test_html_keeps_code_and_translates_attributes(server: Server, translator: qkv.Translator) -> None:
    source = '<p title="The red cat > a dog">The <code class="a>b">x_y</code> cat.</p>'
    translated = server.translate(source, format="html")
    value = translator.translate("The red cat > a dog").text.replace(">", "&gt;")
    assert translated.startswith(f'<p title="{value}">')
    assert translated.count('<code class="a>b">x_y</code>') == 1


def test_escaped_html_stays_escaped(server: Server) -> None:
    translated = server.translate("<p>cat &lt;script&gt; &amp; dog</p>", format="html")
    assert "<script>" not in translated
    assert translated.startswith("<p>")
    assert translated.endswith("</p>")


def test_settings_for_a_page(server: Server) -> None:
    response = server.request("/frontend/settings").json
    assert response["charLimit"] == 3000
    assert response["language"]["source"] == {"code": "en", "name": "English"}
    assert ".txt" in response["supportedFilesFormat"]
    assert response["keyRequired"] is False


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"q": "a", "source": "xx", "target": "it"}, 400, "'xx' is not supported"),
        ({"q": "a", "source": "en", "target": "xx"}, 400, "'xx' is not available"),
        ({"q": "a", "target": "xx"}, 400, "'xx' is not available as a target language: available: it"),
        ({"source": "en", "target": "it"}, 422, "q"),
        ({"q": "a", "target": "it", "format": "pdf"}, 422, "format"),
        ({"q": "a", "target": "it", "alternatives": -1}, 422, "alternatives"),
        ({"q": ["a", 5], "target": "it"}, 422, "q"),
        ({"q": "a", "target": "it", "model": "book"}, 404, "no translation model 'book'"),
        ({"q": "a", "target": "it", "model": "nobody"}, 404, "'nobody'"),
        ([], 422, "body"),
    ],
)
def test_errors_have_libretranslates_format(server: Server, body: Any, status: int, said: str) -> None:
    response = server.request("/translate", body)
    assert response.status == status
    assert said in response.json["error"]
    if status == 422 and isinstance(body, dict):
        assert response.json["pointer"].split("/")[1] == said


def test_a_file_is_translated(server: Server, translator: qkv.Translator) -> None:
    text = "".join(f"{line}\n\n" for line in LINES[:5])
    parts = {"source": "en", "target": "it"}
    border = "xxBORDERxx"
    body = "".join(
        f'--{border}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in parts.items()
    )
    body += f'--{border}\r\nContent-Disposition: form-data; name="file"; filename="../../etc/a.txt"\r\n'
    body += f"Content-Type: text/plain\r\n\r\n{text}\r\n--{border}--\r\n"
    headers = {"Content-Type": f"multipart/form-data; boundary={border}"}
    response = server.request("/translate_file", body.encode(), headers=headers)
    assert response.status == 200, response.data
    place = response.json["translatedFileUrl"]
    assert place.startswith(server.url)
    file = server.request(place.removeprefix(server.url))
    assert file.data.decode() == "".join(f"{each.text}\n\n" for each in translator.translate(LINES[:5]))
    assert file.headers["content-disposition"].endswith("a.txt")
    assert "/" not in file.headers["content-disposition"].split("''")[1]


# ---- native routes ---------------------------------------------------------------------------------------------------


def test_a_score_is_forced_decoding(server: Server, translator: qkv.Translator) -> None:
    response = server.request("/score", {"source": LINES[0], "target": "Il gatto."}).json
    assert response["logprob"] == pytest.approx(translator.score(LINES[0], "Il gatto.").logprob, abs=1e-4)
    assert response["tokens"][-1] == "</s>"
    assert len(response["tokens"]) == len(response["token_logprobs"])


def test_attention_returns_the_data_of_the_explorer(server: Server, translator: qkv.Translator) -> None:
    response = server.request("/attention", {"text": LINES[0]}).json
    embedded = json.loads(json.dumps(translator.attention(LINES[0]).drawn()))
    assert set(embedded) <= set(response)
    for name in ("source", "fed", "written", "words", "legend", "rare", "units", "translation"):
        assert response[name] == embedded[name]
    packed = response["weights"]["decoder.0.cross"]
    weights = np.frombuffer(base64.b64decode(packed["data"]), "<u2").reshape(packed["shape"]) / response["units"]
    np.testing.assert_allclose(weights.sum(-1), 1, atol=0.01)
    for name, heads in embedded["heads"].items():
        for ours, theirs in zip(response["heads"][name], heads, strict=True):
            assert ours["confidence"] == pytest.approx(theirs["confidence"], abs=1e-4)
    assert response["what_if"] is None
    assert len(response["steps"]) == len(response["written"])


def test_attention_with_a_counterfactual(server: Server, translator: qkv.Translator) -> None:
    body = {"text": LINES[0], "without": ["decoder.0.cross", ["encoder.0.self", 1]], "force": [0, "Il"], "drop": [0]}
    response = server.request("/attention", body).json["what_if"]
    heads = ["decoder.0.cross", ("encoder.0.self", 1)]
    expected = translator.what_if(LINES[0], heads_off=heads, force=(0, "Il"), drop=[0])
    assert response["after"]["translation"] == expected.after.translation
    assert response["before"]["translation"] == expected.before.translation
    assert response["forced_logprob"] == pytest.approx(expected.forced_logprob, abs=1e-3)
    refused = server.request("/attention", {"text": LINES[0], "without": ["nowhere"]})
    assert refused.status == 422
    assert "nowhere" in refused.json["error"]


def test_alternatives_at_a_position(server: Server, translator: qkv.Translator) -> None:
    best = translator.translate(LINES[0]).text
    response = server.request("/alternatives", {"source": LINES[0], "target": best, "position": 0, "n": 3}).json[
        "words"
    ]
    assert [each["word"] for each in response] == [o.word for o in translator.alternatives(LINES[0], best, 0, 3)]


def test_a_document_from_upload_to_download(server: Server, translator: qkv.Translator) -> None:
    text = "".join(f"{line}\n" for line in LINES * 4)
    begun = server.request("/documents?name=a%2Fb.txt&target=it", text.encode())
    assert begun.status == 202, begun.data
    place = f"/documents/{begun.json['id']}"
    assert begun.json["total"] == len(LINES) * 4
    server.until(lambda: server.request(place).json["state"] != "running")
    status = server.request(place).json
    assert (status["done"], status["skipped"], status["flagged"]) == (begun.json["total"], {}, [])
    file = server.request(f"{place}/file")
    expected = {line: each.text for line, each in zip(LINES, translator.translate(LINES), strict=True)}
    assert file.data.decode().splitlines() == [expected[line] for line in LINES * 4]
    assert file.headers["content-type"].startswith("text/plain")
    assert server.request(place, method="DELETE").status == 204
    assert server.request(place).status == 404
    assert server.request("/documents?name=a.exe", b"MZ").status == 422


@pytest.mark.parametrize(
    "asked",
    [
        {"source": "xx", "target": "it"},
        {"source": "en", "target": "xx"},
        {"target": "xx"},
        {"target": "xx", "model": "tiny"},
        {"target": "it", "model": "book"},
        {"target": "it", "model": "nobody"},
    ],
)
def test_documents_and_texts_are_refused_alike(server: Server, asked: dict[str, str]) -> None:
    document = server.request(f"/documents?{urlencode({'name': 'a.txt', **asked})}", LINES[0].encode())
    text = server.request("/translate", {"q": LINES[0], **asked})
    assert (document.status, document.json) == (text.status, text.json)


def test_documents_with_markup_and_with_one_long_line(server: Server, translator: qkv.Translator) -> None:
    long = " ".join(LINES)
    for name, text in (("a.md", f"# The **red** cat.\n\n{LINES[0]}\n"), ("b.txt", long)):
        begun = server.request(f"/documents?name={name}&target=it", text.encode())
        place = f"/documents/{begun.json['id']}"
        server.until(lambda place=place: server.request(place).json["state"] != "running")
        response = server.request(f"{place}/file").data.decode()
        if name == "b.txt":
            assert response == translator.translate(long).text
        else:
            heading, _, rest = response.partition("\n")
            assert heading.replace("**", "") == f"# {translator.translate('The red cat.').text}"
            assert heading.count("**") == 2
            assert rest.strip() == translator.translate(LINES[0]).text


def test_health_metrics_and_cards(server: Server) -> None:
    assert server.request("/health/live").json == {"status": "ok"}
    health = server.request("/health").json
    assert health["status"] == "ok"
    assert health["workers"] == 1
    before = server.metric("qkv_sentences_total")
    server.translate(LINES[:3])
    assert server.metric("qkv_sentences_total") == before + 3
    tiny, book = server.request("/models").json["models"]
    assert (tiny["name"], tiny["source"], tiny["targets"], tiny["does"]) == ("tiny", "en", ["it"], "translate")
    assert tiny["parameters"] > 10_000
    assert book["does"] == "complete"


def test_models_include_their_cards(server: Server, tiny: Path, writer: Path) -> None:
    for entry, run in zip(server.request("/models").json["models"], (tiny, writer), strict=True):
        assert entry["card"] == (run / "card.md").read_text(encoding="utf-8")
        assert entry["card"].startswith("# ")
        assert f"{entry['parameters']:,} parameters" in entry["card"]


def test_pages_have_a_strict_content_security_policy(server: Server) -> None:
    response = server.request("/page/explorer/views.js")
    assert response.status == 200
    assert "javascript" in response.headers["content-type"]
    for path in ("/page/explorer/views.js", "/health", "/nowhere"):
        headers = server.request(path).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/explorer/..%2f..%2frecord.py", "/page//etc/passwd"):
        assert server.request(path).status == 404


def test_scripts_of_other_sites_are_refused(server: Server) -> None:
    body = {"q": LINES[0], "source": "en", "target": "it"}
    other = server.request("/translate", body, headers={"Origin": "https://example.org"})
    assert other.status == 403
    assert "access-control-allow-origin" not in other.headers
    own = server.request("/translate", body, headers={"Origin": server.url})
    assert own.status == 200
    preflight = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    assert server.request("/translate", method="OPTIONS", headers=preflight).status == 405


@pytest.mark.filterwarnings("ignore")  # warnings inside schemathesis
def test_no_request_of_the_schema_causes_an_internal_error(server: Server) -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    quick = settings(
        max_examples=5,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    seen = set()

    def check(case: Any) -> None:
        answer = case.call(timeout=PATIENCE)
        seen.add(case.operation.label)
        assert answer.status_code < 500, (case.operation.label, answer.status_code, answer.text[:300])

    for operation in schema.get_all_operations():
        quick(given(case=operation.ok().as_strategy())(check))()
    assert {"POST /translate", "POST /v1/completions", "POST /attention", "POST /documents"} <= seen
    assert server.translate(LINES[0])


def test_documented_options_and_routes_exist(server: Server, call: Any) -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    options -= {"--require-hashes", "--no-deps", "--no-build-isolation"}  # of pip
    known = call("serve", "--help").out
    assert not [option for option in options if option not in known]
    routes = {path.replace("{id}", "ID") for path in server.request("/openapi.json").json["paths"]} | {
        "/",
        "/openapi.json",
    }
    named = set(re.findall(r"`(?:(?:GET|POST|DELETE) )?(/[a-z_0-9./]*[A-Z]*(?:/file)?)(?:\?name=…)?`", text))
    elsewhere = {path for path in named if path.startswith(("/runs", "/v1/")) and path not in routes}
    assert named - elsewhere <= routes
    assert len(named & routes) > 15


def test_documented_commands_parse() -> None:
    import typer.main

    serve = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    lines = [
        line.partition("do CUDA_VISIBLE_DEVICES=$gpu ")[2].partition(" &")[0] or line
        for line in "".join(documented("sh")).splitlines()
    ]
    commands = [shlex.split(line, comments=True)[2:] for line in lines if line.startswith("qkv serve")]
    assert len(commands) >= 5
    for arguments in commands:
        assert serve.make_context("serve", list(arguments)).params["runs"] or "--new-key" in arguments


@pytest.mark.parametrize(
    ("path", "kind", "body", "said"),
    [
        ("/translate", FORM, b'{"q": "a", "target": "it"}', "Content-Type: application/json"),
        ("/score", FORM, b'{"source": "a", "target": "b"}', "Content-Type: application/json"),
        ("/translate_file", FORM, b"file=a", "a field called file"),
        ("/translate", JSON, b'{"q": "a", "target": "it", "alternatives": 99}', "request fewer"),
        ("/translate", JSON, b'{"q": "a", "source": "it", "target": "en"}', "available: en"),
        ("/nowhere", JSON, b"{}", "/openapi.json lists every route"),
        ("/documents/1", {}, None, "send it again"),
    ],
)
def test_an_error_names_the_remedy(server: Server, path: str, kind: Any, body: bytes | None, said: str) -> None:
    assert said in server.request(path, body, headers=kind).json["error"]


def test_the_container_copies_existing_files() -> None:
    root = Path(__file__).parents[2]
    lines = (root / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    steps = [line.split() for line in lines if line and not line.startswith("#")]
    copied = [name for step in steps if step[0] == "COPY" and "--from=build" not in step for name in step[1:-1]]
    assert copied
    ignored = (root / ".dockerignore").read_text(encoding="utf-8").split()
    assert all((root / name).exists() and f"!{name.removeprefix('./')}" in ignored for name in copied)
    images = [step[1] for step in steps if step[0] == "FROM"]
    assert all(re.search(r":\d", image) for image in images)  # a version, not the newest image
    last = len(steps) - 1 - [step[0] for step in reversed(steps)].index("FROM")
    users = [step[1] for step in steps[last:] if step[0] == "USER"]
    assert users
    assert users[-1] not in ("root", "0")


def test_the_lock_has_the_tested_versions_with_hashes() -> None:
    root = Path(__file__).parents[2]
    pinned = {line.lower() for line in (root / "constraints.txt").read_text(encoding="utf-8").splitlines()}
    lock = (root / "requirements-serve.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    entries = [line.split() for line in lock.splitlines() if line and not line.startswith("#")]
    assert {entry[0].split("==")[0] for entry in entries} >= {
        "fastapi",
        "uvicorn",
        "starlette",
        "pydantic",
        "py3langid",
    }
    for name, *hashes in entries:
        assert name in pinned or name.replace("-", "_") in pinned, name
        assert hashes
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes)


def test_the_command_refuses_invalid_arguments(tiny: Path, tmp_path: Path, call: Any) -> None:
    assert "no such run folder" in call("serve", tmp_path / "none").error
    assert "second model called tiny" in call("serve", f"tiny={tiny}", f"tiny={tiny}").error
    assert "at least one" in call("serve").error
    assert "cannot be read" in call("serve", tiny, "--keys", tmp_path / "none", "--port", 0).error
    assert "cannot listen" in call("serve", tiny, "--host", "203.0.113.7", "--port", 1).error
