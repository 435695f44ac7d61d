"""Export a trained run for other toolkits: a folder with weights, tokenizers and a README.md, usable without qkv.

With separate source and target vocabularies, the target's tokenizer is in the subfolder `target`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from qkv.assembly import Run
from qkv.console import say
from qkv.core import files
from qkv.core.attention import MultiHeadAttention
from qkv.core.errors import QkvError, UsageError
from qkv.core.transformer import Transformer
from qkv.decoding.search_request import tag_before
from qkv.models.variants import score_of
from qkv.options import SIZES, Config, DecodeConfig, TransformerConfig

# Packages that the exported folder needs; the first is the hub's name for the format.
REQUIREMENTS = {"ctranslate2": "ctranslate2 tokenizers", "huggingface": "transformers torch"}


def export(run: str | Path | Run, *, to: str, output: str | Path, weights: str = "", tag: str = "") -> Path:
    """Export an encoder-decoder Transformer to a new folder for `ctranslate2` or `huggingface`; return the folder.

    tokenizer.json and README.md make the folder usable without qkv. A model trained with language tags is exported for
    one direction, that of `tag`. The folder appears only when it is complete; an existing one must be empty.
    """
    opened, folder = run if isinstance(run, Run) else Run.open(run), Path(output)
    if to not in REQUIREMENTS:
        raise UsageError(f'unknown export format "{to}": choose {" or ".join(REQUIREMENTS)}')
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file: name a folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder}: is not empty: name another folder")
    config, tokenizers = opened.config, opened.tokenizers
    tag_before(tag, tokenizers, config)
    model = opened.model(torch.device("cpu"), weights)
    if not isinstance(model, Transformer):
        raise UsageError(
            f'{opened.path}: cannot export a model of kind "{config.model.kind}": only Transformers that translate'
        )
    target = folder.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        draft.mkdir(parents=True)
        exporter = importlib.import_module(f"qkv.interop.{to}")
        program = exporter.write_folder(model, tokenizers, config, draft, tag)
        readme = draft / "README.md"
        files.write_text(readme, _readme(opened, opened.weights(weights).stem, to, program))
        for path in draft.rglob("*"):  # safetensors makes its files readable by their owner only
            if path.is_file():
                path.chmod(readme.stat().st_mode)
        draft.replace(target)
    except (OSError, SafetensorError) as error:
        raise QkvError(f"{folder}: cannot be written: {files.reason(error)}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _readme(run: Run, weights: str, to: str, program: str) -> str:
    """Return the README.md: a model hub's header, how to use the folder, and the run's model card."""
    data, card = run.config.data, run.path / "card.md"
    if run.in_training():
        say(f"{run.path} is in training: exporting its current {weights} weights")
    languages = [language for language in (data.src_lang, data.tgt_lang) if language]
    header = ["---"]
    if languages:
        header.append(f"language: {json.dumps(languages)}")  # quoted: YAML reads a bare `no` as false
    header += ["pipeline_tag: translation", f"library_name: {REQUIREMENTS[to].split()[0]}", "---"]
    title = f"# {run.path.resolve().name}: {data.src_lang or 'source'} → {data.tgt_lang or 'target'}"
    use = f"`pip install {REQUIREMENTS[to]}`, then:\n\n```python\n{program}```\n"
    about = card.read_text(encoding="utf-8").partition("\n")[2] if card.exists() else ""  # none yet while in training
    return "\n".join([*header, f"{title}\n\n{use}\nWeights: {weights}.\n{about}"])


# ---- parts of the exporters: optional packages, option checks, weights in the terms of other toolkits ----------------


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


def max_output_length(config: Config) -> int:
    """Return the largest number of tokens of any translation: the other toolkits have one limit for all sources."""
    return config.data.max_length + config.decode.extra_length


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
    return heads.flatten(0, 1)
