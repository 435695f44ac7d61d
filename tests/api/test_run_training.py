"""What a new training refuses, and the signals that stop one in good order."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import qkv
from conftest import tiny_config
from qkv.api.run_training import stop_signals
from qkv.core.errors import UsageError
from qkv.options import Config


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"data": {"valid": [{"src": "a", "tgt": "b", "weight": 0.5}]}}, r"data\.valid\[0\]\.weight has no effect"),
        *(
            ({"model": {"kind": "conv"}, "train": {"optimizer": name}}, f'"{name}" finds no matrices in ConvS2S: use')
            for name in ("muon", "soap")
        ),
    ],
)
def test_a_new_training_refuses_options_without_an_effect_and_an_old_one_still_loads(
    tables: dict[str, Any], message: str, corpus: tuple[str, str], tmp_path: Path
) -> None:
    given = tiny_config(*corpus)
    config = Config.from_dict({"data": given.to_dict()["data"] | tables.pop("data", {}), **tables})
    with pytest.raises(UsageError, match=message):
        qkv.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "config.toml").write_text(config.dumps(), encoding="utf-8")
    assert Config.load(tmp_path / "config.toml") == config


def test_a_folder_with_files_of_another_kind_is_left_alone(corpus: tuple[str, str], tmp_path: Path) -> None:
    own = tmp_path / "config.toml"
    own.write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match=r"is no run and holds config\.toml: name a new or an empty folder with --run"):
        qkv.train(tiny_config(*corpus), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    assert own.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_collected_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_signals() as received:
        assert received == []
        os.kill(os.getpid(), number)
        assert received == [number]
    assert signal.getsignal(number) is before


def test_a_second_signal_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_signals():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_patient_code_collects_every_signal() -> None:
    with stop_signals(impatient=False) as received:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert received == [signal.SIGTERM, signal.SIGINT]


def test_other_threads_have_no_handlers() -> None:
    before, received = signal.getsignal(signal.SIGINT), list[object]()

    def work() -> None:
        with stop_signals() as collected:
            received.append((collected, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert received == [([], before)]
