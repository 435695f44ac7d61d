"""Translator: text in one language in, text in another out."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypedDict, Unpack, overload

from qkv import config as configs
from qkv.api.loading import Loaded
from qkv.decode.batched import score_all, search_all
from qkv.decode.search import Hypothesis
from qkv.errors import UsageError
from qkv.explain.align import Alignment, align_pairs, alignment_head
from qkv.explain.align import Head as AlignmentHead
from qkv.explain.importance import HeadImportance, importance
from qkv.explain.record import AttentionMap, attention_map
from qkv.explain.steps import decoding, forced_steps
from qkv.explain.what_if import WhatIf, edit, what_if
from qkv.models.attention import Head
from qkv.models.base import TranslationModel
from qkv.text.split import Pieces, split

CHUNK = 2048  # lines translated together when a file streams through: enough to sort by length
LONGEST_SCORED = 8192  # tokens of a pair that is scored as a whole: memory grows with the square
SPACELESS = {"zh", "zho", "cmn", "yue", "ja", "jpn", "th", "tha", "lo", "lao", "km", "khm", "my", "mya"}


@dataclass(frozen=True)
class Alternative:
    """Another translation of the same text."""

    text: str
    score: float
    logprob: float


@dataclass(frozen=True)
class Translation:
    """A translation and what is known about it; `score` is `logprob` under the length penalty.

    For a long input translated in pieces both are sums over the pieces, each of which was a sentence to the model.
    """

    text: str
    score: float
    logprob: float
    tokens: list[str]
    alternatives: list[Alternative]
    truncated: bool = False  # the longest length allowed was reached before the model ended
    pieces: int = 1  # how many parts a long input was translated in; 0 for blank text

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Scored:
    """The log-probability of a given translation, as a whole and token by token, </s> last."""

    logprob: float
    tokens: list[str]
    token_logprobs: list[float]

    @property
    def perplexity(self) -> float:
        return math.exp(min(700.0, -self.logprob / len(self.token_logprobs)))


class Options(TypedDict, total=False):
    """How to translate; None is as the run's config has it."""

    beam: int | None
    n_best: int
    length_penalty: str | None
    alpha: float | None
    tag: str
    progress: Callable[[int], None]


class Changes(TypedDict, total=False):
    """What to change about a translation (`qkv.explain.what_if`)."""

    heads_off: Iterable[Head]
    force: tuple[int, str | int] | None
    begin: str | None
    drop: Collection[int]
    replace: Mapping[int, str] | None


class Translator(Loaded[TranslationModel]):
    """A trained run, ready to translate."""

    model_class = TranslationModel

    @overload  # a str is a Sequence[str] too, but comes first
    def translate(self, text: str, **options: Unpack[Options]) -> Translation: ...  # type: ignore[overload-overlap]

    @overload
    def translate(self, text: Sequence[str], **options: Unpack[Options]) -> list[Translation]: ...

    def translate(self, text: str | Sequence[str], **options: Unpack[Options]) -> Translation | list[Translation]:
        """Translate a text, or each of several; what is left out of the options is as the run's config has it.

        Blank text stays empty without asking the model. Text longer than the model was trained on is translated in
        pieces, cut at sentences where possible, and put together again. `progress` is told of every finished text.
        """
        if isinstance(text, str):
            (only,) = self._translate([text], **options)
            return only
        return self._translate(text, **options)

    def stream(self, lines: Iterable[str], *, chunk: int = CHUNK, **options: Unpack[Options]) -> Iterator[Translation]:
        """Translate lines as they come, in order and in bounded memory: `chunk` lines at a time."""
        rest = iter(lines)
        while some := list(islice(rest, chunk)):
            yield from self._translate(some, **options)

    def _translate(
        self,
        texts: Sequence[str],
        *,
        beam: int | None = None,
        n_best: int = 1,
        length_penalty: str | None = None,
        alpha: float | None = None,
        tag: str = "",
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Translation]:
        if n_best < 1:
            raise UsageError(f"n_best = {n_best}: must be at least 1")
        spec = self._decode_options(beam=beam, length_penalty=length_penalty, alpha=alpha)
        prefix = self._prefix(tag)
        parts = [self._pieces(line, len(prefix)) for line in texts]
        line_of = [number for number, pieces in enumerate(parts) for _ in pieces]
        sources = [prefix + self.tokenizers.src.encode(piece) for pieces in parts for piece in pieces]
        missing = [len(pieces) for pieces in parts]
        progress(missing.count(0))

        def finished(indices: Sequence[int]) -> None:
            for i in indices:
                missing[line_of[i]] -= 1
            progress(sum(not missing[n] for n in {line_of[i] for i in indices}))

        found = iter(
            search_all(self.model, sources, spec, self.tokenizers, n_best=n_best, device=self.device, progress=finished)
        )
        return [self._translation(pieces, list(islice(found, len(pieces)))) for pieces in parts]

    @overload
    def score(  # type: ignore[overload-overlap]
        self, source: str, target: str, *, tag: str = "", progress: Callable[[int], None] = ...
    ) -> Scored: ...

    @overload
    def score(
        self, source: Sequence[str], target: Sequence[str], *, tag: str = "", progress: Callable[[int], None] = ...
    ) -> list[Scored]: ...

    def score(
        self,
        source: str | Sequence[str],
        target: str | Sequence[str],
        *,
        tag: str = "",
        progress: Callable[[int], None] = lambda done: None,
    ) -> Scored | list[Scored]:
        """Forced decoding: how likely the model finds the given translation of each source.

        Both are taken as a whole: which part of a target translates which part of a source is not known. So a pair that
        is endless is refused.
        """
        if isinstance(source, str) and isinstance(target, str):
            (only,) = self.score([source], [target], tag=tag, progress=progress)
            return only
        if isinstance(source, str) or isinstance(target, str):
            raise UsageError("one text and a list of texts cannot correspond: give two texts, or two lists")
        if len(source) != len(target):
            raise UsageError(f"{len(source)} sources but {len(target)} targets: they must correspond line by line")
        src, tgt = self.tokenizers.src, self.tokenizers.tgt
        prefix = self._prefix(tag)
        sources = [prefix + src.encode(line) for line in source]
        targets = [tgt.encode(line) for line in target]
        for number, pair in enumerate(zip(sources, targets, strict=True), 1):
            if (length := max(map(len, pair))) > LONGEST_SCORED:
                raise UsageError(
                    f"line {number}: {length:,} tokens: a pair is scored as a whole, at most {LONGEST_SCORED:,}: "
                    f"split it into sentences"
                )
        logprobs = score_all(self.model, sources, targets, self.tokenizers, device=self.device, progress=progress)
        return [Scored(sum(row), [*tgt.tokens(ids), "</s>"], row) for ids, row in zip(targets, logprobs, strict=True)]

    def attention(self, source: str, target: str | None = None, *, tag: str = "") -> AttentionMap:
        """The weights of every layer and head while the model writes its translation, or the given one.

        With them the steps of the decoding, with the candidates at each, and the beam as a tree; a translation that is
        given was not searched for, so it has no beam.
        """
        ids = self._sentence(source, tag)
        beam = None
        if target is None:
            found = decoding(self.model, self.tokenizers, ids, self.config.decode, self.device)
            written, steps, beam = found.hypotheses[0].tokens, found.steps, found.beam
        else:
            written = self.tokenizers.tgt.encode(target)
            steps = forced_steps(self.model, self.tokenizers, ids, written, self.device)
        recorded = attention_map(self.model, self.tokenizers, source, ids, written, self.device)
        return dataclasses.replace(recorded, steps=steps, beam=beam)

    def what_if(self, source: str, *, tag: str = "", beam: int | None = None, **changes: Unpack[Changes]) -> WhatIf:
        """Translate a sentence as it is and with something changed: heads off, another word forced, words dropped."""
        self._sentence(source, tag)
        edited = edit(self.tokenizers.src, source, changes.get("drop", ()), changes.get("replace") or {})
        self._sentence(edited, tag)
        spec = self._decode_options(beam=beam)
        return what_if(self.model, self.tokenizers, spec, self.device, source, tag=self._prefix(tag), **changes)

    def importance(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        tag: str = "",
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[HeadImportance]:
        """What every head is worth: how much the loss of these translations grows without it, most important first."""
        rows = [self._sentence(line, tag, f"line {number}: ") for number, line in enumerate(sources, 1)]
        return importance(
            self.model,
            self.tokenizers,
            rows,
            [self.tokenizers.tgt.encode(line) for line in targets],
            self.device,
            progress,
        )

    def align(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        head: AlignmentHead | None = None,
        rule: str = "marks",
        tag: str = "",
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Alignment]:
        """Which words of each translation come from which words of its source.

        By default through the head that the run's `alignment.json` names (`qkv align --find`), or that guided alignment
        taught, or else the mean of all heads.
        """
        if len(sources) != len(targets):
            raise UsageError(f"{len(sources)} sources but {len(targets)} targets: they must correspond line by line")
        self._prefix(tag)
        chosen = head or alignment_head(self.run)
        options: dict[str, Any] = {"rule": rule, "tag": tag, "progress": progress}
        return align_pairs(self.model, self.tokenizers, sources, targets, self.device, chosen, **options)

    def _sentence(self, text: str, tag: str, where: str = "") -> list[int]:
        """The ids of one sentence that the model can read as a whole."""
        ids = self._prefix(tag) + self.tokenizers.src.encode(text)
        limit = self.config.data.max_length
        if not text.strip() or len(ids) > limit:
            raise UsageError(f"{where}this is for one sentence of 1 to {limit} tokens, and here are {len(ids)}")
        return ids

    def _decode_options(self, **changed: Any) -> configs.Decode:
        given = {name: value for name, value in changed.items() if value is not None}
        return self.config.replace(decode=given).decode

    def _prefix(self, tag: str) -> list[int]:
        """The ids before every source: the language tag, which a model trained with tags alone cannot do without."""
        if tag:
            return [self.tokenizers.src.tag(tag)]
        if self.tokenizers.src.tags and all(corpus.tag for corpus in self.config.data.train):
            known = ", ".join(self.tokenizers.src.tags)
            raise UsageError(f"this model was trained with language tags: give one of them as tag (--tag): {known}")
        return []

    def _pieces(self, line: str, prefix: int) -> Pieces:
        room = self.config.data.max_length - prefix
        return split(line, lambda piece: len(self.tokenizers.src.encode(piece)) <= room)

    def _translation(self, pieces: Pieces, found: list[list[Hypothesis]]) -> Translation:
        """Put the hypotheses of all pieces together, rank by rank."""
        if not found:
            return Translation("", 0.0, 0.0, [], [], pieces=0)
        ranks = [self._join(pieces, hypotheses) for hypotheses in zip(*found, strict=False)]
        best, alternatives = ranks[0], ranks[1:]
        return Translation(
            text=best.text,
            score=best.score,
            logprob=best.logprob,
            tokens=self.tokenizers.tgt.tokens([token for hypotheses in found for token in hypotheses[0].tokens]),
            alternatives=alternatives,
            truncated=any(hypotheses[0].truncated for hypotheses in found),
            pieces=len(found),
        )

    def _join(self, pieces: Pieces, hypotheses: tuple[Hypothesis, ...]) -> Alternative:
        texts = [self.tokenizers.tgt.decode(h.tokens).replace("\n", " ") for h in hypotheses]
        language = re.split(r"[-_]", self.config.data.tgt_lang.lower())[0]
        glue = " "
        if language in SPACELESS:  # one space between sentences is the source's way of writing
            glue = ""
            pieces = Pieces(pieces.pieces, tuple("" if gap == " " else gap for gap in pieces.separators))
        text = pieces.join(texts, glue).strip()
        return Alternative(text, sum(h.score for h in hypotheses), sum(h.logprob for h in hypotheses))
