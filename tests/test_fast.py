"""The fast trainer takes the plain one's steps. Without a GPU its operations run one by one, as their plain twins."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import begun, resume, sentences, tiny_config, updates, weights, write_pairs
from qkv.core.batches import PairBatches, Update
from qkv.engines.cuda_training.cuda_trainer import FastTrainer, make_trainer
from qkv.train.trainer import Trainer

STEPS = 6
Make = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A trainer of a kind, with some options changed; one pair of the text is much longer than the others."""
    text = sentences(120)
    text.append((" ".join(source for source, _ in text[:40]), " ".join(target for _, target in text[:40])))
    files = write_pairs(tmp_path, text)

    def trainer(kind: type[Trainer], **train: Any) -> Trainer:
        sizes = {"tokens_per_step": 512, "micro_tokens": 512}  # left to itself, the fast trainer mixes more lengths
        values = {"steps": 50, "metric": "loss", "log_every": 1, "average": 0, **sizes} | train
        dropout = values.pop("dropout", 0.0)
        model = {"d_model": 16, "d_ff": 32, "dropout": dropout}
        settings = tiny_config(*files).replace(model=model, data={"max_length": 400}, train=values)
        return kind(*begun(tmp_path, settings))

    return trainer


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"clip": 0.5, "ema": 0.9},
        {"optimizer": "muon", "schedule": "wsd", "learning_rate": 0.01, "warmup": 2},
        {"optimizer": "soap"},
        {"r_drop": 5.0, "dropout": 1e-9},  # so little that both drop nothing, each in its own way
    ],
    ids=str,
)
def test_steps_are_those_of_the_plain_trainer(make: Make, train: dict[str, Any]) -> None:
    plain, fast = make(Trainer, **train), make(FastTrainer, **train)
    assert isinstance(fast.updates, PairBatches)
    fast.updates.longest = 128  # a pair beyond it takes the plain way
    ways, close = set(), 2e-4
    if plain.spec.optimizer == "soap":
        close = 0.02  # eigenvectors of eigenvalues that are nearly alike follow the rounding
    for ours, theirs in zip(updates(fast, 12), updates(plain, 12), strict=True):
        ways.add(bool(ours.micro_batches))
        assert fast.step(ours) == pytest.approx(plain.step(theirs), rel=close)
        assert ours.tokens == theirs.tokens
    assert ways == {True, False}, "some updates must hold the long pair beside the others, and others not"
    for name, weight in weights(plain).items():
        torch.testing.assert_close(weights(fast)[name], weight, rtol=10 * close, atol=close)
    assert fast.progress == plain.progress
    if plain.ema is not None and fast.ema is not None:
        for ours, theirs in zip(fast.ema.weights, plain.ema.weights, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-5)


def test_an_update_in_several_passes_is_the_same_update(make: Make) -> None:
    whole, parts = make(FastTrainer), make(FastTrainer)
    assert isinstance(parts.updates, PairBatches)
    parts.updates.packed_tokens, several = 200, 0
    for one, many in zip(updates(whole, STEPS), updates(parts, STEPS), strict=True):
        several += len(many.packed) > 1
        assert parts.step(many) == pytest.approx(whole.step(one), rel=2e-4)
    assert several


def test_a_resumed_run_goes_on_as_an_unbroken_one(make: Make, tmp_path: Path) -> None:
    options = {"dropout": 0.2, "ema": 0.9, "seed": 3}
    unbroken, broken, resumed = (make(FastTrainer, **options) for _ in range(3))
    steps = updates(unbroken, STEPS)
    for update in steps[:3]:
        broken.step(update)
    resume(tmp_path / "saved", broken, resumed)
    outcomes = [unbroken.step(update) for update in steps]
    assert [resumed.step(update) for update in steps[3:]] == outcomes[3:]
    for name, weight in weights(unbroken).items():
        torch.testing.assert_close(weights(resumed)[name], weight, rtol=0, atol=0)


def test_an_update_that_is_not_finite_changes_nothing(make: Make) -> None:
    trainer = make(FastTrainer, ema=0.9)
    first, *rest = [update for update in updates(trainer, 12) if update.packed]
    trainer.step(first)
    before = weights(trainer)
    assert isinstance(trainer, FastTrainer)
    assert trainer.ema is not None
    average = [weight.clone() for weight in trainer.ema.weights]
    trainer.captured.weights.grads[0] = math.inf
    assert not trainer.step(rest[0]).finite
    assert (trainer.progress.skipped, trainer.progress.skipped_in_a_row) == (1, 1)
    for name, weight in weights(trainer).items():
        assert torch.equal(weight, before[name])
    for now, then in zip(trainer.ema.weights, average, strict=True):
        assert torch.equal(now, then)
    assert trainer.step(rest[1]).finite
    assert trainer.progress.skipped_in_a_row == 0


def test_what_does_not_fit_is_computed_in_parts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast = make(Trainer), make(FastTrainer)
    assert isinstance(fast, FastTrainer)
    ours, theirs = next(
        pair for pair in zip(updates(fast, STEPS), updates(plain, STEPS), strict=True) if pair[0].packed
    )

    def full(*_: Any) -> None:
        fast.captured.weights.grads.add_(1.0)  # half a gradient
        raise torch.OutOfMemoryError

    monkeypatch.setattr(fast.captured, "add_gradient", full)
    assert fast.step(ours) == pytest.approx(plain.step(theirs), rel=2e-4)
    assert isinstance(fast.updates, PairBatches)
    assert fast.updates.packed_tokens == max(ours.packed[0].sizes) // 2


def test_rows_of_a_ragged_update_can_be_looked_at(make: Make) -> None:
    plain, fast = make(Trainer), make(FastTrainer)
    ours, theirs = next(
        pair for pair in zip(updates(fast, STEPS), updates(plain, STEPS), strict=True) if pair[0].packed
    )

    def rows(trainer: Trainer, update: Update) -> list[tuple[list[int], list[int]]]:
        found = []
        for batch in trainer.padded(update):
            for source, labels in zip(batch.source.tolist(), batch.labels.tolist(), strict=True):
                found.append(([i for i in source if i], [i for i in labels if i]))
        return sorted(found)

    assert rows(fast, ours) == rows(plain, theirs)


def test_room_is_made_for_all_updates_of_a_pass(make: Make) -> None:
    trainer = make(FastTrainer, micro_tokens=0, seed=2)
    assert isinstance(trainer.updates, PairBatches)
    most = trainer.updates.most_rows(0)
    counts = [batch.counts for step in updates(trainer, len(trainer.updates.plan(0))) for batch in step.packed]
    assert len(counts) > 1
    assert all(count <= room for batch in counts for count, room in zip(batch, most, strict=True))
    assert [max(column) > 0 for column in zip(*counts, strict=True)] == [room > 0 for room in most]


def test_rows_end_where_learned_positions_do(make: Make) -> None:
    free = make(FastTrainer)
    assert isinstance(free.updates, PairBatches)
    model = {"positions": "learned", "max_positions": 500}
    learned = FastTrainer(free.config.replace(model=model), free.prepared)
    assert isinstance(learned.updates, PairBatches)
    assert (free.updates.longest, learned.updates.longest) == (1024, 500)


def test_an_end_in_passes_is_that_of_its_own_plan(make: Make) -> None:
    """Left to itself, the fast trainer cuts a pass into other updates."""
    plain, fast = (
        make(kind, tokens_per_step=450, micro_tokens=0, epochs=2.0, steps=10_000) for kind in (Trainer, FastTrainer)
    )
    own = [sum(len(trainer.updates.plan(epoch)) for epoch in range(2)) for trainer in (plain, fast)]
    assert [plain.spec.steps, fast.spec.steps] == own
    assert own[0] != own[1]


def test_another_trainer_goes_on_in_the_same_plan(make: Make) -> None:
    """Resumed where another trainer serves, on a CPU or with checkpointing, a run reads what it has not read yet."""
    plain, fast = (make(kind, micro_tokens=0, epochs=2.0, steps=10_000) for kind in (Trainer, FastTrainer))
    plain.go_on_from(fast.progress)
    ours, theirs = ([[micro.tolist() for micro in update] for update in each.updates.plan(0)] for each in (plain, fast))
    assert ours == theirs
    assert plain.spec.steps == fast.spec.steps


def test_a_cpu_has_the_plain_trainer(make: Make) -> None:
    trainer = make(Trainer)
    assert type(make_trainer(trainer.config, trainer.prepared)) is Trainer
