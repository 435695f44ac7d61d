"""The run folder: files, lock, weights and log."""

from __future__ import annotations

import json
import math
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core_runs import CPU, byte_tokenizers
from qkv.core import files
from qkv.core.config import Config, TrainConfig, TransformerConfig
from qkv.core.errors import QkvError, UsageError
from qkv.core.run import JsonlLog, Run, by_step, load_weights, read_record
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.transformer import Transformer

SMALL = TransformerConfig(d_model=8, d_ff=16, heads=2, encoder_layers=1, decoder_layers=1, tie="output")
CONFIG = Config(model=SMALL, train=TrainConfig(steps=7))


def run_with_weights(folder: Path, *names: str) -> Run:
    """A folder with files of weights; they are empty, for tests that only look for them."""
    (folder / "weights").mkdir()
    for name in names:
        (folder / "weights" / f"{name}.safetensors").touch()
    return Run(folder)


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_a_new_run_folder_reads_back(tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    Run.create(tmp_path / "run", CONFIG, byte_tokenizers(), command="qkv train", origin="a test")
    run = Run.open(str(tmp_path / "run"))
    assert run.config == CONFIG
    assert run.tokenizers.fingerprint == byte_tokenizers().fingerprint
    assert run.about["format"] == 1
    assert (run.about["torch"], run.about["python"]) == (torch.__version__, platform.python_version())
    assert (run.about["command"], run.about["origin"]) == ("qkv train", "a test")
    assert before <= datetime.fromisoformat(run.about["begun"]) <= datetime.now(UTC)
    assert (run.scores, run.checkpoints()) == ({}, [])
    assert Run.create(tmp_path / "other", CONFIG, byte_tokenizers()).about["command"] == ""


def test_run_json_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed before leaves no run folder."""
    written: list[str] = []
    write = files.write_text
    monkeypatch.setattr(files, "write_text", lambda path, text: written.append(path.name) or write(path, text))
    Run.create(tmp_path / "run", CONFIG, byte_tokenizers())
    assert written[-1] == "run.json"
    assert sorted(written) == ["config.toml", "run.json", "tokenizer.json"]


def test_other_folders_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing: no such run folder: train one with `qkv train … --run "):
        Run.open(tmp_path / "missing")
    (tmp_path / "run.json").mkdir()
    with pytest.raises(UsageError, match=r"not a run folder \(no run.json in it\): give the folder that --run named"):
        Run.open(tmp_path)
    (tmp_path / "run.json").rmdir()
    for content in ("{", "[1]", '{"format": 1'):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(QkvError, match=r"run\.json: damaged: restore it from a copy, or train again"):
            Run.open(tmp_path)
    (tmp_path / "run.json").write_text('{"format": 2}')
    with pytest.raises(QkvError, match=r"run folder of format 2, but this qkv reads format 1: use the qkv version"):
        Run.open(tmp_path)


def test_files_for_people_have_one_entry_a_line(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", CONFIG, byte_tokenizers())
    run.write_scores({"chosen": "best", "best": {"loss": 1.5}})
    for name in ("run.json", "scores.json"):
        lines = (run.path / name).read_text(encoding="utf-8").split("\n")
        assert (lines[0], lines[-2], lines[-1]) == ("{", "}", "")
        assert all(line.startswith("  ") for line in lines[1:-2])
    assert run.scores == {"chosen": "best", "best": {"loss": 1.5}}


def test_a_new_config_replaces_the_one_that_was_read(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", CONFIG, byte_tokenizers())
    assert run.config.train.steps == 7
    longer = Config(model=SMALL, train=TrainConfig(steps=9))
    run.write_config(longer)
    assert run.config == Run.open(run.path).config == longer


def test_records_are_read_as_their_class(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"steps": 5, "device": "é"}', encoding="utf-8")
    assert read_record(path, TrainConfig) == TrainConfig(steps=5, device="é")
    path.write_text('{"unknown": 5}')
    for missing in (path, tmp_path / "none.json"):
        with pytest.raises(QkvError, match="damaged: restore it from a copy, or train again"):
            read_record(missing, TrainConfig)


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_weights_are_found_by_name(tmp_path: Path) -> None:
    run = run_with_weights(tmp_path, "best", "average", "step-0000020", "step-0000100")
    for name, stem in [("", "best"), ("best", "best"), ("average", "average"), ("step-0000020", "step-0000020")]:
        assert run.weights(name) == tmp_path / "weights" / f"{stem}.safetensors"
    run.write_scores({"chosen": "average"})
    assert run.weights() == tmp_path / "weights" / "average.safetensors"
    assert run.weights("best") == tmp_path / "weights" / "best.safetensors"


def test_weights_that_are_not_there_are_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"^{tmp_path}: no weights: the first come with the first validation of a"):
        Run(tmp_path).weights()
    there = ["average", "best", *(f"step-{step:07d}" for step in (2, 4, 6, 8, 10))]
    run = run_with_weights(tmp_path, *reversed(there))
    with pytest.raises(UsageError, match=rf"^{tmp_path}: no weights named worst: there are {', '.join(there)}$"):
        run.weights("worst")


def test_copies_with_other_names_are_no_steps(tmp_path: Path) -> None:
    for name in ("step-0000002-backup", "step-0000002.safetensors.old", "my-step-0000002", "step-0000003"):
        (tmp_path / name).mkdir()
    assert by_step(tmp_path) == {3: tmp_path / "step-0000003"}


def test_steps_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    steps = [9_999_999, 10_000_000, 5, 100, 7, 60, 2_000, 31]
    run = run_with_weights(tmp_path, *(f"step-{step:07d}" for step in steps), "best", "step-x")
    assert [path.stem for path in run.checkpoints()] == [f"step-{step:07d}" for step in sorted(steps)]
    assert list(by_step(tmp_path / "weights")) == sorted(steps)
    assert by_step(tmp_path / "nothing") == {}


def test_a_model_is_loaded_ready_for_use(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", CONFIG, byte_tokenizers())
    torch.manual_seed(3)
    size = byte_tokenizers().src.size
    trained = Transformer(SMALL, size, size)
    run.keep_weights("step-0000004", trained, 4)
    about: dict[str, str] = {}
    model = run.model(CPU, "step-0000004", about)
    assert not model.training
    assert {p.device.type for p in run.model(torch.device("meta"), "step-0000004").parameters()} == {"meta"}
    assert about == {"format": "pt", "step": "4", "made by": "qkv"}
    loaded = dict(model.named_parameters())
    assert loaded.keys() == dict(trained.named_parameters()).keys()
    for name, parameter in trained.named_parameters():
        assert torch.equal(loaded[name], parameter)


def test_a_model_has_the_sizes_of_both_vocabularies(tmp_path: Path) -> None:
    tokenizers = TokenizerPair(Tokenizer("char", ["ab"]), Tokenizer("char", []))
    model: Any = Run.create(tmp_path / "run", CONFIG, tokenizers).build_model()
    assert model.source.tokens.num_embeddings == model.target.tokens.num_embeddings + 1 == 260


def test_weights_of_another_model_are_refused_before_any_is_copied() -> None:
    model = nn.Linear(2, 3)
    parameters = dict(model.named_parameters())
    whole = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for wrong, message in [
        ({"weight": whole["weight"]}, r"bias is nothing in the file and \(3,\) in the config"),
        ({**whole, "more": torch.ones(1)}, r"more is \(1,\) in the file and nothing in the config"),
        ({**whole, "bias": torch.ones(4)}, r"bias is \(4,\) in the file and \(3,\) in the config"),
    ]:
        with pytest.raises(QkvError, match=rf"^file: weights of another model: {message}$"):
            load_weights(parameters, wrong, Path("file"))
        assert all(torch.equal(parameters[name], tensor) for name, tensor in before.items())
    load_weights(parameters, whole, Path("file"))
    assert all(torch.equal(parameters[name], tensor) for name, tensor in whole.items())
    assert all(parameter.requires_grad for parameter in model.parameters())


# ---- the log ---------------------------------------------------------------------------------------------------------


def test_the_log_has_small_numbers_and_none_for_nan(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "log.jsonl")
    log.event("valid", 1, {"loss": math.inf, "rate": 1.23456789e-7, "sample": "a\u2028b\nc", "bleu": None})
    (line,) = (tmp_path / "log.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    values = {"event": "valid", "step": 1, "loss": None, "rate": 1.23457e-7, "sample": "a\u2028b\nc", "bleu": None}
    assert json.loads(line) == values
    assert "\u2028" in line, "text of any script is readable in the file"
    log.event("start", 1, {"validated": 1})
    assert (tmp_path / "log.jsonl").read_text(encoding="utf-8") == line + "\n"


def test_the_log_holds_updates_and_validations(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "log.jsonl")
    log.event("start", 0, {"validated": 0})
    assert log.path.read_text() == "", "a log exists from the start on"
    for kind in ("message", "progress", "train", "given_up", "valid"):
        log.event(kind, 3, {"text": kind, "count": 2, "share": 0.5})
    lines = [json.loads(line) for line in log.path.read_text(encoding="utf-8").splitlines()]
    assert lines == [
        {"event": "train", "step": 3, "text": "train", "count": 2, "share": 0.5},
        {"event": "valid", "step": 3, "text": "valid", "count": 2, "share": 0.5},
    ]


def test_a_resumed_run_drops_what_will_come_again(tmp_path: Path) -> None:
    """Updates after the state's step, validations after its last one, and a line that a killed process cut."""
    log = JsonlLog(tmp_path / "log.jsonl")
    for kind, step in [("train", 4), ("valid", 4), ("train", 8), ("valid", 8), ("train", 9)]:
        log.event(kind, step, {})
    kept = log.path.read_text().splitlines()[:3]
    with log.path.open("a") as file:
        file.write('7\n{"step": 1}\n{"event": "train", "st')
    with log.path.open("ab") as file:
        file.write('{"event": "valid", "sample": "é'.encode()[:-1])  # inside a character
    log.event("start", 8, {"validated": 4})
    assert log.path.read_text().splitlines() == kept
    inode = log.path.stat().st_ino
    log.event("start", 8, {"validated": 4})
    assert log.path.stat().st_ino == inode, "a log in order is not written again"
