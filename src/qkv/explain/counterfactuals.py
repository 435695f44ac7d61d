"""What if: translate again with heads muted, another word forced or the source changed, and compare."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from qkv.core.errors import UsageError
from qkv.core.search import Hypothesis, SearchState, length_penalty
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.transformer import StepModel
from qkv.data.subwords import readable_tokens
from qkv.decoding.search_request import score_all
from qkv.explain.attention_heads import HeadName, head_counts, mute_heads
from qkv.explain.attention_maps import words
from qkv.explain.decoding_tree import EncodedSource
from qkv.options import DecodeConfig


@dataclass(frozen=True)
class Outcome:
    """A source, its translation, and the log-probability; `score` is `logprob` under the length penalty."""

    source: str
    translation: str
    tokens: list[str]
    logprob: float
    score: float


@dataclass(frozen=True)
class WhatIf:
    """The translation before a change and after it.

    `forced_logprob` and `forced_score` belong to the first translation, scored with teacher forcing under the change. A
    forced word does not affect them: model and source are the same.
    """

    before: Outcome
    after: Outcome
    forced_logprob: float
    forced_score: float

    @property
    def changed(self) -> bool:
        """Return whether the translation is different."""
        return self.before.translation != self.after.translation

    @property
    def likelier(self) -> float:
        """Return the change in the log-probability of the first translation, in nats."""
        return self.forced_logprob - self.before.logprob

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "changed": self.changed,
            "likelier": self.likelier,
            "logprob_change": self.after.logprob - self.before.logprob,
            "score_change": self.after.score - self.before.score,
        }


def what_if(
    model: StepModel,
    tokenizers: TokenizerPair,
    spec: DecodeConfig,
    device: torch.device,
    text: str,
    *,
    tag: Sequence[int] = (),
    heads_off: Iterable[HeadName] = (),
    force: tuple[int, str | int] | None = None,
    begin: str | None = None,
    drop: Collection[int] = (),
    replace: Mapping[int, str] | None = None,
) -> WhatIf:
    """Translate a sentence as it is, and again with all given changes; `tag` are ids before the source.

    `heads_off` are names or (name, head) as in `mute_heads`. `force` = (step, word) keeps the tokens that the first
    translation has before that step, counted from 0, puts the word (or the token of that id) there and continues the
    search; `begin` replaces the beginning of the translation instead. `drop` and `replace` refer to words of the source
    by their index in `source_words`.
    """
    tgt = tokenizers.tgt
    if force is not None and begin is not None:
        raise UsageError("force and begin exclude each other: put the word into the beginning")
    changed_text = edit(tokenizers.src, text, drop, replace or {})
    source, changed = ([*tag, *tokenizers.src.encode(line)] for line in (text, changed_text))
    first = EncodedSource(model, tokenizers, source, device).search(spec)[0]
    prefix = tgt.encode(begin or "") if force is None else _forced(tgt, first.tokens, *force)
    heads_off = list(heads_off)
    with mute_heads(heads_off, head_counts(model, device)) if heads_off else nullcontext():
        second = EncodedSource(model, tokenizers, changed, device).search(spec, prefix=prefix)[0]
        (logprobs,) = score_all(model, [changed], [first.tokens], tokenizers, device=device)
    logprob = sum(logprobs)
    return WhatIf(
        before=_outcome(tgt, text, first),
        after=_outcome(tgt, changed_text, second),
        forced_logprob=logprob,
        forced_score=logprob / float(length_penalty(len(logprobs), spec)),
    )


def _outcome(tgt: Tokenizer, source: str, best: Hypothesis) -> Outcome:
    return Outcome(source, tgt.decode(best.tokens), readable_tokens(tgt, best.tokens), best.logprob, best.score)


def source_words(src: Tokenizer, text: str) -> list[str]:
    """Return the words of a source, in the order in which `drop`, `replace` and attention maps number them."""
    return [piece.strip(" ") for piece in _pieces(src, text)]


def edit(src: Tokenizer, text: str, drop: Collection[int], replace: Mapping[int, str]) -> str:
    """Return the text with the words in `drop` removed and those in `replace` replaced, both by index."""
    if not drop and not replace:
        return text
    pieces = _pieces(src, text)
    for number in (*drop, *replace):
        if not 0 <= number < len(pieces):
            numbered = " ".join(f"{i} {piece.strip(' ')}" for i, piece in enumerate(pieces))
            raise UsageError(f"the source has no word {number}: its words are {numbered}")
    for number, word in replace.items():
        space = " " if pieces[number].startswith(" ") else ""
        pieces[number] = space + word.strip()
    remaining = "".join(piece for number, piece in enumerate(pieces) if number not in drop).strip()
    if not remaining:
        raise UsageError("no word of the source would remain: drop fewer words")
    return remaining


def _pieces(src: Tokenizer, text: str) -> list[str]:
    """Return the words, each with its leading space; joined, they give the text after one space."""
    ids = src.encode(text)
    spans = words(readable_tokens(src, ids))
    return [b"".join(map(src.bytes_of, ids[i:j])).decode("utf-8", "replace") for i, j in spans]


def _forced(tgt: Tokenizer, written: list[int], step: int, word: str | int) -> list[int]:
    """Return the tokens before the step, followed by the forced word or token."""
    if not 0 <= step <= len(written):
        raise UsageError(f"step {step}: the translation has steps 0 to {len(written)}")
    before = written[:step]
    if isinstance(word, int):
        if not tgt.offset <= word < tgt.size:
            raise UsageError(f"token {word} has no text: force one of the ids {tgt.offset} to {tgt.size - 1}")
        return [*before, word]
    word = word.removeprefix("▁").strip()
    if not word:
        raise UsageError("the forced word is empty: give a word")
    if word[0].isalnum():
        return [*before, *tgt.encode(word)]
    return tgt.encode(tgt.decode(before) + word)  # punctuation follows without a space


# ---- the most probable words at a position of a translation ----------------------------------------------------------


BATCH = 8  # beginnings of words that are continued in one call of the model
BRANCHES = 20  # tokens that continue each of them
ROUNDS = 40  # limit on the number of calls


@dataclass(frozen=True)
class WordBoundaries:
    """For each token of a vocabulary, whether it can start a new word and whether its word may continue: (vocab,)."""

    tokenizer: Tokenizer

    @cached_property
    def begins(self) -> Tensor:
        """Mark the tokens that never continue a word of letters or digits."""
        return torch.tensor([not _letter(self._text(token)[:1]) for token in range(self.tokenizer.size)])

    @cached_property
    def ends(self) -> Tensor:
        """Mark the tokens that end in a letter or digit, after which the word may continue."""
        return torch.tensor([_letter(self._text(token)[-1:]) for token in range(self.tokenizer.size)])

    @cached_property
    def ends_punctuation(self) -> Tensor:
        """Mark the tokens that end a word of punctuation: those that start with a space, and </s>."""
        tgt = self.tokenizer
        return torch.tensor([token == tgt.eos or tgt.bytes_of(token).startswith(b" ") for token in range(tgt.size)])

    def _text(self, token: int) -> str:
        return self.tokenizer.bytes_of(token).decode("utf-8", "replace")


def _letter(character: str) -> bool:
    return character.isalnum() or character == "\ufffd"  # an incomplete character is counted as a letter


@dataclass(frozen=True)
class NewWordAfterPrefix:
    """Logits processor: after a forced prefix that ends in a letter, the next token starts a new word."""

    boundaries: WordBoundaries
    changes_score: ClassVar[bool] = True
    capturable: ClassVar[bool] = False

    def __call__(self, log_probs: Tensor, state: SearchState) -> None:
        before = (state.length - 1).clamp(min=0)
        # The token at place length + 1 is forced by forced[length].
        forced = (state.forced.gather(1, before[:, None]).squeeze(1) >= 0) & (state.length > 0)
        free = state.forced.gather(1, state.length[:, None]).squeeze(1) < 0
        last = state.newest  # (sentences, rows)
        after_letter = (forced & free)[:, None] & self.boundaries.ends.to(last.device)[last]
        log_probs.masked_fill_(after_letter[:, :, None] & ~self.boundaries.begins.to(last.device), -math.inf)


@torch.inference_mode()
def word_alternatives(
    source: EncodedSource, prefix: Sequence[int], boundaries: WordBoundaries, n: int
) -> list[tuple[list[int], float]]:
    """Return the n most probable words after a prefix as tokens, each with its log-probability, best first.

    The probability of a word is that of its tokens and of any token that ends it. Best-first search: the most probable
    beginnings are continued until none is more probable than the n-th word, because longer words are less probable.
    """
    tgt = boundaries.tokenizer
    beginnings: list[tuple[float, list[int]]] = [(0.0, [])]  # a heap of (−log-probability, tokens)
    words: dict[str, tuple[list[int], float]] = {}
    for _ in range(ROUNDS):
        best = sorted((logprob for _, logprob in words.values()), reverse=True)[:n]
        if not beginnings or (len(best) == n and -beginnings[0][0] <= best[-1]):
            break
        batch = [heapq.heappop(beginnings) for _ in range(min(BATCH, len(beginnings)))]
        rows = [[tgt.bos, *prefix, *tokens] for _, tokens in batch]
        next_log_probs = _next_log_probs(source, rows)
        next_log_probs[:, [tgt.pad, tgt.bos]] = -math.inf
        for (cost, tokens), log_probs in zip(batch, next_log_probs, strict=True):
            continuing = log_probs.clone()
            if tokens:
                may_end = boundaries.begins if boundaries.ends[tokens[-1]] else boundaries.ends_punctuation
                ended = float(log_probs[may_end].logsumexp(0)) - cost
                word = tgt.decode(tokens).strip()
                if word and ended > words.get(word, (tokens, -math.inf))[1]:
                    words[word] = tokens, ended
                continuing[may_end] = -math.inf
            continuing[: tgt.offset] = -math.inf  # special tokens have no text
            for logprob, token in zip(*(part.tolist() for part in continuing.topk(BRANCHES)), strict=True):
                if logprob > -math.inf:
                    heapq.heappush(beginnings, (cost - logprob, [*tokens, token]))
    return sorted(words.values(), key=lambda pair: -pair[1])[:n]


def _next_log_probs(source: EncodedSource, rows: list[list[int]]) -> Tensor:
    """Return the log-probabilities of the token after each row: (rows, vocab), on the CPU."""
    width, device = max(map(len, rows)), source.source.device
    padded = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows], device=device)
    logits, _ = source.step(padded, source.start(source.encoded, len(rows)))  # the causal mask hides the padding
    last = torch.tensor([len(row) - 1 for row in rows], device=device)
    return logits[torch.arange(len(rows), device=device), last].log_softmax(-1, dtype=torch.float).cpu()
