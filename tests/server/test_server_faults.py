"""Faults: bad bodies, slow clients, dead processes, full queues; afterwards the server still works."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import qkv
from conftest import PATIENCE, sentences
from qkv.server.service import SLICE
from serving import ENDLESS, FORM, JSON, Answer, Server, serving, train_language_model

LINES = [source for source, _ in sentences(300, seed=9)]
PAIR = {"source": "en", "target": "it"}


@pytest.fixture(scope="module")
def expected(tiny: Path) -> dict[str, str]:
    lines = list(dict.fromkeys(LINES))
    translations = qkv.Translator(tiny, device="cpu").translate(lines)
    return {line: each.text for line, each in zip(lines, translations, strict=True)}


@pytest.fixture(scope="module")
def _running(tiny: Path) -> Iterator[Server]:
    limits = ("--batch-tokens", 64, "--max-characters", 50_000)
    with serving(f"tiny={tiny}", "--workers", 1, *limits) as running:
        yield running


@pytest.fixture
def server(_running: Server, expected: dict[str, str]) -> Iterator[Server]:
    """The server, checked to work after each test."""
    yield _running
    _running.until(lambda: _running.request("/health/ready").status == 200)
    assert _running.translate(LINES[:5]) == [expected[line] for line in LINES[:5]]
    _running.until(lambda: _running.request("/health").json["waiting"] == 0)


def text(answer: Answer) -> str:
    return str(answer.json["error"])


# ---- bodies ----------------------------------------------------------------------------------------------------------


def test_ten_megabytes_are_refused(server: Server) -> None:
    response = server.request("/translate", {"q": "a" * 10_000_000, **PAIR})
    assert response.status == 413
    assert "1,048,576 bytes" in text(response)
    response = server.request("/documents?name=a.txt", b"a" * 11_000_000)
    assert response.status == 413


def test_ten_megabytes_without_a_length_are_refused(server: Server) -> None:
    with server.connect() as line:
        line.sendall(b"POST /translate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(100):
            line.sendall(b"%x\r\n%b\r\n" % (100_000, b"a" * 100_000))
        line.sendall(b"0\r\n\r\n")
        assert line.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_sentence_of_100_000_characters_is_refused_with_the_limit(server: Server) -> None:
    response = server.request("/translate", {"q": "cat " * 25_000, **PAIR})
    assert response.status == 413
    assert "at most 50,000" in text(response)
    assert response.json["pointer"] == "/q"


def test_a_sentence_as_long_as_allowed_is_translated(server: Server, tiny: Path) -> None:
    long = "the cat sees the red house and " * 50
    assert server.translate(long) == qkv.Translator(tiny, device="cpu").translate(long).text


@pytest.mark.parametrize("path", ["/translate", "/score", "/v1/completions"])
def test_bytes_that_are_not_utf_8_are_refused(server: Server, path: str) -> None:
    response = server.request(path, b'{"q": "\xff\xfe", "source": "en"}', headers=JSON)
    assert response.status == 422
    assert response.json["error"]


def test_a_form_that_is_not_utf_8_is_refused(server: Server) -> None:
    response = server.request("/translate", b"q=%ff%fe&source=en&target=it", headers=FORM)
    assert response.status == 422


@pytest.mark.parametrize("path", ["/translate", "/score", "/v1/completions"])
@pytest.mark.parametrize("opening", ["[", '{"q":'])
def test_json_that_is_deep_is_refused(server: Server, path: str, opening: str) -> None:
    response = server.request(path, (opening * 100_000).encode(), headers=JSON)
    assert response.status == 422


@pytest.mark.parametrize("body", [b"", b"{", b"null", b"NaN", b'{"q": NaN}', b'{"q": "\\ud800", "target": "it"}'])
def test_invalid_json_is_refused(server: Server, body: bytes) -> None:
    assert server.request("/translate", body, headers=JSON).status == 422
    assert server.request("/score", body, headers=JSON).status == 422


def test_zero_length(server: Server) -> None:
    assert server.translate("") == ""
    assert server.translate([]) == []
    assert server.translate(["", "\n\n", "  "]) == ["", "\n\n", "  "]
    assert server.request("/detect", {"q": ""}).json == []
    empty = server.request("/documents?name=a.txt&target=it", b"")
    assert server.request(f"/documents/{empty.json['id']}", method="DELETE").status == 204
    refused = server.request("/attention", {"text": ""})
    assert refused.status == 422


def test_control_characters(server: Server, tiny: Path) -> None:
    every = "".join(map(chr, range(0x20))) + "\x7f\x85\u2028\ufeff\u202e\U0010ffff\ufdd0"
    texts = [f"The{c}cat." for c in every]
    assert server.translate(texts) == [each.text for each in qkv.Translator(tiny, device="cpu").translate(texts)]
    assert server.request("/translate", {"q": every, **PAIR, "format": "html"}).status == 200


@pytest.mark.parametrize(
    ("q", "status", "pointer", "said"),
    [
        (["a"] * 10_001, 413, "/q", "at most 10000"),
        (["a", 5], 422, "/q/1", "valid string"),
        (5, 422, "/q", "valid string"),
    ],
    ids=["too many", "one of them no text", "no text"],
)
def test_invalid_texts_are_reported(server: Server, q: object, status: int, pointer: str, said: str) -> None:
    response = server.request("/translate", {"q": q, **PAIR})
    assert (response.status, response.json["pointer"]) == (status, pointer)
    assert said in text(response)


def test_ten_thousand_alternatives(server: Server) -> None:
    response = server.request("/translate", {"q": "The cat.", **PAIR, "alternatives": 10_000})
    assert response.status == 422
    assert "at most 10" in text(response)
    assert response.json["pointer"] == "/alternatives"
    huge = server.request("/translate", b"q=a&source=en&target=it&alternatives=" + b"9" * 5000, headers=FORM)
    assert huge.status == 422
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "n": 10_000}
    assert server.request("/v1/chat/completions", chat).status == 422


def test_many_texts(server: Server) -> None:
    assert server.request("/translate", {"q": ["a"] * 1001, **PAIR}).status == 413


def test_bytes_that_are_not_http(server: Server) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 100):
        with server.connect() as line:
            line.sendall(sent)
            assert line.recv(100)[:12] in (b"", b"HTTP/1.1 400")


# ---- connections -----------------------------------------------------------------------------------------------------


def post(line: socket.socket, texts: list[str], *, keep: int = 0) -> None:
    """Send a request without its last `keep` bytes."""
    body = json.dumps({"q": texts, **PAIR}).encode()
    head = f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    data = f"{head}\r\n\r\n".encode() + body
    line.sendall(data[: len(data) - keep])


def test_a_disconnect_cancels_the_request(server: Server) -> None:
    before = server.metric("qkv_cancelled_total")
    done = server.metric("qkv_sentences_total")
    with server.held():
        with server.connect() as line:
            post(line, LINES * 3)
            server.until(lambda: server.accepted == len(LINES) * 3)
        server.until(lambda: server.request("/health").json["waiting"] == 0)
        server.until(lambda: server.metric("qkv_cancelled_total") == before + 1)
    server.until(lambda: server.accepted == 0)
    assert server.metric("qkv_sentences_total") - done < len(LINES) * 3 / 2


def test_a_disconnect_after_a_large_body_is_noticed(server: Server) -> None:
    """uvicorn pauses reading after 64 KB of a body; the server must resume it to notice the disconnect."""
    before = server.metric("qkv_cancelled_total")
    body = json.dumps({"q": LINES * 3, "padding": "x" * 500_000, **PAIR}).encode()
    head = f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with server.held():
        with server.connect() as line:
            line.sendall(f"{head}\r\n\r\n".encode() + body)
            server.until(lambda: server.accepted == len(LINES) * 3)
        server.until(lambda: server.metric("qkv_cancelled_total") == before + 1)


def test_split_and_pipelined_requests_get_the_same_responses(server: Server) -> None:
    def answers(data: bytes, count: int, parts: int = 1) -> list[bytes]:
        with server.connect() as line, line.makefile("rb") as stream:
            size = -(-len(data) // parts)
            for begin in range(0, len(data), size):
                line.sendall(data[begin : begin + size])
                time.sleep(0.02)
            return [answer(stream) for _ in range(count)]

    def answer(stream: Any) -> bytes:
        head = list(iter(stream.readline, b"\r\n"))
        size = next(int(row.split(b":")[1]) for row in head if row.startswith(b"content-length:"))
        return b"".join(row for row in head if not row.startswith(b"date:")) + bytes(stream.read(size))

    def request(text: str) -> bytes:
        body = json.dumps({"q": text, **PAIR}).encode()
        head = f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        return f"{head}\r\n\r\n".encode() + body

    texts = [*LINES[:4], "a" * 60_000]
    alone = [answers(request(text), 1)[0] for text in texts]
    assert [each[9:12] for each in alone] == [b"200"] * 4 + [b"413"]
    assert len(set(alone)) == len(texts)
    assert [answers(request(text), 1, parts=4)[0] for text in texts[:2]] == alone[:2]
    assert answers(b"".join(map(request, texts)), len(texts)) == alone  # pipelined
    assert 'route="/translate",status="413"' in server.request("/metrics").data.decode()


def open_slow(server: Server, stack: ExitStack) -> tuple[list[socket.socket], list[socket.socket]]:
    """Open connections that send an incomplete head, and others that send an incomplete body."""
    lines: tuple[list[socket.socket], list[socket.socket]] = [], []
    for headless, sent in ((True, b""), (True, b"POST /translate HTTP/1.1\r\nHos"), (False, b"")):
        for _ in range(30):
            line = stack.enter_context(server.connect())
            line.sendall(sent) if headless else post(line, LINES[:1], keep=5)
            lines[0 if headless else 1].append(line)
    return lines


def test_slow_clients_do_not_delay_others(server: Server) -> None:
    with ExitStack() as stack:
        open_slow(server, stack)
        assert server.translate(LINES[0])


def test_slow_clients_are_disconnected(tiny: Path) -> None:
    with serving(f"tiny={tiny}", "--workers", 1, "--patience", 2) as server, ExitStack() as stack:
        headless, bodiless = open_slow(server, stack)
        assert {line.recv(100) for line in headless} == {b""}  # no answer
        assert all(line.recv(1000).startswith(b"HTTP/1.1 408 ") for line in bodiless)
        assert server.translate(LINES[0])


def test_a_large_request_and_single_sentences_are_answered_together(server: Server, expected: dict[str, str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        with server.held():
            large = pool.submit(server.translate, LINES * 3)
            server.until(lambda: server.accepted == len(LINES) * 3)
            single = [pool.submit(server.translate, line) for line in LINES[:3]]
            server.until(lambda: server.accepted == len(LINES) * 3 + 3)
        assert [each.result() for each in single] == [expected[line] for line in LINES[:3]]
        assert large.result() == [expected[line] for line in LINES * 3]


def test_many_clients_at_once_get_their_own_answers(server: Server, expected: dict[str, str]) -> None:
    def client(number: int) -> bool:
        own = [LINES[(number * 7 + i) % len(LINES)] for i in range(4)]
        return all(server.translate(line) == expected[line] for line in own)

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(client, range(64)))


# ---- the model process -----------------------------------------------------------------------------------------------


def test_a_killed_model_process_is_replaced(server: Server, expected: dict[str, str]) -> None:
    before = server.metric("qkv_worker_restarts_total")

    def client(number: int) -> Answer:
        return server.request("/translate", {"q": LINES[number * 10 : number * 10 + 60], **PAIR})

    with ThreadPoolExecutor(20) as pool:
        (worker,) = server.workers
        with server.held():
            asked = [pool.submit(client, number) for number in range(20)]
            server.until(lambda: server.accepted == 20 * 60)
            os.kill(worker, signal.SIGKILL)
        answers = [each.result() for each in asked]
    for number, answer in enumerate(answers):
        if answer.status == 200:  # it was in the queue: the next process translated it
            own = LINES[number * 10 : number * 10 + 60]
            assert answer.json["translatedText"] == [expected[line] for line in own]
        else:
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
    assert any(answer.status == 503 and "killed by SIGKILL" in text(answer) for answer in answers)
    server.until(lambda: server.request("/health/ready").status == 200)
    assert server.metric("qkv_worker_restarts_total") == before + 1
    assert server.workers != [worker]


def test_loading_and_stopping(tiny: Path, tmp_path: Path, expected: dict[str, str]) -> None:
    """Requests are refused while the model loads and while the server stops; accepted ones are answered."""
    load = tmp_path / "load"
    os.mkfifo(load)
    how = ("--workers", 1, "--batch-tokens", 32, "--drain", 600)
    with serving(f"tiny={tiny}", *how, ready=False, load_after=load) as server:
        early = server.request("/translate", {"q": "The cat.", **PAIR})
        assert early.status == 503
        assert "loaded" in text(early)
        assert int(early.headers["retry-after"]) >= 1
        assert server.request("/health/live").status == 200
        assert server.request("/health/ready").status == 503
        load.open("wb").close()
        server.until(lambda: server.request("/health/ready").status == 200)
        with ThreadPoolExecutor(1) as pool:
            with server.held():
                document = server.request("/documents?name=a.txt&target=it", "\n".join(LINES).encode()).json["id"]
                large = pool.submit(server.translate, LINES)
                server.until(lambda: server.accepted == SLICE + len(LINES))
                os.kill(server.process.pid, signal.SIGTERM)
                server.until(lambda: server.request("/health").json["status"] == "draining")
                said = r"stopping: waiting for \d requests? and 1 document, at most 600 s; Ctrl-C again ends at once"
                assert re.fullmatch(said, server.log.read_text().splitlines()[-1])
                late = server.request("/translate", {"q": "The cat.", **PAIR})
                assert late.status == 503
                assert "stopping" in text(late)
            assert large.result() == [expected[line] for line in LINES]
        server.until(lambda: server.request(f"/documents/{document}").json["state"] == "done")
        file = server.request(f"/documents/{document}/file").data.decode()
        assert file.split("\n") == [expected[line] for line in LINES]
        assert server.process.wait(PATIENCE) == 0


@pytest.mark.parametrize(("drain", "times"), [(0.3, 1), (600, 2)])
def test_unfinished_work_is_refused_when_the_server_ends(tiny: Path, drain: float, times: int) -> None:
    """After the drain time or a second signal every client gets 503, and the log has no traceback."""
    with serving(f"tiny={tiny}", "--workers", 1, "--batch-tokens", 1, "--drain", drain) as server:
        with server.held(), ThreadPoolExecutor(1) as pool:
            server.request("/documents?name=a.txt&target=it", "\n".join(LINES).encode())
            large = pool.submit(server.request, "/translate", {"q": LINES * 2, **PAIR})
            server.until(lambda: server.accepted == SLICE + len(LINES) * 2)
            for _ in range(times):
                os.kill(server.process.pid, signal.SIGINT)
                server.until(lambda: "stopping" in server.log.read_text())
            answer = large.result()
        assert answer.status == 503
        assert "stopped before this was done" in text(answer)
        assert server.process.wait(PATIENCE) == (0 if times == 1 else 130)
        said = server.log.read_text().splitlines()[1:]
        assert said[0].startswith("stopping: ")
        assert re.fullmatch(r"stopping without \d requests? and 1 document", said[1])
        assert said[2:] == ([] if times == 1 else ["qkv: interrupted"])


def test_a_stream_ends_with_an_error_when_the_server_ends(tmp_path: Path) -> None:
    run = train_language_model(tmp_path)
    with serving(f"book={run}", "--workers", 1, "--drain", 600, "--max-tokens", ENDLESS) as server:
        body = json.dumps({"model": "book", "prompt": "The", "max_tokens": ENDLESS, "stream": True}).encode()
        with server.connect() as line:
            line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            line.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            assert b"200" in line.recv(1000)  # the stream has begun
            for _ in range(2):
                os.kill(server.process.pid, signal.SIGINT)
                server.until(lambda: "stopping" in server.log.read_text())
            data = b"".join(iter(lambda: line.recv(1 << 16), b""))
        assert b"stopped before this was done" in data
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert server.process.wait(PATIENCE) == 130
        assert "Traceback" not in server.log.read_text()


def test_a_clean_stop_logs_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU the model processes load Triton, which reports leaked objects at exit."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # loads Triton without a GPU
    with serving(f"tiny={tiny}", "--workers", 1) as server:
        os.kill(server.process.pid, signal.SIGINT)
        assert server.process.wait(PATIENCE) == 0
        (only,) = server.log.read_text().splitlines()
        assert only.endswith("serves tiny")


def test_a_run_that_cannot_be_loaded_ends_the_server(tiny: Path, tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    for path in (broken / "weights").glob("*.safetensors"):
        path.write_bytes(b"nothing")
    with serving(broken, ready=False) as server:
        assert server.process.wait(PATIENCE) == 1
        last = server.log.read_text().splitlines()[-1]
        assert last.startswith("qkv: ")
        assert "not a safetensors file" in last


# ---- limits and keys -------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_with_retry_after(tiny: Path) -> None:
    tight = ("--workers", 1, "--max-queue", 8, "--batch-tokens", 1, "--max-texts", 2000)
    with serving(f"tiny={tiny}", *tight) as server:

        def client(number: int) -> Answer:
            return server.request("/translate", {"q": LINES[number * 7 : number * 7 + 7], **PAIR})

        with ThreadPoolExecutor(1) as pool:
            with server.held():
                first = pool.submit(client, 0)
                server.until(lambda: server.accepted == 7)
                refused = [client(number) for number in range(1, 16)]
            assert first.result().status == 200
        assert {answer.status for answer in refused} == {429}
        assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
        assert server.metric("qkv_refused_total") == len(refused)
        assert server.request("/translate", {"q": LINES[:9], **PAIR}).status == 413  # larger than the queue
        assert len(server.translate(LINES[:8])) == 8


def test_a_request_above_the_time_limit_is_cancelled(tiny: Path) -> None:
    with serving(f"tiny={tiny}", "--workers", 1, "--batch-tokens", 1, "--timeout", 0.3) as server, server.held():
        response = server.request("/translate", {"q": LINES * 3, **PAIR})
        assert response.status == 504
        assert "0.3 s" in text(response)
        server.until(lambda: server.request("/health").json["waiting"] == 0)  # the queue drops it
