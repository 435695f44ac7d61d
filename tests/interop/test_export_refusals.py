"""Exports are refused by name where the other program cannot compute the model, before a file is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qkv
from conftest import Call, tiny_config
from qkv.assembly import build_model
from qkv.core.errors import UsageError
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.transformer import Transformer
from qkv.data.subwords import unique_names
from qkv.interop import check_supported
from qkv.interop import ctranslate2 as ctranslate2_export
from qkv.interop import huggingface as huggingface_export
from qkv.interop.ctranslate2 import to_ctranslate2
from qkv.interop.huggingface import to_huggingface
from qkv.options import DecoderOnlyConfig, TransformerConfig

WORDS = 40  # learned tokens; the vocabulary has the bytes too


TOKENIZER = Tokenizer("word", [f"w{i}" for i in range(WORDS)], tags=("it",))


TOKENIZERS = TokenizerPair(TOKENIZER, TOKENIZER)


SMALL: dict[str, Any] = {
    "d_model": 32,
    "d_ff": 48,
    "heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "dropout": 0.0,
    "max_positions": 32,
}


def some_model(**options: Any) -> Transformer:
    """Large random weights: no bias is zero, no gain one."""
    torch.manual_seed(1)
    model = build_model(TransformerConfig(**SMALL | options), TOKENIZER.size, TOKENIZER.size).eval()
    gains = {id(m.weight) for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)}
    for p in model.parameters():
        nn.init.normal_(p, mean=1.0 if id(p) in gains else 0.0, std=0.2)
    return model


def words(options: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in options.items()) or "paper"


def test_every_token_has_a_name_of_its_own() -> None:
    tokenizer = Tokenizer("word", ["<s>", "<2it>", "Ġ<s>", "ab"], tags=("it",))
    names = unique_names(tokenizer)
    assert len(set(names)) == len(names) == tokenizer.size
    assert names[:4] == ["<pad>", "<s>", "</s>", "<2it>"]


def test_a_refused_export_leaves_no_files(tiny: Path, tmp_path: Path, call: Call) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine", encoding="utf-8")
    for output, message in ((full, "is not empty: name another folder"), (full / "mine.txt", "is a file")):
        done = call("export", tiny, "--to", "ctranslate2", "-o", output)
        assert done.code == 2
        assert f"{output}: {message}" in done.err
    nowhere = call("export", tiny, "--to", "ctranslate2", "-o", full / "mine.txt" / "out")
    assert nowhere.code == 1
    assert f"{full / 'mine.txt' / 'out'}: cannot be written: Not a directory" in nowhere.err
    assert call("export", tiny, "--to", "onnx", "-o", tmp_path / "out").code == 2
    assert call("export", tiny, "--to", "ctranslate2", "-o", tmp_path / "out", "--weights", "nonesuch").code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert [path.name for path in full.iterdir()] == ["mine.txt"]


def test_only_translation_transformers_are_exported(tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("The cat sees the dog.\n" * 50, encoding="utf-8")
    model = DecoderOnlyConfig(d_model=16, d_ff=16, heads=2, layers=1)
    spec = tiny_config("", "", steps=1, metric="loss", average=0, validate_every=1)
    spec = dataclasses.replace(spec.replace(data={"train": [{"text": str(text)}]}), model=model)
    run = qkv.train(spec, tmp_path / "run")
    with pytest.raises(UsageError, match='of kind "decoder": only Transformers that translate'):
        qkv.export(run, to="ctranslate2", output=tmp_path / "out")
    with pytest.raises(UsageError, match='unknown export format "onnx": choose ctranslate2 or huggingface'):
        qkv.export(run, to="onnx", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "learned"},
        {"positions": "rotary"},
        {"activation": "swiglu"},
        {"rms_norm": True},
        {"window": 4},
        {"attention": "additive"},
        {"d_k": 12, "d_v": 8},
        {"tie": "output", "norm": "pre"},
    ],
    ids=words,
)
def test_transformers_refuses_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"model.{next(iter(options))} = .* supports only"):
        to_huggingface(some_model(**options))


def test_one_error_names_all_unsupported_options() -> None:
    remedy = "train with --set model.positions=sinusoidal --set model.activation=relu --set model.rms_norm=false"
    with pytest.raises(UsageError, match=remedy):
        to_huggingface(some_model(positions="rotary", activation="swiglu", rms_norm=True))


@pytest.mark.parametrize(
    "options",
    [{"window": 4}, {"attention": "additive"}, {"attention": "general", "positions": "rotary"}, {"d_v": 12, "d_k": 8}],
    ids=words,
)
def test_ctranslate2_refuses_by_name(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"model.{next(iter(options))} = .* supports only"):
        to_ctranslate2(some_model(**options), TOKENIZERS, tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("package", ["ctranslate2", "transformers"])
def test_a_missing_package_is_refused_with_an_install_command(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.import_module", import_module)
    export: dict[str, Callable[[Transformer], Any]] = {
        "transformers": to_huggingface,
        "ctranslate2": lambda model: to_ctranslate2(model, TOKENIZERS, tmp_path),
    }
    with pytest.raises(UsageError, match=f"pip install {package}"):
        export[package](some_model())


@pytest.mark.parametrize("supported", [ctranslate2_export.SUPPORTED, huggingface_export.SUPPORTED])
def test_an_option_or_a_value_that_an_exporter_does_not_name_is_refused(supported: dict[str, Any]) -> None:
    check_supported(TransformerConfig(), "it", supported)
    for field in dataclasses.fields(TransformerConfig):
        if field.name in supported:
            changed = TransformerConfig()
            object.__setattr__(changed, field.name, "unknown")
            with pytest.raises(UsageError, match=f"model.{field.name} = 'unknown'"):
                check_supported(changed, "it", supported)
    with pytest.raises(UsageError, match=r"model\.sharpness: the export to it"):
        check_supported(Sharper(), "it", supported)


@dataclasses.dataclass(frozen=True)
class Sharper(TransformerConfig):
    """A model with an option that no exporter has heard of."""

    sharpness: float = 1.0
