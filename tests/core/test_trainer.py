"""One update, the loop that repeats it, and the weights that it keeps."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import sentences, updates, weights, write_pairs
from core_runs import entries, prepare_text, settings, train, trainer_for
from qkv.core import files, optimizer
from qkv.core import trainer as trainer_module
from qkv.core.batches import Batch, Update
from qkv.core.dataset import PreparedText
from qkv.core.errors import Interrupted, QkvError
from qkv.core.loss import SmoothedObjective
from qkv.core.run import Run
from qkv.core.trainer import Trainer
from qkv.core.validation import TranslationTask, Validation


class Messages:
    """A log sink that keeps all events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, dict[str, Any]]] = []

    def event(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self.events.append((kind, step, dict(values)))

    @property
    def texts(self) -> list[str]:
        return [values["text"] for kind, _, values in self.events if kind == "message"]


class MovingAverage:
    """A hook that averages the weights with equal parts of the newest ones."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.steps: list[int] = []

    def __call__(self, number: int, model: torch.nn.Module) -> None:
        self.steps.append(number)
        for name, parameter in model.named_parameters():
            self.tensors_of(model)[name].lerp_(parameter.detach(), 0.5)

    def tensors_of(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        self.weights = self.weights or {name: p.detach().clone() for name, p in model.named_parameters()}
        return self.weights

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.weights


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """150 pairs of the small language."""
    return write_pairs(tmp_path_factory.mktemp("small"), sentences(150))


@pytest.fixture(scope="module")
def prepared(small: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> PreparedText:
    config = settings(small)
    return prepare_text(config.data, tmp_path_factory.mktemp("store") / "store", learn=True)


@pytest.fixture
def trainer(small: tuple[str, str], prepared: PreparedText) -> Callable[..., Trainer]:
    """A model before its first step, of the tests' config with some options changed."""

    def make(model: dict[str, Any] | None = None, **options: object) -> Trainer:
        return trainer_for(settings(small, model, **options), prepared)

    return make


def test_accumulation_does_not_change_the_step(trainer: Callable[..., Trainer]) -> None:
    """The same sentences as one micro-batch or as many: the same loss, gradient norm and new weights."""
    whole, parts = trainer(), trainer()
    update = updates(whole, 1)[0]
    batch = update.micro_batches[0]
    pieces = [_rows(batch, slice(0, 1)), _rows(batch, slice(1, 3)), _rows(batch, slice(3, None))]
    assert all(len(piece.source) for piece in pieces)
    together = whole.step(Update([batch], update.after))
    assert together == pytest.approx(parts.step(Update(pieces, update.after)), rel=1e-5)
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weight, weights(parts)[name], rtol=1e-4, atol=1e-6)


def _rows(batch: Batch, rows: slice) -> Batch:
    labels = batch.labels[rows]
    inputs = tuple(each[rows] for each in batch.inputs)
    return Batch(inputs, labels, int((labels != 0).sum()))


def test_dropout_follows_the_step_number_alone(trainer: Callable[..., Trainer]) -> None:
    a, b = trainer({"dropout": 0.5}), trainer({"dropout": 0.5})
    update = updates(a, 1)[0]
    torch.rand(17)  # after other random numbers were drawn
    first = a.step(update)
    torch.rand(3)
    assert first == b.step(update)
    later = trainer({"dropout": 0.5})
    later.progress.step = 6
    assert later.step(update) != first


def test_bf16_trains_on_a_cpu(trainer: Callable[..., Trainer]) -> None:
    made, exact = trainer(precision="bf16", warmup=1), trainer(precision="fp32", warmup=1)
    assert made.train_step.precision == torch.bfloat16
    for ours, theirs in zip(updates(made, 8), updates(exact, 8), strict=True):
        low, high = made.step(ours), exact.step(theirs)
        assert low.finite
        assert low.loss == pytest.approx(high.loss, rel=0.03)
        assert low.loss != high.loss
    assert all(p.dtype == torch.float32 for p in made.model.parameters())


def poison(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int], bool]) -> None:
    """Make the loss NaN in the steps for which `bad` returns True."""
    real = SmoothedObjective.__call__
    calls: list[int] = []

    def loss(*arguments: Any) -> Any:
        smoothed, nll = real(*arguments)
        if not torch.is_grad_enabled():  # a validation, which measures with the same objective
            return smoothed, nll
        calls.append(0)
        return (smoothed * math.nan, nll) if bad(len(calls)) else (smoothed, nll)

    monkeypatch.setattr(SmoothedObjective, "__call__", loss)


def test_ten_bad_steps_in_a_row_stop_it(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: call > 5)
    messages = Messages()
    with pytest.raises(
        QkvError, match=r"not finite in 10 updates in a row, up to step 15: a lower train\.learning_rate"
    ):
        train(settings(small, steps=50, micro_tokens=256), tmp_path / "run", [messages])
    assert [text for text in messages.texts if "skipped" in text] == [
        f"step {step}: the loss is not finite, update skipped ({step - 5} in all)" for step in range(6, 16)
    ]
    kind, _, values = messages.events[-1]
    assert (kind, values["number"]) == ("given_up", 15)
    assert isinstance(values["update"], Update)
    for name in ("best", "step-0000014"):  # the saved weights are finite
        kept = files.read_tensors(tmp_path / "run" / "weights" / f"{name}.safetensors")
        assert all(bool(tensor.isfinite().all()) for tensor in kept.values())


def scripted(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Let the validations find these losses, one after another."""
    results = iter(losses)
    monkeypatch.setattr(TranslationTask, "validate", lambda *arguments: Validation(next(results), None, ""))


def test_micro_tokens_bound_what_is_computed_at_once(trainer: Callable[..., Trainer]) -> None:
    update = updates(trainer(tokens_per_step=512, micro_tokens=64), 1)[0]
    assert len(update.micro_batches) > 4
    assert all(batch.source.numel() <= 64 and batch.labels.numel() <= 64 for batch in update.micro_batches)
    assert 256 < sum(batch.labels.numel() for batch in update.micro_batches) <= 512


@pytest.mark.parametrize("schedule", ["paper", "inverse_sqrt", "cosine", "linear", "constant"])
def test_the_schedule_reaches_the_optimiser(trainer: Callable[..., Trainer], schedule: str) -> None:
    made = trainer(schedule=schedule, warmup=2)
    for number, update in enumerate(updates(made, 3), 1):
        made.step(update)
        rate = optimizer.learning_rate(number, made.config.train, made.config.model.d_model)
        assert [group["lr"] for group in made.train_step.optimizer.param_groups] == [rate]
        assert made.progress.learning_rate == rate


def test_dropout_is_off_between_an_evaluation_and_the_next_update(trainer: Callable[..., Trainer]) -> None:
    made = trainer()
    with made.train_step.evaluated_model() as model:
        assert not model.training  # type: ignore[attr-defined]
    made.step(updates(made, 1)[0])
    assert made.model.training


def test_adam_takes_the_first_step_that_it_should(trainer: Callable[..., Trainer]) -> None:
    """After one step from zero moments, Adam has moved every weight that has a gradient by the learning rate."""
    made = trainer(schedule="constant", warmup=0, learning_rate=1e-3, clip=0.0)
    before = weights(made)
    made.step(updates(made, 1)[0])
    for name, weight in weights(made).items():
        moved = (weight - before[name]).abs()
        assert moved.max() <= 1e-3 * 1.001
        assert (moved > 0.99e-3).float().mean() > 0.3, name  # the rest have no gradient, or next to none


def test_clipping_limits_the_gradient(trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(clip=0.01)
    norms = []

    def look() -> None:
        norms.append(
            float(torch.nn.utils.get_total_norm([p.grad for p in made.model.parameters() if p.grad is not None]))
        )

    monkeypatch.setattr(made.train_step.optimizer, "step", look)
    outcome = made.step(updates(made, 1)[0])
    assert outcome.gradient_norm > 0.1
    assert norms == [pytest.approx(0.01, rel=1e-3)]


def test_some_bad_steps_do_not_stop_training(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: call % 2 == 0)
    run = train(settings(small, steps=22, validate_every=22, micro_tokens=256), tmp_path / "run").path
    last = entries(run, "train")[-1]
    assert (last["step"], last["skipped"]) == (22, 11)
    assert [line["loss"] is None for line in entries(run, "train")] == [False, True] * 11


def test_a_poisoned_weight_is_noticed(trainer: Callable[..., Trainer]) -> None:
    made = trainer()
    with torch.no_grad():
        next(made.model.parameters()).fill_(math.inf)
    assert not made.step(updates(made, 1)[0]).finite


def test_early_stopping(small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [3.0, 2.0, 2.5, 1.0, 1.1, 1.0, 99.0])
    run = train(settings(small, steps=100, patience=2, average=0), tmp_path / "run")
    assert [line["loss"] for line in entries(run.path, "valid")] == [3.0, 2.0, 2.5, 1.0, 1.1, 1.0]
    assert run.scores["best"] == {"step": 8, "loss": 1.0, "perplexity": math.e, "bleu": None}
    assert run.scores["finished"] == 12


def test_a_patience_of_one_stops_at_the_first_worse_validation(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [3.0, 2.0, 2.5, 1.0])
    run = train(settings(small, steps=100, patience=1, average=0), tmp_path / "run")
    assert [line["loss"] for line in entries(run.path, "valid")] == [3.0, 2.0, 2.5]


def test_the_best_weights_are_kept_and_used(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [3.0, 1.0, 2.0, 2.0, 5.0])
    run = train(settings(small, average=3), tmp_path / "run")
    assert [path.stem for path in run.checkpoints()] == ["step-0000004", "step-0000006", "step-0000008"]
    best, fourth = (files.read_tensors(run.weights(name)) for name in ("best", "step-0000004"))
    assert all(torch.equal(best[name], fourth[name]) for name in fourth)
    assert run.scores["chosen"] == "best"
    assert run.weights() == run.weights("best")


def test_weights_are_chosen_again_when_training_continues(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [3.0, 2.5, 1.0, 2.6, 2.7, 2.9])  # the third and the last are of averages
    run = train(settings(small, average=2, steps=4), tmp_path / "run")
    assert run.scores["chosen"] == "average"
    run = train(settings(small, average=2, steps=8), run.path)
    assert run.scores["chosen"] == "best"
    assert [run.scores[name]["loss"] for name in ("best", "average")] == [2.5, 2.9]


@pytest.mark.parametrize(("epochs", "share"), [(0.5, 0.5), (1.0, 1.0), (1.25, 1.25)])
def test_epochs_are_passes_over_the_text(small: tuple[str, str], tmp_path: Path, epochs: float, share: float) -> None:
    run = train(settings(small, steps=1000, epochs=epochs, validate_every=1000), tmp_path / "run").path
    prepared = PreparedText.open(run / "store")
    passed = entries(run, "train")[-1]["tokens"] / (int(prepared.train.lengths("tgt").sum()) + len(prepared.train))
    assert passed == pytest.approx(share, abs=0.2)
    assert len(entries(run, "valid")) == 1  # at the end, though no step in between was due


@pytest.mark.parametrize("stopped", [None, 5, 6])
def test_a_validation_logs_tokens_and_seconds_so_far(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int | None
) -> None:
    """By a clock on which a step takes one second, a validation 100 and to save 1000; stopped in between or not."""
    now, read, signals = [0.0], [0], list[int]()
    start, saved = Trainer.start, trainer_module.save_state

    def step(self: Trainer, update: Update) -> None:
        now[0] += 1
        read.append(read[-1] + update.tokens)
        if self.progress.step + 1 == stopped:
            signals.append(signal.SIGINT)
        start(self, update)

    def save(*arguments: Any) -> None:
        saved(*arguments)
        now[0] += 1000

    def found(*arguments: Any) -> Validation:
        now[0] += 100
        return Validation(1.0, None, "")

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Trainer, "start", step)
    monkeypatch.setattr(trainer_module, "save_state", save)
    monkeypatch.setattr(TranslationTask, "validate", found)
    spec, run = settings(small, steps=7, log_every=3, validate_every=5), tmp_path / "run"
    if stopped:
        with pytest.raises(Interrupted):
            train(spec, run, signals=signals)
        train(spec, run)
    else:
        train(spec, run)
    assert [line["tokens"] for line in entries(run, "valid")] == [read[5], read[7]]
    assert [line["training_seconds"] for line in entries(run, "valid")] == [5, 7]
    assert [line["seconds"] for line in entries(run, "valid")] == [1105, 3207]


def test_a_schedule_ends_where_the_passes_end(trainer: Callable[..., Trainer]) -> None:
    """With `train.epochs`, the last step is the one that ends the last pass, for the schedule and the bar too."""
    made = trainer(epochs=2.0, steps=10_000, schedule="linear", warmup=0)
    passes = sum(len(made.updates.plan(epoch)) for epoch in range(2))
    assert made.plan().last_step == passes
    assert made.schedule.plan(passes, 0.0) == (0.0, passes)
    made.progress.step = passes
    assert made.done()
    assert trainer(epochs=2.0, steps=3).plan().last_step == 3


def test_a_bad_step_is_skipped_and_counted(
    small: tuple[str, str], prepared: PreparedText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, moments and hooks stay as they are, and the next update is not affected."""
    hook = MovingAverage()
    made = trainer_for(settings(small, micro_tokens=256), prepared, hooks=[hook])
    first, second, third = updates(made, 3)
    made.step(first)
    before, average = weights(made), {name: tensor.clone() for name, tensor in hook.tensors().items()}
    optimizer = made.train_step.optimizer
    counts = [int(state["step"]) for state in optimizer.state.values()]
    with monkeypatch.context() as patch:
        poison(patch, lambda call: True)
        assert not made.step(second).finite
    assert made.progress.step == 2
    assert (made.progress.skipped, made.progress.skipped_in_a_row) == (1, 1)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(made).items())
    assert all(torch.equal(tensor, average[name]) for name, tensor in hook.tensors().items())
    assert [int(state["step"]) for state in optimizer.state.values()] == counts
    assert made.step(third).finite  # and no NaN is left in the gradients
    assert (made.progress.skipped, made.progress.skipped_in_a_row) == (1, 0)
    assert not all(torch.equal(weight, before[name]) for name, weight in weights(made).items())
    assert hook.steps == [1, 3]


def test_the_average_of_the_last_is_their_mean_and_used_if_it_is_better(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [3.0, 2.0, 1.5, 1.0, 0.5])
    messages = Messages()
    run = train(settings(small, average=3), tmp_path / "run", [messages])
    assert run.scores["chosen"] == "average"
    assert run.scores["average"]["of"] == ["step-0000004", "step-0000006", "step-0000008"]
    assert run.weights() == run.weights("average")
    kept = [files.read_tensors(path) for path in run.checkpoints()]
    for name, tensor in files.read_tensors(run.weights()).items():
        mean = torch.stack([tensors[name].double() for tensors in kept]).mean(0).float()
        torch.testing.assert_close(tensor, mean, rtol=0, atol=1e-7)
    assert messages.texts[-2].startswith("average of 3  loss 0.5000")
    assert messages.texts[-1] == f"using average weights by default: {run.path}"


def test_validation_and_kept_weights_are_those_of_the_average(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, torch.Tensor]] = []

    def look(task: TranslationTask, model: torch.nn.Module, *rest: Any) -> Validation:
        seen.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        return Validation(1.0, None, "")

    monkeypatch.setattr(TranslationTask, "validate", look)
    hook = MovingAverage()
    run = train(settings(small, steps=4, validate_every=4, average=0), tmp_path / "run", hooks=[hook])
    state = run.path / "state" / "step-0000004"
    average, own, best = (
        files.read_tensors(path) for path in (state / "ema.safetensors", state / "weights.safetensors", run.weights())
    )
    for name, tensor in hook.tensors().items():
        assert torch.equal(seen[0][name], tensor)
        assert torch.equal(average[name], tensor)
        assert torch.equal(best[name], tensor)
    assert any(not torch.equal(own[name], average[name]) for name in own)


def test_a_stopped_training_goes_on_to_the_same_weights(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process restores weights, moments, position, plan and log, and then says what it did."""
    whole = train(settings(small, steps=9, validate_every=4), tmp_path / "whole")
    start, signals = Trainer.start, list[int]()

    def stopped(self: Trainer, update: Update) -> None:
        if self.progress.step == 5:
            signals.append(signal.SIGTERM)
        start(self, update)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "start", stopped)
        with pytest.raises(Interrupted, match=r"stopped at step 6 and saved: go on with `qkv train --resume") as caught:
            train(settings(small, steps=9, validate_every=4), tmp_path / "parts", signals=signals)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    messages = Messages()
    parts = train(settings(small, steps=9, validate_every=4), tmp_path / "parts", [messages])
    assert "going on from step 6" in messages.texts
    ours, theirs = (files.read_tensors(run.checkpoints()[-1]) for run in (parts, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [line["loss"] for line in entries(parts.path, "train")] == [
        line["loss"] for line in entries(whole.path, "train")
    ]
    assert parts.scores["best"] == whole.scores["best"]
    messages = Messages()
    train(settings(small, steps=9, validate_every=4), tmp_path / "parts", [messages])
    assert messages.texts == [
        f"{parts.path} is finished, at step 9: to train on, raise its limit with --set "
        "(train.steps, train.epochs or train.patience)"
    ]


def test_events_of_a_training(small: tuple[str, str], tmp_path: Path) -> None:
    """Start, one progress for each update, train at each log step, valid at each validation."""
    messages = Messages()
    run = train(settings(small, steps=5, log_every=2, validate_every=3), tmp_path / "run", [messages])
    kinds = [(kind, step) for kind, step, _ in messages.events if kind != "message"]
    assert kinds == [
        *[("start", 0), ("progress", 1), ("progress", 2), ("train", 2), ("progress", 3), ("valid", 3)],
        *[("progress", 4), ("train", 4), ("progress", 5), ("valid", 5)],
    ]
    assert messages.events[0][2] == {"last_step": 5, "validated": 0}
    logged = entries(run.path, "train")
    assert [line["step"] for line in logged] == [2, 4]
    assert set(logged[0]) == {
        *("event", "step", "epoch", "loss", "nll", "norm", "learning_rate"),
        *("tokens", "skipped", "tokens_per_second", "stalled", "seconds"),
    }
    assert set(entries(run.path, "valid")[0]) == {
        *("event", "step", "loss", "perplexity", "bleu", "sample", "tokens", "seconds", "training_seconds"),
    }
    (said,) = (text for text in messages.texts if text.startswith("step       3"))
    assert said.endswith("  0:00  best")


def test_training_begins_with_the_first_update_of_the_first_pass(trainer: Callable[..., Trainer]) -> None:
    made = trainer(micro_tokens=64)
    assert made.progress.position == (0, 0)
    first = updates(made, 1)[0]
    planned = made.updates.plan(0)[0]
    assert first.after == (0, 1)
    for batch, rows in zip(first.micro_batches, planned, strict=True):
        expected = made.updates.batch(rows, (made.config.train.seed, 0, 0))
        assert torch.equal(batch.labels, expected.labels)


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("at", ["keep_weights", "write_scores"])
def test_a_training_killed_in_a_validation_keeps_scores_of_weights_that_there_are(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, every: int
) -> None:
    """The weights of the killed validation are validated again, though other options go on from there."""
    run, call, calls = tmp_path / "run", getattr(Run, at), [0]

    def killed(self: Run, *arguments: Any) -> None:
        call(self, *arguments)
        calls[0] += 1
        if calls[0] == {"keep_weights": 4, "write_scores": 2}[at]:  # of the second validation
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, at, killed)
        with pytest.raises(KeyboardInterrupt):
            train(settings(small, steps=6, validate_every=2, average=0, metric="loss"), run)
    later = settings(small, steps=6, validate_every=every, average=0, metric="loss", learning_rate=500.0)
    opened = train(later, run)
    best, logged = opened.scores["best"], {line["step"]: line["loss"] for line in entries(run, "valid")}
    assert sorted(logged) == [2, 4, 6]
    assert best["loss"] == pytest.approx(logged[best["step"]], rel=1e-5)
    about: dict[str, str] = {}
    files.read_tensors(opened.weights("best"), about)
    assert int(about["step"]) == best["step"]
