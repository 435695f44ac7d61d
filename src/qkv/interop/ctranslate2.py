"""Write a Transformer as a model folder of CTranslate2: model.bin, config.json and vocabularies.

CTranslate2 reads tokens, not text: `unique_names(tokenizer)` has its names. It does not add </s> to a source: the
caller appends it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qkv.core import files
from qkv.core.attention import MultiHeadAttention
from qkv.core.errors import UsageError
from qkv.core.tokenizer import SPECIALS, TokenizerPair
from qkv.core.transformer import Transformer, TransformerLayer, sinusoids
from qkv.data.subwords import unique_names
from qkv.interop import (
    LinearWeights,
    attention_projections,
    check_supported,
    import_optional,
    length_penalty_exponent,
    max_output_length,
)
from qkv.interop.huggingface import library_tokenizer
from qkv.models.variants import LearnedPositions
from qkv.options import Config, TransformerConfig

POSITIONS = 4096  # rows of sinusoids written to the file: CTranslate2's default formula differs
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "kind": ("transformer",),
    "positions": ("sinusoidal", "learned", "rotary", "none"),
    "activation": ("relu", "gelu", "swiglu"),
    "attention": ("scaled", "dot", "general"),
    "norm": ("post", "pre"),
    "rms_norm": (False, True),
    "window": (0,),
    "bias": (False, True),
}
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swiglu": "SWISH"}
PROGRAM = """\
import ctranslate2
import tokenizers

folder = "."  # the folder of this file
source = tokenizers.Tokenizer.from_file(f"{{folder}}/tokenizer.json")
target = {target}
translator = ctranslate2.Translator(folder)  # compute_type="int8" is faster on a CPU and slightly less exact
texts = [source.encode(text).tokens for text in ("First sentence.", "And another.")]
search = {{"beam_size": {beam}, "length_penalty": {penalty}, "max_decoding_length": {longest}}}
for result in translator.translate_batch(texts, **search):
    print(target.decode([target.token_to_id(token) for token in result.hypotheses[0]]))
"""


def write_folder(model: Transformer, tokenizers: TokenizerPair, config: Config, folder: Path, tag: str) -> str:
    """Write model and tokenizers for CTranslate2; return the program for the README."""
    to_ctranslate2(model, tokenizers, folder)
    files.write_text(folder / "tokenizer.json", library_tokenizer(tokenizers.src, tag).to_str())
    target = "source"
    if not tokenizers.shared:
        files.write_text(folder / "target" / "tokenizer.json", library_tokenizer(tokenizers.tgt).to_str())
        target = 'tokenizers.Tokenizer.from_file(f"{folder}/target/tokenizer.json")'
    penalty = length_penalty_exponent(config.decode)
    return PROGRAM.format(target=target, beam=config.decode.beam, penalty=penalty, longest=max_output_length(config))


def to_ctranslate2(model: Transformer, tokenizers: TokenizerPair, folder: str | Path) -> None:
    """Write the weights in fp32; `ctranslate2.Translator(folder, compute_type="int8")` quantises them when loading."""
    spec = model.config
    check_supported(spec, "CTranslate2", SUPPORTED)
    if spec.positions == "rotary":  # the rotation comes between W^Q and the W of `general`: no folding
        check_supported(spec, "CTranslate2 with rotary positions", SUPPORTED | {"attention": ("scaled", "dot")})
    if spec.key_width != spec.value_width:
        raise UsageError(f"model.d_v = {spec.value_width}: CTranslate2 supports only d_v = d_k, {spec.key_width} here")
    target = _empty_model(spec)
    sides = (("encoder", model.source, tokenizers.src), ("decoder", model.target, tokenizers.tgt))
    for side, embedding, tokenizer in sides:
        stack = getattr(target, side)
        tokens = stack.embeddings[0] if isinstance(stack.embeddings, list) else stack.embeddings
        tokens.weight = embedding.tokens.weight.detach().cpu()
        if spec.positions != "rotary":
            stack.position_encodings.encodings = _position_table(embedding.positions, spec.d_model)
        for layer, layer_spec in zip(getattr(model, side), stack.layer, strict=True):
            _set_layer(layer_spec, layer)
        if spec.norm == "pre":
            _set_norm(stack.layer_norm, getattr(model, f"{side}_norm"))
        register = target.register_source_vocabulary if side == "encoder" else target.register_target_vocabulary
        register(unique_names(tokenizer))
    target.decoder.projection.weight = model.output.weight.detach().cpu()
    target.config.layer_norm_epsilon = 1e-5
    target.config.unk_token = SPECIALS[0]  # required by the format; qkv has no unknown tokens
    target.validate()
    target.optimize()
    Path(folder).mkdir(parents=True, exist_ok=True)
    target.save(str(folder))


def _empty_model(spec: TransformerConfig) -> Any:
    specs = import_optional("ctranslate2").specs
    shape = {
        "num_heads": spec.heads,
        "pre_norm": spec.norm == "pre",
        "activation": specs.Activation[ACTIVATIONS[spec.activation]],
        "ffn_glu": spec.activation == "swiglu",
        "rms_norm": spec.rms_norm,
        "rotary_dim": 0 if spec.positions == "rotary" else None,  # 0: all dimensions of a head
        "head_dim": spec.key_width if spec.key_width * spec.heads != spec.d_model else None,
    }
    return specs.TransformerSpec(
        specs.TransformerEncoderSpec(spec.encoder_layers, **shape),
        specs.TransformerDecoderSpec(spec.decoder_layers, **shape),
    )


def _position_table(positions: nn.Module | None, d_model: int) -> Tensor:
    """Return the table of position vectors; zeros if the model adds none: CTranslate2 would add sinusoids."""
    if isinstance(positions, LearnedPositions):
        return positions.table.detach().cpu()
    return torch.zeros(POSITIONS, d_model) if positions is None else sinusoids(POSITIONS, d_model)


def _set_layer(target: Any, layer: TransformerLayer) -> None:
    norms: list[nn.Module] = [residual.norm for residual in layer.residuals]  # type: ignore[misc]
    _set_attention(target.self_attention, layer.attention, norms[0])
    if layer.cross_attention is not None:
        _set_attention(target.attention, layer.cross_attention, norms[1], cross=True)
    feed_forward = layer.feed_forward
    _set_linear(target.ffn.linear_0, LinearWeights.of(feed_forward.inner))
    _set_linear(target.ffn.linear_1, LinearWeights.of(feed_forward.outer))
    if (gate := getattr(feed_forward, "gate", None)) is not None:
        _set_linear(target.ffn.linear_0_noact, LinearWeights.of(gate))
    _set_norm(target.ffn.layer_norm, norms[-1])


def _set_attention(target: Any, attention: MultiHeadAttention, norm: nn.Module, *, cross: bool = False) -> None:
    query, key, value, output = attention_projections(attention)
    inputs = [query, LinearWeights.joined(key, value)] if cross else [LinearWeights.joined(query, key, value)]
    for linear, weights in zip(target.linear, [*inputs, output], strict=True):
        _set_linear(linear, weights)
    _set_norm(target.layer_norm, norm)


def _set_linear(target: Any, linear: LinearWeights) -> None:
    target.weight = linear.weight.cpu()
    if linear.bias is not None:
        target.bias = linear.bias.cpu()


def _set_norm(target: Any, norm: Any) -> None:
    target.gamma = norm.weight.detach().cpu()
    if isinstance(norm, nn.LayerNorm):
        target.beta = norm.bias.detach().cpu()
