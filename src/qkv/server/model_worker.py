"""The model process: loads the runs, then answers jobs sent as lines of JSON, until its input is closed.

A job is a generator; each event it yields is sent back as one line. Completions take turns event by event, so several
grow at once and a translation waits for one token at most; every other job runs to its end. The process ignores stop
signals: the listening process lets accepted work finish and then closes the input.
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
from qkv.core.errors import QkvError, UsageError
from qkv.options import DecoderOnlyConfig
from qkv.segmentation.special_spaces import plain
from qkv.worker_pool import freeze_garbage_collector

Event = dict[str, Any]
READ_SIZE = 1 << 16


def main() -> None:
    """Entry point of the process (see `worker_supervisor.START`)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    output = os.dup(1)
    os.dup2(2, 1)  # prints of a library go to standard error
    channel = JsonLines(0, output)
    for settings in channel.read():
        run_jobs(channel, settings)


class JsonLines:
    """Messages as lines of JSON over two file descriptors."""

    def __init__(self, input: int, output: int) -> None:
        self.input, self.output = input, output
        self.rest = b""

    def read(self, wait: bool = True) -> list[Event]:
        """Return the messages that have arrived; with `wait`, at least one. Raises EOFError at the end."""
        while wait or select.select([self.input], [], [], 0)[0]:
            data = os.read(self.input, READ_SIZE)
            if not data:
                raise EOFError
            *lines, self.rest = (self.rest + data).split(b"\n")
            if lines:
                return [json.loads(line) for line in lines]
        return []

    def write(self, message: Event) -> None:
        data = json.dumps(message, ensure_ascii=False).encode() + b"\n"
        while data:
            data = data[os.write(self.output, data) :]


def run_jobs(channel: JsonLines, settings: Event) -> None:
    """Load the runs, report that they are ready, and run jobs until the channel is closed."""
    import torch

    torch.set_num_threads(settings["threads"])
    try:
        models = {name: _load(path, settings["device"], settings["dtype"]) for name, path in settings["runs"].items()}
    except QkvError as error:
        channel.write({"failed": str(error)})
        return
    device = str(next(iter(models.values())).device)
    channel.write({"ready": {name: model_card(model) for name, model in models.items()}, "device": device})
    freeze_garbage_collector()
    jobs: dict[int, tuple[str, Iterator[Event]]] = {}
    try:
        while True:
            for message in channel.read(wait=not jobs):
                if "cancel" in message:
                    jobs.pop(message["cancel"], None)
                else:
                    kind, model = message["kind"], models[message["model"]]
                    jobs[message["job"]] = kind, JOBS[kind](model, **message["arguments"])
            for number, (kind, events) in list(jobs.items()):
                event: Event = {"event": None}
                while "event" in event:
                    event = _next_event(events)
                    channel.write({"job": number, **event})
                    if kind == "complete":
                        break
                if "event" not in event:
                    del jobs[number]
    except (EOFError, BrokenPipeError):
        return


def _next_event(events: Iterator[Event]) -> Event:
    """The next event of a job, its end, or its error."""
    try:
        return {"event": next(events)}
    except StopIteration:
        return {"done": True}
    except UsageError as error:
        return {"invalid": str(error)}
    except QkvError as error:
        return {"failed": str(error)}
    except Exception as error:  # a bug must not end the process: it has other jobs
        return {"failed": f"{type(error).__name__}: {error}"}


def _load(path: str, device: str, dtype: str) -> qkv.Translator | qkv.LanguageModel:
    run = qkv.Run.open(path)
    if isinstance(run.config.model, DecoderOnlyConfig):
        return qkv.LanguageModel(run, device=device)
    model = qkv.Translator(run, device=device, dtype=dtype)
    model.translate("warm")  # packs the weights, and on a GPU captures the first CUDA graphs
    return model


def model_card(model: qkv.Translator | qkv.LanguageModel) -> Event:
    """The fields of a model in `GET /models` that need the loaded model."""
    from qkv.assembly import parameter_count, shape, vocabulary
    from qkv.decoding.search_request import without_spaces

    config, scores, card = model.config, model.run.scores, model.run.path / "card.md"
    return {
        "kind": config.model.kind,
        "target": config.data.tgt_lang,
        "spaces": not without_spaces(config.data.tgt_lang),
        "parameters": parameter_count(model.model),
        "shape": shape(config.model),
        "vocabulary": vocabulary(model.tokenizers),
        "engine": model.engine if isinstance(model, qkv.Translator) else f"fp32 on {model.device}",
        "longest": config.data.max_length,
        "made": {name: model.run.about.get(name, "") for name in ("begun", "qkv", "torch")},
        "scores": scores.get(scores.get("chosen", "best"), {}),
        "card": card.read_text(encoding="utf-8") if card.exists() else "",
    }


# ---- jobs ------------------------------------------------------------------------------------------------------------


def translate(model: qkv.Translator, texts: list[Any], options: Event) -> Iterator[Event]:
    """Translate sentences with equal options."""
    yield {"results": _isolate_errors(texts, lambda some: _translate(model, some, options))}


def translate_aligned(model: qkv.Translator, texts: list[Any], options: Event) -> Iterator[Event]:
    """Translate sentences, and return the links between source and target words for each alternative."""

    def translate_some(some: list[Any]) -> list[Event]:
        results = _translate(model, some, options)
        sources = [_text(item) for item, result in zip(some, results, strict=True) for _ in result["texts"]]
        targets = [target for result in results for target in result["texts"]]
        try:
            links = iter(model.align(sources, targets, tag=options.get("tag", ""), split=False))
        except QkvError:
            if len(some) > 1:
                raise
            return [{**results[0], "links": None}]  # too long to align: return the translation without links
        return [{**result, "links": [sorted(next(links)) for _ in result["texts"]]} for result in results]

    yield {"results": _isolate_errors(texts, translate_some)}


def _isolate_errors(texts: list[Any], work: Callable[[list[Any]], list[Event]]) -> list[Event]:
    """Run the work on all texts, or after an error on each alone, so that one bad text does not fail the others."""
    try:
        return work(texts)
    except QkvError as error:
        if len(texts) > 1:
            return [result for text in texts for result in _isolate_errors([text], work)]
        return [{"invalid" if isinstance(error, UsageError) else "failed": str(error)}]


def _translate(model: qkv.Translator, items: list[Any], options: Event) -> list[Event]:
    """Translate pieces; an item is a text, or a text with its protected spans."""
    texts = [_text(item) for item in items]
    if any(not isinstance(item, str) for item in items):
        options = {**options, "protected": [() if isinstance(item, str) else item[1] for item in items]}
    return [
        {
            "texts": [result.text, *(other.text for other in result.alternatives)],
            "scores": [result.score, *(other.score for other in result.alternatives)],
            "score": result.score,
            "logprob": result.logprob,
            "source_tokens": _source_tokens(model, text, options, result),
            "target_tokens": len(result.tokens),
            "truncated": result.truncated,
            "looped": result.looped,
            "flags": [flag for flag in result.flags if flag != "blank"],
        }
        for text, result in zip(texts, model.translate(texts, split=False, **options), strict=True)
    ]


def _source_tokens(model: qkv.Translator, text: str, options: Event, result: qkv.Translation) -> int:
    """The number of tokens that the model read: with a language tag, and with stand-ins for protected text."""
    if result.finish_reason == "blank":
        return 0
    if result.tokens:
        return round(len(result.tokens) / result.length_ratio)
    return len(model.tokenizers.src.encode(plain(text)[0].strip())) + bool(options.get("tag"))


def _text(item: Any) -> str:
    return str(item if isinstance(item, str) else item[0])


def score(model: qkv.Translator, source: str, target: str, tag: str = "") -> Iterator[Event]:
    result = model.score(source, target, tag=tag)
    yield {**dataclasses.asdict(result), "perplexity": result.perplexity}


def alternatives(
    model: qkv.Translator, source: str, translation: str, position: int, n: int, tag: str = ""
) -> Iterator[Event]:
    words = model.alternatives(source, translation, position, n, tag=tag)
    yield {"words": [dataclasses.asdict(word) for word in words]}


def attention(
    model: qkv.Translator, text: str, target: str | None, changes: Event | None, tag: str = ""
) -> Iterator[Event]:
    """The data of the attention explorer, and the effect of changes on the translation."""
    drawing = model.attention(text, target, tag=tag).drawn()
    effect = None
    if changes is not None:
        # JSON has no tuples and no integer keys.
        force = changes.get("force")
        effect = model.what_if(
            text,
            tag=tag,
            heads_off=[h if isinstance(h, str) else (h[0], h[1]) for h in changes.get("without", [])],
            force=None if force is None else (force[0], force[1]),
            drop=changes.get("drop", []),
            replace={int(number): word for number, word in changes.get("replace", {}).items()},
        ).to_dict()
    yield drawing | {"what_if": effect}


def complete(model: qkv.LanguageModel, prompt: str, **options: Any) -> Iterator[Event]:
    """The length of the prompt, then for each step the new tokens of the unfinished continuations."""
    yield {"prompt_tokens": model.prompt_tokens(prompt)}
    for tokens in model.stream_tokens(prompt, **options):
        yield {"tokens": [{"token": model.token_text(token.id), **token._asdict()} for token in tokens]}


JOBS: dict[str, Callable[..., Iterator[Event]]] = {
    job.__name__: job for job in (translate, translate_aligned, score, alternatives, attention, complete)
}
