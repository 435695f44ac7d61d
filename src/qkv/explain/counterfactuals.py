"""What if: the translation with heads switched off, another word forced, or the source changed, beside the first."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from qkv.core.errors import UsageError
from qkv.core.search import Hypothesis, SearchState, length_penalty
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.translate import score_all
from qkv.explain.attention_maps import words
from qkv.explain.decoding_tree import Read
from qkv.models.attention import Head, heads_of, without
from qkv.models.state import StepModel
from qkv.options import DecodeConfig


@dataclass(frozen=True)
class Outcome:
    """A translation, and what the model made of it; `score` is `logprob` under the length penalty."""

    source: str
    translation: str
    tokens: list[str]
    logprob: float
    score: float


@dataclass(frozen=True)
class WhatIf:
    """The translation before a change and after it.

    `forced_logprob` and `forced_score` are those of the first translation under the change, found by forced decoding:
    a forced word changes nothing in them, because it changes neither the model nor the source.
    """

    before: Outcome
    after: Outcome
    forced_logprob: float
    forced_score: float

    @property
    def changed(self) -> bool:
        """Whether another translation came out."""
        return self.before.translation != self.after.translation

    @property
    def likelier(self) -> float:
        """By how many nats the first translation became likelier; negative: less likely."""
        return self.forced_logprob - self.before.logprob

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "changed": self.changed,
            "likelier": self.likelier,
            "logprob_change": self.after.logprob - self.before.logprob,
            "score_change": self.after.score - self.before.score,
        }


def what_if(
    model: StepModel[Any, Any],
    tokenizers: TokenizerPair,
    spec: DecodeConfig,
    device: torch.device,
    text: str,
    *,
    tag: Sequence[int] = (),
    heads_off: Iterable[Head] = (),
    force: tuple[int, str | int] | None = None,
    begin: str | None = None,
    drop: Collection[int] = (),
    replace: Mapping[int, str] | None = None,
) -> WhatIf:
    """Translate a sentence as it is, and again with everything changed that is given; `tag` are ids before the source.

    `heads_off` are names or (name, head) as in `without`. `force` = (step, word) keeps the tokens that the first
    translation has before that step, counted from 0, puts the word (or the token of that id) there and lets the search
    go on; `begin` is a whole beginning instead. `drop` and `replace` take words of the source by their number, as
    `source_words` counts them.
    """
    tgt = tokenizers.tgt
    if force is not None and begin is not None:
        raise UsageError("a forced word and a given beginning exclude each other: put the word into the beginning")
    changed_text = edit(tokenizers.src, text, drop, replace or {})
    source, changed = ([*tag, *tokenizers.src.encode(line)] for line in (text, changed_text))
    first = Read(model, tokenizers, source, device).search(spec)[0]
    prefix = tgt.encode(begin or "") if force is None else _forced(tgt, first.tokens, *force)
    heads_off = list(heads_off)
    with without(heads_off, heads_of(model, device) if heads_off else {}):
        second = Read(model, tokenizers, changed, device).search(spec, prefix=prefix)[0]
        (logprobs,) = score_all(model, [changed], [first.tokens], tokenizers, device=device)
    logprob = sum(logprobs)
    return WhatIf(
        before=_outcome(tgt, text, first),
        after=_outcome(tgt, changed_text, second),
        forced_logprob=logprob,
        forced_score=logprob / float(length_penalty(len(logprobs), spec)),
    )


def _outcome(tgt: Tokenizer, source: str, best: Hypothesis) -> Outcome:
    return Outcome(source, tgt.decode(best.tokens), tgt.tokens(best.tokens), best.logprob, best.score)


def source_words(src: Tokenizer, text: str) -> list[str]:
    """The words of a source, as they are numbered here and in an attention map without a language tag."""
    return [piece.strip(" ") for piece in _pieces(src, text)]


def edit(src: Tokenizer, text: str, drop: Collection[int], replace: Mapping[int, str]) -> str:
    """The text without the words of the numbers in `drop`, and with others in place of those in `replace`."""
    if not drop and not replace:
        return text
    pieces = _pieces(src, text)
    for number in (*drop, *replace):
        if not 0 <= number < len(pieces):
            known = " ".join(f"{i} {piece.strip(' ')}" for i, piece in enumerate(pieces))
            raise UsageError(f"the source has no word {number}: its words are {known}")
    for number, word in replace.items():
        space = " " if pieces[number].startswith(" ") else ""
        pieces[number] = space + word.strip()
    left = "".join(piece for number, piece in enumerate(pieces) if number not in drop).strip()
    if not left:
        raise UsageError("no word of the source would remain: drop fewer")
    return left


def _pieces(src: Tokenizer, text: str) -> list[str]:
    """The words of a text with the spaces before them: together they are the text, and a space before it."""
    ids = src.encode(text)
    spans = words(src.tokens(ids))
    return [b"".join(map(src.bytes_of, ids[i:j])).decode("utf-8", "replace") for i, j in spans]


def _forced(tgt: Tokenizer, written: list[int], step: int, word: str | int) -> list[int]:
    """The tokens before the step, and the word or token at it."""
    if not 0 <= step <= len(written):
        raise UsageError(f"step {step}: the translation has steps 0 to {len(written)}")
    before = written[:step]
    if isinstance(word, int):
        if not tgt.offset <= word < tgt.size:
            raise UsageError(f"token {word} writes nothing: a forced token is one of {tgt.offset} to {tgt.size - 1}")
        return [*before, word]
    word = word.removeprefix("▁").strip()
    if not word:
        raise UsageError("the forced word is empty: give one")
    if word[0].isalnum():
        return [*before, *tgt.encode(word)]
    return tgt.encode(tgt.decode(before) + word)  # punctuation joins what stands before it


# ---- Other words at a place of a translation: which the model finds likely there, one token of them after ------------


AT_ONCE = 8  # beginnings of words that are looked at together
BRANCHES = 20  # tokens that each of them is continued with
ROUNDS = 40  # … at most


@dataclass(frozen=True)
class Borders:
    """Where words begin and end among the tokens of a vocabulary."""

    tokenizer: Tokenizer

    @cached_property
    def begins(self) -> Tensor:
        """Which tokens never go on with a word of letters or digits: (vocab,)."""
        return torch.tensor([not _letter(self._text(token)[:1]) for token in range(self.tokenizer.size)])

    @cached_property
    def ends(self) -> Tensor:
        """Which tokens end in a letter or digit, so that the word they write may go on: (vocab,)."""
        return torch.tensor([_letter(self._text(token)[-1:]) for token in range(self.tokenizer.size)])

    def _text(self, token: int) -> str:
        return self.tokenizer.bytes_of(token).decode("utf-8", "replace")


def _letter(character: str) -> bool:
    return character.isalnum() or character == "\ufffd"  # which is part of one, as far as anybody knows


@dataclass(frozen=True)
class WordEnds:
    """A rule: where a forced beginning ends in a letter, a new word comes next."""

    borders: Borders
    changes_score: ClassVar[bool] = True
    capturable: ClassVar[bool] = False

    def __call__(self, log_probs: Tensor, state: SearchState) -> None:
        before = (state.length - 1).clamp(min=0)
        # The token at place length + 1 is forced by forced[length].
        forced = (state.forced.gather(1, before[:, None]).squeeze(1) >= 0) & (state.length > 0)
        free = state.forced.gather(1, state.length[:, None]).squeeze(1) < 0
        last = state.newest  # (sentences, rows)
        bound = (forced & free)[:, None] & self.borders.ends.to(last.device)[last]
        log_probs.masked_fill_(bound[:, :, None] & ~self.borders.begins.to(last.device), -math.inf)


@torch.inference_mode()
def likeliest_words(
    model: StepModel[Any, Any],
    source: Tensor,
    prefix: Sequence[int],
    borders: Borders,
    n: int,
) -> list[tuple[list[int], float]]:
    """The n likeliest words after a prefix as tokens, each with its log-probability, best first.

    A word's probability is that of its tokens and of anything that ends it. The search takes up the likeliest beginning
    each time, and is over when no beginning is as likely as the n-th word: whatever it grows into is less likely.
    """
    tgt = borders.tokenizer
    memory = model.encode(source, torch.tensor([source.shape[1]], device=source.device))
    beginnings: list[tuple[float, list[int]]] = [(0.0, [])]  # a heap: the likeliest first
    words: dict[str, tuple[list[int], float]] = {}
    for _ in range(ROUNDS):
        best = sorted((logprob for _, logprob in words.values()), reverse=True)[:n]
        if not beginnings or (len(best) == n and -beginnings[0][0] <= best[-1]):
            break
        some = [heapq.heappop(beginnings) for _ in range(min(AT_ONCE, len(beginnings)))]
        after = _after(model, memory, [[tgt.bos, *prefix, *tokens] for _, tokens in some], source.device)
        after[:, [tgt.pad, tgt.bos]] = -math.inf
        for (cost, tokens), log_probs in zip(some, after, strict=True):
            going_on = log_probs.clone()
            if tokens:
                may_end = borders.begins if borders.ends[tokens[-1]] else _spaces(tgt)
                ended = float(log_probs[may_end].logsumexp(0)) - cost
                word = tgt.decode(tokens).strip()
                if word and ended > words.get(word, (tokens, -math.inf))[1]:
                    words[word] = tokens, ended
                going_on[may_end] = -math.inf
            going_on[: tgt.offset] = -math.inf  # what writes nothing
            for gained, token in zip(*(part.tolist() for part in going_on.topk(BRANCHES)), strict=True):
                if gained > -math.inf:
                    heapq.heappush(beginnings, (cost - gained, [*tokens, token]))
    return sorted(words.values(), key=lambda pair: -pair[1])[:n]


def _after(model: StepModel[Any, Any], memory: Any, rows: list[list[int]], device: torch.device) -> Tensor:
    """The log-probabilities of what follows each row of tokens: (rows, vocab), on the CPU."""
    width = max(map(len, rows))
    fed = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows], device=device)
    logits, _ = model.step(fed, model.start(memory, len(rows)))  # nothing sees what was put behind it
    last = torch.tensor([len(row) - 1 for row in rows], device=device)
    return logits[torch.arange(len(rows), device=device), last].log_softmax(-1, dtype=torch.float).cpu()


def _spaces(tgt: Tokenizer) -> Tensor:
    """Which tokens begin with a space, or are </s>: what ends a word of marks."""
    return torch.tensor([token == tgt.eos or tgt.bytes_of(token).startswith(b" ") for token in range(tgt.size)])
