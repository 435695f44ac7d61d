"""Keys and rate limits, request parsing, completion streams, served models and languages."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

import qkv
from conftest import sentences, tiny_config, write_pairs
from qkv.core.errors import UsageError
from qkv.segmentation.text_cutter import LineStatistics
from qkv.server import listener, model_worker, served_models, service
from qkv.server.listener import open_socket
from qkv.server.middleware import Metrics, Refusal, RequestLimits, parse_form, parse_json
from qkv.server.scheduler import Scheduler, SchedulerOptions
from qkv.server.served_models import ServedModel, ServedModels
from qkv.server.service import ApiKey, RateLimiter, Service, hash_key, new_key, read_keys

# ---- keys ------------------------------------------------------------------------------------------------------------


def test_keys_are_found_by_their_hash(tmp_path: Path) -> None:
    (key, line), (other, second) = new_key("one"), new_key("two")
    path = tmp_path / "keys"
    path.write_text(f"# a comment\n\n{line}\n{second} 60  # slowly\n", encoding="utf-8")
    keys = read_keys(path)
    one, two = keys[hash_key(key)], keys[hash_key(other)]
    assert (one.name, one.rate, two.name, two.rate) == ("one", None, "two", 60)
    assert hash_key("") not in keys
    assert hash_key(line.split()[1]) not in keys  # the hash is not a key
    assert key not in line


@pytest.mark.parametrize("text", ["", "# nothing\n", "name nohash\n", "name " + "0" * 64 + " many\n"])
def test_key_files_without_a_valid_key_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="new-key"):
        read_keys(tmp_path / "keys")


def test_a_request_without_a_key_is_refused_even_if_the_file_has_the_hash_of_an_empty_one() -> None:
    nothing: Any = None
    service = Service(nothing, nothing, RequestLimits(), Metrics(), {hash_key(""): ApiKey("empty")})
    request = Request({"type": "http", "path": "/translate", "headers": [], "client": ("127.0.0.1", 1)})
    with pytest.raises(Refusal, match="An API key is required"):
        service.authorize(request)


def test_a_bucket_refills() -> None:
    limiter = RateLimiter()
    assert [limiter.take("a", 3, now=0.0) for _ in range(4)] == [0, 0, 0, 20]
    assert limiter.take("b", 3, now=0.0) == 0  # another client has its own bucket
    assert limiter.take("a", 3, now=10.0) == pytest.approx(10)
    assert limiter.take("a", 3, now=20.0) == 0
    assert limiter.take("a", 3, now=20.0) == pytest.approx(20)
    assert [limiter.take("a", 3, now=1e6) for _ in range(4)] == [0, 0, 0, 20]  # never more than a minute's worth


# ---- bodies ----------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
)


@given(json_values)
def test_json_round_trip(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    for read in (parse_json, parse_form):
        with suppress(Refusal):  # any other exception fails the test
            read(data)


def test_a_port_is_shared_only_with_reuse_port() -> None:
    with open_socket("127.0.0.1", 0, reuse_port=True) as first:
        port = first.getsockname()[1]
        with open_socket("127.0.0.1", port, reuse_port=True) as second:
            assert second.getsockname()[1] == port
        with pytest.raises(UsageError, match="cannot listen"):
            open_socket("127.0.0.1", port)
    with pytest.raises(UsageError, match="cannot listen"):
        open_socket("127.0.0.1", 99_999)


# ---- models and languages --------------------------------------------------------------------------------------------


def test_models_are_found_by_name_and_language(tiny: Path) -> None:
    models = ServedModels.open([tiny, f"other={tiny}"])
    assert list(models) == ["tiny", "other"]
    assert models.choose("en", "it", [])[0].name == "tiny"
    assert models.choose("en", "it", [], "other")[0].name == "other"
    assert models.languages() == {"en": ["it"], "it": []}
    with pytest.raises(Refusal, match="'xx' is not supported"):
        models.choose("xx", "it", [])
    with pytest.raises(Refusal, match="no language model"):
        models.by_name(None, translates=False)
    with pytest.raises(UsageError, match="second model"):
        ServedModels.open([tiny, tiny])


def test_a_model_is_chosen_by_the_language_of_a_text(tiny: Path) -> None:
    models = ServedModels.open([tiny, f"back={tiny}"])
    models["back"] = dataclasses.replace(models["back"], source="de", targets=("it", "fr"))
    german, english = "Wo ist das Haus meiner Schwester?", "Where is the house of my sister?"
    assert models.choose("auto", "it", [german])[0].name == "back"
    assert models.choose("auto", "it", [english])[0].name == "tiny"
    assert models.choose("auto", "it", [german], "tiny")[0].name == "tiny"  # it supports no other source language
    assert models.choose("auto", "fr", [english])[0].name == "back"  # the only one with this target
    assert models.choose("de", "", [])[0].name == "back"
    with pytest.raises(Refusal, match="'xx' is not available as a target language: available: it, fr"):
        models.choose("auto", "xx", [english])


@pytest.mark.parametrize("by_sentence", [True, False])
def test_a_text_is_cut_as_the_training_text_was(tiny: Path, by_sentence: bool) -> None:
    """Plain text and HTML: into sentences, unless the training text had several to a line."""
    model = ServedModel.open("tiny", tiny)
    if not by_sentence:
        statistics = LineStatistics({"3": 1.0}, 50, 1000)
        model = dataclasses.replace(model, cutter=dataclasses.replace(model.cutter, statistics=statistics))
    text, sentences_of = "One cat. Two dog.  Three house!", ["One cat.", "Two dog.", "Three house!"]
    cut, costs = model.split(text)
    assert list(cut.pieces) == (sentences_of if by_sentence else [text])
    assert costs == [1 + len(model.tokenizers.src.encode(piece)) for piece in cut.pieces]
    limits, metrics = RequestLimits(), Metrics()
    serving = Service(ServedModels(), Scheduler(SchedulerOptions({}), limits, metrics), limits, metrics)
    page = serving._html_parts(model, "<p><b>One</b> cat. Two dog.</p>")
    marked = ["<b>One</b> cat.", "Two dog."] if by_sentence else ["<b>One</b> cat. Two dog."]
    assert [segment.raw for segment in page.segments] == marked
    german = dataclasses.replace(model, cutter=dataclasses.replace(model.cutter, language="de"))
    assert len(serving._html_parts(german, "<p>Er kam am 3. Mai an.</p>").segments) == 1


def test_special_spaces_are_restored_once(tiny: Path) -> None:
    cut, _ = ServedModel.open("tiny", tiny).split("One 10\u00a0km, two 10 km.")
    numbers = dict.fromkeys(("score", "logprob", "source_tokens", "target_tokens", "truncated", "looped"), 1)
    part = {"texts": ["Uno 10\u00a0km, due 10 km."], "scores": [1], "flags": [], **numbers}  # from the model process
    result = service._joined("", cut, [part], n_best=1, spaces=True, aligned=False)
    assert result.texts == part["texts"]


def test_source_tokens_are_those_that_the_model_read(translator: qkv.Translator) -> None:
    """A stand-in for protected text, not the text; they weight the scores of pieces."""
    read = qkv.Translation("Uno `x y z`.", -1.0, -1.0, list("abcdef"), [], length_ratio=1.5)
    assert model_worker._source_tokens(translator, "One `x y z`.", {}, read) == 4
    (row,) = model_worker._translate(translator, ["One cat."], {})
    assert row["source_tokens"] == len(translator.tokenizers.src.encode("One cat."))


def test_a_run_without_languages_is_reported(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(listener, "run", lambda app, listening: listening.close())
    nameless = tmp_path / "nameless"
    shutil.copytree(tiny, nameless)
    written = nameless / "config.toml"
    written.write_text(written.read_text().replace('tgt_lang = "it"', 'tgt_lang = ""'))
    models = ServedModels.open([tiny, nameless])
    listener.serve(models, SchedulerOptions({}), RequestLimits(), open_socket("127.0.0.1", 0))
    _, said = capsys.readouterr().err.splitlines()
    assert said == (
        f"nameless has no language codes, so clients must use en and target: "
        f"set src_lang and tgt_lang under [data] in {written}"
    )


def test_languages_are_recognised() -> None:
    assert served_models.detect_languages("Dove si trova la casa di tua sorella?")[0][0] == "it"
    assert [code for code, _ in served_models.detect_languages("Wo ist das Haus?", among=["en", "it"])] != ["de"]
    assert served_models.detect_languages(" ") == []
    assert served_models.language_name("de-AT") == "German"
    assert served_models.language_name("tlh") == "tlh"


# ---- models ----------------------------------------------------------------------------------------------------------


CARD = """
import sys
import qkv
from qkv.server.model_worker import model_card
model_card(qkv.Translator(sys.argv[1], device="cpu"))
print("torch._dynamo" in sys.modules)
"""


def test_a_model_process_does_not_import_the_compiler(tiny: Path) -> None:
    """The import would take a second and 140 MB in each process."""
    done = subprocess.run([sys.executable, "-c", CARD, tiny], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(("tags", "targets"), [(("de", "fr"), ("de", "fr")), (("", "bt"), ("it",))])
def test_tags_are_languages_only_if_all_text_has_them(
    tmp_path: Path, tags: tuple[str, str], targets: tuple[str, ...]
) -> None:
    corpora = []
    for tag in tags:
        src, tgt = write_pairs(tmp_path, sentences(60, seed=len(corpora)), f"text{tag}")
        corpora.append({"src": src, "tgt": tgt, "tag": tag})
    small = {"d_model": 16, "d_ff": 16}
    spec = tiny_config("", "", steps=2, metric="loss", average=0).replace(data={"train": corpora}, model=small)
    served = ServedModel.open("both", qkv.train(spec, tmp_path / "run").path)
    assert served.targets == targets
    assert served.tag("") == (targets[0] if tags[0] else "")
