"""Recording the weights of all attentions, and muting heads: wrappers around the attention of the plain model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qkv.core.attention import Attend, around_attention
from qkv.core.errors import UsageError
from qkv.models.variants import observe_weights

HeadName = str | tuple[str, int]  # "decoder.1.cross", or one head of it: ("decoder.1.cross", 3)


@dataclass
class Recording:
    """Attention weights by name, e.g. `decoder.2.cross`: one tensor (batch, heads, queries, keys) for each call."""

    weights: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, weights: Tensor) -> None:
        self.weights.setdefault(name, []).append(weights)


@contextmanager
def record_attention() -> Iterator[Recording]:
    """Collect the weights of every attention computed inside the block."""
    recording = Recording()
    with around_attention(observe_weights(recording.add)):
        yield recording


def head_counts(model: Any, device: torch.device) -> dict[str, int]:
    """The number of heads of each attention of a translating model, by name, found by reading one token."""
    one = torch.ones(1, 1, dtype=torch.long, device=device)
    with torch.inference_mode(), record_attention() as recording:
        model.step(one, model.start(model.encode(one, one[0])))
    return {name: parts[0].shape[1] for name, parts in recording.weights.items()}


@contextmanager
def mute_heads(heads: Iterable[HeadName], known: Mapping[str, int]) -> Iterator[None]:
    """Inside the block these heads contribute zero to the concatenation before W^O; no weight is changed.

    A name means all heads of an attention, a prefix such as `decoder.1` or `encoder` all attentions below it, a pair
    one head. `known` is the result of `head_counts`. Nested blocks add up.
    """
    muted: dict[str, set[int]] = {}
    for head in heads:
        for name, numbers in _named(head, known).items():
            muted.setdefault(name, set()).update(numbers)

    def wrap(
        attention: Any, attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        mixed = attend(q, k, v, mask, causal)  # (batch, heads, queries, d_v)
        if attention.name not in muted:
            return mixed
        return mixed.index_fill(1, torch.tensor(sorted(muted[attention.name]), device=mixed.device), 0.0)

    with around_attention(wrap):
        yield


def _named(head: HeadName, known: Mapping[str, int]) -> dict[str, Iterable[int]]:
    """The attentions and heads that one name or pair means; what the model does not have is refused."""
    if isinstance(head, str):
        names = [name for name in known if name == head or name.startswith(f"{head}.")]
        if not names:
            raise _unknown(head, known)
        return {name: range(known[name]) for name in names}
    if len(head) != 2 or type(head[1]) is not int:  # it may come from an HTTP request
        raise UsageError(f'{head!r} is no head: give a name, or a name and a number such as ("decoder.0.cross", 3)')
    name, number = head
    if name not in known:
        raise _unknown(name, known)
    if not 0 <= number < known[name]:
        raise UsageError(f"{name} has no head {number}: its heads are 0 to {known[name] - 1}")
    return {name: (number,)}


def _unknown(name: str, known: Mapping[str, int]) -> UsageError:
    return UsageError(f'no attention is called "{name}": this model has {", ".join(known) or "none"}')
