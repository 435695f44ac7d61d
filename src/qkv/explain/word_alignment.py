"""Word alignment from cross-attention, choice of the best head, and alignment error rate.

A decoder query has an input token (`fed`) and predicts the next one (`written`); its weights may be attributed to
either, a choice called `reading`. The weight between two words is the sum over the source word's tokens and the mean
over the target word's tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.assembly import Run
from qkv.core import files
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import TokenizerPair
from qkv.core.transformer import StepModel
from qkv.data import alignments
from qkv.data.alignments import Link, tokens_of_words
from qkv.decoding.search_request import pair_batches
from qkv.explain.attention_heads import attention_of_pairs
from qkv.options import TransformerConfig
from qkv.training.regularization import guided_layer

READINGS = ("written", "fed")
THRESHOLDS = (0.0, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35)
HEAD_FILE = "alignment.json"  # in the run folder

Weights = NDArray[np.float32]
Groups = list[list[int]]  # for each word, the positions of its tokens


class Alignment(frozenset[Link]):
    """Links (source word, target word), counted from 0."""

    @classmethod
    def parse(cls, text: str) -> Alignment:
        """Parse Pharaoh text: `0-0 1-2`."""
        try:
            return cls(alignments.parse_pharaoh(text))
        except ValueError as error:
            raise UsageError(str(error)) from None

    def __str__(self) -> str:
        return alignments.to_pharaoh(self)


# ---- agreement -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """Counts of predicted links A, sure gold links S, |A ∩ S| and |A ∩ P|, as in Och and Ney (2003)."""

    predicted: int
    sure: int
    correct_sure: int
    correct_possible: int  # sure links are possible too

    @property
    def aer(self) -> float:
        """Alignment error rate: 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|)."""
        total = self.predicted + self.sure
        return 1 - (self.correct_sure + self.correct_possible) / total if total else 0.0

    @property
    def precision(self) -> float:
        return self.correct_possible / self.predicted if self.predicted else 1.0

    @property
    def recall(self) -> float:
        return self.correct_sure / self.sure if self.sure else 1.0

    def __str__(self) -> str:
        return f"AER {self.aer:.4f}  precision {self.precision:.4f}  recall {self.recall:.4f}"


def agreement(
    predicted: Sequence[Iterable[Link]],
    sure: Sequence[Iterable[Link]],
    possible: Sequence[Iterable[Link]] | None = None,
) -> Agreement:
    """Compare the alignments of a test set with gold ones; without possible links, only sure ones are correct."""
    if len(predicted) != len(sure) or (possible is not None and len(possible) != len(sure)):
        raise UsageError(f"{len(predicted)} alignments but {len(sure)} gold alignments: give one line for each")
    counts = np.zeros(4, np.int64)
    for a, s, p in zip(map(set, predicted), map(set, sure), map(set, possible or sure), strict=True):
        counts += [len(a), len(s), len(a & s), len(a & (p | s))]
    return Agreement(*counts.tolist())


# ---- from weights to links -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlignmentHead:
    """The source of alignment weights: one head, the mean of a layer's heads, or of all heads; and how to read them.

    A target word is linked with the source word of greatest weight. With a threshold it is also linked with each source
    word for which the weight is at least this share of the target word's row and of the source word's column.
    """

    layer: str = ""  # e.g. decoder.0.cross; empty: all layers
    number: int | None = None  # None: the mean of all heads
    reading: str = "written"
    threshold: float = 0.0  # 0: one link for each target word

    def __post_init__(self) -> None:
        if self.reading not in READINGS:
            raise UsageError(f'unknown reading "{self.reading}": choose one of {", ".join(READINGS)}')
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold = {self.threshold}: must be from 0 to 1")

    def __str__(self) -> str:
        head = f"head {self.number}" if self.number is not None else "mean of heads"
        rule = f"threshold {self.threshold:g}" if self.threshold else "best word"
        return f"{self.layer or 'all layers'}, {head}, {self.reading}, {rule}"

    def choose(self, weights: Mapping[str, Weights]) -> Weights:
        """Return one head's weights (target, source), or the mean over heads; a layer has (heads, target, source)."""
        if self.layer and self.layer not in weights:
            raise UsageError(f'the model has no attention "{self.layer}": choose one of {", ".join(weights)}')
        layer = weights[self.layer] if self.layer else np.concatenate(list(weights.values()))
        if self.number is None:
            return layer.mean(0)
        if not self.layer or not 0 <= self.number < len(layer):
            raise UsageError(
                f"no head {self.number} of {self.layer or 'all layers'}: name a layer and a head, 0 to {len(layer) - 1}"
            )
        return layer[self.number]


def word_weights(weights: Weights, source: Groups, target: Groups, reading: str = "written") -> Weights:
    """Convert weights between tokens (…, target, source) to weights between words (…, target words, source words).

    The rows are the decoder's queries, with inputs <s> and the target tokens, and outputs the target tokens and </s>.
    """
    queries, keys = weights.shape[-2:]
    shift = READINGS.index(reading)
    columns = np.zeros((keys, len(source)), np.float32)
    rows = np.zeros((len(target), queries), np.float32)
    for word, tokens in enumerate(source):
        columns[tokens, word] = 1.0
    for word, tokens in enumerate(target):
        rows[word, [token + shift for token in tokens]] = 1.0 / len(tokens)
    return (rows @ weights @ columns).astype(np.float32)


def choose_links(weights: Weights, threshold: float = 0.0) -> NDArray[np.bool_]:
    """Return the links as a mask, given the weights between words (…, target words, source words)."""
    tiny = np.finfo(np.float32).tiny
    chosen = np.zeros(weights.shape, np.bool_)
    np.put_along_axis(chosen, weights.argmax(-1)[..., None], True, axis=-1)
    if threshold:
        of_target = weights / np.maximum(weights.sum(-1, keepdims=True), tiny)
        of_source = weights / np.maximum(weights.sum(-2, keepdims=True), tiny)
        chosen |= np.minimum(of_target, of_source) >= threshold
    return chosen


# ---- a model's alignments --------------------------------------------------------------------------------------------


@torch.inference_mode()
def _record_pairs(
    model: StepModel,
    tokenizers: TokenizerPair,
    sources: Sequence[str],
    targets: Sequence[str],
    device: torch.device,
    rule: str,
    tag: str,
) -> Iterator[tuple[int, dict[str, Weights], Groups, Groups]]:
    """Run the model with teacher forcing on all pairs with words on both sides.

    Yield each pair's index, its cross-attention weights by name, and the tokens of its source and target words.
    """
    if len(sources) != len(targets):
        raise UsageError(f"{len(sources)} sources but {len(targets)} targets: give one target for each source")
    src, tgt = tokenizers.src, tokenizers.tgt
    sources, targets = ([line.strip(" \t\r\n") for line in side] for side in (sources, targets))
    prefix = [src.tag(tag)] if tag else []
    numbers = [
        n for n, pair in enumerate(zip(sources, targets, strict=True)) if all(alignments.words(s, rule) for s in pair)
    ]
    source_ids = [prefix + src.encode(sources[n]) for n in numbers]
    target_ids = [tgt.encode(targets[n]) for n in numbers]
    for indices, batch in pair_batches(source_ids, target_ids, tokenizers, device):
        cross = attention_of_pairs(model, batch, ".cross")  # (batch, heads, target, source)
        for row, i in enumerate(indices):
            number = numbers[i]
            weights = {name: layer[row] for name, layer in cross.items()}
            source_words = tokens_of_words(src, source_ids[i], sources[number], rule)
            target_words = tokens_of_words(tgt, target_ids[i], targets[number], rule)
            yield number, weights, source_words, target_words


def align_pairs(
    model: StepModel,
    tokenizers: TokenizerPair,
    sources: Sequence[str],
    targets: Sequence[str],
    device: torch.device,
    head: AlignmentHead,
    *,
    rule: str = "marks",
    tag: str = "",
    progress: Callable[[int], None] = lambda done: None,
) -> list[Alignment]:
    """Align each source with its target, by the attention weights of a teacher-forced pass.

    `head` is a result of `rank_heads`, or `AlignmentHead()`: the mean of all heads, which aligns less well. `rule`
    defines words: "marks" (separated by spaces, punctuation marks are words) or "spaces" (separated by spaces only).
    """
    alignments = [Alignment() for _ in sources]
    for number, weights, source, target in _record_pairs(model, tokenizers, sources, targets, device, rule, tag):
        of_words = word_weights(head.choose(weights), source, target, head.reading)
        links = np.argwhere(choose_links(of_words, head.threshold)).tolist()
        alignments[number] = Alignment((i, j) for j, i in links)
        progress(1)
    return alignments


def rank_heads(
    model: StepModel,
    tokenizers: TokenizerPair,
    sources: Sequence[str],
    targets: Sequence[str],
    gold: Sequence[Iterable[Link]],
    device: torch.device,
    *,
    rule: str = "marks",
    tag: str = "",
) -> list[tuple[AlignmentHead, Agreement]]:
    """Score every head, layer mean, reading and threshold against gold alignments of a validation set, best first."""
    counts: dict[AlignmentHead, NDArray[np.int64]] = {}  # predicted and correct links
    for number, weights, source, target in _record_pairs(model, tokenizers, sources, targets, device, rule, tag):
        expected = np.zeros((len(target), len(source)), np.bool_)
        for i, j in gold[number]:
            if j >= len(target) or i >= len(source):
                raise UsageError(
                    f"line {number + 1}: link {i}-{j}, but the sentences have {len(source)} and {len(target)} words: "
                    f"give gold alignments of these lines, or choose another rule for words"
                )
            expected[j, i] = True
        for reading in READINGS:
            names = [(name, head) for name, layer in weights.items() for head in (*range(len(layer)), None)]
            heads = [*(AlignmentHead(name, head, reading) for name, head in names), AlignmentHead(reading=reading)]
            stacked = np.stack([head.choose(weights) for head in heads])
            of_words = word_weights(stacked, source, target, reading)
            for threshold in THRESHOLDS:
                predicted = choose_links(of_words, threshold)
                correct = predicted & expected
                for head, *numbers in zip(heads, predicted.sum((1, 2)), correct.sum((1, 2)), strict=True):
                    candidate = dataclasses.replace(head, threshold=threshold)
                    counts.setdefault(candidate, np.zeros(2, np.int64))[:] += numbers
    sure = sum(len(set(links)) for links in gold)
    if not counts:
        raise UsageError("no sentence pair has words on both sides: give a validation set with gold alignments")
    scores = [(head, Agreement(int(a), sure, int(hits), int(hits))) for head, (a, hits) in counts.items()]
    return sorted(scores, key=lambda scored: scored[1].aer)


def alignment_head(run: Run) -> AlignmentHead:
    """Return the head to align with: the saved one, else that of guided alignment, else the mean of all heads."""
    path = run.path / HEAD_FILE
    if path.exists():
        try:
            return AlignmentHead(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise QkvError(f"{path}: damaged: find the head again with `qkv align {run.path} … --find`") from None
    if run.config.train.guided_alignment and isinstance(run.config.model, TransformerConfig):
        return AlignmentHead(f"decoder.{guided_layer(run.config.model.decoder_layers)}.cross", 0, "written", 0.2)
    return AlignmentHead()


def save_head(run: Run, head: AlignmentHead) -> None:
    """Write the head to align with into the run folder."""
    files.write_text(run.path / HEAD_FILE, json.dumps(dataclasses.asdict(head)) + "\n")
