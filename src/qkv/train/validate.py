"""Validation: the loss on held-out text, and what else tells how good a model of its kind is.

Models that translate are scored by BLEU of greedy translations against the raw references; a language model by the
loss for each character and byte of the text, which no choice of tokens can flatter.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qkv import config
from qkv.data import batches
from qkv.data.loader import Batch, collate
from qkv.data.plain import block_batch, hide, text_blocks
from qkv.data.store import Prepared
from qkv.decode.batched import search_all
from qkv.decode.complete import Sampling, generate
from qkv.evaluate import metrics
from qkv.models.base import Model, TranslationModel
from qkv.models.transformer import DecoderOnly
from qkv.train.loss import smoothed_loss

TOKENS = 4096  # of validation text computed at once
SAMPLE = 48  # tokens that a language model writes to be looked at


@dataclass(frozen=True)
class Validation:
    """Scores on the validation set."""

    loss: float  # −log p for each token, not smoothed
    bleu: float | None
    sample: str  # the first translation, or some text, to look at
    text: metrics.TextLoss | None = None  # the same loss for each character and byte of running text

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 50.0))

    def value(self, metric: str) -> float:
        """The metric as a finite number of which more is better."""
        value = self.bleu if metric == "bleu" and self.bleu is not None else -self.loss
        return value if math.isfinite(value) else -sys.float_info.max

    def to_dict(self) -> dict[str, Any]:
        """Plain values; a loss that is not finite, which JSON cannot hold, is None."""
        finite = math.isfinite(self.loss)
        return {
            "loss": self.loss if finite else None,
            "perplexity": self.perplexity if finite else None,
            "bleu": self.bleu,
            **(self.text.to_dict() if self.text and finite else {}),
        }

    def __str__(self) -> str:
        text = f"loss {self.loss:.4f}  perplexity {self.perplexity:.2f}"
        if self.text is not None:
            text += f"  nats per character {self.text.per_character:.4f}  bits per byte {self.text.bits_per_byte:.4f}"
        return text if self.bleu is None else f"{text}  BLEU {self.bleu:.2f} (greedy)"


@torch.inference_mode()
def validate(model: Model, prepared: Prepared, spec: config.Config, device: torch.device) -> Validation:
    """Measure the model as it stands; dropout is off while this runs."""
    training = model.training
    model.eval()
    total, tokens = total_loss(model, _batches(prepared, spec), prepared.tokenizers.tgt.pad, device)
    bleu, sample, text = None, "", None
    if isinstance(model, DecoderOnly):
        raw = prepared.valid_text[1].read_text(encoding="utf-8")
        text = metrics.TextLoss(total, tokens, len(raw), len(raw.encode()))
        sample = _sample(model, prepared, spec, device)
    elif isinstance(model, TranslationModel) and spec.train.metric == "bleu":
        bleu, sample = _bleu(model, prepared, spec, device)
    model.train(training)
    return Validation(total / tokens, bleu, sample, text)


def total_loss(model: Model, given: Iterator[Batch], pad: int, device: torch.device) -> tuple[float, int]:
    """−log p of all labels together, and their number."""
    total, tokens = 0.0, 0
    for batch in given:
        moved = batch.to(device)
        _, nll = smoothed_loss(model.hidden(*moved.inputs), model.output.weight, moved.labels, smoothing=0.0, pad=pad)
        total += float(nll)
        tokens += batch.tokens
    return total, tokens


def _batches(prepared: Prepared, spec: config.Config) -> Iterator[Batch]:
    """The validation text as this kind of model is measured on it: the same at every validation."""
    store, tgt = prepared.valid, prepared.tokenizers.tgt
    if isinstance(spec.model, config.DecoderOnly):
        yield from running_text(np.asarray(store.stream), spec, prepared.tokenizers.tgt)
        return
    widths = [np.asarray(store.tgt_lengths) + 1]
    if isinstance(spec.model, config.Translating):
        widths.insert(0, np.asarray(store.src_lengths) + 1)
    order = np.lexsort(widths).astype(np.int64)
    for indices in batches.cut(order, widths[0], widths[-1], max(TOKENS, *(int(side.max()) for side in widths))):
        rows = [store.tgt(i) for i in indices]
        if isinstance(spec.model, config.EncoderOnly):
            random = [np.random.default_rng((int(i), 5)) for i in indices]
            yield hide([row.astype(np.int64) for row in rows], tgt, spec.model.masked, random)
        else:
            yield collate([store.src(i) for i in indices], rows, prepared.tokenizers)


def running_text(ids: Any, spec: config.Config, tokenizer: Any) -> Iterator[Batch]:
    """A whole text in blocks of the model's context, each token predicted once."""
    length = spec.data.max_length
    blocks = text_blocks(ids, tokenizer, length)
    rows = max(1, TOKENS // length)
    return (block_batch(blocks[first : first + rows]) for first in range(0, len(blocks), rows))


def _sample(model: DecoderOnly, prepared: Prepared, spec: config.Config, device: torch.device) -> str:
    tgt = prepared.tokenizers.tgt
    drawn = generate(
        model,
        [tgt.newline],
        Sampling(temperature=0.8, seed=0),
        context=spec.data.max_length,
        forbidden=(tgt.pad, tgt.bos, tgt.eos),
        device=device,
    )
    return tgt.decode_text([next(drawn).tokens[0] for _ in range(SAMPLE)])


def _bleu(model: TranslationModel, prepared: Prepared, spec: config.Config, device: torch.device) -> tuple[float, str]:
    store, tokenizers = prepared.valid, prepared.tokenizers
    sources = [store.src(i).tolist() for i in range(len(store))]
    greedy = dataclasses.replace(spec.decode, beam=1)
    found = search_all(model, sources, greedy, tokenizers, device=device)
    texts = [tokenizers.tgt.decode(hypotheses[0].tokens).replace("\n", " ") for hypotheses in found]
    references = prepared.valid_text[1].read_text(encoding="utf-8").split("\n")[: len(texts)]
    return metrics.bleu(texts, references, tgt_lang=spec.data.tgt_lang), texts[0]
