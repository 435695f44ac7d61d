"""Implementations that train the same model: qkv, transformers, torch.nn.Transformer, x-transformers.

A contender has three methods: `prepare` on the shared weights, `logits`, and `step`. To add one, write a subclass and
add it to `contenders`. All use torch's fused Adam; on a GPU bf16 with fp32 weights, on a CPU fp32. `prepare` raises
`UsageError` if a package is not installed.
"""

from __future__ import annotations

import copy
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.assembly import optimizer_for
from qkv.core.batches import Batch
from qkv.core.dataset import Rows
from qkv.core.errors import UsageError
from qkv.core.tokenizer import BOS, EOS, PAD
from qkv.core.transformer import Transformer
from qkv.engines.cuda_training.cuda_trainer import CudaGraphs
from qkv.engines.cuda_training.packed_batch import PackedBatch, pack
from qkv.interop import to_huggingface
from qkv.options import TrainConfig
from qkv.training.memory_limits import loss_in_parts

OURS, TRANSFORMERS, TORCH, X_TRANSFORMERS = "qkv", "transformers MarianMT", "torch.nn.Transformer", "x-transformers"
STEP = 256  # packed batches are padded to a multiple of this many tokens, to limit the number of shapes
RATE = 1e-4  # constant learning rate; only speed matters


@dataclass(frozen=True)
class TrainingSetup:
    """Weights, device and options that all contenders share."""

    model: Transformer  # on the CPU; contenders copy it
    device: torch.device
    width: int  # of a batch: the longest sentence
    spec: TrainConfig

    @property
    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


class Contender(ABC):
    """One way to train: `prepare`, then `logits` for the comparison and `step` for the timing."""

    exact = True  # same architecture and weights, so the logits must be equal

    def __init__(self, engine: str, how: str) -> None:
        self.engine, self.how = engine, how

    @property
    def name(self) -> str:
        return f"{self.engine} {self.how}"

    @abstractmethod
    def prepare(self, subject: TrainingSetup) -> None:
        """Create model and optimizer on the device."""

    def collate(self, batch: Batch) -> Any:
        """Convert a batch to the contender's format on the host; not timed, a loader thread would do it."""
        return batch

    @abstractmethod
    def logits(self, batch: Batch) -> Tensor:
        """Return logits (batch, target, vocab) in fp32 without dropout."""

    @abstractmethod
    def step(self, batch: Any) -> int:
        """Update the weights once and return the number of target tokens; need not synchronise."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory."""


class StandardLoop(Contender):
    """The usual training loop: loss under autocast, backward, fused Adam.

    `make` returns a module from (source, lengths, target) to logits. With `compiled`, torch compiles model and loss for
    the single batch shape.
    """

    def __init__(self, engine: str, make: Callable[[TrainingSetup], nn.Module], *, compiled: bool = False) -> None:
        super().__init__(engine, "compiled" if compiled else "eager")
        self.make, self.compiled = make, compiled

    def prepare(self, subject: TrainingSetup) -> None:
        self.subject = subject
        self.model: Any = self.make(subject).to(subject.device).train()
        self.run = torch.compile(self.loss, dynamic=False) if self.compiled else self.loss
        betas = (subject.spec.beta1, subject.spec.beta2)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.Adam(parameters, lr=RATE, betas=betas, eps=subject.spec.eps, fused=True)

    def logits(self, batch: Batch) -> Tensor:
        with eval_mode(self.model):
            logits: Tensor = self.model(*batch.inputs)
        return logits

    def loss(self, batch: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        """Return the mean loss over tokens without padding."""
        smoothing = self.subject.spec.label_smoothing
        logits = self.model(*batch)  # (batch, target, vocab)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, label_smoothing=smoothing)

    def step(self, batch: Batch) -> int:
        with self.subject.autocast:
            loss = self.run(batch.inputs, batch.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return batch.tokens

    def close(self) -> None:
        self.model = self.run = self.optimizer = None  # type: ignore[assignment]
        torch.compiler.reset()


class PlainQkv(StandardLoop):
    """qkv's plain model and its loss in parts, which never holds all logits at once."""

    def __init__(self) -> None:
        super().__init__(OURS, lambda subject: copy.deepcopy(subject.model))
        self.how = "plain"

    def loss(self, batch: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        hidden = self.model.hidden_at(labels != PAD, *batch)
        smoothing = self.subject.spec.label_smoothing
        loss, _ = loss_in_parts(hidden, self.model.output.weight, labels, smoothing=smoothing, pad=PAD)
        return loss / (labels != PAD).sum()


class FusedQkv(Contender):
    """qkv's fused pass over packed batches, replayed as CUDA graphs on a GPU."""

    def __init__(self) -> None:
        super().__init__(OURS, "captured")

    def prepare(self, subject: TrainingSetup) -> None:
        self.model = copy.deepcopy(subject.model).to(subject.device).train()
        optimizer = optimizer_for(self.model, subject.spec)
        dtype = torch.bfloat16 if subject.device.type == "cuda" else torch.float32
        self.graphs = CudaGraphs(self.model, optimizer, None, subject.spec, pad=PAD, dtype=dtype)
        self.steps = 0

    def collate(self, batch: Batch) -> PackedBatch:
        real = batch.labels != PAD
        lengths = [side.numpy() - 1 for side in (batch.lengths, real.sum(1))]  # without </s>
        rows = [
            np.concatenate([row[:length] for row, length in zip(ids.numpy(), own, strict=True)])
            for ids, own in zip((batch.source, batch.labels), lengths, strict=True)
        ]
        return pack(*map(Rows, rows, lengths), bos=BOS, eos=EOS, pad=PAD, step=STEP)

    def logits(self, batch: Batch) -> Tensor:
        with eval_mode(self.model):
            logits: Tensor = self.model(*batch.inputs)
        return logits

    def step(self, batch: PackedBatch) -> int:
        self.steps += 1
        self.graphs.add_gradient(batch, self.steps)
        self.graphs.update(rate=RATE)
        return batch.tokens

    def close(self) -> None:
        self.model = self.graphs = None  # type: ignore[assignment]


class OtherArchitecture(StandardLoop):
    """A different architecture of the same sizes; its logits are not comparable."""

    exact = False


def contenders(device: torch.device) -> list[Contender]:
    """Return all contenders; the first, qkv's plain model, is the reference for the logits."""
    everyone: list[Contender] = [PlainQkv(), FusedQkv()] if device.type == "cuda" else [PlainQkv()]
    for engine, make in ((TRANSFORMERS, _marian), (TORCH, _torch)):
        everyone += [StandardLoop(engine, make, compiled=compiled) for compiled in (False, True)]
    return [*everyone, OtherArchitecture(X_TRANSFORMERS, _x_transformers)]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a block without dropout and gradients."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


# ---- models of other packages ----------------------------------------------------------------------------------------


class _Marian(nn.Module):
    """transformers' MarianMT with the signature of qkv's model."""

    def __init__(self, subject: TrainingSetup) -> None:
        super().__init__()
        self.model = to_huggingface(subject.model, max_positions=max(512, subject.width))
        self.model.set_attn_implementation("sdpa")
        self.model.config.attention_dropout = subject.model.config.attention_dropout

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        real = torch.arange(source.shape[1], device=source.device) < lengths[:, None]
        output = self.model(
            input_ids=source, attention_mask=real.long(), decoder_input_ids=target, use_cache=False, return_dict=True
        )
        logits: Tensor = output.logits
        return logits


def _marian(subject: TrainingSetup) -> nn.Module:
    return _Marian(subject)


def _torch(subject: TrainingSetup) -> nn.Module:
    """Return torch's layers, with dropout inside attention and feed-forward set as in our config."""
    peer = TorchTransformer(copy.deepcopy(subject.model))
    spec = subject.model.config
    for module in peer.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = spec.attention_dropout
        elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            module.dropout.p = spec.activation_dropout
    return peer


class _XTransformer(nn.Module):
    """x-transformers' encoder and decoder of equal sizes and otherwise default options; tied output."""

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


def _x_transformers(subject: TrainingSetup) -> nn.Module:
    try:
        return _XTransformer(subject, importlib.import_module("x_transformers"))
    except ImportError:
        raise UsageError("x-transformers is not installed: pip install x-transformers") from None


# ---- torch.nn.Transformer --------------------------------------------------------------------------------------------


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
