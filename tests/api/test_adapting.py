"""Adapting: a trained model is trained further on other text, with its weights, model and subwords."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

import qkv
from conftest import Call, Done, sentences, tiny_config, write_pairs
from qkv.api import auto_recipe, run_training
from qkv.assembly import Run, task_for
from qkv.core import files
from qkv.core.dataset import PreparedText
from qkv.core.errors import UsageError
from qkv.options import Config, CorpusConfig, DataConfig, DecoderOnlyConfig, TokenizerConfig, TrainConfig

Pair = tuple[str, str]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Other text with the same words: sentences of the small language with reversed translations."""
    pairs = [(source, " ".join(reversed(target.split()))) for source, target in sentences(400)]
    return write_pairs(tmp_path_factory.mktemp("other"), pairs)


def test_it_begins_with_the_weights_of_the_run(tiny: Path, other: Pair, tmp_path: Path) -> None:
    """With a rate of 0 the weights do not change; model, subwords and languages are taken from the run."""
    still = tiny_config(*other, steps=2, validate_every=2, learning_rate=0.0)
    still = still.replace(data={"src_lang": "", "tgt_lang": ""}, model={"d_model": 16}, tokenizer={"vocab": 300})
    run, source = qkv.train(still, tmp_path / "run", start=tiny), Run.open(tiny)
    ours, theirs = (files.read_tensors(each.weights("best")) for each in (run, source))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert run.tokenizers.fingerprint == source.tokenizers.fingerprint
    assert (run.config.model, run.config.tokenizer) == (source.config.model, source.config.tokenizer)
    assert (run.config.data.src_lang, run.config.data.tgt_lang) == ("en", "it")
    assert run.about["start"] == str(tiny.resolve())


def test_other_text_is_learned_in_fewer_steps(tiny: Path, other: Pair, tmp_path: Path) -> None:
    short = tiny_config(*other, steps=40, validate_every=40, metric="loss", average=0)
    losses = [
        qkv.train(short, tmp_path / name, start=start).scores["best"]["loss"]
        for name, start in (("adapted", tiny), ("new", None))
    ]
    assert losses[0] < 0.8 * losses[1]


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_it_resumes_without_the_run_it_came_from(tiny: Path, other: Pair, tmp_path: Path, ema: float) -> None:
    """Stopped before its first state and without its text files, it starts again with the same weights and subwords."""
    source = tmp_path / "source"
    shutil.copytree(tiny, source)
    still = tiny_config(*other, steps=2, validate_every=2, learning_rate=0.0, ema=ema)
    run, _ = run_training._begin(tmp_path / "run", still, None, [], "", 1, Run.open(source))
    shutil.rmtree(source)
    shutil.rmtree(run.store)
    qkv.train(run=run.path, resume=True)
    ours, theirs = (files.read_tensors(each.weights("best")) for each in (run, Run.open(tiny)))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert run.tokenizers.fingerprint == Run.open(tiny).tokenizers.fingerprint


def test_options_that_change_the_weights_are_refused(tiny: Path, other: Pair, tmp_path: Path) -> None:
    for setting in ("model.d_model=32", "tokenizer.vocab=100", "model.norm=post"):
        with pytest.raises(UsageError, match=f"its weights depend on {setting.partition('=')[0]}"):
            qkv.train(tiny_config(*other), tmp_path / "run", start=tiny, settings=[setting])
    free = ["model.dropout=0.1", "tokenizer.dropout=0.1", "train.steps=1"]
    assert qkv.train(tiny_config(*other), tmp_path / "run", start=tiny, settings=free).config.model.dropout == 0.1
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="not a run folder"):
        qkv.train(tiny_config(*other), tmp_path / "none", start=tmp_path / "empty")
    assert not (tmp_path / "none").exists()


def test_a_command_adapts_with_nothing_configured(
    tiny: Path, other: Pair, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_recipe, "seconds_a_pass", lambda *_: 30.0)
    monkeypatch.setattr(auto_recipe, "FEWEST", 3)
    words = ("train", "--from", tiny, "--src", other[0], "--tgt", other[1], "--run", tmp_path / "run")
    done: Done = call(*words, "--minutes", "1", "--set", "train.device=cpu", "--set", "data.workers=1")
    assert done.code == 0, done.err
    made, cpu = Run.open(tmp_path / "run").config, torch.device("cpu")
    text = PreparedText.open(tmp_path / "run" / "store")
    found = task_for(made).validate(Run.open(tiny).model(cpu), text, made, cpu)
    assert f"before training, weights of {tiny.resolve()}: {found}" in done.err
    assert dataclasses.replace(made.model, dropout=0.0) == Run.open(tiny).config.model
    assert made.train.steps == 2 * auto_recipe.updates_a_pass(made, PreparedText.open(tmp_path / "run" / "store"))
    assert made.train.learning_rate == pytest.approx(auto_recipe.ADAPTING_RATE * auto_recipe._rate(made), abs=1e-5)
    assert "--resume takes" in call("train", "--resume", "--from", tiny, "--run", tmp_path / "run").error


def test_a_run_used_as_a_config_warns_that_its_weights_are_not_used(
    tiny: Path, other: Pair, call: Call, tmp_path: Path
) -> None:
    sets = ["train.steps=1", "train.validate_every=1"]
    words = ("train", tiny, "--src", other[0], "--tgt", other[1], "--run", tmp_path / "run")
    done: Done = call(*words, *(word for setting in sets for word in ("--set", setting)))
    assert done.code == 0, done.err
    assert f"to start from its weights, give --from {tiny}" in done.err


def test_a_language_model_is_fine_tuned_on_other_text(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("".join(f"{line}\n" for line, _ in sentences(300)), encoding="utf-8")
    (tmp_path / "two").write_text("".join(f"{line}\n" for _, line in sentences(300)), encoding="utf-8")
    model = DecoderOnlyConfig(d_model=16, d_ff=16, heads=2, layers=1)
    train = TrainConfig(
        steps=2, tokens_per_step=256, validate_every=2, device="cpu", learning_rate=0.0, tensorboard=False
    )
    runs: list[Run] = []
    for name in ("one", "two"):
        data = DataConfig(train=(CorpusConfig(text=str(tmp_path / name)),), max_length=16)
        spec = Config(data, TokenizerConfig(vocab=300), model, train)
        runs.append(qkv.train(spec, tmp_path / f"run-{name}", start=runs[0] if runs else None))
    ours, theirs = (files.read_tensors(run.weights("best")) for run in runs)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
