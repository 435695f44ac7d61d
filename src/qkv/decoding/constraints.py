"""Phrases that a translation must have, and phrases that it must not have.

Both are about the text, not about tokens: case-sensitive and in whole words, so that a forbidden "cat" does not forbid
"category", and a required one is not met by it. A text can be spelt in several ways; the rules below see all of them.
In languages without spaces there are no word borders, and a phrase is found wherever its characters occur.
"""

from __future__ import annotations

import bisect
import codecs
import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from qkv.core.errors import UsageError
from qkv.core.search import SearchState
from qkv.core.tokenizer import Tokenizer, one_line

LETTER = "ꙮ"  # a letter of no phrase: stands for a longer last word


def clean(phrases: Sequence[str], name: str) -> tuple[str, ...]:
    """The phrases as they are looked for: composed characters, single spaces; blank ones are refused."""
    if isinstance(phrases, str):
        raise UsageError(f"{name} takes a list of phrases: put the phrase in brackets")
    found = tuple(" ".join(unicodedata.normalize("NFC", phrase).split()) for phrase in phrases)
    if "" in found:
        raise UsageError(f"{name} has a blank phrase: remove it")
    return found


def find(phrase: str, text: str, whole_words: bool = True, start: int = 0) -> int:
    """Where a phrase ends in the text, from `start` on; -1 if it does not occur."""
    while (place := text.find(phrase, start)) >= 0:
        end = place + len(phrase)
        inside = place > 0 and _is_word(phrase[0]) and _is_word(text[place - 1])
        goes_on = end < len(text) and _is_word(phrase[-1]) and _is_word(text[end])
        if not whole_words or not (inside or goes_on):
            return end
        start = place + 1
    return -1


def _is_word(character: str) -> bool:
    """Letters, digits, the accents on them, and the underscore."""
    return character.isalnum() or character == "_" or unicodedata.category(character).startswith("M")


def living_rows(state: SearchState) -> Iterator[tuple[int, int, list[int]]]:
    """Yield slot, row and the tokens written so far of each hypothesis that is still searched."""
    parts = zip(*(part.tolist() for part in (state.tokens, state.length, state.logprob)), strict=True)
    for slot, (sentence, length, logprobs) in enumerate(parts):
        for row, (tokens, logprob) in enumerate(zip(sentence, logprobs, strict=True)):
            if logprob > -math.inf:
                yield slot, row, tokens[1 : 1 + length]


def _first(piece: bytes) -> str:
    """Return the first character of a token's bytes; U+FFFD if it is not whole."""
    return piece[:4].decode("utf-8", "replace")[:1]


# ---- forbidden -------------------------------------------------------------------------------------------------------


class Avoid:
    """Forbid the token that would complete a phrase, in every spelling.

    A word that goes on behind the phrase is another word: it is forbidden only in the spelling that writes the phrase
    first and the rest of the word after it, because the rest may not come. Where it must come, as in
    an `exempt` spelling of a required phrase, or after a prefix, only tokens that lengthen the word may follow.
    """

    changes_score = True
    capturable = False

    def __init__(
        self,
        phrases: Sequence[str],
        tokenizer: Tokenizer,
        whole_words: bool = True,
        exempt: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.phrases, self.whole_words = clean(phrases, "avoid"), whole_words
        # A newline becomes a space in a translation.
        self.bytes = [tokenizer.bytes_of(token).replace(b"\n", b" ") for token in range(tokenizer.size)]
        vocabulary = sorted((piece, token) for token, piece in enumerate(self.bytes) if piece)
        forms = {unicodedata.normalize(form, phrase) for phrase in self.phrases for form in ("NFC", "NFD")}
        self.patterns = [_Pattern(form.encode(), vocabulary, whole_words) for form in sorted(forms)]
        self.apart = {token for token, piece in enumerate(self.bytes) if not _joins(piece)}  # end a word; </s> does too
        self.exempt = {spelt[:n] for spelt in exempt for n in range(1, len(spelt))}

    def __call__(self, log_probs: Tensor, state: SearchState) -> None:
        places: list[tuple[int, int, int]] = []
        longest = state.longest.tolist()
        for slot, row, tokens in living_rows(state):
            found = self.forbidden(tokens, left=longest[slot] - len(tokens))
            places += [(slot, row, token) for token in found]
        if places:
            log_probs[tuple(torch.tensor(places, device=log_probs.device).T)] = -math.inf

    def forbidden(self, tokens: Sequence[int], left: int = 0) -> set[int]:
        """Return the tokens that would complete a phrase after `tokens`; the output may add `left` tokens in all."""
        text = b"".join(map(self.bytes.__getitem__, tokens))
        found = {token for pattern in self.patterns for token in pattern.completing(text)}
        if left > 1:  # a word that must go on needs room for it
            found -= {token for token in found if self._exempts([*tokens, token])}
        if any(pattern.complete(text) for pattern in self.patterns):
            found |= self.apart
        return found

    def _exempts(self, tokens: Sequence[int]) -> bool:
        return any(tuple(tokens[-len(begun) :]) == begun for begun in self.exempt)

    def occurs(self, text: str) -> str | None:
        """Return the first forbidden phrase that occurs in the text, or None."""
        composed = unicodedata.normalize("NFC", text)
        return next((phrase for phrase in self.phrases if find(phrase, composed, self.whole_words) >= 0), None)


class _Pattern:
    """The bytes of one phrase, and which tokens complete it when so many of them are written already."""

    def __init__(self, phrase: bytes, vocabulary: list[tuple[bytes, int]], whole_words: bool) -> None:
        self.phrase = phrase
        text = phrase.decode()
        self.left, self.right = (whole_words and _is_word(text[end]) for end in (0, -1))  # where a word must not go on
        self.after: dict[int, list[int]] = {}
        for done in range(len(phrase)):
            rest = phrase[done:]
            begin = bisect.bisect_left(vocabulary, (rest, -1))
            fitting = []
            while begin < len(vocabulary) and vocabulary[begin][0].startswith(rest):
                piece, token = vocabulary[begin]
                if self._ends(piece[len(rest) :]):
                    fitting.append(token)
                begin += 1
            if fitting:
                self.after[done] = fitting
        self.within = [token for piece, token in vocabulary if self._holds(piece)]  # after any text

    def completing(self, text: bytes) -> list[int]:
        """Return the tokens that complete the phrase after a text."""
        found = list(self.within)
        for done, tokens in self.after.items():
            if self._stands(text, done):
                found += tokens
        return found

    def complete(self, text: bytes) -> bool:
        """Whether the text ends in the phrase; it contains the phrase unless the next token lengthens the last word."""
        return self.right and self._stands(text, len(self.phrase))

    def _stands(self, text: bytes, done: int) -> bool:
        """Whether the text ends in so many bytes of the phrase, and they begin where a word may."""
        before = text[: len(text) - done]
        return text.endswith(self.phrase[:done]) and not (self.left and before and _is_word(_last(before)))

    def _ends(self, rest: bytes) -> bool:
        return not (self.right and rest and _is_word(_first(rest)))

    def _holds(self, piece: bytes) -> bool:
        place = piece.find(self.phrase, 1)
        while place > 0:
            if self._ends(piece[place + len(self.phrase) :]) and not (self.left and _is_word(_last(piece[:place]))):
                return True
            place = piece.find(self.phrase, place + 1)
        return False


def _last(text: bytes) -> str:
    return text[-4:].decode("utf-8", "replace")[-1]


# ---- required --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MustInclude:
    """Required phrases of one translation; `spelt` are the tokens of each, used where the phrase is forced."""

    phrases: tuple[str, ...]
    spelt: tuple[tuple[int, ...], ...]
    ordered: bool
    whole_words: bool
    tokenizer: Tokenizer

    @classmethod
    def of(
        cls, phrases: Sequence[str], tokenizer: Tokenizer, *, ordered: bool = False, whole_words: bool = True
    ) -> MustInclude:
        """Return several required phrases, in this order or in any; if ordered, a repeated phrase must occur twice."""
        cleaned = clean(phrases, "must_include")
        if not ordered:
            cleaned = tuple(dict.fromkeys(cleaned))
        spelt = tuple(tuple(spell(phrase, tokenizer, space=whole_words)) for phrase in cleaned)
        return cls(cleaned, spelt, ordered, whole_words, tokenizer)

    def __str__(self) -> str:
        return ", ".join(f'"{phrase}"' for phrase in self.phrases)

    def missing(self, text: str) -> list[int]:
        """The numbers of the phrases that a text lacks; if they are ordered, all from the first that it lacks."""
        composed = unicodedata.normalize("NFC", text)
        if not self.ordered:
            return [i for i, phrase in enumerate(self.phrases) if find(phrase, composed, self.whole_words) < 0]
        end = 0
        for i, phrase in enumerate(self.phrases):
            end = find(phrase, composed, self.whole_words, end)
            if end < 0:
                return list(range(i, len(self.phrases)))
        return []

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; a last character that is not whole yet is left out."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        joined = b"".join(map(self.tokenizer.bytes_of, tokens))
        return one_line(decoder.decode(joined)).removeprefix(" ")

    def room(self, missing: Sequence[int]) -> int:
        """Return the total number of tokens of these phrases."""
        return sum(len(self.spelt[i]) for i in missing)

    def need(self, tokens: Sequence[int]) -> int:
        """Return an upper bound on the tokens that are still needed for all phrases."""
        missing = self.missing(self.text(tokens))
        begun = [self._begun(i, tokens)[-1] for i in (missing[:1] if self.ordered else missing)]
        return self.room(missing) - max(begun, default=0)

    def advancing(self, tokens: Sequence[int]) -> set[int]:
        """Return the tokens that begin a missing phrase or continue one."""
        missing = self.missing(self.text(tokens))
        wanted = missing[:1] if self.ordered else missing
        return {self.spelt[i][begun] for i in wanted for begun in self._begun(i, tokens)}

    def _begun(self, i: int, tokens: Sequence[int]) -> list[int]:
        """Return how many tokens of a phrase may already be written at the end, fewest first, 0 included."""
        spelt = self.spelt[i]
        most = min(len(spelt) - 1, len(tokens))
        return [n for n in range(most + 1) if tuple(tokens[len(tokens) - n :]) == spelt[:n]]


def spell(phrase: str, tokenizer: Tokenizer, *, space: bool = True) -> list[int]:
    """The tokens of a phrase as the tokenizer cuts it, with the space before it, or without it as long as they go."""
    if space:
        return tokenizer.encode(phrase)
    pieces = {tokenizer.bytes_of(token): token for token in range(tokenizer.offset, tokenizer.size)}
    rest, tokens = phrase.encode(), []
    while rest:
        length = next(n for n in range(min(len(rest), tokenizer.max_token_bytes), 0, -1) if rest[:n] in pieces)
        tokens.append(pieces[rest[:length]])
        rest = rest[length:]
    return tokens


def check_conflict(required: Sequence[str], prefix: str, avoid: Avoid) -> None:
    """Refuse required text that contains a forbidden phrase; the last word of a prefix may still be lengthened."""
    for phrase, text in [(phrase, phrase) for phrase in required] + [(prefix, prefix + LETTER)]:
        if (forbidden := avoid.occurs(text)) is not None:
            raise UsageError(f'"{phrase}" is required, but "{forbidden}" in it is forbidden: remove one of the two')


def _joins(piece: bytes) -> bool:
    """Whether a token may lengthen the word before it: it begins with a letter, or with a part of a character."""
    return bool(piece) and ((first := _first(piece)) == "\ufffd" or _is_word(first))


@lru_cache(maxsize=4)
def joining(tokenizer: Tokenizer) -> Tensor:
    """The tokens that may lengthen a word: (vocab,)."""
    return torch.tensor([_joins(tokenizer.bytes_of(token)) for token in range(tokenizer.size)])
