"""Validation: the loss on held-out pairs, and BLEU of greedy translations against the raw references."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qkv import config
from qkv.data import batches
from qkv.data.loader import collate
from qkv.data.store import Prepared
from qkv.decode.batched import search_all
from qkv.evaluate import metrics
from qkv.models.transformer import Transformer
from qkv.train.loss import smoothed_loss


@dataclass(frozen=True)
class Validation:
    """Scores on the validation set."""

    loss: float  # −log p for each token, not smoothed
    bleu: float | None
    sample: str  # the first translation, to look at

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
        }

    def __str__(self) -> str:
        text = f"loss {self.loss:.4f}  perplexity {self.perplexity:.2f}"
        return text if self.bleu is None else f"{text}  BLEU {self.bleu:.2f} (greedy)"


@torch.inference_mode()
def validate(model: Transformer, prepared: Prepared, spec: config.Config, device: torch.device) -> Validation:
    """Measure the model as it stands; dropout is off while this runs."""
    training = model.training
    model.eval()
    loss = _loss(model, prepared, device)
    bleu, sample = None, ""
    if spec.train.metric == "bleu":
        bleu, sample = _bleu(model, prepared, spec, device)
    model.train(training)
    return Validation(loss, bleu, sample)


def _loss(model: Transformer, prepared: Prepared, device: torch.device) -> float:
    store, pad = prepared.valid, prepared.tokenizers.tgt.pad
    src, tgt = np.asarray(store.src_lengths) + 1, np.asarray(store.tgt_lengths) + 1
    order = np.lexsort((src, tgt)).astype(np.int64)
    total, tokens = 0.0, 0
    for indices in batches.cut(order, src, tgt, max(4096, int(src.max()), int(tgt.max()))):
        rows = [store.src(i) for i in indices], [store.tgt(i) for i in indices]
        batch = collate(*rows, prepared.tokenizers).to(device)
        hidden = model.hidden(batch.source, batch.lengths, batch.target)
        _, nll = smoothed_loss(hidden, model.output.weight, batch.labels, smoothing=0.0, pad=pad)
        total += float(nll)
        tokens += batch.tokens
    return total / tokens


def _bleu(model: Transformer, prepared: Prepared, spec: config.Config, device: torch.device) -> tuple[float, str]:
    store, tokenizers = prepared.valid, prepared.tokenizers
    sources = [store.src(i).tolist() for i in range(len(store))]
    greedy = dataclasses.replace(spec.decode, beam=1)
    found = search_all(model, sources, greedy, tokenizers, device=device)
    texts = [tokenizers.tgt.decode(hypotheses[0].tokens).replace("\n", " ") for hypotheses in found]
    references = prepared.valid_text[1].read_text(encoding="utf-8").split("\n")[: len(texts)]
    return metrics.bleu(texts, references, tgt_lang=spec.data.tgt_lang), texts[0]
