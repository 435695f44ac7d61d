"""The attention weights of every layer and head while a model reads a source and writes a target."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkv import files
from qkv.data.loader import collate
from qkv.errors import UsageError
from qkv.models.attention import record
from qkv.models.state import StepModel
from qkv.text import Tokenizers

SUFFIXES = (".html", ".json")


@dataclass(frozen=True)
class AttentionMap:
    """Weights by name (`encoder.0.self`, `decoder.1.cross` …), each (heads, queries, keys), and the tokens they join.

    Decoder queries are numbered as the decoder works: the query of a position is the token it is fed, and what it
    writes is the token after it. `written` holds those, so query i of a decoder attention belongs to `written[i]`.
    """

    source: list[str]
    fed: list[str]
    written: list[str]
    text: str
    translation: str
    weights: dict[str, list[list[list[float]]]]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: str | Path) -> None:
        """Write the map as a page (.html) that opens anywhere, or as data (.json)."""
        path = Path(path)
        if path.suffix not in SUFFIXES:
            raise UsageError(f"{path}: an attention map is written as {' or '.join(SUFFIXES)}: choose such a name")
        data = json.dumps(self.to_dict(), ensure_ascii=False)
        if path.suffix == ".html":
            template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
            # "</script" or "<!--" would end or break the script element that holds the data; JSON may spell it so.
            data = template.replace("/*data*/", data.replace("<", "\\u003c"))
        files.write_text(path, data)


@torch.inference_mode()
def attention_map(
    model: StepModel[Any, Any],
    tokenizers: Tokenizers,
    text: str,
    source: list[int],
    target: list[int],
    device: torch.device,
) -> AttentionMap:
    """Force the target through the model and collect the weights it uses."""
    batch = collate([np.asarray(source, np.int64)], [np.asarray(target, np.int64)], tokenizers).to(device)
    with record() as recording:
        model.step(batch.target, model.start(model.encode(batch.source, batch.lengths)))
    weights = {name: _rounded(parts) for name, parts in recording.weights.items()}
    tokens = tokenizers.tgt.tokens(target)
    return AttentionMap(
        source=[*tokenizers.src.tokens(source), "</s>"],
        fed=["<s>", *tokens],
        written=[*tokens, "</s>"],
        text=text,
        translation=tokenizers.tgt.decode(target),
        weights=weights,
    )


def _rounded(parts: list[torch.Tensor]) -> list[list[list[float]]]:
    """Each call recorded one (1, heads, queries, keys) tensor; four decimals are more than an eye can tell apart.

    A recurrent network makes one call for each word of the target, and all see the whole source.
    """
    weights = torch.cat(parts, dim=2)
    rounded: list[list[list[float]]] = np.round(weights[0].double().cpu().numpy(), 4).tolist()
    return rounded
