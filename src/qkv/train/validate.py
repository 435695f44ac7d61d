"""Validation: the loss on held-out text, and what else tells how good a model of its kind is.

Models that translate are scored by BLEU of greedy translations against the raw references; a language model by the
loss for each character and byte of the text, which no choice of tokens can flatter. How sharply the attentions look is
told by their entropy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from qkv.core.search import SearchOptions
from qkv.core.translate import search_all
from qkv.data import batches
from qkv.data.loader import Batch, collate
from qkv.data.plain import block_batch, hide, text_blocks
from qkv.data.store import Prepared
from qkv.decoding.logits_processors import Sampling, generate
from qkv.evaluation import metrics
from qkv.models.attention import record
from qkv.models.base import Model, TranslationModel
from qkv.models.transformer import DecoderOnly
from qkv.options import Config, DecoderOnlyConfig, EncoderOnlyConfig, TranslationConfig
from qkv.train.loss import smoothed_loss

TOKENS = 4096  # of validation text computed at once
SAMPLE = 48  # tokens that a language model writes to be looked at
LOOKED_AT = 16  # sentences at most whose attention is recorded, and tokens at most: all weights are kept at once
LOOKED_AT_TOKENS = 1024


@dataclass(frozen=True)
class Validation:
    """Scores on the validation set."""

    loss: float  # −log p for each token, not smoothed
    bleu: float | None
    sample: str  # the first translation, or some text, to look at
    text: metrics.TextLoss | None = None  # the same loss for each character and byte of running text
    attention_entropy: dict[str, float] = field(default_factory=dict)  # in nats, by name, e.g. decoder.1.cross

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
def validate(model: Model, prepared: Prepared, spec: Config, device: torch.device) -> Validation:
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
    entropy = attention_entropy(model, _looked_at(prepared, spec), prepared.tokenizers.tgt.pad, device)
    model.train(training)
    return Validation(total / tokens, bleu, sample, text, entropy)


def total_loss(model: Model, given: Iterator[Batch], pad: int, device: torch.device) -> tuple[float, int]:
    """−log p of all labels together, and their number."""
    total, tokens = 0.0, 0
    for batch in given:
        moved = batch.to(device)
        hidden = model.hidden_at(moved.labels != pad, *moved.inputs)  # (tokens, d_model)
        _, nll = smoothed_loss(hidden, model.output.weight, moved.labels, smoothing=0.0, pad=pad)
        total += float(nll)
        tokens += batch.tokens
    return total, tokens


def _batches(prepared: Prepared, spec: Config) -> Iterator[Batch]:
    """The validation text as this kind of model is measured on it: the same at every validation."""
    store = prepared.valid
    if isinstance(spec.model, DecoderOnlyConfig):
        yield from running_text(np.asarray(store.stream), spec, prepared.tokenizers.tgt)
        return
    widths = _widths(prepared, spec)
    order = np.lexsort(widths).astype(np.int64)
    for indices in batches.cut(order, widths[0], widths[-1], max(TOKENS, *(int(side.max()) for side in widths))):
        yield _batch(prepared, spec, indices)


def _widths(prepared: Prepared, spec: Config) -> list[batches.Lengths]:
    """How many positions each validation sentence takes, on both sides or on its only one."""
    widths: list[batches.Lengths] = [np.asarray(prepared.valid.tgt_lengths) + 1]
    if isinstance(spec.model, TranslationConfig):
        widths.insert(0, np.asarray(prepared.valid.src_lengths) + 1)
    return widths


def _batch(prepared: Prepared, spec: Config, indices: Sequence[int] | batches.Indices) -> Batch:
    """Some sentences of the validation set, pairs or with tokens hidden."""
    store, tgt = prepared.valid, prepared.tokenizers.tgt
    rows = [store.tgt(i) for i in indices]
    if isinstance(spec.model, EncoderOnlyConfig):
        random = [np.random.default_rng((int(i), 5)) for i in indices]
        return hide([row.astype(np.int64) for row in rows], tgt, spec.model.masked, random)
    return collate([store.src(i) for i in indices], rows, prepared.tokenizers)


def _looked_at(prepared: Prepared, spec: Config) -> Batch:
    """The beginning of the validation text, as one small batch."""
    if isinstance(spec.model, DecoderOnlyConfig):
        length = min(spec.data.max_length, LOOKED_AT_TOKENS // 4)
        ids = np.asarray(prepared.valid.stream[:LOOKED_AT_TOKENS])
        return block_batch(text_blocks(ids, prepared.tokenizers.tgt, length)[:LOOKED_AT])
    widest = np.maximum.accumulate(np.max(_widths(prepared, spec), axis=0)[:LOOKED_AT])
    rows = int((widest * np.arange(1, len(widest) + 1) <= LOOKED_AT_TOKENS).sum())
    return _batch(prepared, spec, range(max(1, rows)))


def attention_entropy(model: Model, batch: Batch, pad: int, device: torch.device) -> dict[str, float]:
    """The mean entropy −Σ a log a of each attention, over heads and the positions that are not padding.

    0 is a single key looked at, log n all n keys alike. A model without attention has none.
    """
    moved = batch.to(device)
    with record() as recording:
        model.hidden(*moved.inputs)
    written = moved.labels != pad  # (batch, target)
    read = written
    if len(moved.inputs) > 1:
        read = torch.arange(moved.source.shape[1], device=device) < moved.lengths[:, None]  # (batch, source)
    means = {}
    for name, parts in recording.weights.items():
        weights = torch.cat(parts, dim=2).float()  # a recurrent network makes one call for each word
        entropy = torch.special.entr(weights).sum(-1).mean(1)  # (batch, queries)
        means[name] = float(entropy[read if name.startswith("encoder") else written].mean())
    return {name: float(f"{mean:.6g}") for name, mean in means.items() if math.isfinite(mean)}


def running_text(ids: Any, spec: Config, tokenizer: Any) -> Iterator[Batch]:
    """A whole text in blocks of the model's context, each token predicted once."""
    length = spec.data.max_length
    blocks = text_blocks(ids, tokenizer, length)
    rows = max(1, TOKENS // length)
    return (block_batch(blocks[first : first + rows]) for first in range(0, len(blocks), rows))


def _sample(model: DecoderOnly, prepared: Prepared, spec: Config, device: torch.device) -> str:
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


def _bleu(model: TranslationModel, prepared: Prepared, spec: Config, device: torch.device) -> tuple[float, str]:
    store, tokenizers = prepared.valid, prepared.tokenizers
    sources = [store.src(i).tolist() for i in range(len(store))]
    greedy = SearchOptions.of(spec.decode, beam=1)
    found = search_all(model, sources, greedy, tokenizers, device=device)
    texts = [tokenizers.tgt.decode(hypotheses[0].tokens).replace("\n", " ") for hypotheses in found]
    references = prepared.valid_text[1].read_text(encoding="utf-8").split("\n")[: len(texts)]
    return metrics.bleu(texts, references, tgt_lang=spec.data.tgt_lang), texts[0]
