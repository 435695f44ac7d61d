"""The lab measures what it says: both sides run, compute the same, and the table and the JSON hold the figures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import sentences
from qkv import config
from qkv.errors import QkvError, UsageError
from qkv.lab import decoding, doctor, engines, speed, synthetic
from qkv.text import Tokenizers, learn
from qkv.text.tokenizer import EOS

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is asked of any server

LINES = ["the cat sees the dog", "a dog sees a cat in the garden", "the garden is green"] * 8


def small(spec: config.Config) -> tuple[list[list[int]], list[list[int]], Tokenizers]:
    tokenizers = learn(LINES, LINES, config.Tokenizer(vocab=280))
    ids = [tokenizers.src.encode(line) for line in LINES]
    return ids, ids, tokenizers


def test_training_is_compared_like_with_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "_text", small)
    output = tmp_path / "speed.json"
    result = speed.measure("train", seconds=0.0, device="cpu", outputs=[str(output)])["train"]
    assert json.loads(output.read_text(encoding="utf-8")) == result
    row = result["rows"]["train"]
    assert row["rounds"] >= 3
    assert row["low"] <= row["ratio"] <= row["high"]
    assert min(row["ours"], row["peer"]) > 0
    assert speed.PEER in capsys.readouterr().out
    with pytest.raises(UsageError, match="choose one of train, decode, all"):
        speed.measure("everything")
    with pytest.raises(UsageError, match="one file for one table"):
        speed.measure("all", outputs=["both.json"])


def test_training_of_what_differs_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_text", small)
    monkeypatch.setattr(speed, "TorchTransformer", another(speed.TorchTransformer))
    with pytest.raises(QkvError, match="the comparison would mean nothing"):
        speed.measure("train", seconds=0.0, device="cpu")


def another(real: Callable[..., Any]) -> Callable[..., torch.nn.Module]:
    """A peer that computes something else."""

    def other(ours: torch.nn.Module) -> torch.nn.Module:
        peer: torch.nn.Module = real(ours)
        with torch.no_grad():
            next(peer.decoder.parameters()).add_(1.0)  # type: ignore[operator, union-attr]
        return peer

    return other


# ---- decoding --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = config.Transformer(d_model=32, d_ff=64, heads=2, encoder_layers=1, decoder_layers=2)
    monkeypatch.setattr(synthetic, "SIZES", {"small": (model, 400)})
    monkeypatch.setattr(decoding, "DRAWN", {"cpu": (12, 7)})


def test_every_engine_writes_the_same(tiny_sizes: None, tmp_path: Path) -> None:
    """All that compute in fp32, on several threads or in several processes; and as many tokens as there must be."""
    run = synthetic.make_run("small", tmp_path / "run")
    subject = engines.Subject(run, torch.device("cpu"), tmp_path)
    sources = synthetic.sentences(run, 12, 7)
    exact = [setting for setting in engines.settings(subject.device, threads=2) if setting.exact]
    # What is captured on a GPU is the same steps, which a CPU can take one by one.
    exact += [each for each in engines.settings(torch.device("cuda")) if each.name == "qkv fp32, captured"]
    assert len({setting.name for setting in exact}) == 8
    assert {setting.engine for setting in exact} == {
        engines.OURS,
        engines.CTRANSLATE2,
        engines.TRANSFORMERS,
        engines.TORCH,
    }
    expected: dict[int, list[set[tuple[int, ...]]]] = {}
    for setting in exact:
        threads = torch.get_num_threads()
        decode = setting.open(subject)
        assert torch.get_num_threads() == threads
        for beam, batch in ((1, 1), (1, 5), (4, 12), (4, 5)):
            found = decode(sources, engines.Task(beam, batch, extra=0, n_best=beam))
            written = [{tuple(token for token in tokens if token != EOS) for tokens in each} for each in found]
            assert written == expected.setdefault(beam, written), (setting.name, beam, batch)
            assert {len(each) for each in written} == {beam}
            assert {len(tokens) for each in written for tokens in each} == {7}
    # They say something: most texts differ.
    assert len({tokens for [tokens] in expected[1]}) > 6


def test_decoding_speed_says_what_was_measured(
    tiny_sizes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = [str(tmp_path / "speed.json"), str(tmp_path / "speed.md")]
    result = decoding.measure(batches=[1, 4], seconds=0.0, device="cpu", outputs=outputs, command="qkv lab speed")
    assert json.loads((tmp_path / "speed.json").read_text(encoding="utf-8")) == result
    assert {"machine", "torch", "qkv", "command", "cores", "threads", "model", "text", "compared"} <= result.keys()
    assert set(result["versions"]) == {"transformers", "ctranslate2"}

    rows = {(row["setting"], row["beam"], row["batch"]): row for row in result["rows"]}
    names = {setting.name for setting in engines.settings(torch.device("cpu"))} - result["missing"].keys()
    assert rows.keys() == {(name, beam, batch) for name in names for beam in (1, 4) for batch in (1, 4)}
    for row in result["rows"]:
        assert row["rounds"] >= 3
        assert 0 < row["low"] <= row["tokens_per_second"] <= row["high"]
        assert row["same"] == 1.0 or not row["fp32"]
        assert row["tokens"] == 7 * row["sentences"]  # whether it writes </s> or stops at the limit
        assert (row["ms_per_token"] is not None) == (row["batch"] == 1)

    peers = {ratio["peer"] for ratio in result["ratios"]}
    assert peers == {engines.CTRANSLATE2, engines.TRANSFORMERS, engines.TORCH}
    assert len(result["ratios"]) == 2 * 3 * 2 * len(peers)  # beams, batches and any, precisions
    for ratio in result["ratios"]:
        assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    shown = capsys.readouterr().out
    page = (tmp_path / "speed.md").read_text(encoding="utf-8")
    for name in names:
        assert name in shown
        assert name in page


def test_ratios_are_of_the_fastest_settings_round_by_round() -> None:
    def row(engine: str, how: str, batch: int, *speeds: float) -> decoding.Row:
        setting = engines.Setting(engine, how, lambda subject: nothing, exact=how == "fp32")
        return decoding.Row(setting, engines.Task(1, batch, 0), [], nothing, speeds=[*speeds])

    def nothing(sources: engines.Sources, task: engines.Task) -> engines.Outputs:
        return []

    rows = [
        row(engines.OURS, "fp32", 1, 10, 20, 60),
        row(engines.OURS, "int8", 1, 30, 30, 30),
        row(engines.CTRANSLATE2, "fp32", 1, 5, 4, 20),
        row(engines.OURS, "fp32", 8, 70, 80, 90),
        row(engines.CTRANSLATE2, "fp32", 8, 1, 2, 3),
        row(engines.CTRANSLATE2, "int8", 8, 10, 20, 30),
    ]
    found = {(each["batch"], each["fp32"]): each for each in decoding._ratios(rows)}
    assert {key: (each["ratio"], each["low"], each["high"]) for key, each in found.items()} == {
        (1, True): (3.0, 2.0, 5.0),
        (1, False): (6.0, 1.5, 7.5),
        (8, True): (40.0, 30.0, 70.0),
        (8, False): (4.0, 3.0, 7.0),
        (None, True): (14.0, 4.5, 20.0),
        (None, False): (4.0, 3.0, 7.0),
    }
    assert found[None, True]["ours"] == "qkv fp32, batch 8"
    assert found[None, True]["theirs"] == "CTranslate2 fp32, batch 1"


def test_what_differs_is_not_timed(tiny_sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "TorchTransformer", another(engines.TorchTransformer))
    with pytest.raises(QkvError, match=r"torch.nn.Transformer .* the comparison would mean nothing"):
        decoding.measure(only=["nn"], batches=[4], seconds=0.0, device="cpu")


def test_a_trained_run_is_decoded_on_its_text(tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.src"
    text.write_text("".join(f"{source}\n" for source, _ in sentences(12, seed=7)) + "\n", encoding="utf-8")
    result = decoding.measure(
        run=str(tiny), src=str(text), beams=[4], batches=[5], only=["qkv", "CTranslate2", "transformers"], seconds=0.0
    )
    assert result["text"] == f"{text}, 12 lines"
    assert {row["engine"] for row in result["rows"]} == {engines.OURS, engines.CTRANSLATE2, engines.TRANSFORMERS}
    for row in result["rows"]:
        assert row["sentences"] == 12
        assert row["same"] == 1.0 or not row["fp32"]


def test_what_is_missing_is_said(tiny_sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        raise UsageError(f"{name} is not installed: pip install {name}")

    monkeypatch.setattr(engines, "engine", nothing)
    options: dict[str, Any] = {"beams": [1], "batches": [4], "seconds": 0.0, "device": "cpu"}
    result = decoding.measure(only=["CTranslate2", "nn"], **options)
    assert result["missing"]
    assert all("pip install ctranslate2" in reason for reason in result["missing"].values())
    assert [row["engine"] for row in result["rows"]] == [engines.TORCH]
    assert result["ratios"] == []  # nothing of ours was measured
    with pytest.raises(UsageError, match="pip install ctranslate2"):
        decoding.measure(only=["CTranslate2"], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run": "somewhere"}, "give --run and --src together"),
        ({"run": "somewhere", "src": "text", "model": "base"}, "give --run and --src together"),
        ({"model": "huge"}, "choose one of small"),
        ({"only": ["fairseq"]}, "no setting is called so"),
        ({"beams": [0]}, "numbers from 1"),
        ({"outputs": ["speed.txt"]}, "write to a .json file"),
    ],
)
def test_wrong_calls_are_refused(tiny_sizes: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        decoding.measure(device="cpu", seconds=0.0, **options)


def test_doctor_notices_a_broken_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(passed for _, passed, _ in doctor.self_test(torch.device("cpu")))
    monkeypatch.setattr(doctor, "score_all", lambda *arguments, **options: [[0.0]] * 5)
    assert not all(passed for _, passed, _ in doctor.self_test(torch.device("cpu")))
