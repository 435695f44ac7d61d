"""torch.nn.Transformer: torch's own layers with qkv's embeddings and weights, trained, and decoding without a cache."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.core.transformer import Transformer
from qkv.lab.contenders import (
    DecodeFunction,
    DecodingSetup,
    Setting,
    TrainingSetup,
    search_with,
)

from ._standard_loop import eager_and_compiled

ENGINE = "torch.nn.Transformer"


def training() -> list[Setting]:
    """Return the loop without and with torch's compiler."""
    return eager_and_compiled(ENGINE, _with_dropouts)


def _with_dropouts(subject: TrainingSetup) -> nn.Module:
    """Return torch's layers, with dropout inside attention and feed-forward set as in our config."""
    peer = TorchTransformer(copy.deepcopy(subject.model))
    spec = subject.model.config
    for module in peer.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = spec.attention_dropout
        elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            module.dropout.p = spec.activation_dropout
    return peer


def decoding(device: torch.device, threads: int) -> list[Setting]:
    """Return its one setting: qkv's search, reading the whole prefix anew at each step; slow, so in small batches."""
    how = "fp32, no cache" + (f", {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else "")
    return [Setting(ENGINE, how, _open, exact=True, most=64, one_batch=True)]


def _open(subject: DecodingSetup) -> DecodeFunction:
    return search_with(TorchTransformer(subject.model).to(subject.device).eval(), subject)


@dataclass
class PrefixState:
    """Decoder state without a cache: encoder output and all previous tokens."""

    memory: Tensor
    padding: Tensor
    tokens: Tensor
    beam: int

    def select(self, rows: Tensor) -> PrefixState:
        return PrefixState(self.memory[rows], self.padding[rows], self.tokens[rows], self.beam)


class TorchTransformer(nn.Module):
    """torch's encoder and decoder layers with qkv's embeddings and a copy of a qkv model's weights."""

    def __init__(self, ours: Transformer) -> None:
        super().__init__()
        spec = ours.config
        self.source, self.target, self.output = ours.source, ours.target, ours.output
        shape = {
            "d_model": spec.d_model,
            "nhead": spec.heads,
            "dim_feedforward": spec.d_ff,
            "dropout": spec.dropout,
            "batch_first": True,
            "norm_first": spec.norm == "pre",
        }
        final = (lambda: nn.LayerNorm(spec.d_model)) if spec.norm == "pre" else (lambda: None)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**shape),
            spec.encoder_layers,
            final(),
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(**shape),
            spec.decoder_layers,
            final(),
        )
        self.load_state_dict(_torch_state_dict(ours), strict=True)

    def hidden(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        padding = _padding(source, lengths)
        memory = self.encoder(self.source(source), src_key_padding_mask=padding)
        return self._decode(target, memory, padding)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        return F.linear(self.hidden(source, lengths, target), self.output.weight)

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        padding = _padding(source, lengths)
        return self.encoder(self.source(source), src_key_padding_mask=padding), padding

    def start(self, memory: tuple[Tensor, Tensor], beam: int = 1) -> PrefixState:
        values, padding = (part.repeat_interleave(beam, 0) for part in memory)
        no_tokens = torch.empty(len(values), 0, dtype=torch.long, device=values.device)
        return PrefixState(values, padding, no_tokens, beam)

    def step(self, tokens: Tensor, state: PrefixState) -> tuple[Tensor, PrefixState]:
        state.tokens = torch.cat([state.tokens, tokens], dim=1)
        hidden = self._decode(state.tokens, state.memory, state.padding)[:, -tokens.shape[1] :]
        return F.linear(hidden, self.output.weight), state

    def _decode(self, target: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        length = target.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        decoded: Tensor = self.decoder(
            self.target(target), memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding
        )
        return decoded


def _padding(source: Tensor, lengths: Tensor) -> Tensor:
    """Return torch's padding mask: True marks padding, the reverse of qkv's convention."""
    return torch.arange(source.shape[1], device=source.device) >= lengths[:, None]


def _torch_state_dict(ours: Transformer) -> dict[str, Tensor]:
    """Return the weights under torch's names; missing attention biases become zeros."""
    state = {
        name: tensor
        for name, tensor in ours.state_dict().items()
        if name.split(".")[0] in ("source", "target", "output")
    }
    norms = {"encoder": ("norm1", "norm2"), "decoder": ("norm1", "norm2", "norm3")}
    sides: list[tuple[str, list[Any]]] = [("encoder", list(ours.encoder)), ("decoder", list(ours.decoder))]
    for side, layers in sides:
        for i, layer in enumerate(layers):
            prefix = f"{side}.layers.{i}"
            attentions = {"self_attn": layer.attention}
            if side == "decoder":
                attentions["multihead_attn"] = layer.cross_attention
            for name, attention in attentions.items():
                for inner, linear in (("in_proj_", attention.qkv), ("out_proj.", attention.output)):
                    state[f"{prefix}.{name}.{inner}weight"] = linear.weight
                    bias = linear.bias if linear.bias is not None else linear.weight.new_zeros(len(linear.weight))
                    state[f"{prefix}.{name}.{inner}bias"] = bias
            for name, linear in (("linear1", layer.feed_forward.inner), ("linear2", layer.feed_forward.outer)):
                state[f"{prefix}.{name}.weight"], state[f"{prefix}.{name}.bias"] = linear.weight, linear.bias
            for name, residual in zip(norms[side], layer.residuals, strict=True):
                state[f"{prefix}.{name}.weight"], state[f"{prefix}.{name}.bias"] = (
                    residual.norm.weight,
                    residual.norm.bias,
                )
        final = getattr(ours, f"{side}_norm")
        if isinstance(final, nn.LayerNorm):
            state[f"{side}.norm.weight"], state[f"{side}.norm.bias"] = final.weight, final.bias
    return {name: tensor.detach().clone() for name, tensor in state.items()}
