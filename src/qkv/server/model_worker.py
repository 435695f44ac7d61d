"""The model process: it opens runs once, then answers jobs that come as lines of JSON, until nobody listens any more.

A job is a generator: it yields events, which go back one line each. Completions take turns, event by event, so a long
one lets translations pass between two of its tokens, and several grow side by side; every other job is done when its
turn comes. A signal to stop is for the parent, which lets accepted work finish and then hangs up.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
from collections.abc import Callable, Iterator
from typing import Any

import qkv
from qkv.config import DecoderOnlyConfig
from qkv.core.errors import QkvError, UsageError
from qkv.documents.html_text import swap, swap_back
from qkv.worker_pool import freeze_garbage_collector

Event = dict[str, Any]
CHUNK = 1 << 16


def main() -> None:
    """The life of the process; its parent starts it with this and nothing else."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    line = Line(0, answers)
    for first in line.read():
        serve(line, first)


class Line:
    """Messages in and out, each a line of JSON."""

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self.writing = reading, writing
        self.rest = b""

    def read(self, wait: bool = True) -> list[Event]:
        """What has come; if nothing has, nothing, or what comes next. Nothing after waiting is the end."""
        while wait or select.select([self.reading], [], [], 0)[0]:
            data = os.read(self.reading, CHUNK)
            if not data:
                raise EOFError
            *lines, self.rest = (self.rest + data).split(b"\n")
            if lines:
                return [json.loads(line) for line in lines]
        return []

    def write(self, message: Event) -> None:
        data = json.dumps(message, ensure_ascii=False).encode() + b"\n"
        while data:
            data = data[os.write(self.writing, data) :]


def serve(line: Line, told: Event) -> None:
    """Open the runs that were told, say so, and answer until the line ends."""
    import torch

    torch.set_num_threads(told["threads"])
    try:
        models = {name: _open(path, told["device"], told["dtype"]) for name, path in told["runs"].items()}
    except QkvError as error:
        line.write({"failed": str(error)})
        return
    device = str(next(iter(models.values())).device)
    line.write({"ready": {name: card(name, model) for name, model in models.items()}, "device": device})
    freeze_garbage_collector()
    jobs: dict[int, tuple[str, Iterator[Event]]] = {}
    try:
        while True:
            for message in line.read(wait=not jobs):
                if "cancel" in message:
                    jobs.pop(message["cancel"], None)
                else:
                    kind, model = message["kind"], models[message["model"]]
                    jobs[message["job"]] = kind, KINDS[kind](model, **message["asked"])
            for number, (kind, events) in list(jobs.items()):
                event: Event = {"event": None}
                while "event" in event:
                    event = _next(events)
                    line.write({"job": number, **event})
                    if kind == "complete":
                        break
                if "event" not in event:
                    del jobs[number]
    except (EOFError, BrokenPipeError):
        return


def _next(events: Iterator[Event]) -> Event:
    """The next event of a job, its end, or why there is none."""
    try:
        return {"event": next(events)}
    except StopIteration:
        return {"done": True}
    except UsageError as error:
        return {"wrong": str(error)}
    except QkvError as error:
        return {"failed": str(error)}
    except Exception as error:  # of whatever kind: the others are still to be answered
        return {"failed": f"{type(error).__name__}: {error}"}


def _open(path: str, device: str, dtype: str) -> qkv.Translator | qkv.Completer:
    run = qkv.Run.open(path)
    if isinstance(run.config.model, DecoderOnlyConfig):
        return qkv.Completer(run, device=device)
    model = qkv.Translator(run, device=device, dtype=dtype)
    model.translate("warm")  # packs the weights, and on a GPU captures the first graphs
    return model


def card(name: str, model: qkv.Translator | qkv.Completer) -> Event:
    """What people may want to know about a model."""
    from qkv.decoding.search_request import without_spaces
    from qkv.explain.model_card import shape, vocabulary
    from qkv.models.base import parameter_count

    config, scores, written = model.config, model.run.scores, model.run.path / "card.md"
    return {
        "name": name,
        "kind": config.model.kind,
        "does": "translate" if isinstance(model, qkv.Translator) else "complete",
        "source": config.data.src_lang,
        "target": config.data.tgt_lang,
        "spaces": not without_spaces(config.data.tgt_lang),
        "parameters": parameter_count(model.model),
        "shape": shape(config.model),
        "vocabulary": vocabulary(model.tokenizers),
        "engine": model.engine if isinstance(model, qkv.Translator) else f"fp32 on {model.device}",
        "longest": config.data.max_length,
        "made": {name: model.run.about.get(name, "") for name in ("begun", "qkv", "torch")},
        "scores": scores.get(scores.get("chosen", "best"), {}),
        "card": written.read_text(encoding="utf-8") if written.exists() else "",
    }


# ---- jobs ------------------------------------------------------------------------------------------------------------


def translate(model: qkv.Translator, texts: list[str], how: Event) -> Iterator[Event]:
    """Translations of sentences, all asked for alike."""
    yield {"results": _each(texts, lambda some: _translated(model, some, how))}


def markup(model: qkv.Translator, texts: list[str], how: Event) -> Iterator[Event]:
    """The same for sentences with inline tags, which go to the words that their words are aligned with."""
    yield {"results": _each(texts, lambda some: [_marked(model, text, how) for text in some])}


def _marked(model: qkv.Translator, text: str, how: Event) -> Event:
    from qkv.documents.inline_markup import place_markup, strip_markup

    plain = swap_back(strip_markup(text))
    (found,) = _translated(model, [plain], how)
    links = model.align([plain] * len(found["texts"]), found["texts"], tag=how.get("tag", ""))
    placed = [place_markup(text, swap(each), link) for each, link in zip(found["texts"], links, strict=True)]
    return {**found, "texts": placed}


def aligned(model: qkv.Translator, texts: list[str], how: Event) -> Iterator[Event]:
    """Translations, and which words of them come from which, for those who set the markup themselves."""

    def both(some: list[str]) -> list[Event]:
        found = _translated(model, some, how)
        try:
            links = model.align(some, [each["texts"][0] for each in found], tag=how.get("tag", ""))
        except QkvError:
            if len(some) > 1:
                raise
            return [{**found[0], "links": None}]  # too long to align: its translation is worth having all the same
        return [{**each, "links": sorted(link)} for each, link in zip(found, links, strict=True)]

    yield {"results": _each(texts, both)}


def _each(texts: list[str], work: Callable[[list[str]], list[Event]]) -> list[Event]:
    """What the work gives for every text; where it fails, for each alone, so that one does not spoil the others."""
    try:
        return work(texts)
    except QkvError as error:
        if len(texts) > 1:
            return [found for text in texts for found in _each([text], work)]
        return [{"wrong" if isinstance(error, UsageError) else "failed": str(error)}]


def _translated(model: qkv.Translator, texts: list[str], how: Event) -> list[Event]:
    return [
        {
            "texts": [found.text, *(other.text for other in found.alternatives)],
            "score": found.score,
            "logprob": found.logprob,
            "read": len(model.tokenizers.src.encode(text)),
            "written": len(found.tokens),
            "truncated": found.truncated,
            "looped": found.looped,
        }
        for text, found in zip(texts, model.translate(texts, **how), strict=True)
    ]


def score(model: qkv.Translator, source: str, target: str, tag: str = "") -> Iterator[Event]:
    found = model.score(source, target, tag=tag)
    yield {**dataclasses.asdict(found), "perplexity": found.perplexity}


def alternatives(
    model: qkv.Translator, source: str, translation: str, position: int, n: int, tag: str = ""
) -> Iterator[Event]:
    found = model.alternatives(source, translation, position, n, tag=tag)
    yield {"words": [dataclasses.asdict(each) for each in found]}


def attention(
    model: qkv.Translator, text: str, target: str | None, changes: Event | None, tag: str = ""
) -> Iterator[Event]:
    """What the explorer draws, and what a change would make of the translation."""
    found = model.attention(text, target, tag=tag).drawn()
    changed = None if changes is None else model.what_if(text, tag=tag, **_changes(changes)).to_dict()
    yield found | {"what_if": changed}


def _changes(plain: Event) -> Any:
    """JSON has no tuples, and its keys are text."""
    heads = [head if isinstance(head, str) else (head[0], head[1]) for head in plain.get("without", [])]
    force = plain.get("force")
    return {
        "heads_off": heads,
        "force": None if force is None else (force[0], force[1]),
        "drop": plain.get("drop", []),
        "replace": {int(number): word for number, word in plain.get("replace", {}).items()},
    }


def complete(model: qkv.Completer, prompt: str, **how: Any) -> Iterator[Event]:
    from qkv.server.completion_stream import continuations

    return continuations(model, prompt, **how)


KINDS: dict[str, Callable[..., Iterator[Event]]] = {
    each.__name__: each for each in (translate, markup, aligned, score, alternatives, attention, complete)
}
