"""The parts of the server by themselves: the queue, keys and rates, HTML in parts, text before a stop text, names."""

from __future__ import annotations

import asyncio
import dataclasses
import html as standard
import json
import selectors
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qkv
from conftest import sentences, tiny_config, write_pairs
from qkv.core.errors import UsageError
from qkv.documents import html_text
from qkv.documents.html_text import unescape_markup
from qkv.server import listener, served_models
from qkv.server.auth import Rates, find_key, new_key, read_keys
from qkv.server.completion_stream import Row
from qkv.server.listener import listen
from qkv.server.middleware import Limits, Metrics, Refusal, Wait, _form, _json
from qkv.server.scheduler import Engine, FairQueue, Setup, Unit
from qkv.server.served_models import Models, Served
from qkv.server.worker_supervisor import Worker

GROUP = ("translate", "tiny", "")


class JumpingSelector(selectors.DefaultSelector):
    """A selector that never waits for a timer, but counts the seconds that it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(None if timeout is None else 0)
        if timeout and not events:
            self.now += timeout
        return events


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop with simulated time: when nothing is ready, its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.jumping = JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


def run_simulated(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        runner.run(work)


# ---- the queue -------------------------------------------------------------------------------------------------------


def test_clients_take_turns() -> None:
    async def turns() -> None:
        queue = FairQueue()
        for number in range(100):
            queue.add(Unit("large", GROUP, number, 1))
        for client in "abc":
            queue.add(Unit(client, GROUP, client, 1))
        first = queue.take(8, 100)
        assert Counter(unit.client for unit in first) == {"large": 5, "a": 1, "b": 1, "c": 1}
        assert [unit.asked for unit in first if unit.client == "large"] == [0, 1, 2, 3, 4]
        assert (queue.count, queue.cost) == (95, 95)

    asyncio.run(turns())


def test_a_batch_has_one_group_and_keeps_to_its_budget() -> None:
    async def batches() -> None:
        queue, other = FairQueue(), ("score", "tiny", "")
        for client, group, cost in (("a", GROUP, 5), ("b", other, 1), ("c", GROUP, 4), ("a", GROUP, 9)):
            queue.add(Unit(client, group, None, cost))
        assert [(u.client, u.cost) for u in queue.take(10, 100)] == [("a", 5), ("c", 4)]
        assert [u.client for u in queue.take(10, 100)] == ["b"]
        assert [u.cost for u in queue.take(1, 100)] == [9]  # too much by itself, and taken all the same
        assert queue.take(10, 100) == []
        assert (queue.count, queue.cost) == (0, 0)

    asyncio.run(batches())


def test_what_nobody_waits_for_is_left_out() -> None:
    async def leave() -> None:
        queue = FairQueue()
        units = [Unit("a", GROUP, number, 2) for number in range(4)]
        for unit in units:
            queue.add(unit)
        units[0].answer.cancel()
        units[2].answer.cancel()
        await asyncio.sleep(0)
        assert (queue.count, queue.cost) == (2, 4)
        assert [unit.asked for unit in queue.take(100, 100)] == [1, 3]

    asyncio.run(leave())


def test_batches_are_of_like_length_and_shared_by_the_processes() -> None:
    async def plan() -> None:
        engine = Engine(Setup({}, batch_tokens=20), Limits(), Metrics())
        costs = [3, 9, 2, 8, 3, 9, 2, 8]
        for number, cost in enumerate(costs):
            engine.sentences.add(Unit(number, GROUP, number, cost))
        batches = []
        while batch := engine._batch():
            batches.append([unit.cost for unit in batch])
            assert engine.waiting == len(costs) - sum(map(len, batches))
        assert [cost for batch in batches for cost in batch] == sorted(costs)
        assert all(sum(batch) <= 20 + max(costs) / 2 for batch in batches)
        assert engine.idle

        for number in range(6):
            engine.sentences.add(Unit(number, GROUP, number, 19))
        first, *_ = engine._batch()
        for batch in engine.planned:
            for unit in batch:
                unit.answer.cancel()
        assert engine.waiting == engine.sentences.count
        assert first.wanted
        for waiting in engine.sentences.clients.values():  # all left, and the queue does not know it yet
            for unit in waiting:
                unit.answer.cancel()
        assert engine._batch() == []

    asyncio.run(plan())


def test_a_batch_waits_as_long_as_company_comes() -> None:
    async def come() -> None:
        engine = Engine(Setup({}, batch_tokens=1000, wait=0.05), Limits(), Metrics())

        async def arrive() -> None:
            for number in range(3):
                engine.sentences.add(Unit(number, GROUP, number, 1))
                await asyncio.sleep(0.04)

        coming = asyncio.create_task(arrive())
        await asyncio.sleep(0)
        await engine._company()
        assert coming.done()
        assert len(engine._batch()) == 3
        engine.sentences.add(Unit("much", GROUP, 0, 1000))  # a full batch, which waits for nobody
        late = asyncio.create_task(asyncio.sleep(0.04))
        await engine._company()
        assert not late.done()
        late.cancel()
        assert engine._batch()
        engine.usual = 20  # the half of which waits: a process that is free does not wait for more
        engine.sentences.add(Unit("some", GROUP, 0, 10))
        late = asyncio.create_task(asyncio.sleep(0.04))
        await engine._company()
        assert not late.done()
        late.cancel()

    run_simulated(come())


def test_a_process_that_is_alone_takes_the_whole_batch() -> None:
    async def plan() -> None:
        engine = Engine(Setup({}, batch_tokens=100), Limits(), Metrics())
        engine.workers = [Worker({}), Worker({})]
        for worker in engine.workers:
            worker.ready.set()
        for busy, sizes in (([], [3, 3]), ([engine.workers[0]], [6])):
            engine.busy = busy
            for number in range(6):
                engine.sentences.add(Unit(number, GROUP, number, 5))
            assert [len(engine._batch()) for _ in sizes] == sizes
            assert not engine.waiting

    asyncio.run(plan())


def test_a_process_gets_its_next_batch_only_when_no_other_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Worker, int]] = []
    over = asyncio.Event()

    async def result(self: Worker, kind: str, model: str, asked: Any) -> Any:
        sent.append((self, len(asked["texts"])))
        await over.wait()
        return {"results": [{"texts": [text]} for text in asked["texts"]]}

    async def live(self: Worker) -> None:
        self.about = {"device": "cpu", "ready": {}}
        self.ready.set()
        await asyncio.Event().wait()

    async def work() -> None:
        engine = Engine(Setup({}, workers=2, wait=0.001), Limits(), Metrics())
        engine.start()
        await asyncio.sleep(0.01)
        asked = [
            asyncio.create_task(engine.batch("a", ("translate", "m", ""), ["x"] * size, [5] * size)) for size in (4, 4)
        ]
        await asyncio.sleep(0.05)
        assert {worker for worker, _ in sent} == set(engine.workers)
        assert [size for _, size in sent] == [4, 4]
        asked += [asyncio.create_task(engine.batch("a", ("translate", "m", ""), ["y"], [5]))]
        await asyncio.sleep(0.05)
        assert [size for _, size in sent] == [4, 4, 1]  # although both are busy
        over.set()
        assert [len(found) for found in await asyncio.gather(*asked)] == [4, 4, 1]
        assert engine.idle
        assert engine.busy == []
        await engine.close()

    monkeypatch.setattr(Worker, "result", result)
    monkeypatch.setattr(Worker, "live", live)
    run_simulated(work())


def test_a_large_request_does_not_starve_single_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[str] = []

    async def result(self: Worker, kind: str, model: str, asked: Any) -> Any:
        await asyncio.sleep(0.01)
        return {"results": [{"texts": [text]} for text in asked["texts"]]}

    async def live(self: Worker) -> None:
        self.about = {"device": "cpu", "ready": {}}
        self.ready.set()
        await asyncio.Event().wait()

    async def ask(engine: Engine, client: str, size: int) -> None:
        await engine.batch(client, ("translate", "m", ""), [client] * size, [5] * size)
        answered.append(client)

    async def work() -> None:
        engine = Engine(Setup({}, workers=1, batch_tokens=64), Limits(), Metrics())
        engine.start()
        await asyncio.sleep(0.01)
        asked = [asyncio.create_task(ask(engine, "large", 900))]
        await asyncio.sleep(0.05)  # several batches later
        asked += [asyncio.create_task(ask(engine, client, 1)) for client in "abc"]
        await asyncio.gather(*asked)
        assert sorted(answered[:-1]) == ["a", "b", "c"]
        assert answered[-1] == "large"
        await engine.close()

    monkeypatch.setattr(Worker, "result", result)
    monkeypatch.setattr(Worker, "live", live)
    run_simulated(work())


def test_a_wait_ends_with_a_refusal_and_leaves_no_trace() -> None:
    async def waits() -> None:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(Refusal, match=r"not within 0.01 s") as late, Wait(0.01, 504, "not within {:g} s"):
            await asyncio.sleep(9)
        assert late.value.status_code == 504
        wait = Wait(9, 504, "late")
        for status in (499, 500):  # the second comes too late to matter
            asyncio.get_running_loop().call_soon(wait.end, status, "gone")
        with pytest.raises(Refusal) as left, wait:
            await asyncio.sleep(9)
        assert left.value.status_code == 499
        assert not task.cancelling()
        wait.end(500, "it is over")
        with Wait(0.001, 504, "late"):
            pass
        await asyncio.sleep(0.01)  # nothing ends this
        inner = asyncio.create_task(_hang())
        await asyncio.sleep(0)
        inner.cancel()  # by somebody else: that is no refusal
        with pytest.raises(asyncio.CancelledError):
            await inner

    async def _hang() -> None:
        with Wait(9, 504, "late"):
            await asyncio.sleep(9)

    run_simulated(waits())


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_keys_are_found_by_their_hash(tmp_path: Path) -> None:
    (key, line), (other, second) = new_key("one"), new_key("two")
    path = tmp_path / "keys"
    path.write_text(f"# a comment\n\n{line}\n{second} 60  # slowly\n", encoding="utf-8")
    keys = read_keys(path)
    one, two = find_key(keys, key), find_key(keys, other)
    assert one is not None
    assert two is not None
    assert (one.name, one.rate, two.name, two.rate) == ("one", None, "two", 60)
    assert find_key(keys, "") is None
    assert find_key(keys, line.split()[1]) is None  # the hash itself opens nothing
    assert key not in line


@pytest.mark.parametrize("text", ["", "# nothing\n", "name nohash\n", "name " + "0" * 64 + " many\n"])
def test_key_files_that_let_nobody_in_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="new-key"):
        read_keys(tmp_path / "keys")


def test_a_bucket_fills_again() -> None:
    rates = Rates()
    assert [rates.wait("a", 3, now=0.0) for _ in range(4)] == [0, 0, 0, 20]
    assert rates.wait("b", 3, now=0.0) == 0  # another client has its own
    assert rates.wait("a", 3, now=10.0) == pytest.approx(10)
    assert rates.wait("a", 3, now=20.0) == 0
    assert rates.wait("a", 3, now=20.0) == pytest.approx(20)
    assert [rates.wait("a", 3, now=1e6) for _ in range(4)] == [0, 0, 0, 20]  # never more than a minute's worth


# ---- bodies ----------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
)


@given(json_values)
def test_json_is_read_as_it_was_written(value: Any) -> None:
    assert _json(json.dumps(value).encode()) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (_json, _form):
        with suppress(Refusal):  # whatever else it raises fails the test
            read(data)


# ---- HTML ------------------------------------------------------------------------------------------------------------

pieces = st.sampled_from(
    [
        "<p>",
        "</p>",
        "<b>",
        "</b>",
        "<br>",
        "<br/>",
        "&lt;",
        "&amp;",
        "cat",
        " ",
        "\n",
        "<",
        ">",
        "<!-- x -->",
        "<a href='y'>",
    ]
    + ["</a>", "<script>if (a<b) x()</script>", "a & b", "<img src=x>", "<p", "é", "<style>"]
)


@given(st.lists(pieces, max_size=12).map("".join))
def test_html_in_parts_loses_nothing(source: str) -> None:
    """What is kept is kept to the byte; what is to be translated says the same text, and can be torn at its tags."""
    found = html_text.split_html(source)

    def same(parts: list[html_text.HtmlPart]) -> str:
        return "".join(p.text if p.kept else f"{p.before}{html_text.to_html(p.text)}{p.after}" for p in parts)

    assert standard.unescape(same(found)) == standard.unescape(source)
    for part in found:
        if not part.kept:
            assert part.text == part.text.strip()
            assert standard.unescape(same(part.split_at_tags())) == standard.unescape(same([part]))
            assert all(piece.kept or not piece.has_tags for piece in part.split_at_tags())


def test_html_is_cut_where_sentences_end() -> None:
    found = html_text.split_html("<h1>One <b>two</b></h1><p>three &lt; four<br>five</p>")
    assert [unescape_markup(part.text) for part in found if not part.kept] == ["One <b>two</b>", "three < four", "five"]
    assert [part.is_balanced for part in found if not part.kept] == [True] * 3
    assert not html_text.split_html("a <b>c")[0].is_balanced
    assert not html_text.split_html("a <b><i>c</b></i>")[0].is_balanced


# ---- completions -----------------------------------------------------------------------------------------------------


class Letters:
    """A decoder whose tokens are characters."""

    def feed(self, token: int) -> str:
        return chr(token)

    def close(self) -> str:
        return ""


@given(st.text("ab", min_size=1, max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_stream_never_shows_its_stop_text(text: str, stops: list[str]) -> None:
    row = Row(Letters(), stops)  # type: ignore[arg-type]
    shown = ""
    for number, letter in enumerate(text, 1):
        shown += row.add(ord(letter), last=number == len(text))
        if row.finish:
            break
    # The first stop text to be complete ends it, and it may have begun later than one that is still incomplete.
    ended = [text[: i + 1] for i in range(len(text)) if any(text[: i + 1].endswith(stop) for stop in stops)]
    if ended:
        assert row.finish == "stop"
        assert shown == ended[0][: min(p for p in map(ended[0].find, stops) if p >= 0)]
    else:
        assert (row.finish, shown) == ("length", text)


def test_a_port_is_shared_only_where_that_is_wanted() -> None:
    with listen("127.0.0.1", 0, shared=True) as first:
        port = first.getsockname()[1]
        with listen("127.0.0.1", port, shared=True) as second:
            assert second.getsockname()[1] == port
        with pytest.raises(UsageError, match="cannot listen there"):
            listen("127.0.0.1", port)
    with pytest.raises(UsageError, match="cannot listen there"):
        listen("127.0.0.1", 99_999)


# ---- models and languages --------------------------------------------------------------------------------------------


def test_models_are_found_by_name_and_language(tiny: Path) -> None:
    models = Models.open([tiny, f"other={tiny}"])
    assert list(models) == ["tiny", "other"]
    assert models.pair("en", "it").name == "tiny"
    assert models.pair("en", "it", "other").name == "other"
    assert models.languages() == {"en": ["it"], "it": []}
    with pytest.raises(Refusal, match="'xx' is not supported"):
        models.pair("xx", "it")
    with pytest.raises(Refusal, match="no language model"):
        models.named(None, translates=False)
    with pytest.raises(UsageError, match="second model"):
        Models.open([tiny, tiny])


def test_a_model_is_chosen_by_the_language_of_a_text(tiny: Path) -> None:
    models = Models.open([tiny, f"back={tiny}"])
    models["back"] = dataclasses.replace(models["back"], source="de", targets=("it", "fr"))
    german, english = "Wo ist das Haus meiner Schwester?", "Where is the house of my sister?"
    assert models.choose("auto", "it", [german])[0].name == "back"
    assert models.choose("auto", "it", [english])[0].name == "tiny"
    assert models.choose("auto", "it", [german], "tiny")[0].name == "tiny"  # which knows no other language
    assert models.choose("auto", "fr", [english])[0].name == "back"  # the only one that writes it
    assert models.choose("de", "", [])[0].name == "back"
    with pytest.raises(Refusal, match="'xx' is not available as a target language: there is it, fr"):
        models.choose("auto", "xx", [english])


def test_a_run_that_does_not_know_its_languages_is_told_of(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(listener, "run", lambda app, listening: listening.close())
    nameless = tmp_path / "nameless"
    shutil.copytree(tiny, nameless)
    written = nameless / "config.toml"
    written.write_text(written.read_text().replace('tgt_lang = "it"', 'tgt_lang = ""'))
    models = Models.open([tiny, nameless])
    listener.start(models, Setup({}), Limits(), listen("127.0.0.1", 0))
    _, said = capsys.readouterr().err.splitlines()
    assert said == (
        f"nameless does not know its languages, and clients must call them en and target: "
        f"set src_lang and tgt_lang under [data] in {written}"
    )


def test_languages_are_recognised() -> None:
    assert served_models.detect("Dove si trova la casa di tua sorella?")[0][0] == "it"
    assert [code for code, _ in served_models.detect("Wo ist das Haus?", among=["en", "it"])] != ["de"]
    assert served_models.detect(" ") == []
    assert served_models.name("de-AT") == "German"
    assert served_models.name("tlh") == "tlh"


# ---- models ----------------------------------------------------------------------------------------------------------


CARD = """
import sys
import qkv
from qkv.server.model_worker import card
card("tiny", qkv.Translator(sys.argv[1], device="cpu"))
print("torch._dynamo" in sys.modules)
"""


def test_a_model_process_does_without_the_compiler(tiny: Path) -> None:
    """It takes a second and 140 megabytes, in each process."""
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
    served = Served.open("both", qkv.train(spec, tmp_path / "run").path)
    assert served.targets == targets
    assert served.tag("") == (targets[0] if tags[0] else "")
