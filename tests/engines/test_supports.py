"""Every engine refuses an unknown value of every option, and an unknown option."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from qkv import assembly
from qkv.core.search import BeamSearch, SearchOptions
from qkv.core.tokenizer import Tokenizer
from qkv.core.transformer import Transformer
from qkv.decoding.beam_variants import DecodingOptions
from qkv.engines import cpu, cuda_training
from qkv.engines.cpu import native_search
from qkv.engines.cuda_decoding import continuous_batching, search_kernels
from qkv.engines.cuda_training import cuda_trainer
from qkv.options import AllowList, Config, DecoderOnlyConfig, TrainConfig, TransformerConfig
from qkv.training import unpadded

UNKNOWN = object()


@dataclass(frozen=True)
class NewModelOption(TransformerConfig):
    sharpness: float = 1.0


@dataclass(frozen=True)
class NewTrainOption(TrainConfig):
    courage: float = 1.0


@dataclass(frozen=True)
class NewSearchOption(DecodingOptions):
    haste: float = 1.0


LISTS: dict[str, tuple[AllowList, Any, Any]] = {
    "C, model": (cpu.MODEL, TransformerConfig(), NewModelOption()),
    "C, language model": (cpu.MODEL, DecoderOnlyConfig(), NewModelOption()),
    "unpadded": (unpadded.MODEL, TransformerConfig(), NewModelOption()),
    "cuda_training, model": (cuda_training.MODEL, TransformerConfig(), NewModelOption()),
    "cuda_training, training": (cuda_trainer.TRAIN, TrainConfig(), NewTrainOption()),
    "cuda_decoding, model": (continuous_batching.MODEL, TransformerConfig(), NewModelOption()),
    "cuda_decoding, search": (continuous_batching.SEARCH, DecodingOptions(), NewSearchOption()),
    "kernels of a step, search": (search_kernels.SEARCH, DecodingOptions(), NewSearchOption()),
    "steps in C, search": (native_search.SEARCH, DecodingOptions(), NewSearchOption()),
}


def with_unknown(options: Any, name: str) -> Any:
    """Set a field to an unknown value."""
    changed = copy.copy(options)
    object.__setattr__(changed, name, UNKNOWN)
    return changed


@pytest.mark.parametrize("engine", LISTS)
def test_the_defaults_are_supported(engine: str) -> None:
    allowed, options, _ = LISTS[engine]
    assert allowed.refusal(options) is None


@pytest.mark.parametrize("engine", LISTS)
def test_an_unknown_value_of_any_field_is_refused(engine: str) -> None:
    allowed, options, _ = LISTS[engine]
    for field in dataclasses.fields(options):
        reason = allowed.refusal(with_unknown(options, field.name))
        assert reason is not None, f"{engine}: an unknown {field.name} is accepted"
        assert field.name in reason


@pytest.mark.parametrize("engine", LISTS)
def test_an_option_that_is_not_listed_is_refused(engine: str) -> None:
    allowed, _, extended = LISTS[engine]
    assert "is not on the list" in str(allowed.refusal(extended))


@pytest.mark.parametrize("field", ["activation", "positions", "norm", "attention"])
def test_an_unknown_model_option_takes_the_plain_path(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.models.variants.VariantLayers", lambda config: None)
    built: list[type] = []
    monkeypatch.setattr(Transformer, "__init__", lambda self, *arguments: built.append(type(self)))
    for config in (TransformerConfig(), with_unknown(TransformerConfig(), field)):
        assembly._plain_model(config, 300, 300)
    assert built == [unpadded.UnpaddedTransformer, Transformer]


def test_an_unknown_training_option_takes_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_trainer, "triton", object())
    device, config = torch.device("cuda"), Config()
    assert cuda_trainer.supports(config, device) is None
    for field in dataclasses.fields(config.train):
        changed = copy.copy(config)
        object.__setattr__(changed, "train", with_unknown(config.train, field.name))
        assert cuda_trainer.supports(changed, device) is not None
    for field in dataclasses.fields(config.model):
        changed = copy.copy(config)
        object.__setattr__(changed, "model", with_unknown(config.model, field.name))
        assert cuda_trainer.supports(changed, device) is not None


def test_a_model_with_an_unknown_option_does_not_run_in_c() -> None:
    config = TransformerConfig(d_model=16, d_ff=16, heads=2, encoder_layers=1, decoder_layers=1)
    model = assembly.build_model(config, 300, 300)
    assert cpu.runs_in_c(model)
    for field in dataclasses.fields(config):
        model.config = with_unknown(config, field.name)
        assert not cpu.runs_in_c(model), field.name


@pytest.mark.parametrize("start", [native_search.start_native, search_kernels.start_triton])
def test_an_unknown_search_option_takes_the_plain_step(start: Any) -> None:
    arguments: dict[str, Any] = {"lengths": torch.tensor([3, 4]), "capacity": 9}
    model: Any = None
    known = start(model, SearchOptions(beam=2), Tokenizer("char", []), **arguments)
    unknown = start(model, NewSearchOption(beam=2), Tokenizer("char", []), **arguments)
    assert type(known) is not BeamSearch
    assert isinstance(known, BeamSearch)
    assert type(unknown) is BeamSearch
