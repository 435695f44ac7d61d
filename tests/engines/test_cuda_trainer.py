"""The CUDA training step equals the plain one. Without a GPU its operations run as their PyTorch twins."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import begun, resume, sentences, tiny_config, updates, weights, write_pairs
from qkv.assembly import train_step_for, trainer_for
from qkv.core.batches import PairBatches, Update
from qkv.core.trainer import PlainTrainStep, Trainer
from qkv.engines.cuda_training.cuda_trainer import CudaTrainStep
from qkv.training.memory_limits import MemoryLimitedStep
from qkv.training.regularization import Ema

STEPS = 6
Make = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A trainer of a kind, with some options changed; one pair of the text is much longer than the others."""
    text = sentences(120)
    text.append((" ".join(source for source, _ in text[:40]), " ".join(target for _, target in text[:40])))
    files = write_pairs(tmp_path, text)

    def trainer(kind: type[PlainTrainStep], **train: Any) -> Trainer:
        sizes = {"tokens_per_step": 512, "micro_tokens": 512}  # by default the CUDA trainer mixes more lengths
        values = {"steps": 50, "metric": "loss", "log_every": 1, "average": 0, **sizes} | train
        dropout = values.pop("dropout", 0.0)
        model = {"d_model": 16, "d_ff": 32, "dropout": dropout}
        settings = tiny_config(*files).replace(model=model, data={"max_length": 400}, train=values)
        return trainer_for(*begun(tmp_path, settings), step=kind)

    return trainer


def average_of(trainer: Trainer) -> list[Tensor]:
    """The moving average of the weights."""
    assert isinstance(trainer.train_step.average, Ema)
    return trainer.train_step.average.weights


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"clip": 0.5, "ema": 0.9},
        {"optimizer": "muon", "schedule": "wsd", "learning_rate": 0.01, "warmup": 2},
        {"optimizer": "soap"},
        {"r_drop": 5.0, "dropout": 1e-9},  # so small that neither drops anything
    ],
    ids=str,
)
def test_steps_are_those_of_the_plain_trainer(make: Make, train: dict[str, Any]) -> None:
    plain, fast = make(MemoryLimitedStep, **train), make(CudaTrainStep, **train)
    assert isinstance(fast.updates, PairBatches)
    fast.updates.longest = 128  # a longer pair takes the plain path
    ways, close = set(), 2e-4
    if plain.config.train.optimizer == "soap":
        close = 0.02  # eigenvectors of eigenvalues that are nearly alike follow the rounding
    for ours, theirs in zip(updates(fast, 12), updates(plain, 12), strict=True):
        ways.add(bool(ours.micro_batches))
        assert fast.step(ours) == pytest.approx(plain.step(theirs), rel=close)
        assert ours.tokens == theirs.tokens
    assert ways == {True, False}, "some updates must hold the long pair beside the others, and others not"
    for name, weight in weights(plain).items():
        torch.testing.assert_close(weights(fast)[name], weight, rtol=10 * close, atol=close)
    assert fast.progress == plain.progress
    if train.get("ema"):
        for ours, theirs in zip(average_of(fast), average_of(plain), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-5)


def test_an_update_in_several_passes_is_the_same_update(make: Make) -> None:
    whole, parts = make(CudaTrainStep), make(CudaTrainStep)
    assert isinstance(parts.updates, PairBatches)
    parts.updates.packed_tokens, several = 200, 0
    for one, many in zip(updates(whole, STEPS), updates(parts, STEPS), strict=True):
        several += len(many.packed) > 1
        assert parts.step(many) == pytest.approx(whole.step(one), rel=2e-4)
    assert several


def test_a_resumed_run_equals_an_uninterrupted_one(make: Make, tmp_path: Path) -> None:
    options = {"dropout": 0.2, "ema": 0.9, "seed": 3}
    unbroken, broken, resumed = (make(CudaTrainStep, **options) for _ in range(3))
    steps = updates(unbroken, STEPS)
    for update in steps[:3]:
        broken.step(update)
    resume(tmp_path / "saved", broken, resumed)
    outcomes = [unbroken.step(update) for update in steps]
    assert [resumed.step(update) for update in steps[3:]] == outcomes[3:]
    for name, weight in weights(unbroken).items():
        torch.testing.assert_close(weights(resumed)[name], weight, rtol=0, atol=0)


def test_an_update_that_is_not_finite_changes_nothing(make: Make) -> None:
    trainer = make(CudaTrainStep, ema=0.9)
    first, *rest = [update for update in updates(trainer, 12) if update.packed]
    trainer.step(first)
    before = weights(trainer)
    assert isinstance(trainer.train_step, CudaTrainStep)
    average = [weight.clone() for weight in average_of(trainer)]
    trainer.train_step.graphs().weights.grads[0] = math.inf
    assert not trainer.step(rest[0]).finite
    assert (trainer.progress.skipped, trainer.progress.skipped_in_a_row) == (1, 1)
    for name, weight in weights(trainer).items():
        assert torch.equal(weight, before[name])
    for now, then in zip(average_of(trainer), average, strict=True):
        assert torch.equal(now, then)
    assert trainer.step(rest[1]).finite
    assert trainer.progress.skipped_in_a_row == 0


def test_an_update_too_large_for_memory_is_computed_in_parts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast = make(MemoryLimitedStep), make(CudaTrainStep)
    step = fast.train_step
    assert isinstance(step, CudaTrainStep)
    ours, theirs = next(
        pair for pair in zip(updates(fast, STEPS), updates(plain, STEPS), strict=True) if pair[0].packed
    )

    def full(*_: Any) -> None:
        step.graphs().weights.grads.add_(1.0)  # half a gradient
        raise torch.OutOfMemoryError

    monkeypatch.setattr(step.graphs(), "add_gradient", full)
    assert fast.step(ours) == pytest.approx(plain.step(theirs), rel=2e-4)
    assert isinstance(fast.updates, PairBatches)
    assert fast.updates.packed_tokens == max(ours.packed[0].sizes) // 2


def test_rows_of_a_ragged_update_can_be_looked_at(make: Make) -> None:
    plain, fast = make(MemoryLimitedStep), make(CudaTrainStep)
    ours, theirs = next(
        pair for pair in zip(updates(fast, STEPS), updates(plain, STEPS), strict=True) if pair[0].packed
    )

    def rows(trainer: Trainer, update: Update) -> list[tuple[list[int], list[int]]]:
        found = []
        step = trainer.train_step
        for batch in step.padded(update) if isinstance(step, CudaTrainStep) else update.micro_batches:
            for source, labels in zip(batch.source.tolist(), batch.labels.tolist(), strict=True):
                found.append(([i for i in source if i], [i for i in labels if i]))
        return sorted(found)

    assert rows(fast, ours) == rows(plain, theirs)


def test_buffers_fit_all_updates_of_an_epoch(make: Make) -> None:
    trainer = make(CudaTrainStep, micro_tokens=0, seed=2)
    assert isinstance(trainer.updates, PairBatches)
    most = trainer.updates.most_rows(0)
    counts = [batch.counts for step in updates(trainer, len(trainer.updates.plan(0))) for batch in step.packed]
    assert len(counts) > 1
    assert all(count <= room for batch in counts for count, room in zip(batch, most, strict=True))
    assert [max(column) > 0 for column in zip(*counts, strict=True)] == [room > 0 for room in most]


def test_rows_end_where_learned_positions_do(make: Make) -> None:
    free = make(CudaTrainStep)
    assert isinstance(free.updates, PairBatches)
    model = {"positions": "learned", "max_positions": 500}
    learned = trainer_for(free.config.replace(model=model), free.text, step=CudaTrainStep)
    assert isinstance(learned.updates, PairBatches)
    assert (free.updates.longest, learned.updates.longest) == (1024, 500)


def test_an_end_in_passes_is_that_of_its_own_plan(make: Make) -> None:
    """By default the CUDA trainer plans other updates."""
    plain, fast = (
        make(kind, tokens_per_step=450, micro_tokens=0, epochs=2.0, steps=10_000)
        for kind in (MemoryLimitedStep, CudaTrainStep)
    )
    own = [sum(len(trainer.updates.plan(epoch)) for epoch in range(2)) for trainer in (plain, fast)]
    assert [plain.plan().last_step, fast.plan().last_step] == own
    assert own[0] != own[1]


def test_another_trainer_continues_in_the_same_plan(make: Make) -> None:
    """A run resumed with another trainer (on a CPU, or with checkpointing) continues with the unread batches."""
    plain, fast = (make(kind, micro_tokens=0, epochs=2.0, steps=10_000) for kind in (MemoryLimitedStep, CudaTrainStep))
    plain.go_on_from(fast.progress)
    ours, theirs = ([[micro.tolist() for micro in update] for update in each.updates.plan(0)] for each in (plain, fast))
    assert ours == theirs
    assert plain.plan().last_step == fast.plan().last_step


def test_a_cpu_has_the_plain_trainer(make: Make) -> None:
    trainer = make(MemoryLimitedStep)
    assert train_step_for(trainer.config) is PlainTrainStep
