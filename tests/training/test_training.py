"""Training: it learns, keeps the right weights, logs its steps, and skips bad batches."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch

import qkv
from conftest import Call, begun, sentences, tiny_config, updates, weights, write_pairs
from qkv.api.run_training import average_last
from qkv.assembly import Run, trainer_for
from qkv.core import batches, files
from qkv.core.batches import Batch, Update
from qkv.core.checkpoint import average_checkpoints
from qkv.core.dataset import PreparedText
from qkv.core.loss import SmoothedObjective
from qkv.core.search import SearchOptions
from qkv.core.trainer import Trainer
from qkv.core.translate import search_all
from qkv.core.validation import TranslationTask, Validation
from qkv.data.pair_updates import choose_micro_tokens
from qkv.options import (
    Config,
    ConvS2SConfig,
    ModelConfig,
    RnnConfig,
    TransformerConfig,
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


@pytest.mark.parametrize(("epochs", "passes"), [(0.0, [0]), (2.5, [0, 1, 2])])
def test_the_text_is_planned_once_before_the_first_update(
    corpus: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: float, passes: list[int]
) -> None:
    """Checks, schedule, description and stream share the plans: each of two million pairs takes a second."""
    planned: list[int] = []
    plan, chosen = batches.plan_epoch, choose_micro_tokens.cache_info().misses
    monkeypatch.setattr(batches, "plan_epoch", lambda *a, **how: planned.append(how["epoch"]) or plan(*a, **how))
    trainer = trainer_for(*begun(tmp_path, settings(corpus, epochs=epochs, steps=10_000, tokens_per_step=1024)))
    last_step = trainer.plan().last_step
    trainer.updates.describe(0)
    updates(trainer, 1)
    assert sorted(planned) == passes
    assert choose_micro_tokens.cache_info().misses == chosen + 1
    sizes = [len(trainer.updates.plan(epoch)) for epoch in passes]
    assert last_step == (sizes[0] + sizes[1] + math.ceil(0.5 * sizes[2]) if epochs else 10_000)


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
        if not torch.is_grad_enabled():  # a validation, which measures with the same objective
            return smoothed, nll
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
    assert all(row["given_ids"] and row["predicted_ids"] for row in bad["rows"])
    for name in ("best", "step-0000014"):  # the saved weights are finite
        kept = files.read_tensors(tmp_path / "run" / "weights" / f"{name}.safetensors")
        assert all(bool(tensor.isfinite().all()) for tensor in kept.values())


# ---- saved weights ---------------------------------------------------------------------------------------------------


def scripted(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Let the validations find these losses, one after another."""
    results = iter(losses)
    monkeypatch.setattr(TranslationTask, "validate", lambda *arguments: Validation(next(results), None, ""))


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


def test_languages_are_read_from_the_names_of_the_files(corpus: tuple[str, str], tmp_path: Path) -> None:
    named = tmp_path / "text.en", tmp_path / "text.de"
    for path, given in zip(named, corpus, strict=True):
        path.write_bytes(Path(given).read_bytes())
    made = tiny_config(*map(str, named), steps=1, validate_every=1).replace(data={"src_lang": "", "tgt_lang": ""})
    run = qkv.train(made, tmp_path / "run")
    assert (Run.open(run.path).config.data.src_lang, Run.open(run.path).config.data.tgt_lang) == ("en", "de")
    assert "en → de" in (run.path / "card.md").read_text(encoding="utf-8")
