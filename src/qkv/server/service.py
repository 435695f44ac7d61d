"""The service behind all routes: authorisation, limits, and texts translated sentence by sentence."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Coroutine, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from qkv.api.translation import best_combinations, mean_score
from qkv.core.errors import UsageError
from qkv.data.alignments import Link, join_alignments
from qkv.documents.html_text import HtmlText
from qkv.documents.segments import Segment
from qkv.segmentation.sentences import Span, tiles
from qkv.segmentation.text_cutter import CutText
from qkv.server.middleware import Metrics, Refusal, RequestLimits, check_limit
from qkv.server.scheduler import Scheduler
from qkv.server.served_models import ServedModel, ServedModels

R = TypeVar("R")
SLICE = 64  # sentences in the queue at once of a call that waits for room
LONG = 4000  # characters above which a thread splits the texts, so that the event loop is not blocked
KEY_LINE = re.compile(r"(\S+)\s+([0-9a-f]{64})(?:\s+(\d+))?")
MAX_CLIENTS = 10_000  # token buckets in memory; the least recently used one is dropped first


@dataclass(frozen=True)
class TranslationResult:
    """A translation and its alternatives, best first; the other fields describe the best, over all its sentences."""

    texts: list[str]
    score: float
    logprob: float
    source_tokens: int
    target_tokens: int
    truncated: bool
    looped: bool
    blank: bool = False
    flags: tuple[str, ...] = ()  # of all pieces (`qkv.api.translation.Piece`)
    scores: Sequence[float] = (0.0,)  # of each text
    pieces: Sequence[Mapping[str, Any]] = ()  # spans in source and target, score and flags
    links: Sequence[list[Link] | None] = ()  # of each text, from words of the source; empty if not asked for

    @classmethod
    def combine(
        cls,
        texts: list[str],
        parts: Sequence[Mapping[str, Any]],
        links: Sequence[list[Link] | None] = (),
        scores: Sequence[float] = (0.0,),
        pieces: Sequence[Mapping[str, Any]] = (),
    ) -> TranslationResult:
        """Return the result of texts translated in parts.

        Log-probabilities and token counts are summed, flags are merged; the score is the mean, weighted by the tokens
        of the source.
        """
        sums = {name: sum(part[name] for part in parts) for name in ("logprob", "source_tokens", "target_tokens")}
        weights = [part["source_tokens"] + 1 for part in parts]
        score = mean_score(weights, [part["score"] for part in parts])
        merged: dict[str, Any] = {name: any(part[name] for part in parts) for name in ("truncated", "looped")}
        flags = tuple(dict.fromkeys(flag for part in parts for flag in part["flags"]))
        return cls(
            texts, score, **sums, **merged, blank=not parts, flags=flags, scores=scores, pieces=pieces, links=links
        )

    @property
    def details(self) -> dict[str, Any]:
        """The fields of a `Translation`, for clients."""
        return {
            "score": self.score,
            "logprob": self.logprob,
            # stop: the model ended the sentence; length: the limit did; blank: there was no text
            "finish_reason": "blank" if self.blank else "length" if self.truncated else "stop",
            "truncated": self.truncated,
            "looped": self.looped,
            "flags": list(self.flags),
            "pieces": list(self.pieces),
            "length_ratio": self.target_tokens / max(1, self.source_tokens),
        }


# ---- API keys, stored as hashes, and a rate limit for each client ----------------------------------------------------


@dataclass(frozen=True)
class ApiKey:
    """A client with a key; `rate` is its limit in requests per minute (0: none, None: the server's default)."""

    name: str
    rate: int | None = None


def new_key(name: str) -> tuple[str, str]:
    """Return a new random key and its line for the key file."""
    key = secrets.token_urlsafe(32)
    return key, f"{name} {hash_key(key)}"


def hash_key(key: str) -> str:
    """Hash a key; keys are long and random, so a plain SHA-256 cannot be inverted.

    Comparing hashes reveals nothing about the keys by timing.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> dict[str, ApiKey]:
    """Read a key file into clients by key hash; each line is `name hash [requests per minute]` or a # comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the key file cannot be read: {error}: check --keys") from None
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        if (match := KEY_LINE.fullmatch(text)) is None:
            raise UsageError(
                f"{path}, line {number}: expected `name hash [requests a minute]`: qkv serve --new-key prints one"
            )
        keys[match[2]] = ApiKey(match[1], int(match[3]) if match[3] else None)
    if not keys:
        raise UsageError(f"{path}: no key, so every request would be refused: add a line from qkv serve --new-key")
    return keys


class RateLimiter:
    """A token bucket for each client; a full bucket allows a minute's worth of requests."""

    def __init__(self) -> None:
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests left, and at which time

    def take(self, client: str, rate: int, now: float | None = None) -> float:
        """Take one request from the client's bucket; returns 0, or the seconds until the next one is allowed."""
        now = time.monotonic() if now is None else now
        left, at = self.buckets.pop(client, (float(rate), now))
        left = min(float(rate), left + (now - at) * rate / 60)
        allowed = left >= 1
        self.buckets[client] = (left - 1 if allowed else left, now)
        if len(self.buckets) > MAX_CLIENTS:
            self.buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) * 60 / rate


# ---- the service -----------------------------------------------------------------------------------------------------


@dataclass
class Service:
    """The models, scheduler, limits and keys of one server; routes get it from `request.app.state`."""

    models: ServedModels
    scheduler: Scheduler
    limits: RequestLimits
    metrics: Metrics
    keys: Mapping[str, ApiKey] = field(default_factory=dict)  # by hash; empty: no key is required
    rate: int = 0  # requests per minute and client; 0: no limit
    rate_limiter: RateLimiter = field(default_factory=RateLimiter)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def authorize(self, request: Request, given: str = "") -> str:
        """Check key and rate limit, and return the client's name: its key (body or header) or its address."""
        host, port = request.client or ("", 0)
        client, rate_client, rate = f"{host}:{port}", host, self.rate
        if self.keys:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            bearer = token.strip() if scheme.lower() == "bearer" else ""
            given = given or bearer or request.headers.get("x-api-key", "")
            if not given or (key := self.keys.get(hash_key(given))) is None:
                self.metrics.refused.labels("key").inc()
                reason = "Invalid API key" if given else "An API key is required"
                raise Refusal(401 if is_openai(request) else 403, reason)
            client = rate_client = f"key {key.name}"
            rate = self.rate if key.rate is None else key.rate
        if rate and (seconds := self.rate_limiter.take(rate_client, rate)):
            self.metrics.refused.labels("rate").inc()
            raise Refusal(429, f"Slowdown: {rate:,} requests a minute are allowed", retry_after=seconds + 0.5)
        return client

    async def run(self, request: Request, work: Coroutine[Any, Any, R]) -> R:
        """Return the result of a coroutine, which is cancelled on a disconnect or after the time limit."""
        try:
            return await run_until_disconnect(request.scope, work, self.limits.timeout)
        except TimeoutError:
            reason = f"not done within {self.limits.timeout:g} s: send less at once, or try again later"
            raise Refusal(504, reason) from None

    def check_size(self, texts: Sequence[str], pointer: str) -> None:
        """Refuse more text than the limits allow."""
        check_limit("texts", len(texts), self.limits.texts, pointer)
        check_limit("characters", sum(map(len, texts)), self.limits.characters, pointer)

    # ---- translation -------------------------------------------------------------------------------------------------

    async def translate(
        self,
        client: Hashable,
        model: ServedModel,
        target: str,
        texts: Sequence[str],
        *,
        aligned: bool = False,
        wait_for_room: bool = False,
        protected: Sequence[Sequence[Span]] | None = None,
        n_best: int | None = None,
        **options: Any,
    ) -> list[TranslationResult]:
        """Translate texts sentence by sentence, with the same results as `Translator.translate`.

        With `aligned` the results have links between words; with `wait_for_room` the call waits for room in the queue.
        """
        options = {name: value for name, value in {**options, "n_best": n_best}.items() if value is not None}
        if tag := model.tag(target):
            options["tag"] = tag
        if options.get("sample"):
            options["batch_id"] = secrets.token_hex(8)  # a draw depends on its batch: share it with no other request
        spans: Sequence[Sequence[Span]] = [()] * len(texts) if protected is None else protected

        def split() -> list[tuple[CutText, list[int]]]:
            return [model.split(text, own) for text, own in zip(texts, spans, strict=True)]

        split_texts = await asyncio.to_thread(split) if sum(map(len, texts)) > LONG else split()
        sentences = [item for (cut, _), own in zip(split_texts, spans, strict=True) for item in _items(cut, bool(own))]
        costs = [cost for _, lengths in split_texts for cost in lengths]
        group = ("translate_aligned" if aligned else "translate", model.name, json.dumps(options, sort_keys=True))
        size = SLICE if wait_for_room else max(1, len(sentences))
        results: list[dict[str, Any]] = []
        for begin in range(0, len(sentences), size):
            some = slice(begin, begin + size)
            results += await self.scheduler.submit(
                client, group, sentences[some], costs[some], wait_for_room=wait_for_room
            )
        remaining = iter(results)
        spaces = self.scheduler.model_cards[model.name]["spaces"] if sentences else True  # of the target language
        joined_results = []
        for text, (cut, _) in zip(texts, split_texts, strict=True):
            parts = [next(remaining) for _ in cut.sources]
            joined_results.append(_joined(text, cut, parts, n_best=n_best or 1, spaces=spaces, aligned=aligned))
        return joined_results

    async def translate_html(
        self, client: Hashable, model: ServedModel, target: str, texts: Sequence[str], n_best: int = 1
    ) -> list[TranslationResult]:
        """Translate HTML: tags between sentences stay, inline tags enclose the words aligned with theirs."""
        # In threads, so that the event loop is not blocked: it takes a while to read and to place many tags.
        pages = await asyncio.to_thread(lambda: [self._html_parts(model, text) for text in texts])
        segments = [segment for page in pages for segment in page.segments]
        marked = [segment for segment in segments if segment.needs_alignment]
        others = [segment for segment in segments if not segment.needs_alignment]

        def translated(some: list[Segment], aligned: bool) -> Coroutine[Any, Any, list[TranslationResult]]:
            spans = [segment.protected for segment in some]
            texts = [segment.text for segment in some]
            return self.translate(client, model, target, texts, aligned=aligned, protected=spans, n_best=n_best)

        of_marked, of_others = map(iter, await asyncio.gather(translated(marked, True), translated(others, False)))

        def write(page: HtmlText) -> TranslationResult:
            results = [next(of_marked if segment.needs_alignment else of_others) for segment in page.segments]
            weights = [result.source_tokens + 1 for result in results]
            texts = []
            for choice in best_combinations([result.scores for result in results], weights, n_best):
                links = [result.links[k] if result.links else None for result, k in zip(results, choice, strict=True)]
                ranked = [result.texts[k] for result, k in zip(results, choice, strict=True)]
                texts.append(page.write([*map(Segment.build, page.segments, ranked, links)]))
            return TranslationResult.combine(texts, [vars(result) for result in results])

        return await asyncio.to_thread(lambda: [write(page) for page in pages])

    def _html_parts(self, model: ServedModel, text: str) -> HtmlText:
        """Read HTML; a run of text that is too long for the model is split at its tags."""

        def fits(text: str) -> bool:
            return sum(model.split(text)[1]) < model.max_length

        cutter = model.cutter
        return HtmlText(text, sentences=cutter.sentences == 1, language=cutter.language, fits=fits)


def _items(cut: CutText, given: bool) -> list[Any]:
    """Return the pieces as the model process reads them: a text, or (text, spans) if a client named protected spans."""
    if not given:
        return list(cut.sources)
    return [[source, own.spans] if own else source for source, own in zip(cut.sources, cut.protected, strict=True)]


def _joined(
    text: str, cut: CutText, parts: Sequence[Mapping[str, Any]], *, n_best: int, spaces: bool, aligned: bool
) -> TranslationResult:
    """Return the result of a text from those of its pieces."""
    if not any(part["source_tokens"] for part in parts):
        whole = 0, len(text)
        pieces = [{"source": whole, "target": whole, "score": 0.0, "flags": ["blank"]}] if text else []
        return TranslationResult.combine([text], [], pieces=pieces)
    weights = [part["source_tokens"] + 1 for part in parts]
    choices = best_combinations([part["scores"] for part in parts], weights, n_best)
    ranks = [[part["texts"][k] for part, k in zip(parts, choice, strict=True)] for choice in choices]
    scores = [
        mean_score(weights, [part["scores"][k] for part, k in zip(parts, choice, strict=True)]) for choice in choices
    ]
    joined = [cut.pieces.join(rank, spaces=spaces) for rank in ranks]
    links: list[list[Link] | None] = []
    for choice, rank, target in zip(choices, ranks, joined, strict=True) if aligned else ():
        of_parts = [part["links"] and part["links"][k] for part, k in zip(parts, choice, strict=True)]
        links.append(join_alignments(text, target, list(cut.pieces), rank, of_parts))
    spans = zip(cut.spans, tiles(ranks[0], cut.pieces.gaps(spaces=spaces)), parts, strict=True)
    pieces = [
        {"source": source, "target": target, "score": part["score"], "flags": part["flags"]}
        for source, target, part in spans
    ]
    return TranslationResult.combine(joined, parts, links=links, scores=scores, pieces=pieces)


def service_of(request: Request) -> Service:
    """The service of the server that received a request."""
    service: Service = request.app.state.service
    return service


def is_openai(request: Request) -> bool:
    return request.url.path.startswith("/v1/")


async def run_until_disconnect(scope: Scope, work: Coroutine[Any, Any, R], seconds: float | None = None) -> R:
    """Return the result of a coroutine; a disconnect cancels it (`Refusal`), the time limit too (`TimeoutError`)."""
    disconnected: asyncio.Future[None] = scope["state"]["disconnected"]  # set by `listener.HttpProtocol`
    try:
        async with asyncio.timeout(seconds) as deadline:

            def cancel(_: object) -> None:
                with suppress(RuntimeError):  # the work is done, or the time limit has passed
                    deadline.reschedule(0)

            disconnected.add_done_callback(cancel)
            try:
                return await work
            finally:
                disconnected.remove_done_callback(cancel)
    except TimeoutError:
        if disconnected.done():
            raise Refusal(499, "the client disconnected") from None
        raise
