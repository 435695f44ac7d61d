"""What all routes share: who asks, which model answers, and a text on its way through the engine and back."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from qkv.data.links import word_spans
from qkv.documents import html_text
from qkv.documents.html_text import escape_markup, unescape_markup
from qkv.server.auth import Key, Rates, find_key
from qkv.server.middleware import Limits, Metrics, Refusal, Wait, too_many
from qkv.server.scheduler import Engine, Group
from qkv.server.served_models import Models, Served

R = TypeVar("R")
FACTS = ("score", "logprob", "read", "written", "truncated", "looped")
SLICE = 64  # sentences of somebody patient in the queue at once
LONG = 4000  # characters above which a text is cut in a thread, so that nobody else waits for it


@dataclass(frozen=True)
class Found:
    """A translation and its alternatives, best first, and what is known of the best, in all its parts together."""

    texts: list[str]
    score: float
    logprob: float
    read: int  # tokens
    written: int
    truncated: bool
    looped: bool
    blank: bool = False

    @classmethod
    def together(cls, texts: list[str], parts: Sequence[Mapping[str, Any]]) -> Found:
        """A text put together of parts that were translated one by one."""
        if len(parts) == 1:
            (only,) = parts
            return cls(texts, *[only[name] for name in FACTS])
        added = {name: sum(part[name] for part in parts) for name in ("score", "logprob", "read", "written")}
        either = {name: any(part[name] for part in parts) for name in ("truncated", "looped")}
        return cls(texts, **added, **either, blank=not parts)

    @property
    def finish_reason(self) -> str:
        """stop: the model ended; length: the limit did; blank: there was nothing to translate."""
        return "blank" if self.blank else "length" if self.truncated else "stop"

    @property
    def details(self) -> dict[str, Any]:
        """The same as of a `Translation`, for clients."""
        return {
            "score": self.score,
            "logprob": self.logprob,
            "finish_reason": self.finish_reason,
            "truncated": self.truncated,
            "looped": self.looped,
            "length_ratio": self.written / max(1, self.read),
        }


@dataclass
class Service:
    """The models and the rules of one server; routes find it in `request.app.state`."""

    models: Models
    engine: Engine
    limits: Limits
    metrics: Metrics
    keys: Mapping[str, Key] = field(default_factory=dict)  # by hash; none: everybody may ask
    rate: int = 0  # requests a minute, 0 as many as wanted
    rates: Rates = field(default_factory=Rates)

    # ---- who ---------------------------------------------------------------------------------------------------------

    def admit(self, request: Request, given: str = "") -> str:
        """The client that asks, if it may: by its key, in the body or a header, or else by its address."""
        host, port = request.client or ("", 0)
        client, who, rate = f"{host}:{port}", host, self.rate
        if self.keys:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            bearer = token.strip() if scheme.lower() == "bearer" else ""
            given = given or bearer or request.headers.get("x-api-key", "")
            key = find_key(self.keys, given)
            if key is None:
                self.metrics.refused.labels("key").inc()
                raise Refusal(
                    401 if is_openai(request) else 403, "Invalid API key" if given else "An API key is required"
                )
            client = who = f"key {key.name}"
            rate = self.rate if key.rate is None else key.rate
        if rate and (seconds := self.rates.wait(who, rate)):
            self.metrics.refused.labels("rate").inc()
            raise Refusal(429, f"Slowdown: {rate:,} requests a minute are allowed", retry_after=seconds + 0.5)
        return client

    async def answered(self, request: Request, work: Coroutine[Any, Any, R]) -> R:
        """The result of the work, which ends when the client leaves or its time is up."""
        left = leaving(request.scope)
        with Wait(self.limits.seconds, 504, "not done within {:g} s: send less at once, or again later") as wait:

            def gone(_: object) -> None:
                wait.end(499, "the client has left")

            left.add_done_callback(gone)
            try:
                return await work
            finally:
                left.remove_done_callback(gone)

    # ---- what --------------------------------------------------------------------------------------------------------

    def check_size(self, texts: Sequence[str], pointer: str) -> None:
        """Refuse more text than a request may have."""
        too_many("texts", len(texts), self.limits.texts, pointer)
        too_many("characters", sum(map(len, texts)), self.limits.characters, pointer)

    async def translate(
        self,
        client: Hashable,
        model: Served,
        target: str,
        texts: Sequence[str],
        *,
        patient: bool = False,
        **how: Any,
    ) -> list[Found]:
        """Translate texts, in parts where they are long; the same as `Translator.translate` gives."""
        how = {name: value for name, value in how.items() if value is not None}
        if tag := model.tag(target):
            how["tag"] = tag
        if how.get("sample"):
            how["own"] = secrets.token_hex(8)  # draws are numbered within a batch: it must not be shared
        if sum(map(len, texts)) > LONG:
            cut = await asyncio.to_thread(lambda: [model.pieces(text) for text in texts])
        else:
            cut = [model.pieces(text) for text in texts]
        flat = [piece for pieces, _ in cut for piece in pieces]
        costs = [cost for _, lengths in cut for cost in lengths]
        group = ("translate", model.name, _written(tuple(how.items())))
        results = iter(await self._results(client, group, flat, costs, patient))
        spaces = self.engine.cards[model.name]["spaces"] if flat else True
        found = []
        for pieces, _ in cut:
            own = [next(results) for _ in pieces]
            every = [each["texts"] for each in own]
            ranks = [model.join(pieces, list(rank), spaces) for rank in zip(*every, strict=False)]
            found.append(Found.together(ranks or [""], own))
        return found

    async def _results(
        self, client: Hashable, group: Group, texts: list[str], costs: list[int], patient: bool
    ) -> list[dict[str, Any]]:
        """What the engine gives; who is patient sends a little at a time, however much there is."""
        if not patient:
            return await self.engine.batch(client, group, texts, costs)
        found: list[dict[str, Any]] = []
        for begin in range(0, len(texts), SLICE):
            some = slice(begin, begin + SLICE)
            found += await self.engine.batch(client, group, texts[some], costs[some], patient=True)
        return found

    async def translate_aligned(
        self, client: Hashable, model: Served, target: str, texts: Sequence[str]
    ) -> list[tuple[str, list[tuple[int, int]] | None]]:
        """Translations, each with its links from source words to target words, for whoever can wait."""
        how = {"tag": model.tag(target)} if model.tags else {}
        cut = [model.pieces(text) for text in texts]
        flat = [piece for pieces, _ in cut for piece in pieces]
        costs = [cost for _, lengths in cut for cost in lengths]
        group = ("aligned", model.name, json.dumps(how))
        results = iter(await self._results(client, group, flat, costs, patient=True))
        spaces = self.engine.cards[model.name]["spaces"]
        found = []
        for text, (pieces, _) in zip(texts, cut, strict=True):
            own = [next(results) for _ in pieces]
            written = [each["texts"][0] for each in own]
            whole, links = model.join(pieces, written, spaces), [each["links"] for each in own]
            found.append((whole, joined_links(text, whole, list(pieces), written, links)))
        return found

    async def translate_html(
        self, client: Hashable, model: Served, target: str, texts: Sequence[str], n_best: int = 1
    ) -> list[Found]:
        """Translate HTML: tags between sentences stay, those inside go to the words that their words became."""
        cut = [self._parts(model, text) for text in texts]
        every = [part for parts in cut for part in parts if not part.kept]
        plain = [part for part in every if not part.has_tags]
        tagged = [part for part in every if part.has_tags]
        how: dict[str, Any] = {"n_best": n_best} | ({"tag": model.tag(target)} if model.tags else {})
        group = ("markup", model.name, json.dumps(how, sort_keys=True))
        costs = [1 + len(part.text) // 3 for part in tagged]
        waiting = asyncio.gather(
            self.translate(client, model, target, [unescape_markup(part.text) for part in plain], n_best=n_best),
            self.engine.batch(client, group, [part.text for part in tagged], costs),
        )
        free, bound = await waiting
        found = {
            id(part): vars(each) | {"texts": [escape_markup(text) for text in each.texts]}
            for part, each in zip(plain, free, strict=True)
        }
        found |= {id(part): each for part, each in zip(tagged, bound, strict=True)}
        return [
            Found.together(_assembled(parts, found), [found[id(part)] for part in parts if not part.kept])
            for parts in cut
        ]

    def _parts(self, model: Served, text: str) -> list[html_text.HtmlPart]:
        """The parts of a text; a run whose tags cannot be set, because they do not match or it is long, is torn."""
        found: list[html_text.HtmlPart] = []
        runs = html_text.split_html(text)
        for part in [part for run in runs for part in (run.split_sentences() if model.by_sentence else [run])]:
            whole = (
                part.kept or not part.has_tags or (part.is_balanced and sum(model.pieces(part.text)[1]) < model.longest)
            )
            found += [part] if whole else part.split_at_tags()
        return found


def joined_links(
    source: str,
    target: str,
    sources: Sequence[str],
    targets: Sequence[str],
    links: Sequence[Sequence[Sequence[int]] | None],
) -> list[tuple[int, int]] | None:
    """The links of a text between its words, from those of its sentences; none where a sentence has none.

    None too where joining has made one word of two, as it may without spaces: the numbers of words would be wrong.
    """
    joined: list[tuple[int, int]] = []
    before, after = 0, 0  # words of the sentences so far
    for read, written, own in zip(sources, targets, links, strict=True):
        if own is None:
            return None
        joined += [(before + i, after + j) for i, j in own]
        before, after = before + len(word_spans(read)), after + len(word_spans(written))
    return joined if (before, after) == (len(word_spans(source)), len(word_spans(target))) else None


@lru_cache(64)
def _written(how: tuple[tuple[str, Any], ...]) -> str:
    return json.dumps(dict(how), sort_keys=True)


def _assembled(parts: Sequence[html_text.HtmlPart], found: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """The text put together again, once for each rank that all its parts have."""
    ranks = min((len(found[id(part)]["texts"]) for part in parts if not part.kept), default=1)

    def piece(part: html_text.HtmlPart, rank: int) -> str:
        return (
            part.text if part.kept else f"{part.before}{html_text.to_html(found[id(part)]['texts'][rank])}{part.after}"
        )

    return ["".join(piece(part, rank) for part in parts) for rank in range(ranks)]


def service(request: Request) -> Service:
    """The service that a request is for."""
    found: Service = request.app.state.service
    return found


def is_openai(request: Request) -> bool:
    return request.url.path.startswith("/v1/")


def leaving(scope: Scope) -> asyncio.Future[None]:
    """What is done when the client has left."""
    left: asyncio.Future[None] = scope["state"]["left"]
    return left
