"""The official clients of LibreTranslate and OpenAI work with the server unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from conftest import sentences
from qkv.data.subwords import encode_text
from qkv.server.service import new_key
from serving import ENDLESS, Answer, Server, documented, serving

PAIR = {"source": "en", "target": "it"}


def text(answer: Answer) -> str:
    return str(answer.json["error"])


LINES = [source for source, _ in sentences(40, seed=9)]


@pytest.fixture(scope="module")
def server(tiny: Path, writer: Path) -> Iterator[Server]:
    with serving(f"tiny={tiny}", f"book={writer}", "--workers", 1, "--max-characters", 3000) as running:
        yield running


def test_the_official_client_works_unchanged(server: Server, translator: qkv.Translator) -> None:
    from libretranslatepy import LibreTranslateAPI

    client = LibreTranslateAPI(server.url)
    assert client.translate(LINES[0], "en", "it") == translator.translate(LINES[0]).text
    assert client.languages() == [
        {"code": "en", "name": "English", "targets": ["it"]},
        {"code": "it", "name": "Italian", "targets": []},
    ]
    assert client.detect("Where is the house of your sister?")[0]["language"] == "en"


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


def test_completions_equal_those_of_the_model(client: Any, writer: Path) -> None:
    completer = qkv.LanguageModel(writer, device="cpu")
    completion = client.completions.create(model="book", prompt="The ", max_tokens=20, temperature=0, logprobs=3)
    (best,) = completer.complete("The ", max_tokens=20, temperature=0)
    choice = completion.choices[0]
    assert choice.text == best.text
    assert choice.finish_reason == "length"
    np.testing.assert_allclose(choice.logprobs.token_logprobs, best.token_logprobs, atol=1e-4)
    assert "".join(choice.logprobs.tokens) == best.text
    likely = choice.logprobs.top_logprobs[0]
    assert len(likely) == 3
    assert max(likely, key=likely.get) == choice.logprobs.tokens[0]  # greedy takes the likeliest
    assert completion.usage.completion_tokens == 20
    assert completion.usage.prompt_tokens == len(encode_text(completer.tokenizer, "The "))


def test_completions_are_seeded_and_streamed(client: Any) -> None:
    asked = {"model": "book", "prompt": ["The ", "A "], "max_tokens": 12, "n": 2, "seed": 7}
    whole = client.completions.create(**asked)
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert texts == [choice.text for choice in client.completions.create(**asked).choices]
    assert len(set(texts)) > 1
    streamed = ["", "", "", ""]
    ended = []
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            ended += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage
    assert streamed == texts
    assert ended == ["length"] * 4
    assert usage.completion_tokens == 48


def test_a_stop_text_ends_a_completion(client: Any) -> None:
    asked = {"model": "book", "prompt": "The ", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[6:9]
    expected = whole[: whole.index(stop)]
    completion = client.completions.create(**asked, stop=stop).choices[0]
    assert (completion.text, completion.finish_reason) == (expected, "stop")
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stop=[stop, "@@"], stream=True)]
    assert "".join(chunk.text for chunk in chunks) == expected
    assert chunks[-1].finish_reason == "stop"


def test_a_disconnect_ends_the_stream(writer: Path) -> None:
    import openai

    with (
        serving(f"book={writer}", "--workers", 1, "--max-tokens", ENDLESS) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        with client.completions.create(model="book", prompt="The ", max_tokens=ENDLESS, stream=True) as stream:
            next(iter(stream))
        server.until(lambda: server.metric("qkv_cancelled_total") == 1)
        server.until(lambda: server.request("/health").json["running"] == 0)


def test_chat_translates_the_last_message(client: Any, translator: qkv.Translator) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"{LINES[0]}\n{LINES[1]}"}]
    expected = translator.translate(f"{LINES[0]}\n{LINES[1]}").text
    completion = client.chat.completions.create(model="tiny", messages=messages)
    assert completion.choices[0].message.content == expected
    assert completion.usage.completion_tokens > 0
    chunks = list(client.chat.completions.create(model="tiny", messages=messages, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"
    several = client.chat.completions.create(model="tiny", messages=messages, n=3)
    assert len({choice.message.content for choice in several.choices}) == 3


def test_chat_samples_if_a_temperature_is_given(client: Any, translator: qkv.Translator) -> None:
    messages = [{"role": "user", "content": LINES[3]}]
    asked = {"model": "tiny", "messages": messages, "temperature": 1.5, "seed": 3}
    completion = client.chat.completions.create(**asked).choices[0].message.content
    assert completion == translator.translate(LINES[3], sample=True, temperature=1.5, seed=3).text


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "book"]
    assert client.models.retrieve("book").owned_by == "qkv"


def test_errors_have_openais_format(client: Any) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="no language model 'tiny'"):
        client.completions.create(model="tiny", prompt="a")
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(model="book", prompt="a", echo=True)
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.completions.create(model="book", prompt="a", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="book", prompt="a", max_tokens=10**6)
    assert refused.value.status_code == 413


def test_documented_python_runs(server: Server, translator: qkv.Translator, capsys: Any) -> None:
    (code,) = documented("python")
    exec(code.replace("http://127.0.0.1:8000", server.url).replace('"demo"', '"tiny"'), {})
    first, second, rest = capsys.readouterr().out.split("\n", 2)
    assert first == translator.translate("Your cat is a lovely cat.").text
    assert second == translator.translate("I love you very much.").text
    assert len(rest) > 20  # 50 sampled tokens, each a character or a part of one


def test_keys_rates_and_sites(tiny: Path, tmp_path: Path) -> None:
    import openai
    from libretranslatepy import LibreTranslateAPI

    (mine, line), (slow, other) = new_key("mine"), new_key("slow")
    (tmp_path / "keys").write_text(f"# who may ask\n{line}\n{other} 2\n", encoding="utf-8")
    assert mine not in (tmp_path / "keys").read_text()
    site = "https://example.org"
    with serving(f"tiny={tiny}", "--workers", 1, "--keys", tmp_path / "keys", "--allow-origin", site) as server:
        body: dict[str, Any] = {"q": "The cat.", **PAIR}
        assert server.request("/translate", body).status == 403
        assert text(server.request("/translate", body | {"api_key": "wrong"})) == "Invalid API key"
        assert server.request("/frontend/settings").json["keyRequired"] is True
        assert LibreTranslateAPI(server.url, mine).translate("The cat.", "en", "it")
        chat: Any = {"model": "tiny", "messages": [{"role": "user", "content": "The cat."}]}
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                client.chat.completions.create(**chat)
            with client.with_options(api_key=mine) as known:
                assert known.chat.completions.create(**chat).choices[0].message.content
        for path, sent in (("/score", {"source": "a", "target": "b"}), ("/attention", {"text": "a"})):
            assert server.request(path, sent).status == 403
        assert server.request("/documents?name=a.txt", b"a").status == 403
        statuses = [server.request("/translate", body | {"api_key": slow}).status for _ in range(3)]
        assert statuses == [200, 200, 429]
        last = server.request("/translate", body, headers={"Authorization": f"Bearer {slow}"})
        assert 1 <= int(last.headers["retry-after"]) <= 31
        for origin, status in ((site, 200), ("https://example.com", 403)):
            response = server.request("/translate", body | {"api_key": mine}, headers={"Origin": origin})
            assert response.status == status
            assert response.headers.get("access-control-allow-origin") == (site if status == 200 else None)
        log = server.log.read_text() + server.request("/metrics").data.decode()
        assert not any(secret in log for secret in (mine, slow, "wrong"))
