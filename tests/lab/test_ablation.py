"""Ablation: changes of a recipe at equal time, with several seeds and the noise between them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from conftest import sentences, tiny_config, write_pairs
from qkv.assembly import Run, updates_for
from qkv.core.dataset import PreparedText
from qkv.core.errors import UsageError
from qkv.lab import ablation, trials
from qkv.lab.trials import Point, Result
from qkv.options import Config, DecoderOnlyConfig, TrainConfig

DROP = "model.dropout=0.1 train.r_drop=2"
WORDS = "tokenizer.kind=word"


def recipe(folder: Path) -> Config:
    small = {"d_model": 16, "d_ff": 16}
    return tiny_config(*write_pairs(folder, sentences(60))).replace(model=small, train={"steps": 8, "warmup": 4})


def test_from_text_to_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, page = tmp_path / "work", tmp_path / "table.md"
    # A change that doubles the time of an update halves their number.
    monkeypatch.setattr(ablation, "seconds_per_update", lambda made, text: 0.2 if made.train.r_drop else 0.1)
    options: dict[str, Any] = {"out": work, "seeds": 2, "jobs": 1, "device": "cpu"}
    result = ablation.measure(recipe(tmp_path), [DROP, WORDS], **options, output=[str(page)], command="qkv lab ablate")
    found = [Result.from_dict(each) for each in result["trials"]]
    assert [each.error for each in found] == [""] * 6
    assert [(each.name, each.seed, each.steps) for each in found] == [
        (name, seed, steps) for name, steps in ((ablation.BASELINE, 8), (DROP, 4), (WORDS, 8)) for seed in (1, 2)
    ]
    text = page.read_text(encoding="utf-8")
    assert f"| {DROP} |" in text
    assert "`qkv lab ablate`" in text
    monkeypatch.setattr(trials, "_measure", lambda *arguments: pytest.fail("measured again"))
    assert ablation.measure(recipe(tmp_path), [DROP, WORDS], **options)["trials"] == result["trials"]


def test_the_time_of_an_update_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def seconds(made: Config, prepared: object) -> float:
        asked.append(made.train.r_drop)
        return 3.0 if made.train.r_drop else 1.0

    monkeypatch.setattr(ablation.auto_recipe, "seconds_a_pass", seconds)
    monkeypatch.setattr(trials, "_measure", lambda run, test: figures(run.config.train))
    options: dict[str, Any] = {"out": tmp_path / "work", "seeds": 1, "jobs": 1, "device": "cpu"}
    for _ in range(2):
        result = ablation.measure(recipe(tmp_path), [DROP], **options)
        assert [each["steps"] for each in result["trials"]] == [8, 3]
    assert asked == [0.0, 2.0]
    other = ablation.measure(recipe(tmp_path).replace(train={"steps": 4, "warmup": 0}), [DROP], **options)
    assert [each["steps"] for each in other["trials"]] == [4, 1]
    assert asked == [0.0, 2.0] * 2, "another recipe in the same folder is measured by itself"


@pytest.mark.parametrize(("equal", "share"), [("time", 2.5), ("steps", 1.0)])
def test_updates_follow_from_the_unchanged_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, equal: str, share: float
) -> None:
    smaller = "train.tokens_per_step=512 train.warmup=20 train.validate_every=50"
    monkeypatch.setattr(ablation, "seconds_per_update", lambda made, text: made.train.tokens_per_step)
    monkeypatch.setattr(trials, "_measure", lambda run, test: figures(run.config.train))
    schedule = {"steps": 1000, "epochs": 2.5, "patience": 1, "tokens_per_step": 1280, "warmup": 4, "validate_every": 5}
    made = recipe(tmp_path).replace(train=schedule)
    options: dict[str, Any] = {"out": tmp_path / "work", "seeds": 1, "jobs": 1, "device": "cpu", "equal": equal}
    usual, other = ablation.measure(made, [smaller], **options)["trials"]
    (run,) = (tmp_path / "work" / "runs").glob("as_it_is-*")
    plan = updates_for(made, PreparedText.open(Run.open(run).store)).plan
    passes = len(plan(0)) + len(plan(1)) + math.ceil(len(plan(2)) / 2)
    assert (usual["steps"], other["steps"]) == (passes, round(passes * share))
    (run,) = (tmp_path / "work" / "runs").glob("train.tokens*")
    spec = Run.open(run).config.train
    assert (spec.warmup, spec.validate_every) == (round(20 * share), round(50 * share))
    shorter = ablation.measure(made, [], **options, steps=3)["trials"]
    assert [each["steps"] for each in shorter] == [3]


def figures(spec: TrainConfig) -> dict[str, Any]:
    assert not spec.epochs
    assert not spec.patience
    return {"steps": spec.steps, "bleu": 1.0, "curve": (Point(spec.steps, 1, 1.0, 2.0),)}


def test_a_gain_beyond_the_noise_is_significant() -> None:
    def three(name: str, *values: float) -> list[Result]:
        return [Result(name, seed, "", **figures(TrainConfig()) | {"bleu": bleu}) for seed, bleu in enumerate(values)]

    found = {
        ablation.BASELINE: three(ablation.BASELINE, 30.0, 30.2, 29.8),
        "good": three("good", 31.9, 32.1, 32.0),
        "same": three("same", 30.1, 30.0, 30.2),
        "broken": [Result("broken", 1, "", error="it broke")],
    }
    rows = {row[0]: row for row in ablation._table("", found).rows}
    assert rows["good"][1] == "32.00 ± 0.10"
    assert rows["good"][3].endswith(": significant")
    assert rows["same"][3].endswith(": within the noise")
    assert rows["broken (1 of 1 failed)"][4] == "failed"
    alone = ablation._table("", {name: results[:1] for name, results in found.items()})
    assert [row[3] for row in alone.rows][1] == "+1.9, noise unknown"
    assert rows[ablation.BASELINE][3] == ""


def test_wrong_calls_are_refused_before_any_training(tmp_path: Path) -> None:
    made = recipe(tmp_path)
    with pytest.raises(UsageError, match="choose one of time, steps"):
        ablation.measure(made, [], out=tmp_path, equal="luck")
    with pytest.raises(UsageError, match=r'which model\.kind = "decoder" does not have'):
        ablation.measure(Config(model=DecoderOnlyConfig()), [], out=tmp_path)
    with pytest.raises(UsageError, match=r"unknown option train\.rdrop: did you mean train\.r_drop"):
        ablation.measure(made, ["train.rdrop=1"], out=tmp_path)
    with pytest.raises(UsageError, match=r"a \.json file"):
        ablation.measure(made, [], out=tmp_path, output=["table.txt"])
    with pytest.raises(UsageError, match=r"other validation text .*: give one text to all rows with --valid-src"):
        ablation.measure(made, ["data.valid_size=3"], out=tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("train.steps=5600", "length .* with --steps"),
        ("train.epochs=3", "length .* with --steps"),
        ("model.dropout=0.2 train.patience=1", "run to their end"),
        ("train.seed=7", "same seeds: .* --seeds"),
        ("train.device=cpu", "one device: .* --device"),
        ("train.log_every=7", "no effect"),
        ("data.store=elsewhere", "working folder: .* --out"),
    ],
)
def test_options_decided_by_the_table_are_refused(tmp_path: Path, change: str, why: str) -> None:
    path = change.split()[-1].partition("=")[0]
    with pytest.raises(UsageError, match=rf"^--try {change}: {path} cannot differ between rows, because .*{why}"):
        ablation.measure(recipe(tmp_path), [change], out=tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_refused_options_exist() -> None:
    assert set(ablation.NOT_COMPARABLE) <= {path for path, _, _ in Config().options()}
