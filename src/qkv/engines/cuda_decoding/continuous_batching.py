"""Continuous batching: a fixed number of slots; a new sentence enters a slot as soon as its sentence has finished.

On a GPU the search step of all slots is captured once as a CUDA graph and replayed without synchronisation: the host
reads the flags of an earlier step while the device computes the next one.

The KV cache has a fixed size, and each row has its own position. A step reads no value on the host and uses the same
addresses every time, so it can be captured. Beams are reordered in a cache indirection table, which gives for each
position the row that stores its key and value; keys and values are not copied.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.core.attention import EncoderOutput, MultiHeadAttention, wrappers
from qkv.core.search import Hypothesis, Ids, Search, SearchOptions, check_prefix
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.transformer import Transformer
from qkv.engines import SEARCH_STEP
from qkv.engines.cuda_decoding.inference_kernels import RowCache, lookup, reorder, triton
from qkv.engines.cuda_decoding.search_kernels import start_triton
from qkv.models.variants import score_of
from qkv.options import FLAG, SIZES, AllowList, TransformerConfig, number
from qkv.training.unpadded import reach_positions

# ---- the search ------------------------------------------------------------------------------------------------------

MOST = 512  # slots; more do not make a large GPU faster
LAG = 1  # steps between the newest step and the flags that the host reads


MODEL = AllowList(
    "model",
    TransformerConfig,
    **SIZES,
    norm=("post", "pre"),
    rms_norm=FLAG,
    activation=("relu", "gelu", "swiglu"),
    positions=("sinusoidal", "learned", "rotary", "none"),
    bias=FLAG,
    kind=("transformer",),
    attention=("scaled", "dot", "general"),  # scores computed as dot products
    window=number,
)
# Groups of beams run in slots too; coverage and sampling need more state.
SEARCH = AllowList("search", SearchOptions, **SEARCH_STEP | {"groups": number})


class Sentence(NamedTuple):
    """A sentence to decode."""

    ids: Ids  # with </s>
    longest: int  # tokens of the output, at most
    prefix: Ids  # forced tokens at its start


class SlotDecoding:
    """Decoding engine with continuous batching; on a GPU the steps are replayed as CUDA graphs.

    The schedulers are cached for the next call: capturing a graph takes longer than decoding a sentence.
    """

    def __init__(self, model: Any, tokenizers: TokenizerPair, *, keep: int = 4) -> None:
        self.model, self.tokenizers, self.keep = model, tokenizers, keep
        self.schedulers: OrderedDict[Any, SlotScheduler] = OrderedDict()

    def supports(self, options: SearchOptions) -> str | None:
        """Return None if the model and options can be decoded in slots, else the reason why not."""
        config = self.model.config if isinstance(self.model, Transformer) else None
        for reason in (MODEL.refusal(config), SEARCH.refusal(options)):
            if reason is not None:
                return reason
        if triton is None and torch.cuda.is_available():
            return "without Triton the steps cannot be captured"
        if wrappers.get():
            return "attention is recorded or muted, which only the plain model supports"
        if not all(getattr(processor, "capturable", False) for processor in options.logits_processors()):
            return "a logits processor needs values on the host"
        return None

    def search_all(
        self,
        sources: Sequence[Ids],
        options: SearchOptions,
        *,
        prefixes: Sequence[Ids] | None = None,
        numbers: Sequence[int] | None = None,
        progress: Callable[[Sequence[int]], None] = lambda finished: None,
    ) -> list[list[Hypothesis]]:
        """Return the n best hypotheses of each source, in the order of the sources; the longest enter first."""
        if not sources:
            return []
        src, tgt = self.tokenizers.src, self.tokenizers.tgt
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        results: list[list[Hypothesis]] = [[] for _ in order]

        def finished(place: int, hypotheses: list[Hypothesis]) -> None:
            results[order[place]] = hypotheses
            progress([order[place]])

        forced_prefixes = prefixes or [()] * len(sources)
        check_prefix(chain.from_iterable(forced_prefixes), tgt)
        sentences = [
            Sentence([*sources[i], src.eos], options.longest(len(sources[i])), forced_prefixes[i]) for i in order
        ]
        self._scheduler(sentences, options).run(sentences, pad_id=src.pad, finished=finished)
        return results

    def _scheduler(self, sentences: Sequence[Sentence], options: SearchOptions) -> SlotScheduler:
        """Return a scheduler for sentences of these lengths, from the cache if possible."""
        source = self._rounded(max(len(sentence.ids) for sentence in sentences), 16)
        longest = max(max(sentence.longest, len(sentence.prefix)) for sentence in sentences)
        capacity = self._rounded(longest + 2, 32)
        slots = min(_power_below(len(sentences)), MOST, self._slots_that_fit(options.rows, capacity, source))
        key = (dataclasses.replace(options, max_length=None), slots, capacity, source)
        if key not in self.schedulers:
            while len(self.schedulers) >= self.keep:
                self.schedulers.popitem(last=False)
            sizes = {"slots": slots, "capacity": capacity, "source": source}
            self.schedulers[key] = SlotScheduler(self.model, options, self.tokenizers.tgt, **sizes)
        self.schedulers.move_to_end(key)
        return self.schedulers[key]

    def _rounded(self, length: int, step: int) -> int:
        """Round a length up, so that later calls share the scheduler, but not beyond the learned positions."""
        model: Any = self.model
        rounded = -(-length // step) * step
        return max(length, min(rounded, model.config.max_positions)) if model.config.positions == "learned" else rounded

    def _slots_that_fit(self, rows: int, capacity: int, source: int) -> int:
        """Return the number of sentences with a KV cache of at most an eighth of the device memory."""
        model: Any = self.model
        device = model.output.weight.device
        if device.type != "cuda":
            return MOST
        numbers_per_position = sum(a.attention.heads * (a.attention.d_k + a.attention.d_v) for a in model.decoder)
        size = numbers_per_position * (rows * capacity + source) * model.output.weight.element_size()
        return _power_below(max(1, int(torch.cuda.mem_get_info(device)[1] // 8 // size)))


def _power_below(number: int) -> int:
    """Return the largest power of two up to `number`."""
    return 1 << (number.bit_length() - 1)


class SlotScheduler:
    """Search over any number of sentences, `slots` of them at a time.

    `capacity` counts <s>, the longest output and </s>; `source` the longest source with its </s>. Sentences enter the
    slots in batches of fixed size: one size fills all slots at the start, a smaller one replaces finished sentences.
    """

    @torch.inference_mode()
    def __init__(
        self, model: Any, options: SearchOptions, tgt: Tokenizer, *, slots: int, capacity: int, source: int
    ) -> None:
        self.slots, self.device = slots, model.output.weight.device
        lengths = torch.ones(slots, dtype=torch.long, device=self.device)
        self.search = start_triton(model, options, tgt, lengths=lengths, capacity=capacity)
        self.search.decoder = SlotCache(model, slots, self.search.rows, capacity, source)
        self.advance: Callable[[], object] = self.search.advance
        self.group = max(1, slots // 8)  # finished sentences replaced at a time, at least: the device is idle meanwhile
        self.admissions = [Admission(self.search, size, source, capacity) for size in sorted({self.group, slots})]
        self.lag = 0
        if self.device.type == "cuda":
            self.advance, self.lag = capture_graph(self.advance), LAG
            for admission in self.admissions:
                admission.enter = capture_graph(admission.enter)
            self.search.state.done.fill_(True)
            self.flags = torch.empty(LAG + 1, slots, dtype=torch.bool, pin_memory=True)
            # A graph stores addresses, not tensors: keep position tables alive when longer ones replace them.
            self.tables = list(model.buffers())

    @torch.inference_mode()
    def run(
        self, sentences: Sequence[Sentence], *, pad_id: int, finished: Callable[[int, list[Hypothesis]], None]
    ) -> None:
        """Decode sentences in this order; call `finished` with the index and hypotheses of each."""
        waiting = deque(range(len(sentences)))
        held: list[int | None] = [None] * self.slots
        since = [0] * self.slots  # step at which each slot was filled; earlier flags belong to the previous sentence
        flags: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        step = 0
        while waiting or any(number is not None for number in held):
            free = [slot for slot, number in enumerate(held) if number is None]
            while waiting and free:
                admission = self.admissions[-1 if 2 * min(len(free), len(waiting)) > self.slots else 0]
                entering = [waiting.popleft() for _ in range(min(len(free), len(waiting), admission.size))]
                admission.admit(free[: len(entering)], [sentences[i] for i in entering], pad_id)
                for slot, entered in zip(free, entering, strict=False):
                    held[slot], since[slot] = entered, step
                free = free[len(entering) :]
            self.advance()
            step += 1
            flags.append((step, *self._flags(step)))
            if len(flags) <= self.lag:
                continue
            flagged_step, done, event = flags.popleft()
            if event is not None:
                event.synchronize()
            finished_slots = [
                slot
                for slot, is_done in enumerate(done.tolist())
                if is_done and held[slot] is not None and flagged_step > since[slot]
            ]
            busy = sum(number is not None for number in held) - len(finished_slots)
            if finished_slots and (not busy or len(finished_slots) >= self.group):
                for slot, hypotheses in zip(finished_slots, self.search.finished(finished_slots), strict=True):
                    number = held[slot]
                    assert number is not None
                    held[slot] = None
                    finished(number, hypotheses)

    def _flags(self, step: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start copying the done flags to the host; return them and the event that ends the copy."""
        done = self.search.state.done
        if self.device.type != "cuda":
            return done.clone(), None
        copied = self.flags[step % len(self.flags)]
        copied.copy_(done, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return copied, event


class Admission:
    """Admits `size` sentences to slots in one call: encodes them and initialises their search state."""

    def __init__(self, search: Search, size: int, source: int, capacity: int) -> None:
        self.search, self.size = search, size
        device = search.state.done.device

        def buffer(*shape: int, value: int) -> Tensor:
            return torch.full((size, *shape), value, dtype=torch.long, device=device)

        self.source, self.lengths = buffer(source, value=search.tgt.pad), buffer(value=1)
        self.slots, self.longest, self.forced = buffer(value=0), buffer(value=0), buffer(capacity, value=-1)
        self.enter: Callable[[], object] = self._enter

    def _enter(self) -> None:
        self.search.decoder.admit(self.slots, self.search.model.encode(self.source, self.lengths))
        self.search.place(self.slots, self.longest, self.forced)

    def admit(self, slots: list[int], sentences: list[Sentence], pad: int) -> None:
        """Admit sentences to slots; a batch smaller than `size` is filled up with its last sentence."""
        missing = self.size - len(slots)
        slots, sentences = slots + slots[-1:] * missing, sentences + sentences[-1:] * missing
        rows = _padded_matrix([sentence.ids for sentence in sentences], self.source.shape[1], pad)
        forced = _padded_matrix([sentence.prefix for sentence in sentences], self.forced.shape[1], -1)
        lengths, longest = zip(*((len(sentence.ids), sentence.longest) for sentence in sentences), strict=True)
        lists = torch.tensor([lengths, slots, longest])
        for buffer, new in zip(
            (self.source, self.forced, self.lengths, self.slots, self.longest), (rows, forced, *lists), strict=True
        ):
            buffer.copy_(new)
        self.enter()


def _padded_matrix(rows: Sequence[Ids], width: int, fill: int) -> Tensor:
    """Return rows of ids as a padded matrix; vectorised, because the device waits for it."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    matrix = np.full((len(rows), width), fill, np.int64)
    matrix[np.arange(width) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum())
    return torch.from_numpy(matrix)


def capture_graph(function: Callable[[], object]) -> Callable[[], object]:
    """Capture a function as a CUDA graph, after two warm-up calls that let libraries choose kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


# ---- the KV cache ----------------------------------------------------------------------------------------------------


class SlotCache:
    """KV cache for `sentences` × `beam` rows of up to `capacity` tokens, and sources of up to `source` tokens."""

    def __init__(self, model: Transformer, sentences: int, beam: int, capacity: int, source: int) -> None:
        self.model, self.beam = model, beam
        weight, rows = model.output.weight, sentences * beam
        self.keys, self.values = [], []
        self.source_keys, self.source_values = [], []
        for layer in model.decoder:
            attention, cross = layer.attention, layer.cross_attention
            assert cross is not None
            self.keys.append(weight.new_zeros(rows, capacity, attention.heads, attention.d_k))
            self.values.append(weight.new_zeros(rows, capacity, attention.heads, attention.d_v))
            self.source_keys.append(weight.new_zeros(sentences, source, cross.heads, cross.d_k))
            self.source_values.append(weight.new_zeros(sentences, source, cross.heads, cross.d_v))
        device = weight.device
        row = torch.arange(rows, dtype=torch.int, device=device)
        self.position = torch.zeros(rows, dtype=torch.long, device=device)
        self.origin = row[:, None].repeat(1, capacity)  # row that stores each position; the newest is in the row itself
        self.sentence = (row // beam)[:, None].expand(-1, source)
        self.source_length = torch.ones(rows, dtype=torch.long, device=device)
        reach_positions(model.target, model.decoder, capacity)

    def admit(self, slots: Tensor, encoded: EncoderOutput) -> None:
        """Reset these slots and store the projected encoder outputs of new sentences in them."""
        rows = (slots[:, None] * self.beam + torch.arange(self.beam, device=slots.device)).flatten()
        self.position.index_fill_(0, rows, 0)
        self.origin[:, 0].index_copy_(0, rows, rows.int())
        self.source_length.index_copy_(0, rows, encoded.mask.sum(dim=(1, 2, 3)).repeat_interleave(self.beam))
        for i, layer in enumerate(self.model.decoder):
            assert layer.cross_attention is not None
            k, v = layer.cross_attention.project_memory(encoded.values)
            for cache, new in ((self.source_keys[i], k), (self.source_values[i], v)):
                cache[:, : new.shape[2]].index_copy_(0, slots, new.transpose(1, 2))

    def self_attention(self, layer: int, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        q, k, v = attention.project(x, self.position)  # (rows, heads, 1, width)
        cache = RowCache(self.keys[layer], self.values[layer], self.origin, self.position)
        new = k.squeeze(2), v.squeeze(2)
        return self._attend(attention, q, cache, window=self.model.config.window, new=new)

    def cross_attention(self, layer: int, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        cache = RowCache(self.source_keys[layer], self.source_values[layer], self.sentence, self.source_length)
        return self._attend(attention, attention.project_query(x), cache)

    def _attend(self, attention: MultiHeadAttention, q: Tensor, cache: RowCache, **options: Any) -> Tensor:
        q = q.squeeze(2)
        score, weight = score_of(attention)
        if weight is not None:  # general (Luong): qᵀW replaces the query
            q = torch.einsum("rhd,hde->rhe", q, weight)
        scale = 1 / math.sqrt(attention.d_k) if score == "scaled" else 1.0
        return attention.merge(lookup(q, cache, scale=scale, **options)[:, :, None])

    def advance(self, tokens: int) -> None:
        self.position.add_(tokens).clamp_(max=self.origin.shape[1] - 1)  # free slots are counted, too

    def select(self, rows: Tensor) -> SlotCache:
        """Let each row continue `rows[i]`, a row of the same sentence."""
        reorder(self.origin, rows, self.position, self.beam)
        return self
