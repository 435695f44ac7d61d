"""Training: it learns, keeps the right weights, logs its steps, and skips bad batches."""

from __future__ import annotations

import dataclasses
import itertools
import json
import lzma
import math
import random
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch

import qkv
from conftest import Call, Done, begun, sentences, tiny_config, updates, weights, write_pairs
from qkv.api import auto_recipe
from qkv.api.run_training import average_last
from qkv.assembly import Run, parameters, trainer_for, updates_for
from qkv.core import checkpoint, files, optimizer
from qkv.core import trainer as trainer_module
from qkv.core.batches import Batch, Update
from qkv.core.checkpoint import average_checkpoints
from qkv.core.dataset import PreparedText
from qkv.core.errors import Interrupted
from qkv.core.loss import SmoothedObjective
from qkv.core.run import JsonlLog
from qkv.core.search import SearchOptions
from qkv.core.trainer import Outcome, Trainer
from qkv.core.translate import search_all
from qkv.core.validation import TranslationTask, Validation
from qkv.data.text_preparation import prepare_text
from qkv.options import (
    Config,
    ConvS2SConfig,
    CorpusConfig,
    DataConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    ModelConfig,
    RnnConfig,
    TokenizerConfig,
    TransformerConfig,
    option_path,
)
from qkv.training.regularization import Ema


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """150 pairs of the small language."""
    return write_pairs(tmp_path_factory.mktemp("small"), sentences(150))


def settings(files: tuple[str, str], **train: object) -> Config:
    """A small config for tests of the loop, not of learning."""
    values = {"steps": 8, "validate_every": 2, "log_every": 1, "tokens_per_step": 256, "metric": "loss"}
    return tiny_config(*files, **(values | train)).replace(model={"d_model": 16, "d_ff": 32})


@pytest.fixture
def trainer(small: tuple[str, str], tmp_path: Path) -> Callable[..., Trainer]:
    """A model before its first step, of the tests' config with some options changed."""

    def make(model: dict[str, Any] | None = None, **train: object) -> Trainer:
        return trainer_for(*begun(tmp_path, settings(small, **train).replace(model=model or {})))

    return make


def entries(run: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["event"] == event]


# ---- learns ----------------------------------------------------------------------------------------------------------


# How each kind learns to copy and to reverse in half a minute; models of plain text are in data/test_lm_data.py.
KINDS: dict[str, ModelConfig] = {
    "transformer": TransformerConfig(
        d_model=64, d_ff=256, heads=4, encoder_layers=1, decoder_layers=1, norm="pre", dropout=0.0
    ),
    "rnn": RnnConfig(d_model=64, dropout=0.0),
    "conv": ConvS2SConfig(d_model=64, encoder_layers=3, decoder_layers=3, kernel=3, dropout=0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["copy", "reverse"])
@pytest.mark.parametrize("kind", KINDS)
def test_learns(task: str, kind: str, tmp_path: Path) -> None:
    """Random strings through text files and the public API alone: 99 % of unseen ones right."""
    pick = random.Random(3)
    strings = list({" ".join(pick.choices("abcdefgh", k=pick.randint(2, 6))) for _ in range(9000)})
    pairs = [(text, text if task == "copy" else text[::-1]) for text in sorted(strings)]
    pick.shuffle(pairs)
    test, train = pairs[:300], pairs[300:]
    src, tgt = write_pairs(tmp_path, train)
    spec = tiny_config(src, tgt, steps=500, validate_every=250, metric="loss", average=0, learning_rate=4e-3)
    spec = dataclasses.replace(spec, model=KINDS[kind]).replace(tokenizer={"kind": "char"})
    run = qkv.train(spec, tmp_path / "run")
    found = qkv.Translator(run).translate([source for source, _ in test], beam=1)
    right = sum(each.text == target for each, (_, target) in zip(found, test, strict=True))
    assert right >= 0.99 * len(test)


def test_the_small_language_is_learned(tiny: Path) -> None:
    unseen = sentences(50, seed=2)
    found = qkv.load(tiny).translate([source for source, _ in unseen])
    assert sum(each.text == target for each, (_, target) in zip(found, unseen, strict=True)) >= 45


# ---- one step --------------------------------------------------------------------------------------------------------


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


# ---- a loss that is not finite ---------------------------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int], bool]) -> None:
    """Make the loss NaN in the steps for which `bad` returns True."""
    real = SmoothedObjective.__call__
    calls: list[int] = []

    def loss(*arguments: Any) -> Any:
        smoothed, nll = real(*arguments)
        calls.append(0)
        return (smoothed * math.nan, nll) if bad(len(calls)) else (smoothed, nll)

    monkeypatch.setattr(SmoothedObjective, "__call__", loss)


def test_a_bad_step_is_skipped_and_counted(trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(ema=0.5, micro_tokens=256)
    first, second, third = updates(made, 3)
    made.step(first)
    before, moments = weights(made), [dict(state) for state in made.train_step.optimizer.state.values()]
    counts = [int(state["step"]) for state in moments]
    assert isinstance(made.train_step.average, Ema)
    average_before = [tensor.clone() for tensor in made.train_step.average.weights]
    with monkeypatch.context() as patch:
        poison(patch, lambda call: True)
        assert not made.step(second).finite
    assert made.progress.step == 2
    assert (made.progress.skipped, made.progress.skipped_in_a_row) == (1, 1)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(made).items())
    assert all(map(torch.equal, made.train_step.average.weights, average_before))
    assert [int(state["step"]) for state in made.train_step.optimizer.state.values()] == counts
    assert made.step(third).finite  # and no NaN is left in the gradients
    assert (made.progress.skipped, made.progress.skipped_in_a_row) == (1, 0)
    assert not all(torch.equal(weight, before[name]) for name, weight in weights(made).items())


def test_some_bad_steps_do_not_stop_training(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: call % 2 == 0)
    run = qkv.train(settings(small, steps=22, validate_every=22, micro_tokens=256), tmp_path / "run").path
    last = entries(run, "train")[-1]
    assert (last["step"], last["skipped"]) == (22, 11)
    assert [line["loss"] is None for line in entries(run, "train")] == [False, True] * 11


def test_ten_bad_steps_in_a_row_stop_it(
    small: tuple[str, str], tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: call > 5)
    path = tmp_path / "bad.toml"
    path.write_text(settings(small, steps=50, micro_tokens=256).dumps(), encoding="utf-8")
    done = call("train", path, "--run", tmp_path / "run")
    assert done.code == 1
    assert "not finite in 10 updates in a row, up to step 15" in done.error
    assert done.err.count("update skipped") == 10
    bad = json.loads((tmp_path / "run" / "bad-batch.json").read_text(encoding="utf-8"))
    assert bad["step"] == 15
    known = dict(sentences(150))
    assert bad["rows"]
    assert all(known[row["given"]] == row["predicted"] for row in bad["rows"])
    for name in ("best", "step-0000014"):  # the saved weights are finite
        kept = files.read_tensors(tmp_path / "run" / "weights" / f"{name}.safetensors")
        assert all(bool(tensor.isfinite().all()) for tensor in kept.values())


def test_a_poisoned_weight_is_noticed(trainer: Callable[..., Trainer]) -> None:
    made = trainer()
    with torch.no_grad():
        next(made.model.parameters()).fill_(math.inf)
    assert not made.step(updates(made, 1)[0]).finite


def test_a_score_that_is_not_a_number_is_never_the_best() -> None:
    nothing, poor = Validation(math.nan, None, ""), Validation(30.0, None, "")
    assert nothing.value("loss") < poor.value("loss")
    assert nothing.to_dict()["loss"] is None
    assert Validation(1.0, 3.5, "").value("bleu") == 3.5
    assert Validation(1.0, 3.5, "").value("loss") == -1.0


# ---- saved weights ---------------------------------------------------------------------------------------------------


def scripted(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Let the validations find these losses, one after another."""
    results = iter(losses)
    monkeypatch.setattr(TranslationTask, "validate", lambda *arguments: Validation(next(results), None, ""))


def test_early_stopping(small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [3.0, 2.0, 2.5, 1.0, 1.1, 1.0, 99.0])
    run = qkv.train(settings(small, steps=100, patience=2, average=0), tmp_path / "run")
    assert [line["loss"] for line in entries(run.path, "valid")] == [3.0, 2.0, 2.5, 1.0, 1.1, 1.0]
    assert run.scores["best"] == {"step": 8, "loss": 1.0, "perplexity": math.e, "bleu": None}
    assert run.scores["finished"] == 12


def test_the_best_weights_are_kept_and_used(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [3.0, 1.0, 2.0, 2.0, 5.0])
    run = qkv.train(settings(small, average=3), tmp_path / "run")
    assert [path.stem for path in run.checkpoints()] == ["step-0000004", "step-0000006", "step-0000008"]
    best, fourth = (files.read_tensors(run.weights(name)) for name in ("best", "4"))
    assert all(torch.equal(best[name], fourth[name]) for name in fourth)
    assert run.scores["chosen"] == "best"
    assert run.weights() == run.weights("best")
    assert run.weights("last") == run.weights("8")


def test_the_average_of_the_last_is_their_mean(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [3.0, 2.0, 1.5, 1.0, 0.5])
    run = qkv.train(settings(small, average=3), tmp_path / "run")
    assert run.scores["chosen"] == "average"
    assert run.scores["average"]["of"] == ["step-0000004", "step-0000006", "step-0000008"]
    kept = [files.read_tensors(run.weights(step)) for step in ("4", "6", "8")]
    mean = files.read_tensors(run.weights())
    for name, tensor in mean.items():
        expected = np.mean([tensors[name].double().numpy() for tensors in kept], axis=0).astype(np.float32)
        assert np.array_equal(tensor.numpy(), expected), name
    assert "| average (used by default) | 0.5000 |" in (run.path / "card.md").read_text(encoding="utf-8")

    path, chosen = average_last(run.path, 2)
    assert [path.stem, *(each.stem for each in chosen)] == ["average_2", "step-0000006", "step-0000008"]
    two = files.read_tensors(path)
    assert all(torch.equal(two[name], value) for name, value in average_checkpoints(chosen).items())
    assert all(torch.allclose(two[n], (kept[1][n] + kept[2][n]) / 2, atol=1e-7) for n in two)
    assert run.weights("average_2") == path


def test_weights_are_chosen_again_when_training_continues(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [3.0, 2.5, 1.0, 2.6, 2.7, 2.9])  # the third and the last are of averages
    run = qkv.train(settings(small, average=2, steps=4), tmp_path / "run")
    assert run.scores["chosen"] == "average"
    run = qkv.train(run=run.path, resume=True, settings=["train.steps=8"])
    assert run.scores["chosen"] == "best"
    assert [run.scores[name]["loss"] for name in ("best", "average")] == [2.5, 2.9]


def test_validation_uses_the_moving_average(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def look(task: TranslationTask, model: torch.nn.Module, *rest: Any) -> Validation:
        seen.append(next(model.parameters()).detach().clone())
        return Validation(1.0, None, "")

    monkeypatch.setattr(TranslationTask, "validate", look)
    run = qkv.train(settings(small, ema=0.9, steps=4, validate_every=4, average=0), tmp_path / "run").path
    name = next(iter(dict(Run(run).model(torch.device("cpu")).named_parameters())))
    state = run / "state" / "step-0000004"
    ema, own = (files.read_tensors(state / f"{which}.safetensors")[name] for which in ("ema", "weights"))
    assert torch.equal(seen[0], ema)
    assert not torch.equal(own, ema)
    assert torch.equal(files.read_tensors(run / "weights" / "best.safetensors")[name], ema)


def test_validation_bleu_is_sacrebleu_of_greedy_translations(tiny: Path) -> None:
    """The logged score of a step is that of its weights in greedy search, without repeated searches of loops."""
    run = Run.open(tiny)
    source, reference = (
        (run.store / f"valid.{side}.txt").read_text(encoding="utf-8").splitlines() for side in ("src", "tgt")
    )
    translator = qkv.load(run, weights="100")
    ids, spec = list(map(run.tokenizers.src.encode, source)), SearchOptions(**vars(run.config.decode) | {"beam": 1})
    hypotheses = search_all(translator.model, ids, spec, run.tokenizers, device=torch.device("cpu"))
    found = [run.tokenizers.tgt.decode(each[0].tokens) for each in hypotheses]
    for text, translation in zip(found, translator.translate(source, beam=1), strict=True):
        assert translation.looped or translation.text == text
    logged = next(line for line in entries(tiny, "valid") if line["step"] == 100)
    assert logged["bleu"] == pytest.approx(sacrebleu.corpus_bleu(found, [reference]).score, rel=1e-5)
    assert logged["bleu"] < 99  # otherwise all are equal
    assert logged["sample"] == found[0]


def test_validation_loss_is_the_mean_of_forced_decoding(tiny: Path) -> None:
    run, prepared = Run.open(tiny), PreparedText.open(tiny / "store")
    translator = qkv.load(run)
    source, reference = (path.read_text(encoding="utf-8").splitlines() for path in prepared.valid_text)
    scored = translator.score(source, reference)
    mean = -sum(each.logprob for each in scored) / sum(len(each.tokens) for each in scored)
    result = TranslationTask().validate(translator.model, prepared, run.config, torch.device("cpu"))
    assert result.loss == pytest.approx(mean, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(mean), rel=1e-4)


@pytest.mark.parametrize(("epochs", "share"), [(0.5, 0.5), (1.0, 1.0), (1.25, 1.25)])
def test_epochs_are_passes_over_the_text(small: tuple[str, str], tmp_path: Path, epochs: float, share: float) -> None:
    run = qkv.train(settings(small, steps=1000, epochs=epochs, validate_every=1000), tmp_path / "run").path
    prepared = PreparedText.open(run / "store")
    passed = entries(run, "train")[-1]["tokens"] / (int(prepared.train.lengths("tgt").sum()) + len(prepared.train))
    assert passed == pytest.approx(share, abs=0.2)
    assert len(entries(run, "valid")) == 1  # at the end, though no step in between was due


# ---- log and messages ------------------------------------------------------------------------------------------------


def test_the_log_is_json_line_by_line(tiny: Path) -> None:
    steps = [line["step"] for line in entries(tiny, "train")]
    assert steps == list(range(20, 201, 20))
    assert [line["step"] for line in entries(tiny, "valid")] == [100, 200]
    first, last = entries(tiny, "train")[0], entries(tiny, "train")[-1]
    assert last["loss"] < first["loss"]
    assert last["nll"] < last["loss"]  # label smoothing raises the loss
    assert set(last) == {
        *("event", "step", "epoch", "loss", "nll", "norm", "learning_rate"),
        *("tokens", "skipped", "tokens_per_second", "stalled", "seconds"),
    }
    entropy = entries(tiny, "valid")[-1]["attention_entropy"]
    assert set(entropy) == {"encoder.0.self", "decoder.0.self", "decoder.0.cross"}
    assert all(0 <= value < math.log(32) for value in entropy.values())


@pytest.mark.parametrize("stopped", [None, 5, 6])
def test_a_validation_logs_tokens_and_seconds_so_far(
    small: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int | None
) -> None:
    """By a clock on which a step takes one second, a validation 100 and to save 1000; stopped in between or not."""
    now, read = [0.0], [0]
    start, saved = Trainer.start, trainer_module.save_state

    def step(self: Trainer, update: Update) -> Callable[[], Outcome]:
        now[0] += 1
        read.append(read[-1] + update.tokens)
        if self.progress.step + 1 == stopped:
            signal.raise_signal(signal.SIGINT)
        return start(self, update)

    def save(*arguments: Any) -> None:
        saved(*arguments)
        now[0] += 1000

    def found(*arguments: Any) -> Validation:
        now[0] += 100
        return Validation(1.0, None, "")

    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Trainer, "start", step)
    monkeypatch.setattr(trainer_module, "save_state", save)
    monkeypatch.setattr(TranslationTask, "validate", found)
    spec, run = settings(small, steps=7, log_every=3, validate_every=5), tmp_path / "run"
    if stopped:
        with pytest.raises(Interrupted):
            qkv.train(spec, run)
        qkv.train(run=run, resume=True)
    else:
        qkv.train(spec, run)
    assert [line["tokens"] for line in entries(run, "valid")] == [read[5], read[7]]
    assert [line["training_seconds"] for line in entries(run, "valid")] == [5, 7]
    assert [line["seconds"] for line in entries(run, "valid")] == [105, 1207]


def test_the_log_has_small_numbers_and_none_for_nan(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "log.jsonl")
    log.event("valid", 1, {"loss": math.inf, "rate": 1.23456789e-7, "sample": "a\u2028b\nc", "bleu": None})
    (line,) = (tmp_path / "log.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    values = {"event": "valid", "step": 1, "loss": None, "rate": 1.23457e-7, "sample": "a\u2028b\nc", "bleu": None}
    assert json.loads(line) == values
    log.event("start", 1, {"validated": 1})
    assert (tmp_path / "log.jsonl").read_text(encoding="utf-8") == line + "\n"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_events_are_written(tiny: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tiny / "tensorboard"))
    events.Reload()
    logged = {line["step"]: line["loss"] for line in entries(tiny, "train")}
    shown = {each.step: each.value for each in events.Scalars("train/loss")}
    assert shown == pytest.approx(logged, rel=1e-5)
    assert {"valid/bleu", "valid/loss", "train/learning_rate"} <= set(events.Tags()["scalars"])


def test_the_card_describes_the_training(tiny: Path) -> None:
    card = (tiny / "card.md").read_text(encoding="utf-8")
    assert "en → it" in card
    parameters = sum(p.numel() for p in Run.open(tiny).model(torch.device("cpu")).parameters())
    assert f"{parameters:,} parameters" in card
    assert "1,500" in card  # pairs read
    assert "(used by default)" in card


# ---- the automatic recipe --------------------------------------------------------------------------------------------


def around(given: Config, prepared: PreparedText, *settings: str, minutes: float = 0.0) -> tuple[Config, list[str]]:
    """The recipe chosen for a config with some settings fixed by the user."""
    fixed = set(map(option_path, settings))
    return auto_recipe.choose(given.assign(list(settings)), prepared, minutes, fixed=fixed)


def lasting(given: Config, prepared: PreparedText, steps: int) -> tuple[Config, list[str]]:
    return around(given, prepared, f"train.steps={steps}")


def test_the_automatic_recipe_fits_text_and_time(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, given = PreparedText.open(tiny / "store"), Run.open(tiny).config
    tokens = int(prepared.train.lengths("tgt").sum()) + len(prepared.train)
    assert auto_recipe.tokens_a_pass(prepared.train) == tokens
    # A pass takes a second, and with R-Drop two.
    monkeypatch.setattr(auto_recipe, "seconds_a_pass", lambda config, *_: 1.0 + bool(config.train.r_drop))
    short, reasons = auto_recipe.choose(given, prepared, minutes=1)
    long, _ = auto_recipe.choose(given, prepared, minutes=500)
    passes = [each.train.steps / len(updates_for(each, prepared).plan(0)) for each in (short, long)]
    assert passes == pytest.approx([30, 80], rel=0.02)  # what the time allows; what the text is worth
    assert (short.data, short.tokenizer) == (given.data, given.tokenizer)
    assert f"{short.train.steps:,} steps" in " ".join(reasons)
    assert all("\n" not in reason for reason in reasons)
    wide, _ = auto_recipe.choose(given.replace(data={"max_length": 5000}, train={"tokens_per_step": 9000}), prepared, 1)
    assert wide.train.tokens_per_step > 5000


def test_a_slow_machine_gets_a_smaller_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = PreparedText.open(tiny / "store")
    smallest = dataclasses.replace(auto_recipe.PAIRS[0], limit=10.0)
    monkeypatch.setattr(auto_recipe, "PAIRS", [smallest, *auto_recipe.PAIRS[1:]])  # this text counts as larger
    held = parameters(auto_recipe.PAIRS[1].model, prepared.tokenizers)
    widths = {}
    for read in (1.01 * held, 0.99 * held):  # target tokens in the ten minutes
        seconds = 600 * auto_recipe.tokens_a_pass(prepared.train) / read
        monkeypatch.setattr(auto_recipe, "seconds_a_pass", lambda *_, seconds=seconds: seconds)
        chosen, reasons = auto_recipe.choose(Run.open(tiny).config, prepared, minutes=10)
        widths[read > held] = chosen.model.d_model
        assert any("smaller" in reason for reason in reasons) == (read < held)
    assert widths == {True: 256, False: 128}


def test_dropout_goes_by_the_text_even_where_time_is_short(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = PreparedText.open(tiny / "store")
    small = [dataclasses.replace(size, limit=10.0, r_drop=False) for size in auto_recipe.PAIRS[:-1]]
    monkeypatch.setattr(auto_recipe, "PAIRS", [*small, auto_recipe.PAIRS[-1]])  # this text counts as large
    monkeypatch.setattr(auto_recipe, "seconds_a_pass", lambda *_: 600 / 50)
    chosen, _ = auto_recipe.choose(Run.open(tiny).config, prepared, minutes=10)  # 50 passes, more than are worth while
    assert (chosen.model.d_model, chosen.model.dropout) == (128, auto_recipe.PAIRS[-1].model.dropout)


def test_a_short_training_on_a_cpu_takes_small_updates() -> None:
    text = 10_000_000  # target tokens
    assert [auto_recipe.tokens_per_step(text, read, "cpu") for read in (1e5, 8e6, 1e9)] == [1024, 2048, 8192]
    assert {auto_recipe.tokens_per_step(text, read, "cuda") for read in (1e5, 1e9)} == {25_000}


def test_few_passes_need_little_dropout(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, given = PreparedText.open(tiny / "store"), Run.open(tiny).config
    size = dataclasses.replace(auto_recipe.PAIRS[0], r_drop=False)
    monkeypatch.setattr(auto_recipe, "PAIRS", [size])
    updates = auto_recipe.updates_a_pass(lasting(given, prepared, 1)[0], prepared)
    chosen = {passes: lasting(given, prepared, round(passes * updates))[0] for passes in (1, 20, 80, 200)}
    full = size.model.dropout
    dropouts = {passes: config.model.dropout for passes, config in chosen.items()}
    assert dropouts == pytest.approx({1: full / 80, 20: full / 4, 80: full, 200: full}, abs=0.006)


def test_there_is_r_drop_where_there_is_time(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, given = PreparedText.open(tiny / "store"), Run.open(tiny).config
    monkeypatch.setattr(auto_recipe, "seconds_a_pass", lambda config, *_: 1.0 + bool(config.train.r_drop))
    (once, _), (twice, reasons) = (
        auto_recipe.choose(given, prepared, minutes=seconds / 60) for seconds in (29.9, 30.1)
    )
    assert (once.train.r_drop, twice.train.r_drop) == (0.0, auto_recipe.R_DROP)
    assert twice.model.dropout == pytest.approx(auto_recipe.PAIRS[0].model.dropout * 2 / 3)
    assert twice.train.steps < once.train.steps  # each of them takes twice the time
    assert any("R-Drop" in reason for reason in reasons)
    assert (once.train.optimizer, once.train.schedule, once.train.average) == ("adam", "wsd", 0)


@pytest.mark.parametrize("steps", [7, 101, 451, 2381, 10_001])
def test_validations_are_about_equally_far_apart(tiny: Path, steps: int) -> None:
    prepared, given = PreparedText.open(tiny / "store"), Run.open(tiny).config
    every = lasting(given, prepared, steps)[0].train.validate_every
    assert 2 * (steps % every or every) > every  # the last comes at the end, and not just after another
    assert steps / 12 <= every or every >= 900


@pytest.mark.parametrize(
    ("settings", "positions"),
    [((), "rotary"), (("model.positions=learned",), "learned"), (("model.d_k=5", "model.d_v=5"), "sinusoidal")],
)
def test_positions_are_rotary_unless_the_users_options_exclude_them(
    tiny: Path, settings: tuple[str, ...], positions: str
) -> None:
    prepared, given = PreparedText.open(tiny / "store"), Run.open(tiny).config
    chosen, reasons = around(given, prepared, "train.steps=10", *settings)
    assert chosen.model.positions == positions
    assert any(f"{positions} positions" in reason for reason in reasons) == (positions != "sinusoidal")


@pytest.mark.parametrize(("parallel", "optimizer"), [("data", "muon"), ("sharded", "adam")])
def test_a_gpu_gets_muon_where_matrices_are_whole(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, parallel: str, optimizer: str
) -> None:
    prepared, given = PreparedText.open(tiny / "store"), Run.open(tiny).config
    monkeypatch.setattr(auto_recipe, "seconds_a_pass", lambda *_: 0.01)
    monkeypatch.setattr(auto_recipe, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(auto_recipe, "describe_device", str)
    chosen, _ = auto_recipe.choose(given.replace(train={"parallel": parallel}), prepared, minutes=1)
    assert (chosen.train.optimizer, chosen.train.schedule) == (optimizer, "wsd")


@pytest.mark.parametrize(("name", "r_drop", "beam"), [("multi30k", 5.0, 5), ("europarl", 0.0, 4)])
def test_a_recipe_by_name_finds_its_files(name: str, r_drop: float, beam: int, tmp_path: Path, call: Call) -> None:
    """`qkv train multi30k --set data.root=DIR`, with files that are packed."""
    for part, pairs in (("train", sentences(80)), ("valid", sentences(80)[:9])):
        for language, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            (tmp_path / f"{part}.{language}.xz").write_bytes(lzma.compress("".join(f"{x}\n" for x in lines).encode()))
    sets = [f"data.root={tmp_path}", "train.steps=2", "tokenizer.vocab=300", "train.device=cpu"]
    sets += ["model.d_model=16", "model.d_ff=16", "model.encoder_layers=1", "model.decoder_layers=1"]
    done: Done = call("train", name, "--run", tmp_path / "run", *(x for s in sets for x in ("--set", s)))
    assert done.code == 0, done.err
    made = Run.open(tmp_path / "run").config
    assert (made.train.r_drop, made.train.optimizer, made.decode.beam) == (r_drop, "muon", beam)
    missing: Done = call("train", "multi30k_fr", "--set", f"data.root={tmp_path}", "--run", tmp_path / "other")
    assert missing.code == 2
    assert "train.fr" in missing.err


def test_options_of_the_user_take_precedence(corpus: tuple[str, str], call: Call, tmp_path: Path) -> None:
    src, tgt = corpus
    sets = ["train.steps=1", "model.d_model=8", "model.d_ff=8", "model.heads=2", "train.device=cpu"]
    done: Done = call(
        *("train", "--src", src, "--tgt", tgt, "--run", tmp_path / "run"), *(x for s in sets for x in ("--set", s))
    )
    assert done.code == 0, done.err
    assert "auto: train.steps=1, as you say" in done.err
    chosen = Run.open(tmp_path / "run").config
    assert (chosen.train.steps, chosen.model.d_model, chosen.model.norm) == (1, 8, "pre")


def test_the_recipe_is_chosen_around_options_of_the_user(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other options follow: time, passes and learning rate are those of the final model."""
    prepared, given = PreparedText.open(tiny / "store"), Config(Run.open(tiny).config.data)
    measured: list[Config] = []

    def seconds(tried: Config, *_: Any) -> float:
        measured.append(tried)
        return 1.0

    monkeypatch.setattr(auto_recipe, "seconds_a_pass", seconds)
    wide, _ = around(given, prepared, "model.d_model=192", "train.tokens_per_step=8192", minutes=1)
    assert {(each.model.d_model, each.train.tokens_per_step) for each in (*measured, wide)} == {(192, 8192)}
    sure, reasons = around(given, prepared, "model.dropout=0", minutes=1)
    assert (sure.model.dropout, sure.train.r_drop) == (0.0, 0.0)
    assert "dropout 0 as you say" in " ".join(reasons)
    once, _ = around(given, prepared, "train.r_drop=0", minutes=1)
    assert once.train.r_drop == 0.0
    own = ("train.tokens_per_step=8192", "train.micro_tokens=4096")
    assert around(given, prepared, *own, minutes=1)[0].train.micro_tokens == 4096
    assert around(given, prepared, own[1], minutes=1)[0].train.tokens_per_step >= 4096
    paper, _ = around(given, prepared, "train.schedule=paper", minutes=1)
    assert paper.train.learning_rate == 1.0
    few, reasons = around(given, prepared, "train.epochs=3", minutes=1)
    assert few.train.steps == pytest.approx(3 * auto_recipe.updates_a_pass(few, prepared), abs=1)
    assert "3.0 passes over the text (as you say)" in " ".join(reasons)
    monkeypatch.setattr(auto_recipe, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(auto_recipe, "describe_device", str)
    rates = [
        around(given, prepared, f"train.optimizer={optimizer}", minutes=1)[0].train.learning_rate
        for optimizer in ("adam", "muon")
    ]
    assert rates == pytest.approx([1e-3 * 2, 4e-3 * math.sqrt(2)], abs=1e-5)


def test_several_ranks_have_more_time(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, given = PreparedText.open(tiny / "store"), Run.open(tiny).config
    monkeypatch.setattr(auto_recipe, "seconds_a_pass", lambda config, prepared, ranks: 60 / ranks)
    alone, four = (auto_recipe.choose(given, prepared, 13.9, ranks=ranks)[0].train.steps for ranks in (1, 4))
    assert four == pytest.approx(4 * alone, rel=0.03)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_the_time_of_a_pass_is_that_of_its_updates(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every kind of model: an encoder predicts only few of the tokens it reads."""
    (tmp_path / "text").write_text("".join(f"{line}\n" for line, _ in sentences(400)), encoding="utf-8")
    data = DataConfig(train=(CorpusConfig(text=str(tmp_path / "text")),), max_length=16)
    model = {"decoder": DecoderOnlyConfig, "encoder": EncoderOnlyConfig}[kind](d_model=16, d_ff=16, heads=2, layers=1)
    given = Config(data, model=model).replace(train={"tokens_per_step": 512, "device": "cpu"})
    prepared = prepare_text(data, TokenizerConfig(vocab=300), tmp_path / "store", running_text=kind == "decoder")
    clock = itertools.count(0.0, 0.5)
    monkeypatch.setattr(auto_recipe.time, "perf_counter", lambda: next(clock))
    assert auto_recipe.seconds_a_pass(given, prepared) == 0.5 * auto_recipe.updates_a_pass(given, prepared)


def test_languages_are_read_from_the_names_of_the_files(corpus: tuple[str, str], tmp_path: Path) -> None:
    named = tmp_path / "text.en", tmp_path / "text.de"
    for path, given in zip(named, corpus, strict=True):
        path.write_bytes(Path(given).read_bytes())
    made = tiny_config(*map(str, named), steps=1, validate_every=1).replace(data={"src_lang": "", "tgt_lang": ""})
    run = qkv.train(made, tmp_path / "run")
    assert (Run.open(run.path).config.data.src_lang, Run.open(run.path).config.data.tgt_lang) == ("en", "de")
    assert "en → de" in (run.path / "card.md").read_text(encoding="utf-8")


def test_a_schedule_ends_where_the_passes_end(trainer: Callable[..., Trainer]) -> None:
    """With `train.epochs`, the last step is the one that ends the last pass, for the schedule and the bar too."""
    made = trainer(epochs=2.0, steps=10_000, schedule="linear", warmup=0)
    passes = sum(len(made.updates.plan(epoch)) for epoch in range(2))
    assert made.plan().last_step == passes
    assert made.schedule.plan(passes, 0.0) == (0.0, passes)
    made.progress.step = passes
    assert made.done()
    assert trainer(epochs=2.0, steps=3).plan().last_step == 3


def test_the_recipe_follows_the_steps_that_are_asked_for(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's number of steps also shortens warm-up and intervals; a lower bound is reported as one."""
    prepared, given = PreparedText.open(tiny / "store"), Run.open(tiny).config
    monkeypatch.setattr(auto_recipe, "seconds_a_pass", lambda *_: 600.0)
    chosen, reasons = lasting(given, prepared, 60)
    assert (chosen.train.steps, chosen.train.warmup) == (60, 20)
    assert chosen.train.validate_every <= 60
    assert "as you say" in " ".join(reasons)
    floor, reasons = auto_recipe.choose(given, prepared, minutes=0.1)
    assert floor.train.steps == auto_recipe.FEWEST
    assert "fewer steps teach nothing, so longer than 0.1 min" in " ".join(reasons)
    few = dataclasses.replace(auto_recipe.PAIRS[0], passes=1)
    monkeypatch.setattr(auto_recipe, "PAIRS", [few])
    monkeypatch.setattr(auto_recipe, "seconds_a_pass", lambda *_: 1e-3)
    assert "(fewer steps teach nothing)" in " ".join(auto_recipe.choose(given, prepared)[1])


def test_the_model_follows_the_steps_that_are_asked_for(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a number of steps the default time limit is not used."""
    prepared, given = PreparedText.open(tiny / "store"), Run.open(tiny).config
    smallest = dataclasses.replace(auto_recipe.PAIRS[0], limit=10.0)
    monkeypatch.setattr(auto_recipe, "PAIRS", [smallest, *auto_recipe.PAIRS[1:]])  # this text counts as larger
    monkeypatch.setattr(auto_recipe, "seconds_a_pass", lambda *_: 600.0)
    assert auto_recipe.choose(given, prepared)[0].model.d_model == 128
    large, _ = lasting(given, prepared, 1_000_000)
    assert (large.model.d_model, large.train.r_drop) == (256, auto_recipe.R_DROP)
    small, reasons = lasting(given, prepared, 5)
    assert (small.model.d_model, small.train.r_drop) == (128, 0.0)
    assert "all that could be read in 5 steps" in " ".join(reasons)
