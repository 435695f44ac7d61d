"""Our Transformer as a model folder of CTranslate2: model.bin, config.json and vocabularies.

CTranslate2 is given tokens, not text: `tokenizer.names[i]` is its name for our token i. It does not end a source by
itself, so the caller puts </s> behind each, as we do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qkv.core.errors import UsageError
from qkv.core.tokenizer import SPECIALS, TokenizerPair
from qkv.interop.exported_weights import Linear, check, engine, projections
from qkv.models.attention import MultiHeadAttention
from qkv.models.layers import Embedding, FeedForward, LearnedPositions, sinusoids
from qkv.models.transformer import DecoderLayer, EncoderLayer, Transformer
from qkv.options import TransformerConfig

POSITIONS = 4096  # sinusoids written to the file: its own are others
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swiglu": "SWISH"}


def to_ctranslate2(model: Transformer, tokenizers: TokenizerPair, folder: str | Path) -> None:
    """Write the weights as they are; `ctranslate2.Translator(folder, compute_type="int8")` makes its own of them."""
    spec = model.spec
    check(spec, "CTranslate2", {"window": (0,), "attention": ("scaled", "dot", "general")})
    if spec.positions == "rotary":  # the query is turned before it meets W
        check(spec, "CTranslate2 with rotary positions", {"attention": ("scaled", "dot")})
    if spec.key_width != spec.value_width:
        raise UsageError(f"model.d_v = {spec.value_width}: CTranslate2 cannot express it, only d_k = {spec.key_width}")
    theirs = _spec(spec)
    for side, ours, tokenizer in (("encoder", model.source, tokenizers.src), ("decoder", model.target, tokenizers.tgt)):
        stack = getattr(theirs, side)
        _set_embedding(stack, ours, spec)
        for layer, into in zip(getattr(model, side), stack.layer, strict=True):
            _set_layer(into, layer)
        if spec.norm == "pre":
            _set_norm(stack.layer_norm, getattr(model, f"{side}_norm"))
        register = theirs.register_source_vocabulary if side == "encoder" else theirs.register_target_vocabulary
        register(tokenizer.names)
    theirs.decoder.projection.weight = model.output.weight.detach().cpu()
    theirs.config.layer_norm_epsilon = 1e-5
    theirs.config.unk_token = SPECIALS[0]  # there are no unknown tokens, but it wants one
    _save(theirs, Path(folder))


def _spec(spec: TransformerConfig) -> Any:
    specs = engine("ctranslate2").specs
    shape = {
        "num_heads": spec.heads,
        "pre_norm": spec.norm == "pre",
        "activation": specs.Activation[ACTIVATIONS[spec.activation]],
        "ffn_glu": spec.activation == "swiglu",
        "rms_norm": spec.rms_norm,
        "rotary_dim": 0 if spec.positions == "rotary" else None,  # 0: all of a head's
        "head_dim": spec.key_width if spec.key_width * spec.heads != spec.d_model else None,
    }
    return specs.TransformerSpec(
        specs.TransformerEncoderSpec(spec.encoder_layers, **shape),
        specs.TransformerDecoderSpec(spec.decoder_layers, **shape),
    )


def _set_embedding(stack: Any, ours: Embedding, spec: TransformerConfig) -> None:
    embeddings = stack.embeddings[0] if isinstance(stack.embeddings, list) else stack.embeddings
    embeddings.weight = ours.tokens.weight.detach().cpu()
    if spec.positions != "rotary":
        stack.position_encodings.encodings = _positions(ours.positions, spec.d_model)


def _positions(ours: nn.Module | None, d_model: int) -> Tensor:
    """What is added at each position: without a table it would add sinusoids of its own, so zeros are one too."""
    if isinstance(ours, LearnedPositions):
        return ours.table.detach().cpu()
    return torch.zeros(POSITIONS, d_model) if ours is None else sinusoids(POSITIONS, d_model)


def _set_layer(into: Any, layer: EncoderLayer | DecoderLayer) -> None:
    norms: list[nn.Module] = [residual.norm for residual in layer.residuals]  # type: ignore[misc]
    _set_attention(into.self_attention, layer.attention, norms[0])
    if isinstance(layer, DecoderLayer) and layer.cross_attention is not None:
        _set_attention(into.attention, layer.cross_attention, norms[1], cross=True)
    _set_feed_forward(into.ffn, layer.feed_forward, norms[-1])


def _set_attention(into: Any, attention: MultiHeadAttention, norm: nn.Module, *, cross: bool = False) -> None:
    query, key, value, output = projections(attention)
    inputs = [query, Linear.joined(key, value)] if cross else [Linear.joined(query, key, value)]
    for linear, ours in zip(into.linear, [*inputs, output], strict=True):
        _set_linear(linear, ours)
    _set_norm(into.layer_norm, norm)


def _set_feed_forward(into: Any, ours: FeedForward, norm: nn.Module) -> None:
    _set_linear(into.linear_0, Linear.of(ours.inner))
    _set_linear(into.linear_1, Linear.of(ours.outer))
    if ours.gate is not None:
        _set_linear(into.linear_0_noact, Linear.of(ours.gate))
    _set_norm(into.layer_norm, norm)


def _set_linear(into: Any, ours: Linear) -> None:
    into.weight = ours.weight.cpu()
    if ours.bias is not None:
        into.bias = ours.bias.cpu()


def _set_norm(into: Any, norm: Any) -> None:
    into.gamma = norm.weight.detach().cpu()
    if isinstance(norm, nn.LayerNorm):
        into.beta = norm.bias.detach().cpu()


def _save(theirs: Any, folder: Path) -> None:
    theirs.validate()
    theirs.optimize()
    folder.mkdir(parents=True, exist_ok=True)
    theirs.save(str(folder))
