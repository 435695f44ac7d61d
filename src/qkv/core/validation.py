"""Validation: the loss on held-out pairs, and BLEU of greedy translations against the raw references."""

from __future__ import annotations

import math
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from qkv.core.batches import Batch, PairBatches, UpdateStream, collate, cut
from qkv.core.config import Config
from qkv.core.dataset import PreparedText
from qkv.core.device import World
from qkv.core.errors import QkvError
from qkv.core.loss import Loss, SmoothedObjective, label_smoothed_loss
from qkv.core.search import SearchOptions, StartSearch, start_search
from qkv.core.tokenizer import one_line
from qkv.core.transformer import Model
from qkv.core.translate import search_all

TOKENS = 4096  # of validation text computed at once


@dataclass(frozen=True)
class Validation:
    """Scores on the validation set."""

    loss: float  # −log p for each token, without label smoothing
    bleu: float | None
    sample: str  # the first translation, for people
    details: dict[str, Any] = field(default_factory=dict)  # further values for the log

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 50.0))

    def value(self, metric: str) -> float:
        """Return the metric as a finite number; more is better."""
        value = self.bleu if metric == "bleu" and self.bleu is not None else -self.loss
        return value if math.isfinite(value) else -sys.float_info.max

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which has no infinity: a loss that is not finite is None."""
        loss, perplexity = (self.loss, self.perplexity) if math.isfinite(self.loss) else (None, None)
        return {"loss": loss, "perplexity": perplexity, "bleu": self.bleu}

    def __str__(self) -> str:
        text = f"loss {self.loss:.4f}  perplexity {self.perplexity:.2f}"
        return text if self.bleu is None else f"{text}  BLEU {self.bleu:.2f} (greedy)"


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], tokenize: str = "13a") -> float:
    """Return sacreBLEU's BLEU of a corpus in NFC; it tokenises the raw references itself."""
    from sacrebleu.metrics.bleu import BLEU

    if not references or len(hypotheses) != len(references):
        raise QkvError(f"{len(hypotheses)} hypotheses but {len(references)} references: give one of both for each line")
    ours, theirs = ([unicodedata.normalize("NFC", each) for each in side] for side in (hypotheses, references))
    metric = BLEU(tokenize=tokenize, force=True)  # force: no warning about tokenised text
    return float(metric.corpus_score(ours, [theirs]).score)


class Task(Protocol):
    """What a kind of model reads, and what it is measured by; `validate` gets a model without dropout."""

    def updates(self, text: PreparedText, config: Config, device: torch.device, world: World) -> UpdateStream: ...
    def validate(self, model: Any, text: PreparedText, config: Config, device: torch.device) -> Validation: ...


class TranslationTask:
    """Training on sentence pairs, validated by the loss and by BLEU of greedy translations.

    The arguments replace the default search, BLEU, loss and batches.
    """

    def __init__(
        self,
        start: StartSearch = start_search,
        bleu: Callable[[Sequence[str], Sequence[str]], float] = corpus_bleu,  # of hypotheses and references
        loss: Loss = label_smoothed_loss,
        batches: Callable[..., UpdateStream] = PairBatches,
    ) -> None:
        self.start, self.bleu, self.loss, self.batches = start, bleu, loss, batches

    def updates(self, text: PreparedText, config: Config, device: torch.device, world: World) -> UpdateStream:
        return self.batches(text.train, text.tokenizers, **update_options(config, device, world))

    def validate(self, model: Any, text: PreparedText, config: Config, device: torch.device) -> Validation:
        """Measure the model on the held-out pairs."""
        store, tokenizers = text.valid, text.tokenizers
        src, tgt = (np.asarray(lengths) + 1 for lengths in (store.lengths("src"), store.lengths("tgt")))
        order = np.lexsort((src, tgt)).astype(np.int64)
        cuts = cut(order, src, tgt, max(TOKENS, int(src.max()), int(tgt.max())))
        held_out = (
            collate([store.row("src", i) for i in rows], [store.row("tgt", i) for i in rows], tokenizers)
            for rows in cuts
        )
        bleu, sample = None, ""
        with torch.inference_mode():
            total, tokens = total_loss(model, held_out, tokenizers.tgt.pad, device, self.loss)
            if config.train.metric == "bleu" and math.isfinite(total):  # else there is nothing to search
                sources = [store.row("src", i).tolist() for i in range(len(store))]
                greedy = SearchOptions(**vars(config.decode) | {"beam": 1})
                found = search_all(model, sources, greedy, tokenizers, device=device, start=self.start)
                texts = [one_line(tokenizers.tgt.decode(best[0].tokens)) for best in found]
                references = text.valid_text[1].read_text(encoding="utf-8").split("\n")[: len(texts)]
                bleu, sample = self.bleu(texts, references), texts[0]
        return Validation(total / tokens, bleu, sample)


def update_options(config: Config, device: torch.device, world: World) -> dict[str, Any]:
    """Return the arguments that all streams of updates have in common."""
    size = {"tokens": config.train.tokens_per_step, "micro_tokens": config.train.micro_tokens}
    return {**size, "seed": config.train.seed, "world": world, "device": device}


def total_loss(model: Model, batches: Iterable[Batch], pad: int, device: torch.device, loss: Loss) -> tuple[float, int]:
    """Return −log p summed over all labels, and the number of labels."""
    objective, total, tokens = SmoothedObjective(0.0, pad, loss), 0.0, 0
    for batch in batches:
        _, nll = objective(model, batch.to(device))
        total += float(nll)
        tokens += batch.tokens
    return total, tokens
