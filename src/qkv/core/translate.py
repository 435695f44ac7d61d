"""Lines in, lines out: many sentences through the search in batches by length, and the scores of given targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from qkv.core import batches
from qkv.core.batches import Batch, collate, pad
from qkv.core.errors import UsageError
from qkv.core.search import Hypothesis, Ids, SearchOptions, SpecialTokens, StartSearch, search, start_search
from qkv.core.tokenizer import TokenizerPair
from qkv.core.transformer import StepModel

Indices = Sequence[int]


@dataclass(frozen=True)
class Alternative:
    """Another translation of the same text."""

    text: str
    score: float
    logprob: float
    truncated: bool = False


@dataclass(frozen=True)
class Translation:
    """A translation and its scores; `score` is `logprob` under the length penalty.

    For an input translated in pieces both are sums over the pieces.
    """

    text: str
    score: float
    logprob: float
    tokens: list[str]
    alternatives: list[Alternative]
    truncated: bool = False  # the longest length allowed was reached before the model ended
    pieces: int = 1  # how many sentences or parts of long ones were translated; 0 for blank text
    finish_reason: str = "stop"  # stop: the model ended; length: the limit did; blank: there was nothing to translate
    length_ratio: float = 0.0  # tokens of the output for each of the input
    looped: bool = False  # the first output repeated itself; the search was repeated, and this is the better output

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return self.text


Split = Callable[
    [str, int], tuple[Sequence[str], Callable[[list[str]], str]]
]  # line, number → pieces, how to join them


def translate_lines(
    lines: Sequence[str],
    tokenizers: TokenizerPair,
    search: Callable[[list[list[int]], list[int]], list[list[Hypothesis]]],
    *,
    max_length: int,
    tag: Ids = (),
    split: Split | None = None,
) -> list[Translation]:
    """Translate lines; `search` gets the ids of all pieces and the line of each, and returns their n best hypotheses.

    Lines without text stay empty. A line of more than `max_length` tokens is cut by `split`, or refused; `tag` is put
    before each source.
    """
    sources: list[list[int]] = []
    line_of: list[int] = []
    joins = []
    for number, line in enumerate(lines):
        pieces, join = split(line, number) if split else ([line.strip()] if line.strip() else [], "".join)
        joins.append(join)
        sources += [[*tag, *tokenizers.src.encode(piece)] for piece in pieces]
        line_of += [number] * len(pieces)
        if not split and pieces and len(sources[-1]) > max_length:
            raise UsageError(f"line {number + 1}: {len(sources[-1])} tokens, at most {max_length}: split the line")
    found: list[list[list[Hypothesis]]] = [[] for _ in lines]
    read = [0] * len(lines)
    for number, ids, hypotheses in zip(line_of, sources, search(sources, line_of), strict=True):
        found[number].append(hypotheses)
        read[number] += len(ids)
    return [_translation(*line, tokenizers) for line in zip(found, joins, read, strict=True)]


def _translation(
    pieces: list[list[Hypothesis]], join: Callable[[list[str]], str], read: int, tokenizers: TokenizerPair
) -> Translation:
    """Put the hypotheses of all pieces of a line together, rank by rank."""
    if not pieces:
        return Translation("", 0.0, 0.0, [], [], pieces=0, finish_reason="blank")
    ranks = []
    for rank in zip(*pieces, strict=False):
        text = join([tokenizers.tgt.decode(h.tokens).replace("\n", " ") for h in rank]).strip()
        score, logprob = sum(h.score for h in rank), sum(h.logprob for h in rank)
        ranks.append(Alternative(text, score, logprob, any(h.truncated for h in rank)))
    best, written = ranks[0], [token for hypotheses in pieces for token in hypotheses[0].tokens]
    return Translation(
        **vars(best),
        tokens=tokenizers.tgt.tokens(written),
        alternatives=ranks[1:],
        pieces=len(pieces),
        finish_reason="length" if best.truncated else "stop",
        length_ratio=len(written) / max(1, read),
    )


# ---- many sentences --------------------------------------------------------------------------------------------------


class DecodingEngine(Protocol):
    """Replaces `search_all` for the options that it supports: processes, or slots on a GPU."""

    def supports(self, options: SearchOptions) -> str | None:
        """Return None, or the reason why `search_all` has to do it."""
        ...

    def search_all(
        self,
        sources: Sequence[Ids],
        options: SearchOptions,
        *,
        prefixes: Sequence[Ids] | None = None,
        numbers: Sequence[int] | None = None,
        progress: Callable[[Indices], None] = lambda finished: None,
    ) -> list[list[Hypothesis]]:
        """Return the n best hypotheses of each source, in the order of the sources."""
        ...


def search_all(
    model: StepModel[Any, Any],
    sources: Sequence[Ids],
    options: SearchOptions,
    tokenizers: TokenizerPair,
    *,
    device: torch.device,
    prefixes: Sequence[Ids] | None = None,
    numbers: Sequence[int] | None = None,
    progress: Callable[[Indices], None] = lambda finished: None,
    start: StartSearch = start_search,
) -> list[list[Hypothesis]]:
    """Return the n best hypotheses of each source, in the order of the sources, searched in batches by length.

    Outputs begin with the tokens of `prefixes`; `numbers`, the places of the sentences in the whole input, seed
    samples; `progress` gets the sentences that are finished.
    """
    results: list[list[Hypothesis]] = [[] for _ in sources]
    src, tgt = tokenizers.src, tokenizers.tgt
    longest = longest_outputs(sources, options)
    for batch in batches_by_length(sources, options, device):
        prefix = None
        if prefixes and any(prefixes[i] for i in batch):
            begun = [torch.tensor(prefixes[i], dtype=torch.long) for i in batch]
            prefix = torch.nn.utils.rnn.pad_sequence(begun, batch_first=True, padding_value=-1).to(device)
        rows = [np.asarray(sources[i], np.int64) for i in batch]
        found = search(
            model,
            pad(rows, src.pad, last=src.eos).to(device),
            torch.tensor([len(row) + 1 for row in rows], device=device),
            options,
            SpecialTokens(tgt.bos, tgt.eos, tgt.pad),
            longest=torch.tensor([longest[i] for i in batch], device=device),
            prefix=prefix,
            numbers=[numbers[i] if numbers else i for i in batch],
            start=start,
        )
        for i, hypotheses in zip(batch, found, strict=True):
            results[i] = hypotheses
        progress(batch)
    return results


def longest_outputs(sources: Sequence[Ids], options: SearchOptions) -> list[int]:
    """Return the length limit of each sentence's output."""
    return [len(ids) + options.extra_length if options.max_length is None else options.max_length for ids in sources]


def batches_by_length(sources: Sequence[Ids], options: SearchOptions, device: torch.device) -> Iterator[list[int]]:
    """Yield positions of sources grouped by length, longest first: too large a batch fails at the start."""
    # Padded source tokens times beams: enough to keep the device busy.
    budget = options.batch_tokens or (4096 if device.type == "cpu" else 131_072)
    yield from by_length([len(ids) + 1 for ids in sources], budget // max(options.beam, options.n_best))


def by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield positions of rows grouped into batches of at most `tokens` padded tokens, longest first."""
    widths = np.asarray(lengths, np.int64)
    order = np.argsort(-widths, kind="stable").astype(np.int64)
    for batch in batches.cut(order, widths, widths, tokens):
        yield batch.tolist()


# ---- forced decoding -------------------------------------------------------------------------------------------------


@torch.inference_mode()
def token_logprobs(model: StepModel[Any, Any], batch: Batch, pad: int) -> list[list[float]]:
    """Return log p of each label, </s> last, for each row; their sum is the log-probability of the target."""
    logits, _ = model.step(batch.target, model.start(model.encode(batch.source, batch.lengths)))
    log_probs = logits.float().log_softmax(-1)  # (batch, target, vocab)
    chosen: Tensor = log_probs.gather(-1, batch.labels[:, :, None]).squeeze(-1)
    real = (batch.labels != pad).sum(1).tolist()
    return [row[:count] for row, count in zip(chosen.tolist(), real, strict=True)]


def score_all(
    model: StepModel[Any, Any],
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    tokenizers: TokenizerPair,
    *,
    device: torch.device,
    tokens: int = 2048,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[float]]:
    """Return log p of each token of each target, </s> last; `progress` gets how many more are done.

    A batch is small because the logits of all its tokens exist at once: 300 MB with a vocabulary of 37,000.
    """
    results: list[list[float]] = [[] for _ in sources]
    lengths = [max(len(s), len(t)) + 1 for s, t in zip(sources, targets, strict=True)]
    for indices in by_length(lengths, tokens):
        source, target = ([np.asarray(side[i], np.int64) for i in indices] for side in (sources, targets))
        batch = collate(source, target, tokenizers).to(device)
        for i, logprobs in zip(indices, token_logprobs(model, batch, tokenizers.tgt.pad), strict=True):
            results[i] = logprobs
        progress(len(indices))
    return results
