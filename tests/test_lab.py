"""The lab measures what it says: both sides run, compute the same, and the table and the JSON hold the figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv import config
from qkv.errors import QkvError, UsageError
from qkv.lab import doctor, speed
from qkv.text import Tokenizers, learn

LINES = ["the cat sees the dog", "a dog sees a cat in the garden", "the garden is green"] * 8


def small(spec: config.Config) -> tuple[list[list[int]], list[list[int]], Tokenizers]:
    tokenizers = learn(LINES, LINES, config.Tokenizer(vocab=280))
    ids = [tokenizers.src.encode(line) for line in LINES]
    return ids, ids, tokenizers


def test_speed_compares_like_with_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "_text", small)
    monkeypatch.setattr(speed, "DECODING", {"greedy": (1, 8), "beam": (3, 8)})
    result = speed.measure("all", seconds=0.0, device="cpu", output=str(tmp_path / "speed.json"))
    assert json.loads((tmp_path / "speed.json").read_text(encoding="utf-8")) == result
    assert set(result["rows"]) == {"train", "greedy", "beam"}
    for row in result["rows"].values():
        assert row["rounds"] >= 3
        assert row["low"] <= row["ratio"] <= row["high"]
        assert min(row["ours"], row["peer"]) > 0
    assert speed.PEER in capsys.readouterr().out
    with pytest.raises(UsageError, match="choose one of train, decode, all"):
        speed.measure("everything")


def test_speed_refuses_to_compare_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_text", small)
    real: Callable[..., Any] = speed.TorchTransformer

    def other(ours: torch.nn.Module) -> torch.nn.Module:
        peer: torch.nn.Module = real(ours)
        with torch.no_grad():
            next(peer.decoder.parameters()).add_(1.0)  # type: ignore[operator, union-attr]
        return peer

    monkeypatch.setattr(speed, "TorchTransformer", other)
    for what in ("train", "decode"):
        with pytest.raises(QkvError, match="the comparison would mean nothing"):
            speed.measure(what, seconds=0.0, device="cpu")


def test_doctor_notices_a_broken_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(passed for _, passed, _ in doctor.self_test(torch.device("cpu")))
    monkeypatch.setattr(doctor, "score_all", lambda *arguments, **options: [[0.0]] * 5)
    assert not all(passed for _, passed, _ in doctor.self_test(torch.device("cpu")))
