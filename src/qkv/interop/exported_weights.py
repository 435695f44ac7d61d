"""What the exports share: an engine that may not be there, options it may not have, and attentions in its terms."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qkv.core.errors import UsageError
from qkv.models.attention import MultiHeadAttention
from qkv.options import DecodeConfig, TransformerConfig


def engine(name: str) -> Any:
    """The package of that name, which is no dependency of ours."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"{name} is not installed: pip install {name}") from None


def check(spec: TransformerConfig, engine: str, can: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse a model with options that the engine has not, all at once; `can` holds the values that it has."""
    lacking = {option: values for option, values in can.items() if getattr(spec, option) not in values}
    if lacking:
        what = " and ".join(f"model.{option} = {getattr(spec, option)!r}" for option in lacking)
        known = " and ".join(" or ".join(map(repr, values)) for values in lacking.values())
        others = " ".join(f"--set model.{option}={str(values[0]).lower()}" for option, values in lacking.items())
        raise UsageError(
            f"{what}: {engine} cannot express it, only {known}: choose another engine, or train with {others}"
        )


def penalty(search: DecodeConfig) -> float:
    """Our length penalty in terms of engines that divide a score by length**penalty.

    The paper's ((5 + length) / 6)**alpha is near to length**alpha, and not the same.
    """
    return {"none": 0.0, "average": 1.0, "gnmt": search.alpha}[search.length_penalty]


class Linear(NamedTuple):
    """x ↦ xWᵀ + b, as torch keeps it."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layer: nn.Linear) -> Linear:
        return cls(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())

    @classmethod
    def joined(cls, *parts: Linear) -> Linear:
        """Several maps of the same x as one, their outputs side by side."""
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)


def projections(attention: MultiHeadAttention) -> tuple[Linear, Linear, Linear, Linear]:
    """W^Q, W^K, W^V and W^O for an engine that knows no score but qᵀk/√d_k: what another needs goes into W^Q.

    `dot` is √d_k times that, and qᵀWk of `general` is the product with another query, Wᵀq. `additive` is none.
    """
    weight, bias = Linear.of(attention.qkv)
    widths = [attention.heads * width for width in (attention.d_k, attention.d_k, attention.d_v)]
    biases = [None] * 3 if bias is None else list(bias.split(widths))
    query, key, value = (Linear(*pair) for pair in zip(weight.split(widths), biases, strict=True))
    if attention.score != "scaled":
        query = Linear(*(None if part is None else _unscaled(part, attention) for part in query))  # type: ignore[arg-type]
    return query, key, value, Linear.of(attention.output)


def _unscaled(part: Tensor, attention: MultiHeadAttention) -> Tensor:
    """Rows of W^Q, or its bias, whose product with a key is divided by √d_k once more."""
    heads = part.unflatten(0, (attention.heads, attention.d_k)) * math.sqrt(attention.d_k)  # (heads, d_k, …)
    if attention.score_weight is not None:
        heads = torch.einsum("hij,hi...->hj...", attention.score_weight.detach(), heads)
    rows: Tensor = heads.flatten(0, 1)
    return rows
