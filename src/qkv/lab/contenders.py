"""Those who train the same model: ours, and what a user might write instead, each set up as who knows it well would.

A contender prepares itself on the shared weights, shows its logits, and takes training steps; a new one is one more
line in `contenders`. On a GPU all compute in bf16 with fp32 weights, on a CPU in fp32, all with torch's fused Adam.
What is not installed refuses to be prepared and says why.
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

from qkv import config
from qkv.core.errors import UsageError
from qkv.data.loader import Batch
from qkv.data.ragged import Flat, Ragged, lay
from qkv.engines.cuda_training.cuda_trainer import Captured
from qkv.export import to_huggingface
from qkv.lab.peers import TorchTransformer
from qkv.models.transformer import Transformer
from qkv.text.tokenizer import BOS, EOS, PAD
from qkv.train import optim
from qkv.train.loss import smoothed_loss

OURS, TRANSFORMERS, TORCH, X_TRANSFORMERS = "qkv", "transformers MarianMT", "torch.nn.Transformer", "x-transformers"
STEP = 256  # a batch of ours is filled up to a multiple of so many tokens, so that its shapes are few
RATE = 1e-4  # the learning rate: that of no schedule, as nothing is to be learned


@dataclass(frozen=True)
class Subject:
    """What all contenders begin with."""

    model: Transformer  # on the CPU; nobody may change it
    device: torch.device
    width: int  # of a batch: no sentence is longer
    spec: config.TrainConfig

    @property
    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


class Contender(ABC):
    """One way to train: `prepare`, then `logits` for the comparison and `step` for the race."""

    exact = True  # it has our architecture and weights, so its logits must be ours

    def __init__(self, engine: str, how: str) -> None:
        self.engine, self.how = engine, how

    @property
    def name(self) -> str:
        return f"{self.engine} {self.how}"

    @abstractmethod
    def prepare(self, subject: Subject) -> None:
        """Make model and optimiser on the device."""

    def laid(self, batch: Batch) -> Any:
        """A batch as this one wants it, on the host: the work of a loader's thread, which is not timed."""
        return batch

    @abstractmethod
    def logits(self, batch: Batch) -> Tensor:
        """(batch, target, vocab), in fp32 and without dropout."""

    @abstractmethod
    def step(self, batch: Any) -> int:
        """One update of the weights; returns the target tokens it learned from, and need not wait for the device."""

    @abstractmethod
    def close(self) -> None:
        """Give back the memory."""


class Written(Contender):
    """A model in the loop that everyone writes: loss under autocast, backward, fused Adam.

    `make` gives a module from (source, lengths, target) to logits; `compiled` has torch compile it with its loss, for
    the one shape that there is.
    """

    def __init__(self, engine: str, make: Callable[[Subject], nn.Module], *, compiled: bool = False) -> None:
        super().__init__(engine, "compiled" if compiled else "eager")
        self.make, self.compiled = make, compiled

    def prepare(self, subject: Subject) -> None:
        self.subject = subject
        self.model: Any = self.make(subject).to(subject.device).train()
        self.run = torch.compile(self.loss, dynamic=False) if self.compiled else self.loss
        betas = (subject.spec.beta1, subject.spec.beta2)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.Adam(parameters, lr=RATE, betas=betas, eps=subject.spec.eps, fused=True)

    def logits(self, batch: Batch) -> Tensor:
        with evaluating(self.model):
            found: Tensor = self.model(*batch.inputs)
        return found

    def loss(self, batch: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        """The mean over the real tokens."""
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


class Plain(Written):
    """Our model and our loss, which never holds all logits, one operation after the other."""

    def __init__(self) -> None:
        super().__init__(OURS, lambda subject: copy.deepcopy(subject.model))
        self.how = "plain"

    def loss(self, batch: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        hidden = self.model.hidden_at(labels != PAD, *batch)
        smoothing = self.subject.spec.label_smoothing
        loss, _ = smoothed_loss(hidden, self.model.output.weight, labels, smoothing=smoothing, pad=PAD)
        return loss / (labels != PAD).sum()


class Fast(Contender):
    """Our fused pass over sentences laid end to end; on a GPU, as CUDA graphs."""

    def __init__(self) -> None:
        super().__init__(OURS, "captured")

    def prepare(self, subject: Subject) -> None:
        self.model = copy.deepcopy(subject.model).to(subject.device).train()
        optimizer = optim.build(self.model, subject.spec)
        dtype = torch.bfloat16 if subject.device.type == "cuda" else torch.float32
        self.captured = Captured(self.model, optimizer, None, subject.spec, pad=PAD, dtype=dtype)
        self.steps = 0

    def laid(self, batch: Batch) -> Ragged:
        real = batch.labels != PAD
        lengths = [side.numpy() - 1 for side in (batch.lengths, real.sum(1))]  # without </s>
        rows = [
            np.concatenate([row[:length] for row, length in zip(ids.numpy(), own, strict=True)])
            for ids, own in zip((batch.source, batch.labels), lengths, strict=True)
        ]
        return lay(*map(Flat, rows, lengths), bos=BOS, eos=EOS, pad=PAD, step=STEP)

    def logits(self, batch: Batch) -> Tensor:
        with evaluating(self.model):
            found: Tensor = self.model(*batch.inputs)
        return found

    def step(self, batch: Ragged) -> int:
        self.steps += 1
        self.captured.add_gradient(batch, self.steps)
        self.captured.update(rate=RATE)
        return batch.tokens

    def close(self) -> None:
        self.model = self.captured = None  # type: ignore[assignment]


class OtherArchitecture(Written):
    """One whose layers are not the paper's: of the same sizes, but its logits are its own."""

    exact = False


def contenders(device: torch.device) -> list[Contender]:
    """All there are; ours come first, the plain one as the reference for the others' logits."""
    found: list[Contender] = [Plain(), Fast()] if device.type == "cuda" else [Plain()]
    for engine, make in ((TRANSFORMERS, _marian), (TORCH, _torch)):
        found += [Written(engine, make, compiled=compiled) for compiled in (False, True)]
    return [*found, OtherArchitecture(X_TRANSFORMERS, _x_transformers)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


# ---- what they are made of -------------------------------------------------------------------------------------------


class _Marian(nn.Module):
    """transformers' model, with the signature of ours."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model = to_huggingface(subject.model, max_positions=max(512, subject.width))
        self.model.set_attn_implementation("sdpa")
        self.model.config.attention_dropout = subject.model.spec.attention_dropout

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        real = torch.arange(source.shape[1], device=source.device) < lengths[:, None]
        made = self.model(
            input_ids=source, attention_mask=real.long(), decoder_input_ids=target, use_cache=False, return_dict=True
        )
        logits: Tensor = made.logits
        return logits


def _marian(subject: Subject) -> nn.Module:
    return _Marian(subject)


def _torch(subject: Subject) -> nn.Module:
    """torch's layers; their dropout inside attention and feed-forward, which the paper has not, is that of our spec."""
    peer = TorchTransformer(copy.deepcopy(subject.model))
    spec = subject.model.spec
    for module in peer.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = spec.attention_dropout
        elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            module.dropout.p = spec.activation_dropout
    return peer


class _XTransformer(nn.Module):
    """x-transformers' encoder and decoder of our sizes, its own choices in all else; output tied to the embedding."""

    def __init__(self, subject: Subject, package: Any) -> None:
        super().__init__()
        spec, vocab = subject.model.spec, len(subject.model.output.weight)
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


def _x_transformers(subject: Subject) -> nn.Module:
    try:
        return _XTransformer(subject, importlib.import_module("x_transformers"))
    except ImportError:
        raise UsageError("x-transformers is not installed: pip install x-transformers") from None
