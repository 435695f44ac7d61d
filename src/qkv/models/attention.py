"""Attention (paper, section 3.2): masks, score functions, multi-head, windows, a recorder for the weights, muted heads.

Two paths compute the same thing. The written-out one is equation 1 as printed and can hand its weights to a recorder;
the fused one is PyTorch's kernel, on a window of keys where attention is restricted. Outside a `record()` block only
the fused path runs, but for additive attention, which is no product of matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.core.errors import UsageError
from qkv.models.rows import Rows

Head = str | tuple[str, int]  # "decoder.1.cross", or one head of it: ("decoder.1.cross", 3)


def attention_mask(
    queries: int,
    keys: int,
    key_lengths: Tensor | None = None,
    *,
    causal: bool = False,
    window: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """The one mask of the project: boolean, (batch or 1, 1, queries, keys), True where a query may attend to a key.

    The last query stands at the last key, so the same call serves a whole sequence and the newest part of one.
    `window` = r leaves each query the keys at most r positions away (restricted self-attention, section 4), and itself
    even where it is padding, so that no row is empty.
    """
    device = key_lengths.device if key_lengths is not None else device
    key = torch.arange(keys, device=device)
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - key  # (queries, keys)
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        allowed = allowed & (distance >= 0)
    if window:
        allowed = allowed & (distance.abs() <= window)
    if key_lengths is None:
        return allowed[None, None]
    real = (key < key_lengths[:, None])[:, None, None]  # (batch, 1, 1, keys)
    return with_padding(allowed, real) if window else allowed & real  # (batch, 1, queries, keys)


def with_padding(allowed: Tensor, real: Tensor) -> Tensor:
    """A band of allowed keys, of which the real ones are left and, to every query, its own position."""
    queries, keys = allowed.shape[-2:]
    own = torch.eye(keys, dtype=torch.bool, device=allowed.device)[keys - queries :]
    return (allowed & real) | own


# ---- recording -------------------------------------------------------------------------------------------------------


@dataclass
class Recording:
    """Attention weights by name, e.g. `decoder.2.cross`: one tensor (batch, heads, queries, keys) for each call."""

    weights: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, weights: Tensor) -> None:
        self.weights.setdefault(name, []).append(weights.detach())


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def record() -> Iterator[Recording]:
    """Collect the weights of every attention computed inside the block."""
    token = _recording.set(Recording())
    try:
        yield _recording.get()  # type: ignore[misc]
    finally:
        _recording.reset(token)


# ---- muting ----------------------------------------------------------------------------------------------------------


_muted: ContextVar[Mapping[str, tuple[int, ...]] | None] = ContextVar("muted", default=None)


def heads_of(model: Any, device: torch.device) -> dict[str, int]:
    """How many heads each attention of a translating model has, by name: those at work while it reads one token."""
    one = torch.ones(1, 1, dtype=torch.long, device=device)
    with torch.inference_mode(), record() as recording:
        model.step(one, model.start(model.encode(one, one[0])))
    return {name: parts[0].shape[1] for name, parts in recording.weights.items()}


def is_watched() -> bool:
    """Whether weights are recorded or heads muted here, which only the models of this package can do."""
    return _recording.get() is not None or _muted.get() is not None


@contextmanager
def without(heads: Iterable[Head], known: Mapping[str, int]) -> Iterator[None]:
    """Inside the block these heads contribute zero to the concatenation before W^O; no weight is changed.

    A name takes all heads of an attention, and `decoder.1` or `encoder` all attentions whose names begin so; a pair is
    one head. `known` is what `heads_of` says of the model. Blocks add up.
    """
    muted = {name: set(silent) for name, silent in (_muted.get() or {}).items()}
    for head in heads:
        for name, silent in _named(head, known).items():
            muted.setdefault(name, set()).update(silent)
    token = _muted.set({name: tuple(sorted(silent)) for name, silent in muted.items()} or None)
    try:
        yield
    finally:
        _muted.reset(token)


def _named(head: Head, known: Mapping[str, int]) -> dict[str, Iterable[int]]:
    """The attentions and heads that one name or pair means; what the model does not have is refused."""
    if isinstance(head, str):
        found = [name for name in known if name == head or name.startswith(f"{head}.")]
        if not found:
            raise _unknown(head, known)
        return {name: range(known[name]) for name in found}
    if len(head) != 2 or type(head[1]) is not int:  # it may have come from outside
        raise UsageError(f'{head!r} is no head: give a name, or a name and a number such as ("decoder.0.cross", 3)')
    name, number = head
    if name not in known:
        raise _unknown(name, known)
    if not 0 <= number < known[name]:
        raise UsageError(f"{name} has no head {number}: its heads are 0 to {known[name] - 1}")
    return {name: (number,)}


def _unknown(name: str, known: Mapping[str, int]) -> UsageError:
    return UsageError(f'no attention is called "{name}": this model has {", ".join(known) or "none"}')


# ---- equation 1 and its rivals ---------------------------------------------------------------------------------------


def attention_scores(q: Tensor, k: Tensor, score: str = "scaled", weight: Tensor | None = None) -> Tensor:
    """How well each key answers each query, before the softmax: (…, queries, keys).

    `scaled` is qᵀk/√d_k (equation 1) and `dot` qᵀk. With learned weights, `general` is qᵀWk (Luong et al., 2015) and
    `additive` wᵀtanh(q + k) (Bahdanau et al., 2015), whose two matrices are the projections that made q and k.
    """
    if score == "additive":
        assert weight is not None
        together = (q[..., :, None, :] + k[..., None, :, :]).tanh()  # (…, queries, keys, d_k)
        return (together @ weight[..., None, :, None]).squeeze(-1)
    if score == "general":
        assert weight is not None
        q = q @ weight
    scores = q @ k.transpose(-2, -1)
    return scores / math.sqrt(q.shape[-1]) if score == "scaled" else scores


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None, score: str = "scaled", weight: Tensor | None = None
) -> Tensor:
    """softmax(QKᵀ/√d_k): (batch, heads, queries, keys); masked-out keys get exactly zero."""
    scores = attention_scores(q, k, score, weight)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(dim=-1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: int = 0,
    score: str = "scaled",
    weight: Tensor | None = None,
    dropout: float = 0.0,
    name: str = "",
) -> Tensor:
    """Attention (equation 1) for q, k (batch, heads, length, d_k) and v (batch, heads, length, d_v).

    `causal` and `window` are masks of a whole sequence attending to itself, apart because the fused kernel then needs
    none or a small one; `mask` is then that of the keys, (batch, 1, 1, keys).
    """
    recording = _recording.get()
    if recording is None and score != "additive":
        found = _fused(q, k, v, mask, causal=causal, window=window, score=score, weight=weight, dropout=dropout)
    else:
        if causal or window:
            mask = _whole_mask(q, k, mask, causal, window)
        weights = attention_weights(q, k, mask, score, weight)
        if recording is not None:
            recording.add(name, weights)
        found = F.dropout(weights, dropout) @ v
    muted = _muted.get()
    if muted is not None and name in muted:
        found = found.index_fill(1, torch.tensor(muted[name], device=found.device), 0.0)
    return found  # (batch, heads, queries, d_v)


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    window: int,
    score: str,
    weight: Tensor | None,
    dropout: float,
) -> Tensor:
    """PyTorch's kernel, which never holds the weights."""
    if weight is not None:  # general: qᵀW takes the place of the query
        q = q @ weight
    scale = None if score == "scaled" else 1.0
    if window and q.shape[-2] > 2 * window:  # in a shorter sequence the blocks would overlap most of it
        return _attend_in_window(q, k, v, mask, window=window, causal=causal, dropout=dropout, scale=scale)
    if not window and not (causal and mask is not None):
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, is_causal=causal, scale=scale)
    mask = _whole_mask(q, k, mask, causal, window)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, scale=scale)


def _whole_mask(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, window: int) -> Tensor:
    allowed = attention_mask(q.shape[-2], k.shape[-2], causal=causal, window=window, device=q.device)
    if mask is None:
        return allowed
    return with_padding(allowed, mask) if window else allowed & mask


def _attend_in_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    window: int,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Restricted self-attention in O(window · n): blocks of `window` queries, each with the keys around it.

    A block sees its own keys and those of the block before it and, unless causal, after it. Blocks become rows of the
    batch, so that the kernel works on (batch · blocks, heads, window, 3 · window) and nothing is n × n.
    """
    batch, n = q.shape[0], q.shape[2]
    blocks = -(-n // window)
    after = 0 if causal else window
    ends = (window, blocks * window - n + after)  # keys before the first block, and behind the last

    def around(x: Tensor) -> Tensor:  # (batch, heads, n, width) → (batch · blocks, heads, keys around a block, width)
        cut = F.pad(x, (0, 0, *ends)).unfold(2, 2 * window + after, window)  # (batch, heads, blocks, width, keys)
        return cut.permute(0, 2, 1, 4, 3).flatten(0, 1)

    query = F.pad(q, (0, 0, 0, blocks * window - n)).unflatten(2, (blocks, window))
    query = query.transpose(1, 2).flatten(0, 1)  # (batch · blocks, heads, window, d_k)
    real = q.new_ones(1, n, dtype=torch.bool) if mask is None else mask[:, 0, 0]
    real = F.pad(real, ends).unfold(1, 2 * window + after, window)  # (batch or 1, blocks, keys)
    real = real.expand(batch, -1, -1).flatten(0, 1)[:, None, None]
    distance = torch.arange(window, device=q.device)[:, None] + window - torch.arange(real.shape[-1], device=q.device)
    near = (distance <= window) & (distance >= (0 if causal else -window))  # (window, keys)
    allowed = (near & real) | (distance == 0)
    found: Tensor = F.scaled_dot_product_attention(query, around(k), around(v), allowed, dropout_p=dropout, scale=scale)
    found = found.unflatten(0, (batch, blocks))
    return found.transpose(1, 2).flatten(2, 3)[:, :, :n]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021): turn each pair (2i, 2i + 1) of x by its position's angle.

    `table` is that of the sinusoids, (length, d_k), or one for each row, (rows, 1, length, d_k): sines and cosines of
    the same angles. The product of a query and a key then depends on the distance between them alone.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.complex(table[..., 1::2].float(), table[..., 0::2].float())
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


class MultiHeadAttention(nn.Module):
    """Concat(head_1 … head_h)·W^O with head_i = Attention(Q·W_i^Q, K·W_i^K, V·W_i^V) (section 3.2.2).

    `rotary` makes the table of sines and cosines by which queries and keys are turned, if they are.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_k: int,
        d_v: int,
        *,
        score: str = "scaled",
        rotary: nn.Module | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        name: str = "",
    ) -> None:
        super().__init__()
        self.heads, self.d_k, self.d_v = heads, d_k, d_v
        self.score = score
        self.rotary = rotary
        self.dropout = dropout
        self.name = name
        # W^Q, W^K and W^V of all heads lie in one matrix: self-attention is then a single product.
        self.qkv = nn.Linear(d_model, heads * (2 * d_k + d_v), bias=bias)
        self.output = nn.Linear(heads * d_v, d_model, bias=bias)
        for part in self.qkv.weight.split([heads * d_k, heads * d_k, heads * d_v]):
            nn.init.xavier_uniform_(part)
        nn.init.xavier_uniform_(self.output.weight)
        if bias:
            nn.init.zeros_(self.qkv.bias)
            nn.init.zeros_(self.output.bias)
        self.score_weight: nn.Parameter | None = None
        if score == "general":
            self.score_weight = nn.Parameter(torch.empty(heads, d_k, d_k).normal_(std=d_k**-1.0))
        elif score == "additive":
            self.score_weight = nn.Parameter(torch.empty(heads, d_k).normal_(std=d_k**-0.5))

    def project(self, x: Tensor, start: int | Tensor = 0, rows: Rows | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x (batch, length, d_model): each (batch, heads, length, d_k or d_v).

        `start` is the position of the first, of all rows or of each, for those that are turned by their position; of
        `rows` laid end to end, each begins at 0.
        """
        widths = [self.heads * self.d_k, self.heads * self.d_k, self.heads * self.d_v]
        q, k, v = map(self._split_heads, self.qkv(x).split(widths, dim=-1))
        if self.rotary is not None:
            table = self.rotary(start, x.shape[1]) if rows is None else rows.each(self.rotary)
            table = table[:, None] if isinstance(start, Tensor) else table  # alike for all heads
            q, k = rotate(q, table), rotate(k, table)
        return q, k, v

    def project_query(self, x: Tensor) -> Tensor:
        """Only the queries of x."""
        rows = slice(0, self.heads * self.d_k)
        return self._split_heads(F.linear(x, self.qkv.weight[rows], self._bias(rows)))

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Only the keys and values: what encoder-decoder attention needs of the encoder's output."""
        rows = slice(self.heads * self.d_k, None)
        kv = F.linear(memory, self.qkv.weight[rows], self._bias(rows))
        k, v = kv.split([self.heads * self.d_k, self.heads * self.d_v], dim=-1)
        return self._split_heads(k), self._split_heads(v)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        window: int = 0,
        rows: tuple[Rows, Rows] | None = None,
    ) -> Tensor:
        """Attend with projected heads and map back to (batch, queries, d_model).

        Queries and keys of `rows` laid end to end, (1, heads, tokens, width), stand in their rows meanwhile.
        """
        if rows is not None:
            q, k, v = rows[0].pad(q), rows[1].pad(k), rows[1].pad(v)
        heads = attend(
            q,
            k,
            v,
            mask,
            causal=causal,
            window=window,
            score=self.score,
            weight=self.score_weight,
            dropout=self.dropout if self.training else 0.0,
            name=self.name,
        )
        return self.merge(heads if rows is None else rows[0].take(heads))

    def merge(self, heads: Tensor) -> Tensor:
        """What the heads found, (batch, heads, queries, d_v), side by side and mapped to (batch, queries, d_model)."""
        mapped: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return mapped

    def _split_heads(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (self.heads, -1))
        return split.transpose(1, 2)  # (batch, heads, length, width)

    def _bias(self, rows: slice) -> Tensor | None:
        return None if self.qkv.bias is None else self.qkv.bias[rows]
