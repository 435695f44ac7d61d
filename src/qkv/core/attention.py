"""Attention (paper, section 3.2): equation 1, masks, several heads, and the contexts of training and of search.

Tensors of heads are (batch, heads, length, width): width is d_k for queries and keys, and d_v for values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SPARE = 16  # free positions of a cache that has just grown

# ---- equation 1 ------------------------------------------------------------------------------------------------------


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(QKᵀ/√d_k): (batch, heads, queries, keys). Keys that are masked out get exactly zero."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(dim=-1)


def padding_mask(keys: int, lengths: Tensor) -> Tensor:
    """Mask (batch, 1, 1, keys): True for the first `lengths[i]` keys of row i, which are no padding."""
    return (torch.arange(keys, device=lengths.device) < lengths[:, None])[:, None, None]


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """Mask (1, 1, queries, keys): True where a key is not later than the query.

    The last query has the position of the last key: one rule for whole sequences and for their newest tokens.
    """
    key = torch.arange(keys, device=device)
    return (key[keys - queries :, None] >= key)[None, None]


# ---- multi-head attention --------------------------------------------------------------------------------------------


class MultiHeadAttention(nn.Module):
    """Concat(head_1 … head_h)·W^O with head_i = Attention(Q·W_i^Q, K·W_i^K, V·W_i^V) (section 3.2.2)."""

    def __init__(self, d_model: int, heads: int, d_k: int, d_v: int, *, bias: bool = False, name: str = "") -> None:
        super().__init__()
        self.heads, self.d_k, self.d_v, self.name = heads, d_k, d_v, name
        self.widths = [heads * d_k, heads * d_k, heads * d_v]  # of queries, keys and values
        # W^Q, W^K and W^V of all heads are one matrix, so that self-attention is a single product.
        self.qkv = nn.Linear(d_model, sum(self.widths), bias=bias)
        self.output = nn.Linear(heads * d_v, d_model, bias=bias)
        for part in (*self.qkv.weight.split(self.widths), self.output.weight):
            nn.init.xavier_uniform_(part)
        if bias:
            nn.init.zeros_(self.qkv.bias)
            nn.init.zeros_(self.output.bias)

    def project(self, x: Tensor, position: int | Tensor = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x (batch, length, d_model); only variants use the position of the first token."""
        q, k, v = map(self._split_heads, self.qkv(x).split(self.widths, dim=-1))
        return q, k, v

    def project_query(self, x: Tensor) -> Tensor:
        return self._split_heads(self._linear(x, slice(0, self.widths[0])))

    def project_memory(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder output."""
        k, v = self._linear(encoded, slice(self.widths[0], None)).split(self.widths[1:], dim=-1)
        return self._split_heads(k), self._split_heads(v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Attend and merge: (batch, queries, d_model); `causal` is the mask of a sequence attending to itself."""
        return self.merge(attend(self, q, k, v, mask, causal))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Equation 1 by PyTorch's fused kernel, which never holds the weights."""
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """The weights of equation 1 as printed, which `attend` does not keep: (batch, heads, queries, keys)."""
        return attention_weights(q, k, causal_mask(q.shape[-2], k.shape[-2], q.device) if causal else mask)

    def merge(self, heads: Tensor) -> Tensor:
        """Concatenate heads (batch, heads, queries, d_v) and multiply by W^O: (batch, queries, d_model)."""
        return self.output(heads.transpose(1, 2).flatten(2))

    def new_cache(self) -> KVCache:
        return KVCache()

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (batch, heads, length, width)

    def _linear(self, x: Tensor, rows: slice) -> Tensor:
        return F.linear(x, self.qkv.weight[rows], None if self.qkv.bias is None else self.qkv.bias[rows])


class KVCache:
    """Keys and values of the tokens so far in one layer: (rows, heads, capacity, width), filled from the left."""

    def __init__(self) -> None:
        self.length = 0  # tokens held
        self.kept: list[Tensor] = []  # keys, values
        self.spare: list[Tensor] = []  # of the same size, for `select` to copy into: allocating costs more than copying

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store keys and values of n more tokens; return all of them, and the mask of the n newest queries."""
        start, end = self.length, self.length + k.shape[2]
        if not self.kept or end > self.kept[0].shape[2]:
            larger = [new.new_empty(*new.shape[:2], end + SPARE, new.shape[3]) for new in (k, v)]
            for buffer, old in zip(larger, self.kept, strict=False):
                buffer[:, :, :start] = old[:, :, :start]
            self.kept, self.spare = larger, []
        keys, values = self.kept
        keys[:, :, start:end], values[:, :, start:end] = k, v
        self.length = end
        mask = causal_mask(end - start, end, k.device) if end - start > 1 else None
        return keys[:, :, :end], values[:, :, :end], mask

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may occur several times."""
        if not self.spare or len(self.spare[0]) < len(rows):
            self.spare = [old.new_empty(len(rows), *old.shape[1:]) for old in self.kept]
        chosen = [buffer[: len(rows)] for buffer in self.spare]
        for buffer, old in zip(chosen, self.kept, strict=True):
            torch.index_select(old, 0, rows, out=buffer)
        self.kept, self.spare = chosen, self.kept


# ---- contexts: which keys the attentions of a layer see --------------------------------------------------------------


class Context(Protocol):
    """Attends from x (rows, n, d_model) to the tokens that its rows may see, or to the source: (rows, n, d_model)."""

    position: Any  # of the first token, as in `Embedding`

    def self_attention(self, layer: int, attention: MultiHeadAttention, x: Tensor) -> Tensor: ...
    def cross_attention(self, layer: int, attention: MultiHeadAttention, x: Tensor) -> Tensor: ...


@dataclass
class EncoderOutput:
    """The last layer of the encoder (batch, source, d_model), and the mask (batch, 1, 1, source) of its real tokens."""

    values: Tensor
    mask: Tensor


@dataclass
class WholeSequence:
    """All positions at once: a source with the mask of its real tokens, or a target in training (teacher forcing).

    Without a mask, each position attends to itself and those before it.
    """

    mask: Tensor | None = None
    encoded: EncoderOutput | None = None
    position: int = 0

    def self_attention(self, layer: int, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        return attention(*attention.project(x), self.mask, causal=self.mask is None)

    def cross_attention(self, layer: int, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        assert self.encoded is not None
        k, v = attention.project_memory(self.encoded.values)
        return attention(attention.project_query(x), k, v, self.encoded.mask)


@dataclass
class CachedDecoding:
    """State of search: the tokens so far as cached keys and values, and the source once for all its beams."""

    caches: list[KVCache]
    sources: list[tuple[Tensor, Tensor]]  # for each layer: keys, values (sentences, heads, source, width)
    mask: Tensor | None  # (sentences, 1, 1, source); None for a language model, which has no source
    beam: int
    position: int = 0

    def self_attention(self, layer: int, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        q, k, v = attention.project(x, self.position)
        return attention(q, *self.caches[layer].append(k, v))

    def cross_attention(self, layer: int, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        # All beams of a sentence read the same source, so they are queries of one attention and nothing is copied.
        rows, n, width = x.shape
        q = attention.project_query(x.reshape(rows // self.beam, self.beam * n, width))
        return attention(q, *self.sources[layer], self.mask).reshape(rows, n, width)

    def advance(self, tokens: int) -> None:
        self.position += tokens

    def select(self, rows: Tensor) -> CachedDecoding:
        if self.mask is not None and (kept := kept_sentences(rows, self.beam, len(self.mask))) is not None:
            self.sources = [(k.index_select(0, kept), v.index_select(0, kept)) for k, v in self.sources]
            self.mask = self.mask.index_select(0, kept)
        for cache in self.caches:
            cache.select(rows)
        return self


def kept_sentences(rows: Tensor, beam: int, sentences: int) -> Tensor | None:
    """The sentence of each `beam` selected rows; None if they are all sentences in their order."""
    kept = rows[::beam] // beam
    return None if torch.equal(kept, torch.arange(sentences, device=rows.device)) else kept


# ---- wrappers around attention ---------------------------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]  # q, k, v, mask, causal -> heads
Wrap = Callable[[Any, Attend, Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]
# The innermost last. Engines without this hook must not replace the model while the tuple is not empty.
wrappers: ContextVar[tuple[Wrap, ...]] = ContextVar("wrappers", default=())


@contextmanager
def around_attention(wrap: Wrap) -> Iterator[None]:
    """Call `wrap(attention, attend, q, k, v, mask, causal)` in place of every `attend` inside the block.

    The wrapper may call the `attend` it is given: of nested blocks, the outer one gets the wrapper of the inner one.
    """
    token = wrappers.set((*wrappers.get(), wrap))
    try:
        yield
    finally:
        wrappers.reset(token)


def attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """Run an attention inside the active wrappers: (batch, heads, queries, d_v)."""
    call: Attend = attention.attend
    for wrap in reversed(wrappers.get()):
        call = partial(wrap, attention, call)
    return call(q, k, v, mask, causal)
