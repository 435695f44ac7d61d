"""Training tasks for plain text: a language model predicts the next token, an encoder fills in hidden tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qkv.core import batches
from qkv.core.batches import Batch, UpdateStream
from qkv.core.config import Config
from qkv.core.dataset import PreparedText
from qkv.core.device import World
from qkv.core.tokenizer import Tokenizer
from qkv.core.validation import TOKENS, Validation, total_loss, update_options
from qkv.data.lm_data import BlockBatches, MaskedBatches, block_batch, mask_tokens, text_blocks
from qkv.data.subwords import decode_text, newline_of
from qkv.decoding.logits_processors import Sampling, generate
from qkv.evaluation.metrics import TextLoss
from qkv.options import EncoderOnlyConfig
from qkv.training.unpadded import loss_in_parts

SAMPLE_TOKENS = 48  # written by a language model at each validation, for people


@dataclass(frozen=True)
class TextValidation(Validation):
    """Scores of a language model: also the loss for each character and byte, which no choice of tokens can flatter."""

    text: TextLoss | None = None

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        return values if self.text is None or values["loss"] is None else values | self.text.to_dict()

    def __str__(self) -> str:
        shown = super().__str__()
        if self.text is None:
            return shown
        return f"{shown}  nats per character {self.text.per_character:.4f}  bits per byte {self.text.bits_per_byte:.4f}"


class LanguageModelTask:
    """Running text in blocks of the model's context; the model predicts each token from the tokens before it."""

    def updates(self, text: PreparedText, config: Config, device: torch.device, world: World) -> UpdateStream:
        return BlockBatches(text.train, length=config.data.max_length, **update_options(config, device, world))

    @torch.inference_mode()
    def validate(self, model: Any, text: PreparedText, config: Config, device: torch.device) -> Validation:
        """Measure the loss on the held-out text, and let the model write some text."""
        tgt = text.tokenizers.tgt
        held_out = running_text(np.asarray(text.valid.ids["tgt"]), config, tgt)
        total, tokens = total_loss(model, held_out, tgt.pad, device, loss_in_parts)
        raw = text.valid_text[1].read_text(encoding="utf-8")
        context, forbidden = config.data.max_length, (tgt.pad, tgt.bos, tgt.eos)
        sampling = Sampling(temperature=0.8, seed=0)
        drawn = generate(model, [newline_of(tgt)], sampling, context=context, forbidden=forbidden, device=device)
        sample = decode_text(tgt, [next(drawn).tokens[0] for _ in range(SAMPLE_TOKENS)])
        return TextValidation(total / tokens, None, sample, text=TextLoss.of(total, tokens, raw))


def running_text(ids: Any, config: Config, tokenizer: Tokenizer) -> Iterator[Batch]:
    """Yield a whole text in blocks of the model's context; each token is predicted once."""
    length = config.data.max_length
    blocks = text_blocks(ids, tokenizer, length)
    rows = max(1, TOKENS // length)
    return (block_batch(blocks[first : first + rows]) for first in range(0, len(blocks), rows))


class MaskedLanguageModelTask:
    """Lines of plain text with hidden tokens; the model fills them in."""

    def updates(self, text: PreparedText, config: Config, device: torch.device, world: World) -> UpdateStream:
        masked = _masked(config)
        return MaskedBatches(text.train, text.tokenizers, masked=masked, **update_options(config, device, world))

    @torch.inference_mode()
    def validate(self, model: Any, text: PreparedText, config: Config, device: torch.device) -> Validation:
        """Measure the loss on the held-out lines; the same tokens are hidden at every validation."""
        widths = np.asarray(text.valid.lengths("tgt")) + 1
        order = np.argsort(widths, kind="stable").astype(np.int64)
        cuts = batches.cut(order, widths, widths, max(TOKENS, int(widths.max())))
        held_out = (masked_batch(text, config, rows) for rows in cuts)
        total, tokens = total_loss(model, held_out, text.tokenizers.tgt.pad, device, loss_in_parts)
        return Validation(total / tokens, None, "")


def masked_batch(text: PreparedText, config: Config, indices: batches.Indices) -> Batch:
    """Return held-out lines with hidden tokens, which are the same at every call."""
    random = [np.random.default_rng((int(i), 5)) for i in indices]
    rows = [text.valid.row("tgt", i).astype(np.int64) for i in indices]
    return mask_tokens(rows, text.tokenizers.tgt, _masked(config), random)


def _masked(config: Config) -> float:
    assert isinstance(config.model, EncoderOnlyConfig)
    return config.model.masked
