"""Transformers of every variant with random weights as after training, and random sentences of token ids."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import torch

from qkv.assembly import build_model
from qkv.core.transformer import Transformer
from qkv.options import TransformerConfig

SPEC = TransformerConfig(d_model=16, d_ff=32, heads=4, encoder_layers=2, decoder_layers=2, dropout=0.0)
VOCAB = 30
VARIANTS: list[dict[str, Any]] = [
    {"norm": "post", "tie": "none"},  # tied ones tend to repeat a token for ever before they have learned anything
    {"norm": "pre"},
    {"norm": "pre", "positions": "learned", "d_k": 5, "d_v": 3, "bias": True, "tie": "none"},
    {"positions": "rotary", "rms_norm": True, "activation": "swiglu", "tie": "none"},
    {"positions": "none", "window": 2, "attention": "general", "activation": "gelu", "tie": "none"},
    {"norm": "pre", "positions": "rotary", "window": 3, "attention": "dot", "d_k": 2, "tie": "none"},
    {"norm": "pre", "attention": "additive", "tie": "none"},
]
NAMES = ["post", "pre", "learned", "rotary", "window", "rotary in a window", "additive"]


@cache
def model_of(variant: int) -> Transformer:
    torch.manual_seed(variant)
    model = build_model(dataclasses.replace(SPEC, **VARIANTS[variant]), VOCAB, VOCAB)
    return shaken(model).eval()


def shaken(model: Transformer) -> Transformer:
    """Weights as after training: no bias is zero, no gain one, and outputs differ."""
    std = 0.25 if model.config.activation == "swiglu" else 0.5  # the product of two layers would amplify rounding
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if name.endswith("norm.weight") else 0.0, std=std)
    return model


def some_text(count: int, seed: int = 0, longest: int = 9) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, VOCAB, random.integers(1, longest + 1)).tolist() for _ in range(count)]
