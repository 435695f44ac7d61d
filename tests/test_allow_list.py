"""The allow-lists of the engines: every field and every value that is not named is refused with a reason."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.options import AllowList, number


@dataclass(frozen=True)
class Options:
    kind: str = "known"
    activation: str = "relu"
    window: int = 0
    width: int = 512


@dataclass(frozen=True)
class Extended(Options):
    cutting: float = 0.0


LIST = AllowList(
    "model", Options, kind={"known"}, activation={"relu", "gelu"}, window=lambda window: window < 3, width=number
)


def test_named_values_are_supported() -> None:
    assert LIST.refusal(Options()) is None
    assert LIST.refusal(Options(activation="gelu", window=2, width=7)) is None


def test_unknown_values_fields_and_classes_are_refused() -> None:
    assert LIST.refusal(Options(activation="silu")) == "model.activation = 'silu' is not supported"
    assert LIST.refusal(Options(window=3)) == "model.window = 3 is not supported"
    assert LIST.refusal(Extended()) == "model.cutting is not on the list of supported options"
    assert LIST.refusal("other") == "model.kind = 'str' is not supported"
