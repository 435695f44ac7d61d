"""Memory limits: smaller micro-batches keep the gradient, and activation checkpointing is bit-identical."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import sentences, tiny_config, write_pairs
from qkv.assembly import build_model, trainer_for
from qkv.core.batches import Batch, Update
from qkv.core.dataset import PreparedText
from qkv.core.errors import QkvError
from qkv.core.trainer import Trainer
from qkv.data.pair_updates import AlignedBatch
from qkv.data.text_preparation import prepare_text
from qkv.options import (
    AttentionModelConfig,
    Config,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    ModelConfig,
    TransformerConfig,
)
from qkv.training import memory_limits
from qkv.training.unpadded import loss_in_parts

LINKS = torch.tensor([[0, 1, 1], [1, 0, 0], [2, 1, 0], [2, 0, 1]])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, PreparedText]:
    folder = tmp_path_factory.mktemp("text")
    settings = tiny_config(*write_pairs(folder, sentences(300)), tokens_per_step=512, micro_tokens=256)
    settings = settings.replace(model={"d_model": 16, "d_ff": 32, "encoder_layers": 2, "decoder_layers": 2})
    return settings, prepare_text(settings.data, settings.tokenizer, folder / "store")


Make = Callable[..., Trainer]


@pytest.fixture
def trainer(prepared: tuple[Config, PreparedText]) -> Make:
    def make(model: dict[str, Any] | None = None, **train: object) -> Trainer:
        settings, text = prepared
        return trainer_for(settings.replace(model=model or {}, train=train), text, step=memory_limits.MemoryLimitedStep)

    return make


def first(trainer: Trainer) -> Update:
    steps = trainer.updates.starting(trainer.progress.position)
    update = next(steps)
    steps.close()
    return update


def small_device(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, tokens: int) -> list[int]:
    """Make the backward pass of a batch above a number of tokens run out of memory, with half of its gradient done.

    Returns the sizes that were tried, as they are tried.
    """
    step = trainer.train_step
    assert isinstance(step, memory_limits.MemoryLimitedStep)
    real, tried = step.forward_backward, []

    def limited(batch: Batch) -> Tensor:
        tried.append(memory_limits.size(batch))
        if tried[-1] > tokens:
            real(memory_limits.take(batch, 0, 1))
            raise torch.OutOfMemoryError("as a GPU would say")
        return real(batch)

    monkeypatch.setattr(step, "forward_backward", limited)
    return tried


# ---- batches that do not fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [200, 100, 40])
def test_smaller_micro_batches_keep_the_step(
    trainer: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tokens: int
) -> None:
    plenty, scarce = trainer(), trainer()
    update = first(plenty)
    assert max(map(memory_limits.size, update.micro_batches)) > tokens
    tried = small_device(scarce, monkeypatch, tokens)
    expected = plenty.step(update)
    assert scarce.step(update) == pytest.approx(expected, rel=1e-5)
    for own, other in zip(scarce.model.parameters(), plenty.model.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
    assert capsys.readouterr().err.count("out of memory") == 1
    del tried[:]
    scarce.step(update)
    assert max(tried) <= tokens  # which it remembers
    assert not capsys.readouterr().err
    assert scarce.progress.tokens == 2 * update.tokens


def test_a_sentence_that_does_not_fit_is_refused(trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer()
    small_device(made, monkeypatch, 3)
    with pytest.raises(QkvError, match=r"a single sentence of \d+ tokens does not fit on cpu.*train\.checkpointing"):
        made.step(first(made))


def test_the_largest_batch_is_tried_first(trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer()
    sizes = [
        memory_limits.size(made.updates.batch(micro, (0, 0, 0))) for update in made.updates.plan(0) for micro in update
    ]
    assert memory_limits.size(memory_limits.largest_batch(made.updates)) == max(sizes)
    tried = small_device(made, monkeypatch, 100)
    step = made.train_step
    assert isinstance(step, memory_limits.MemoryLimitedStep)
    step.probe()
    assert tried[0] == max(sizes)
    assert step.limit.tokens <= 100
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert made.progress.step == 0


def test_rows_are_taken_with_their_links() -> None:
    source, lengths = torch.arange(1, 7).reshape(3, 2), torch.tensor([2, 2, 2])
    labels = torch.tensor([[5, 2], [2, 0], [4, 2]])
    batch = AlignedBatch((source, lengths, labels), labels, 5, LINKS)
    part = memory_limits.take(batch, 1, 3)
    assert part.tokens == 3
    assert part.source.tolist() == [[3, 4], [5, 6]]
    assert isinstance(part, AlignedBatch)
    assert part.alignment.tolist() == [[0, 0, 0], [1, 1, 0], [1, 0, 1]]
    nothing = memory_limits.idle(batch)
    assert (nothing.tokens, nothing.labels.tolist()) == (0, [[0, 0]])
    assert isinstance(nothing, AlignedBatch)
    assert len(nothing.alignment) == 0


def test_a_room_cuts_into_parts_that_fit() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        rows, width, limit = (int(random.integers(1, high)) for high in (30, 12, 120))
        ids = torch.from_numpy(random.integers(1, 9, (rows, width)))
        room = memory_limits.MicroBatchLimit(torch.device("cpu"))
        room.tokens = limit
        parts = room.parts(Batch((ids,), ids, rows * width))
        assert torch.equal(torch.cat([part.labels for part in parts]), ids)
        assert all(memory_limits.size(part) <= limit or len(part.labels) == 1 for part in parts)
        assert len(parts) == 1 or len(parts[0].labels) == max(1, limit // width)


# ---- activations computed twice --------------------------------------------------------------------------------------


KINDS: list[ModelConfig] = [
    TransformerConfig(d_model=16, d_ff=32, heads=2, encoder_layers=2, decoder_layers=2, norm="pre"),
    TransformerConfig(d_model=16, d_ff=32, heads=2, encoder_layers=1, decoder_layers=2, positions="rotary"),
    DecoderOnlyConfig(d_model=16, d_ff=32, heads=2, layers=2),
    EncoderOnlyConfig(d_model=16, d_ff=32, heads=2, layers=2),
]


@pytest.mark.parametrize("spec", KINDS, ids=lambda spec: f"{spec.kind} {spec.positions}")
def test_layers_computed_twice_give_the_same_gradient(spec: AttentionModelConfig) -> None:
    """Dropout included: both passes draw the same masks."""
    spec = dataclasses.replace(spec, dropout=0.3, attention_dropout=0.2, activation_dropout=0.1)
    torch.manual_seed(1)
    model = build_model(spec, 30, 30)  # type: ignore[call-overload]
    ids, lengths = torch.randint(3, 30, (4, 6)), torch.tensor([6, 5, 6, 2])
    inputs = {"transformer": (ids, lengths, ids), "decoder": (ids,), "encoder": (ids, lengths)}[spec.kind]

    def gradients() -> tuple[Tensor, list[Tensor], int]:
        kept: list[int] = []
        model.zero_grad()
        torch.manual_seed(7)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            hidden = model.hidden(*inputs)
        loss, _ = loss_in_parts(hidden, model.output.weight, ids, smoothing=0.1, pad=0)
        loss.backward()
        return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()], sum(kept)

    loss, expected, kept = gradients()
    memory_limits.recompute_layers(model)
    again, found, less = gradients()
    assert torch.equal(loss, again)
    assert all(map(torch.equal, expected, found))
    assert less < kept / 2


def test_checkpointing_is_an_option_of_training(trainer: Make) -> None:
    plain, twice = (trainer({"dropout": 0.3}, checkpointing=chosen) for chosen in (False, True))
    update = first(plain)
    for _ in range(3):
        assert twice.step(update) == plain.step(update)
    for own, other in zip(twice.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(own, other)
