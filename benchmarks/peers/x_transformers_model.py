"""x-transformers: its encoder and decoder of equal sizes, otherwise with its default options."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from qkv.core.errors import UsageError
from qkv.lab.contenders import Setting, TrainingSetup

from ._standard_loop import StandardLoop

PACKAGE = "x-transformers"


def training() -> list[Setting]:
    """Return the usual training loop; another architecture of the same sizes has other logits."""
    return [Setting(PACKAGE, "eager", _open)]


def _open(setup: TrainingSetup) -> StandardLoop:
    try:
        return StandardLoop(setup, XTransformer(setup, importlib.import_module("x_transformers")))
    except ImportError:
        raise UsageError("x-transformers is not installed: pip install x-transformers") from None


class XTransformer(nn.Module):
    """Encoder and decoder with one embedding, and with the signature of qkv's model; tied output."""

    def __init__(self, subject: TrainingSetup, package: Any) -> None:
        super().__init__()
        spec, vocab = subject.model.config, len(subject.model.output.weight)
        shape = {"dim": spec.d_model, "heads": spec.heads, "attn_dim_head": spec.key_width, "attn_flash": True}
        inner = {"ff_mult": spec.d_ff / spec.d_model, "pre_norm": spec.norm == "pre"}
        shared = {"num_tokens": vocab, "max_seq_len": subject.width, "emb_dropout": spec.dropout}
        encoder = package.Encoder(depth=spec.encoder_layers, layer_dropout=0.0, **shape, **inner)
        decoder = package.Decoder(depth=spec.decoder_layers, cross_attend=True, **shape, **inner)
        self.encoder = package.TransformerWrapper(attn_layers=encoder, **shared)
        self.decoder = package.TransformerWrapper(attn_layers=decoder, tie_embedding=True, **shared)
        self.encoder.token_emb = self.decoder.token_emb

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        real = torch.arange(source.shape[1], device=source.device) < lengths[:, None]
        memory = self.encoder(source, mask=real, return_embeddings=True)
        logits: Tensor = self.decoder(target, context=memory, context_mask=real)
        return logits
