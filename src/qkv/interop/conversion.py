"""Parts shared by the exporters: optional packages, option checks, and weights in the terms of other toolkits."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qkv.core.attention import MultiHeadAttention
from qkv.core.errors import UsageError
from qkv.engines import SIZES
from qkv.models.variants import score_of
from qkv.options import DecodeConfig, TransformerConfig


def import_optional(name: str) -> Any:
    """Import a package that is not a dependency of qkv; say how to install it if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"{name} is not installed: pip install {name}") from None


def check_supported(spec: TransformerConfig, toolkit: str, supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse a model with options that the toolkit does not support, naming all of them in one error.

    Like the engines' allow-lists, `supported` names every option but sizes: one that it does not name is refused.
    """
    for field in dataclasses.fields(spec):
        if field.name not in supported and field.name not in SIZES:
            raise UsageError(f"model.{field.name}: the export to {toolkit} does not support this option")
    lacking = {option: values for option, values in supported.items() if getattr(spec, option) not in values}
    if lacking:
        given = " and ".join(f"model.{option} = {getattr(spec, option)!r}" for option in lacking)
        known = " and ".join(" or ".join(map(repr, values)) for values in lacking.values())
        remedy = " ".join(f"--set model.{option}={str(values[0]).lower()}" for option, values in lacking.items())
        raise UsageError(f"{given}: {toolkit} supports only {known}: choose another format, or train with {remedy}")


def length_penalty_exponent(search: DecodeConfig) -> float:
    """Return the exponent for toolkits that divide a score by length**exponent.

    The paper's ((5 + length) / 6)**alpha is approximated by length**alpha.
    """
    return {"none": 0.0, "average": 1.0, "gnmt": search.alpha}[search.length_penalty]


class LinearWeights(NamedTuple):
    """Weight and bias of x ↦ xWᵀ + b, in torch's layout."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layer: nn.Linear) -> LinearWeights:
        return cls(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())

    @classmethod
    def joined(cls, *parts: LinearWeights) -> LinearWeights:
        """Concatenate the outputs of several layers with the same input."""
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)


def attention_projections(
    attention: MultiHeadAttention,
) -> tuple[LinearWeights, LinearWeights, LinearWeights, LinearWeights]:
    """Return W^Q, W^K, W^V and W^O for a toolkit with scores qᵀk/√d_k only; other scores are folded into W^Q.

    `dot` multiplies the query by √d_k; `general`, qᵀWk, also replaces it by Wᵀq. `additive` cannot be folded.
    """
    weight, bias = LinearWeights.of(attention.qkv)
    widths = [attention.heads * width for width in (attention.d_k, attention.d_k, attention.d_v)]
    biases = [None] * 3 if bias is None else list(bias.split(widths))
    query, key, value = (LinearWeights(*pair) for pair in zip(weight.split(widths), biases, strict=True))
    if score_of(attention)[0] != "scaled":
        folded = None if query.bias is None else _fold_score(query.bias, attention)
        query = LinearWeights(_fold_score(query.weight, attention), folded)
    return query, key, value, LinearWeights.of(attention.output)


def _fold_score(part: Tensor, attention: MultiHeadAttention) -> Tensor:
    """Return W^Q, or its bias, for which scaled scores equal this attention's scores."""
    heads = part.unflatten(0, (attention.heads, attention.d_k)) * math.sqrt(attention.d_k)  # (heads, d_k, …)
    if (score_weight := score_of(attention)[1]) is not None:
        heads = torch.einsum("hij,hi...->hj...", score_weight.detach(), heads)
    rows: Tensor = heads.flatten(0, 1)
    return rows
