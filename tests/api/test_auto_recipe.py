"""The automatic recipe: a model, options and steps that fit the text, the time and what the user fixed."""

from __future__ import annotations

import dataclasses
import itertools
import lzma
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Call, Done, sentences
from qkv.api import auto_recipe
from qkv.assembly import Run, parameters, updates_for
from qkv.core.dataset import PreparedText
from qkv.data.text_preparation import prepare_text
from qkv.options import (
    Config,
    CorpusConfig,
    DataConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    TokenizerConfig,
    option_path,
)


def around(given: Config, prepared: PreparedText, *settings: str, minutes: float = 0.0) -> tuple[Config, list[str]]:
    """The recipe chosen for a config with some settings fixed by the user."""
    fixed = set(map(option_path, settings))
    return auto_recipe.choose(given.assign(list(settings)), prepared, minutes=minutes, fixed=fixed)


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
    wide, _ = auto_recipe.choose(
        given.replace(data={"max_length": 5000}, train={"tokens_per_step": 9000}), prepared, minutes=1
    )
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
    alone, four = (auto_recipe.choose(given, prepared, ranks, minutes=13.9)[0].train.steps for ranks in (1, 4))
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
