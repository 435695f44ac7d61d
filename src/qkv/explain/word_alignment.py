"""Word alignment from attention: which word of a source each word of a target comes from, and how well that agrees.

A decoder query stands between two tokens: it is fed one and writes the next. Its weights may be read as those of
either, and both readings are offered. A word takes the sum of the weights on its source tokens, and the mean over its
target tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.assembly import Run
from qkv.core import files
from qkv.core.batches import collate
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import TokenizerPair
from qkv.core.translate import by_length
from qkv.data import alignments
from qkv.data.alignments import Link, tokens_of_words
from qkv.models.attention import record
from qkv.models.state import StepModel
from qkv.options import TransformerConfig
from qkv.training.regularization import guided_layer

READINGS = ("written", "fed")
THRESHOLDS = (0.0, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35)
KEPT = "alignment.json"  # in the run folder
TOKENS = 2048  # forced through the model at once: every weight of every layer is written out meanwhile

Weights = NDArray[np.float32]
Groups = list[list[int]]  # for each word, the positions of its tokens


class Alignment(frozenset[Link]):
    """Links (source word, target word), counted from 0."""

    @classmethod
    def parse(cls, text: str) -> Alignment:
        """From Pharaoh text: `0-0 1-2`."""
        try:
            return cls(alignments.parse_pharaoh(text))
        except ValueError as error:
            raise UsageError(f'"{error}" is no link: an alignment is written source-target, e.g. 0-0 1-2') from None

    def __str__(self) -> str:
        return alignments.to_pharaoh(self)


# ---- agreement -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """Found links against gold ones, of which some may be sure and others only possible (Och and Ney, 2003)."""

    found: int
    sure: int
    found_sure: int
    found_possible: int  # sure ones are possible too

    @property
    def aer(self) -> float:
        """Alignment error rate: 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|)."""
        total = self.found + self.sure
        return 1 - (self.found_sure + self.found_possible) / total if total else 0.0

    @property
    def precision(self) -> float:
        return self.found_possible / self.found if self.found else 1.0

    @property
    def recall(self) -> float:
        return self.found_sure / self.sure if self.sure else 1.0

    def __str__(self) -> str:
        return f"AER {self.aer:.4f}  precision {self.precision:.4f}  recall {self.recall:.4f}"


def agreement(
    found: Sequence[Iterable[Link]], sure: Sequence[Iterable[Link]], possible: Sequence[Iterable[Link]] | None = None
) -> Agreement:
    """How the alignments of a whole test set agree with gold; without possible links, only sure ones are right."""
    if len(found) != len(sure) or (possible is not None and len(possible) != len(sure)):
        raise UsageError(f"{len(found)} alignments and {len(sure)} gold ones: they must correspond line by line")
    counts = np.zeros(4, np.int64)
    for a, s, p in zip(map(set, found), map(set, sure), map(set, possible or sure), strict=True):
        counts += [len(a), len(s), len(a & s), len(a & (p | s))]
    return Agreement(*counts.tolist())


# ---- from weights to links -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """Whose weights align, and how they are read: one head, the mean of a layer's heads, or of all there are.

    A target word is linked with the source word of most weight. With a threshold it is linked also with every word that
    has this share of its weight and gives it this share of its own.
    """

    layer: str = ""  # as recorded, e.g. decoder.0.cross; empty: all layers
    number: int | None = None  # none: the mean of all heads
    reading: str = "written"
    threshold: float = 0.0  # 0: one link for each target word

    def __post_init__(self) -> None:
        if self.reading not in READINGS:
            raise UsageError(f'"{self.reading}" is no reading of attention: choose one of {", ".join(READINGS)}')
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold = {self.threshold}: must be from 0 to 1")

    def __str__(self) -> str:
        whose = f"head {self.number}" if self.number is not None else "mean of heads"
        how = f"threshold {self.threshold:g}" if self.threshold else "best word"
        return f"{self.layer or 'all layers'}, {whose}, {self.reading}, {how}"

    def choose(self, weights: Mapping[str, Weights]) -> Weights:
        """This head's weights, (target, source), from those of all layers, each (heads, target, source)."""
        if self.layer and self.layer not in weights:
            raise UsageError(f'no attention is called "{self.layer}": there are {", ".join(weights)}')
        layer = weights[self.layer] if self.layer else np.concatenate(list(weights.values()))
        if self.number is None:
            mean: Weights = layer.mean(0)
            return mean
        if not self.layer or not 0 <= self.number < len(layer):
            raise UsageError(
                f"head {self.number} of {self.layer or 'all layers'}: name a layer and 0 to {len(layer) - 1}"
            )
        chosen: Weights = layer[self.number]
        return chosen


def word_weights(weights: Weights, source: Groups, target: Groups, reading: str = "written") -> Weights:
    """Weights between tokens (…, target, source) as weights between words (…, target words, source words).

    The rows are the decoder's queries: <s> and the target are fed to them, the target and </s> written by them.
    """
    queries, keys = weights.shape[-2:]
    shift = READINGS.index(reading)
    columns = np.zeros((keys, len(source)), np.float32)
    rows = np.zeros((len(target), queries), np.float32)
    for word, tokens in enumerate(source):
        columns[tokens, word] = 1.0
    for word, tokens in enumerate(target):
        rows[word, [token + shift for token in tokens]] = 1.0 / len(tokens)
    joined: Weights = (rows @ weights @ columns).astype(np.float32)
    return joined


def choose_links(weights: Weights, threshold: float = 0.0) -> NDArray[np.bool_]:
    """Which words are linked, given the weights between words (…, target words, source words)."""
    tiny = np.finfo(np.float32).tiny
    chosen = np.zeros(weights.shape, np.bool_)
    np.put_along_axis(chosen, weights.argmax(-1)[..., None], True, axis=-1)
    if threshold:
        of_target = weights / np.maximum(weights.sum(-1, keepdims=True), tiny)
        of_source = weights / np.maximum(weights.sum(-2, keepdims=True), tiny)
        chosen |= np.minimum(of_target, of_source) >= threshold
    return chosen


def align(weights: Mapping[str, Weights], source: Groups, target: Groups, head: Head) -> Alignment:
    """The alignment of one sentence pair from its cross-attention, by name (heads, target, source)."""
    if not source or not target:
        return Alignment()
    chosen = choose_links(word_weights(head.choose(weights), source, target, head.reading), head.threshold)
    return Alignment((int(i), int(j)) for j, i in np.argwhere(chosen))


# ---- a model's alignments --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pair:
    """A sentence pair forced through the model."""

    weights: dict[str, Weights]
    source: Groups
    target: Groups


@torch.inference_mode()
def _force(
    model: StepModel[Any, Any],
    tokenizers: TokenizerPair,
    sources: Sequence[str],
    targets: Sequence[str],
    device: torch.device,
    rule: str,
    tag: str,
) -> Iterator[tuple[int, _Pair]]:
    """Every pair that has words on both sides, by its number, with the weights of all cross-attention."""
    if len(sources) != len(targets):
        raise UsageError(f"{len(sources)} sources but {len(targets)} targets: they must correspond line by line")
    src, tgt = tokenizers.src, tokenizers.tgt
    prefix = [src.tag(tag)] if tag else []
    numbers = [
        n for n, pair in enumerate(zip(sources, targets, strict=True)) if all(alignments.words(s, rule) for s in pair)
    ]
    rows = [prefix + src.encode(sources[n]) for n in numbers]
    written = [tgt.encode(targets[n]) for n in numbers]
    for some in by_length([max(len(s), len(t)) + 1 for s, t in zip(rows, written, strict=True)], TOKENS):
        given = [np.asarray(rows[i], np.int64) for i in some], [np.asarray(written[i], np.int64) for i in some]
        batch = collate(*given, tokenizers).to(device)
        with record() as recording:
            model.step(batch.target, model.start(model.encode(batch.source, batch.lengths)))
        cross = {
            name: torch.cat(parts, dim=2).float().cpu().numpy()  # (batch, heads, target, source)
            for name, parts in recording.weights.items()
            if name.endswith(".cross")
        }
        for place, i in enumerate(some):
            number = numbers[i]
            yield (
                number,
                _Pair(
                    {name: weights[place] for name, weights in cross.items()},
                    tokens_of_words(src, rows[i], sources[number], rule),
                    tokens_of_words(tgt, written[i], targets[number], rule),
                ),
            )


def align_pairs(
    model: StepModel[Any, Any],
    tokenizers: TokenizerPair,
    sources: Sequence[str],
    targets: Sequence[str],
    device: torch.device,
    head: Head | None = None,
    *,
    rule: str = "marks",
    tag: str = "",
    progress: Callable[[int], None] = lambda done: None,
) -> list[Alignment]:
    """The alignment of each source with its target, which is forced through the model.

    `head` is one that `rank_heads` found; without it, the mean of all heads of all layers aligns, less well.
    `rule` says what a word is: punctuation marks stand alone ("marks"), or words are what spaces divide ("spaces").
    """
    found = [Alignment() for _ in sources]
    for number, pair in _force(model, tokenizers, sources, targets, device, rule, tag):
        found[number] = align(pair.weights, pair.source, pair.target, head or Head())
        progress(1)
    return found


def rank_heads(
    model: StepModel[Any, Any],
    tokenizers: TokenizerPair,
    sources: Sequence[str],
    targets: Sequence[str],
    gold: Sequence[Iterable[Link]],
    device: torch.device,
    *,
    rule: str = "marks",
    tag: str = "",
    thresholds: Sequence[float] = THRESHOLDS,
) -> list[tuple[Head, Agreement]]:
    """Every head, layer mean and reading with every threshold, best first: the gold is that of a validation set."""
    counts: dict[Head, NDArray[np.int64]] = {}
    for number, pair in _force(model, tokenizers, sources, targets, device, rule, tag):
        right = np.zeros((len(pair.target), len(pair.source)), np.bool_)
        for i, j in gold[number]:
            if j >= len(pair.target) or i >= len(pair.source):
                sizes = f"{len(pair.source)} and {len(pair.target)}"
                raise UsageError(
                    f"line {number + 1}: link {i}-{j}, but the sentences have {sizes} words: check the rule"
                )
            right[j, i] = True
        for reading in READINGS:
            heads = _all_heads(pair.weights, reading)
            stacked = np.stack([head.choose(pair.weights) for head in heads])
            joined = word_weights(stacked, pair.source, pair.target, reading)
            for threshold in thresholds:
                chosen = choose_links(joined, threshold)
                for head, found, same in zip(heads, chosen.sum((1, 2)), (chosen & right).sum((1, 2)), strict=True):
                    own = Head(head.layer, head.number, reading, threshold)
                    counts.setdefault(own, np.zeros(2, np.int64))[:] += (found, same)
    sure = sum(len(set(one)) for one in gold)
    if not counts:
        raise UsageError("no sentence pair has words on both sides: give a validation set with gold alignments")
    scores = [(head, Agreement(int(a), sure, int(both), int(both))) for head, (a, both) in counts.items()]
    return sorted(scores, key=lambda scored: scored[1].aer)


def alignment_head(run: Run) -> Head:
    """The head to align with: what `keep_head` kept, or what guided alignment taught, or else the mean of all."""
    path = run.path / KEPT
    if path.exists():
        try:
            return Head(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise QkvError(f"{path}: damaged: find the head anew with `qkv align {run.path} … --find`") from None
    if run.config.train.guided_alignment and isinstance(run.config.model, TransformerConfig):
        return Head(f"decoder.{guided_layer(run.config.model.decoder_layers)}.cross", 0, "written", 0.2)
    return Head()


def keep_head(run: Run, head: Head) -> None:
    """Keep in the run folder which head to align with."""
    files.write_text(run.path / KEPT, json.dumps(dataclasses.asdict(head)) + "\n")


def _all_heads(weights: Mapping[str, Weights], reading: str) -> list[Head]:
    """Every head, the mean of every layer, and the mean of all."""
    numbers = [(name, number) for name, layer in weights.items() for number in (*range(len(layer)), None)]
    return [*(Head(name, number, reading) for name, number in numbers), Head(reading=reading)]


# ---- uses ------------------------------------------------------------------------------------------------------------


def untranslated(words: Sequence[str], alignment: Iterable[Link]) -> list[bool]:
    """For each source word, whether nothing in the target is linked with it."""
    linked = {i for i, _ in alignment}
    return [number not in linked for number in range(len(words))]
