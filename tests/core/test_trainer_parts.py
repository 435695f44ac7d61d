"""The parts of a training: numbers of an update, several ranks, updates in flight, clocks and kept weights."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import sentences, updates, weights, write_pairs
from core_runs import entries, prepare_text, settings, train, trainer_for
from qkv.core import trainer as trainer_module
from qkv.core.batches import Position, Update, UpdateStream
from qkv.core.checkpoint import Progress
from qkv.core.dataset import PreparedText
from qkv.core.device import World
from qkv.core.optimizer import Plan
from qkv.core.run import Run
from qkv.core.trainer import Outcome, PlainTrainStep, Trainer
from qkv.core.validation import TranslationTask, Validation
from search_tables import label_logprobs


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """150 pairs of the small language."""
    return write_pairs(tmp_path_factory.mktemp("small"), sentences(150))


@pytest.fixture(scope="module")
def prepared(small: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> PreparedText:
    return prepare_text(settings(small).data, tmp_path_factory.mktemp("store") / "store", learn=True)


@pytest.fixture
def trainer(small: tuple[str, str], prepared: PreparedText) -> Callable[..., Trainer]:
    """A model before its first step, of the tests' config with some options changed."""

    def make(world: World | None = None, **options: object) -> Trainer:
        return trainer_for(settings(small, **options), prepared, **({"world": world} if world else {}))

    return make


class Events:
    """A log sink that keeps the messages."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def event(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind == "message":
            self.texts.append(values["text"])


# ---- one update ------------------------------------------------------------------------------------------------------


def test_the_numbers_of_an_update_are_those_of_a_token(trainer: Callable[..., Trainer]) -> None:
    """Loss and −log p are means over all labels of the update, and the norm is that of the gradient of this loss."""
    made = trainer(micro_tokens=64, label_smoothing=0.3, clip=0.5)
    update = updates(made, 1)[0]
    assert len(update.micro_batches) > 2
    logprobs = [p for batch in update.micro_batches for row in label_logprobs(made.model.eval(), batch) for p in row]  # type: ignore[arg-type]
    losses = [made.train_step.objective(made.model, batch)[0] for batch in update.micro_batches]
    loss = torch.stack(losses).sum() / len(logprobs)
    gradients = torch.autograd.grad(loss, list(made.model.parameters()))
    outcome = made.step(update)
    assert outcome.tokens == len(logprobs) == update.tokens
    assert outcome.nll == pytest.approx(-sum(logprobs) / len(logprobs), rel=1e-5)
    assert outcome.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    assert outcome.gradient_norm == pytest.approx(norm, rel=1e-4)
    assert made.progress.tokens == outcome.tokens


def test_an_outcome_is_finite_if_loss_and_gradient_are() -> None:
    assert Outcome(1.0, 1.0, 0.0, 5).finite
    assert not Outcome(1.0, 1.0, math.inf, 5).finite
    assert not Outcome(math.nan, 1.0, 0.0, 5).finite


def test_a_small_gradient_is_not_clipped(trainer: Callable[..., Trainer]) -> None:
    clipped, free = trainer(clip=1e6), trainer(clip=0.0)
    for made in (clipped, free):
        made.step(updates(made, 1)[0])
    assert all(torch.equal(weight, weights(free)[name]) for name, weight in weights(clipped).items())


def test_the_model_trains_with_dropout_after_it_was_evaluated(trainer: Callable[..., Trainer]) -> None:
    made = trainer()
    made.model.eval()
    made.step(updates(made, 1)[0])
    assert made.model.training


def test_every_update_of_every_rank_and_seed_has_its_own_random_numbers(trainer: Callable[..., Trainer]) -> None:
    seeds = set()
    for seed in (1, 2):
        for rank in range(8):
            made = trainer(seed=seed).train_step
            made.world = World(rank, 8)
            seeds |= {made.seed(number) % 2**32 for number in range(1, 200)}  # a CPU's generator uses 32 bits
    assert len(seeds) == 2 * 8 * 199
    made = trainer(seed=2).train_step
    made.world = World(3, 8)
    assert made.seed(7) == 2_000_006 + 7 + 3 * 0x9E3779B1, "runs of earlier versions are resumed with these"


def test_what_an_update_returns_holds_no_graph(trainer: Callable[..., Trainer]) -> None:
    made = trainer()
    for batch in updates(made, 1)[0].micro_batches:
        assert not made.train_step.forward_backward(batch).requires_grad


# ---- weights in place of the trained ones ----------------------------------------------------------------------------


def test_other_weights_are_evaluated_and_the_own_come_back(trainer: Callable[..., Trainer]) -> None:
    step = trainer().train_step
    own = {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}
    average = {name: tensor + 1 for name, tensor in own.items()}
    given = {name: tensor + 2 for name, tensor in own.items()}

    def evaluated(values: dict[str, Tensor] | None) -> dict[str, Tensor]:
        with step.evaluated_model(values) as model:
            assert model is step.model
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
        return all(torch.equal(ours[name], theirs[name]) for name in theirs)

    assert same(evaluated(None), own)
    step.average = SimpleNamespace(tensors=lambda: average)  # type: ignore[assignment]
    assert same(evaluated(None), average)
    assert same(evaluated(given), given)
    with pytest.raises(RuntimeError), step.evaluated_model(given):
        raise RuntimeError
    assert same(dict(step.model.named_parameters()), own)


@pytest.mark.parametrize(("average", "kept"), [(0, ["8"]), (1, ["8"]), (2, ["6", "8"])])
def test_so_many_checkpoints_are_kept_as_are_averaged(
    average: int, kept: list[str], small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TranslationTask, "validate", lambda *arguments: Validation(1.0, None, ""))
    events = Events()
    run = train(settings(small, average=average), tmp_path / "run", [events])
    assert [path.stem.lstrip("step-0") for path in run.checkpoints()] == kept
    assert (run.path / "weights" / "average.safetensors").exists() == ("average" in run.scores) == (average == 2)
    assert run.scores["chosen"] == "best", "of equals, the best checkpoint"
    assert run.scores["metric"] == "loss"
    assert events.texts[-1] == f"using best weights by default: {run.path}"


# ---- the loop --------------------------------------------------------------------------------------------------------


def test_a_plan_is_made_once_for_each_update(trainer: Callable[..., Trainer]) -> None:
    """A schedule that follows the clock would otherwise answer twice, and in two ways."""
    made, asked = trainer(), list[tuple[int, float]]()

    class Clock:
        def plan(self, step: int, elapsed: float) -> Plan:
            asked.append((step, elapsed))
            return Plan(0.001 * len(asked), 100)

    made.schedule = Clock()
    made.progress.seconds = 7.0
    assert [made.plan(), made.plan()] == [(0.001, 100)] * 2
    made.step(updates(made, 1)[0])
    assert (made.progress.learning_rate, made.progress.last_step) == (0.001, 100)
    assert made.plan() == (0.002, 100)
    assert asked == [(1, 7.0), (2, 7.0)]


def test_a_resumed_training_reads_in_the_micro_batches_of_its_state(trainer: Callable[..., Trainer]) -> None:
    made = trainer(micro_tokens=128)
    assert made.progress.micro_tokens == 128
    made.go_on_from(Progress(step=5, micro_tokens=64))
    assert (made.updates.micro_tokens, made.progress.step) == (64, 5)
    made.go_on_from(Progress(step=6))  # an old state, which did not record them
    assert made.updates.micro_tokens == 64


def test_updates_in_flight_are_read_late_and_before_every_line_of_the_log(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread: list[int] = []
    most: list[int] = []
    start, real = PlainTrainStep.start, Trainer.log

    def started(self: PlainTrainStep, update: Update, number: int, rate: float) -> Any:
        read = start(self, update, number, rate)
        unread.append(number)
        most.append(len(unread))

        def late() -> Outcome:
            assert unread.pop(0) == number, "in their order"
            return read()

        return late

    def log(self: Trainer, kind: str, **values: Any) -> None:
        if kind in ("train", "valid"):
            assert not unread
        real(self, kind, **values)

    monkeypatch.setattr(PlainTrainStep, "max_in_flight", 2)
    monkeypatch.setattr(PlainTrainStep, "start", started)
    monkeypatch.setattr(Trainer, "log", log)
    run = train(settings(small, steps=11, log_every=5, validate_every=8), tmp_path / "run")
    assert not unread
    assert most == [1, 2, 3, 3, 3, 1, 2, 3, 1, 2, 1], "read at steps 5 and 10, and before the validation at step 8"
    assert [line["step"] for line in entries(run.path, "train")] == [5, 10]


def test_the_log_has_the_speed_and_the_share_of_waiting_since_its_last_line(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a batch takes one second to read and three to compute, and a validation 100."""
    now, read = [0.0], [0]
    start, make = Trainer.start, UpdateStream.make

    def step(self: Trainer, update: Update) -> None:
        now[0] += 3
        read.append(read[-1] + update.tokens)
        start(self, update)

    def load(self: UpdateStream, *arguments: Any) -> Update:
        now[0] += 1
        return make(self, *arguments)

    def found(*arguments: Any) -> Validation:
        now[0] += 100
        return Validation(2.0, None, "a sample", {"entropy": 0.5})

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Trainer, "start", step)
    monkeypatch.setattr(UpdateStream, "make", load)
    monkeypatch.setattr(TranslationTask, "validate", found)
    events = Events()
    run = train(settings(small, steps=6, log_every=2, validate_every=3, average=0), tmp_path / "run", [events]).path
    lines = entries(run, "train")
    speeds = [(read[step] - read[step - 2]) / 8 for step in (2, 4, 6)]
    assert [line["tokens_per_second"] for line in lines] == pytest.approx(speeds, rel=1e-5)
    assert [line["stalled"] for line in lines] == [0.25] * 3
    assert [line["seconds"] for line in lines] == [8, 116, 124]
    assert [line["tokens"] for line in lines] == [read[2], read[4], read[6]]
    valid = entries(run, "valid")
    assert [(line["entropy"], line["sample"], line["loss"]) for line in valid] == [(0.5, "a sample", 2.0)] * 2
    said = [text for text in events.texts if text.startswith("step")]
    assert said == [
        f"step       3  {Validation(2.0, None, '')}  1:52  best",
        f"step       6  {Validation(2.0, None, '')}  3:44",
    ]


# ---- several ranks ---------------------------------------------------------------------------------------------------


class Threads(World):
    """One of several processes, which are threads here: an exchange is a list that all fill and then read."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Any]) -> None:
        super().__init__(rank, size)
        self.barrier, self.board = barrier, board

    def exchange(self, value: Any) -> list[Any]:
        self.board[self.rank] = value
        self.barrier.wait()
        values = list(self.board)
        self.barrier.wait()
        return values

    def broadcast(self, word: str = "") -> str:
        return str(self.exchange(word)[0])

    def largest(self, number: int) -> int:
        return int(max(self.exchange(number)))

    def sum(self, tensors: Sequence[Tensor]) -> None:
        others = self.exchange([tensor.detach().clone() for tensor in tensors])
        for tensor, parts in zip(tensors, zip(*others, strict=True), strict=True):
            tensor.copy_(torch.stack(parts).sum(0))


def fit_together(trainers: Callable[[World], Trainer], run: Run, size: int, sinks: Sequence[Any]) -> list[Any]:
    """Train with so many ranks; return the trainers, or the error of a rank in its place."""
    barrier, board, results = threading.Barrier(size, timeout=60), [None] * size, [None] * size
    made = [trainers(Threads(rank, size, barrier, board)) for rank in range(size)]

    def work(rank: int) -> None:
        try:
            made[rank].fit(run, [sinks[rank]])
            results[rank] = made[rank]  # type: ignore[call-overload]
        except BaseException as error:
            results[rank] = error  # type: ignore[call-overload]
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_ranks_train_like_one_process_and_the_first_one_writes(
    small: tuple[str, str], prepared: PreparedText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(small, steps=4, micro_tokens=64)
    validate, states = TranslationTask.validate, list[list[str]]()

    def validated(*arguments: Any) -> Validation:
        if (tmp_path / "ranks" / "state").exists():
            states.append([path.name for path in (tmp_path / "ranks" / "state").iterdir()])
        return validate(*arguments)

    monkeypatch.setattr(TranslationTask, "validate", validated)
    alone = trainer_for(config, prepared)
    alone.fit(Run.create(tmp_path / "alone", config, prepared.tokenizers))
    sinks = [Events(), Events(), Events()]
    run = Run.create(tmp_path / "ranks", config, prepared.tokenizers)
    ranks = fit_together(lambda world: trainer_for(config, prepared, world=world), run, 3, sinks)
    for made in ranks:
        assert isinstance(made, Trainer), made
        for name, weight in weights(alone).items():
            torch.testing.assert_close(weights(made)[name], weight, rtol=1e-3, atol=1e-5)
        assert all(torch.equal(weight, weights(ranks[0])[name]) for name, weight in weights(made).items())
        assert (made.progress.step, made.progress.tokens) == (4, alone.progress.tokens)
        assert made.progress.worse == ranks[0].progress.worse
    assert sinks[0].texts
    assert sinks[1].texts == sinks[2].texts == []
    losses = [[line["loss"] for line in entries(folder, "train")] for folder in (run.path, tmp_path / "alone")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert states[:2] == [["step-0000002"], ["step-0000004"]], "a rank may be killed while the first one validates"
    again = [Events(), Events(), Events()]
    assert all(fit_together(lambda world: trainer_for(config, prepared, world=world), run, 3, again))
    assert ["is finished, at step 4" in text for text in again[0].texts] == [True]


def test_a_rank_without_rows_takes_the_gradient_of_the_others(trainer: Callable[..., Trainer]) -> None:
    barrier, board = threading.Barrier(2, timeout=60), [None, None]
    made = [trainer(Threads(rank, 2, barrier, board)) for rank in range(2)]
    alone = trainer()
    (update,) = updates(alone, 1)
    shares = [update, Update([], Position(0, 1))]
    threads = [threading.Thread(target=made[rank].step, args=(shares[rank],)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = alone.step(update)
    for each in made:
        assert each.outcome == pytest.approx(expected, rel=1e-5)
        assert all(torch.equal(weight, weights(alone)[name]) for name, weight in weights(each).items())
