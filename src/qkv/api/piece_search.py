"""The pieces of a call's texts through the search, and again where a translation lost something.

A piece is searched once. It is searched again if its output loops (with blocked n-grams), if a protected text is not in
it (with stand-ins, then under a constraint), or if it seems to leave something out (in smaller pieces).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qkv.api.omission import OmissionCheck
from qkv.api.translation import PieceOutput, best_combinations, mean_score
from qkv.core.errors import QkvError
from qkv.core.search import Hypothesis, Ids
from qkv.core.tokenizer import TokenizerPair
from qkv.core.translate import translate_lines
from qkv.decoding.constraints import MustInclude
from qkv.decoding.search_request import SearchInput, SearchRequest, SearchRunner
from qkv.evaluation.diagnosis import breaking, find_loop
from qkv.segmentation.protected_text import Protected
from qkv.segmentation.sentences import WORD, split
from qkv.segmentation.special_spaces import plain, restore

UNLIKELY = -2.5  # mean log-probability of a token below which an output is not to be trusted
MOST_REQUIRED = 8  # protected texts of a piece that are required phrases; more make a slow search and a bad output
SLACK = 0.05  # in the mean log-probability, because parts have more </s> than a whole
RETRIES = 2  # searches of a piece in smaller and smaller parts


class SourcePiece(NamedTuple):
    """A piece to translate: the number of its text in the call, its place in the text, its source."""

    text: int
    place: int
    source: str
    protected: Protected | None

    def lacks(self, output: PieceOutput) -> bool:
        """Whether a protected text is not in the output as often as in the piece."""
        return self.protected is not None and bool(self.protected.missing(output.texts[0]))

    def trust(self, output: PieceOutput) -> float:
        """Return the mean log-probability of an output's tokens, </s> included; -inf if it lacks a protected text."""
        best = output.hypotheses[0]
        return -math.inf if self.lacks(output) else best.logprob / (len(best.tokens) + 1)


@dataclass
class PieceSearch:
    """Translates the pieces of one call; `prefixes` and `required` are those of its texts."""

    runner: SearchRunner
    tokenizers: TokenizerPair
    request: SearchRequest
    max_length: int
    tag: Ids
    prefixes: Sequence[list[int]]
    required: Sequence[Sequence[str]]
    first: int
    check_positions: Callable[[int], None]
    progress: Callable[[int], None]  # gets the number of texts whose pieces were all searched
    stand_ins: Sequence[str] = ()
    omission: OmissionCheck | None = None
    waiting: dict[int, set[int]] = field(default_factory=dict)  # the pieces of each text not searched yet

    def __call__(self, pieces: Sequence[SourcePiece], texts: int) -> list[PieceOutput]:
        """Return the translation of each piece of so many texts."""
        for piece in pieces:
            if self._read(piece).strip():
                self.waiting.setdefault(piece.text, set()).add(piece.place)
        self.progress(texts - len(self.waiting))
        outputs = self._searched(pieces)
        self._with_protected(pieces, outputs)
        self._without_omissions(pieces, outputs)
        return outputs

    def _finished(self, pieces: Sequence[SourcePiece]) -> None:
        """Report the texts of which these pieces were the last ones."""
        ended = 0
        for piece in pieces:
            if left := self.waiting.get(piece.text):
                left.discard(piece.place)
                ended += not left
        self.progress(ended)

    # ---- one search --------------------------------------------------------------------------------------------------

    def _searched(
        self,
        pieces: Sequence[SourcePiece],
        phrases: Sequence[Sequence[str]] | None = None,
    ) -> list[PieceOutput]:
        """Search the pieces, with the required phrases of their texts and further ones."""
        read = [self._read(piece) for piece in pieces]
        extra = [()] * len(pieces) if phrases is None else phrases
        looped: set[int] = set()

        def search(ids: list[list[int]], numbers: list[int]) -> list[list[Hypothesis]]:
            chosen = [pieces[i] for i in numbers]
            work = SearchInput(
                ids,
                prefixes=[self.prefixes[piece.text] for piece in chosen],
                required=[self._phrases(piece.text, extra[i]) for i, piece in zip(numbers, chosen, strict=True)],
                numbers=[((self.first + piece.text) << 20) + piece.place for piece in chosen],
            )
            self.check_positions(max([self.request.options.max_length or 0, *map(len, work.prefixes)]))
            hypotheses, repeated = self._search(work, lambda indices: self._finished([chosen[i] for i in indices]))
            looped.update(i for i, is_repeated in zip(numbers, repeated, strict=True) if is_repeated)
            return hypotheses

        lines = translate_lines(read, self.tokenizers, search, max_length=self.max_length, tag=self.tag)
        return [
            PieceOutput(
                [restore(piece.source, text) for text in line.texts] or [piece.source],
                line.hypotheses or [Hypothesis([], 0.0, 0.0, False)],
                line.source_tokens,
                _flags(line.hypotheses, i in looped),
            )
            for i, (piece, line) in enumerate(zip(pieces, lines, strict=True))
        ]

    def _read(self, piece: SourcePiece) -> str:
        """Return what the model reads; nothing of a piece without letters and digits, beside protected text."""
        has_words = piece.protected.words_around if piece.protected else WORD.search(piece.source)
        return plain(piece.source)[0] if has_words or self._is_constrained(piece) else ""

    def _is_constrained(self, piece: SourcePiece) -> bool:
        """Whether the translation of the piece's text has a given prefix or required phrases."""
        return bool(self.prefixes[piece.text] or self.required[piece.text])

    def _phrases(self, text: int, more: Sequence[str]) -> MustInclude | None:
        """Return the phrases required of a piece of a text."""
        tgt = self.tokenizers.tgt
        return self.request.required([*self.required[text], *more], tgt.decode(self.prefixes[text]), tgt)

    def _search(
        self, work: SearchInput, progress: Callable[[Sequence[int]], None]
    ) -> tuple[list[list[Hypothesis]], list[bool]]:
        """Search; repeat the search with blocked n-grams for looped outputs. Return n-best lists, and which looped."""
        results = self.runner.run(work, self.request, progress)
        looped = [False] * len(results)
        repeat: dict[int, list[int]] = {}  # length of the n-grams to block -> sentences
        for i, hypotheses in enumerate(results):
            if (loop := find_loop(hypotheses[0].tokens, work.sources[i])) is not None:
                looped[i] = True
                repeat.setdefault(breaking(loop, self.request.options.no_repeat_ngram), []).append(i)
        for n, indices in repeat.items():
            options = dataclasses.replace(self.request.options, no_repeat_ngram=n)
            try:
                second = self.runner.run(work.some(indices), dataclasses.replace(self.request, options=options))
            except QkvError:  # the constraints need repeated n-grams: keep the first result
                continue
            for i, hypotheses in zip(indices, second, strict=True):
                if find_loop(hypotheses[0].tokens, work.sources[i]) is None:
                    results[i] = hypotheses
        return results, looped

    # ---- protected text ----------------------------------------------------------------------------------------------

    def _with_protected(self, pieces: Sequence[SourcePiece], outputs: list[PieceOutput]) -> None:
        """Take care that each protected text is in its output as often as in its piece.

        A piece with such texts is also searched with stand-ins. Of the two outputs, the likelier one that has every
        text is taken. If neither has, or the model would hardly write it, the texts become required phrases. What is
        still missing is inserted, and the output is flagged.
        """
        bound = {i: p.protected for i, p in enumerate(pieces) if p.protected is not None and outputs[i].source_tokens}
        for i, output in self._by_stand_ins(pieces, bound):
            outputs[i] = max(outputs[i], output, key=pieces[i].trust)
        few = [i for i, protected in bound.items() if len(protected.wanted) <= MOST_REQUIRED]
        doubtful = [i for i in few if pieces[i].trust(outputs[i]) < UNLIKELY]
        for i, output in self._by_constraint(pieces, doubtful):
            if pieces[i].trust(output) > max(UNLIKELY, pieces[i].trust(outputs[i])):
                outputs[i] = output
        for i, protected in bound.items():
            flags = ("protected",) if pieces[i].trust(outputs[i]) < UNLIKELY else ()
            texts = [protected.repair(text) for text in outputs[i].texts]
            outputs[i] = outputs[i]._replace(texts=texts, flags=(*outputs[i].flags, *flags))

    def _by_stand_ins(
        self, pieces: Sequence[SourcePiece], bound: Mapping[int, Protected]
    ) -> Iterator[tuple[int, PieceOutput]]:
        """Search pieces with stand-ins for their protected texts; yield the outputs in which each came back."""
        substitutes = {i: protected.stand_in(self.stand_ins) for i, protected in bound.items()}
        fitting = {i: given for i, given in substitutes.items() if given is not None and self._fits(given[0])}
        outputs = self._searched([pieces[i]._replace(source=source) for i, (source, _) in fitting.items()])
        for (i, (_, words)), output in zip(fitting.items(), outputs, strict=True):
            texts = [bound[i].put_back(text, words) for text in output.texts]
            if texts[0] is not None:
                kept = [(text, h) for text, h in zip(texts, output.hypotheses, strict=True) if text is not None]
                yield i, output._replace(texts=[text for text, _ in kept], hypotheses=[h for _, h in kept])

    def _by_constraint(self, pieces: Sequence[SourcePiece], doubtful: Sequence[int]) -> list[tuple[int, PieceOutput]]:
        """Search pieces with their protected texts as required phrases."""
        options = self.request.options
        if not doubtful or options.sampling is not None or options.groups > 1 or self.request.shortlist:
            return []
        phrases = [list(dict.fromkeys(own.texts)) if (own := pieces[i].protected) else [] for i in doubtful]
        try:
            return list(zip(doubtful, self._searched([pieces[i] for i in doubtful], phrases), strict=True))
        except QkvError:  # one of them is forbidden, or longer than an output may be: search the others without it
            half = len(doubtful) // 2
            halves = (doubtful[:half], doubtful[half:]) if half else ()
            return [found for part in halves for found in self._by_constraint(pieces, part)]

    def _fits(self, source: str) -> bool:
        return len(self.tokenizers.src.encode(source)) <= self.max_length

    # ---- omissions ---------------------------------------------------------------------------------------------------

    def _without_omissions(self, pieces: Sequence[SourcePiece], outputs: list[PieceOutput]) -> None:
        """Search a piece that seems to leave something out in smaller parts; flag it if that is no better."""
        check = self.omission
        if check is None:
            return

        def suspects_of(numbers: Sequence[int], outputs: Mapping[int, PieceOutput]) -> list[int]:
            found = [outputs[i] for i in numbers]
            lengths = [(each.source_tokens - len(self.tag), len(each.hypotheses[0].tokens)) for each in found]
            pairs = [(pieces[i].source, each.texts[0]) for i, each in zip(numbers, found, strict=True)]
            return [numbers[k] for k in check.suspects(pairs, lengths)]

        checked = [i for i, p in enumerate(pieces) if outputs[i].source_tokens and not self._is_constrained(p)]
        suspects = suspects_of(checked, dict(enumerate(outputs)))
        for attempt in range(1, RETRIES + 1):
            if not suspects:
                return
            joined = self._in_parts(pieces, suspects, 2**attempt)
            # Parts of a whole sentence often give a longer output, but one that the model finds unlikely.
            worse = (i for i in suspects if pieces[i].trust(joined[i]) < pieces[i].trust(outputs[i]) - SLACK)
            failed = {*suspects_of(suspects, joined), *worse, *(i for i in suspects if pieces[i].lacks(joined[i]))}
            for i in suspects:
                if i not in failed:
                    protected = pieces[i].protected
                    texts = [protected.repair(text) if protected else text for text in joined[i].texts]
                    outputs[i] = joined[i]._replace(texts=texts)
            suspects = [i for i in suspects if i in failed]
        for i in suspects:
            outputs[i] = outputs[i]._replace(flags=(*outputs[i].flags, "omission"))

    def _in_parts(self, pieces: Sequence[SourcePiece], numbers: Sequence[int], count: int) -> dict[int, PieceOutput]:
        """Search pieces in about `count` parts each, and join the outputs of the parts."""
        parts = {i: self._parts(pieces[i], count) for i in numbers}
        found = iter(self._searched([pieces[i]._replace(source=part) for i in numbers for part in parts[i]]))
        gap = " " if self.request.whole_words else ""
        return {i: _joined([next(found) for _ in parts[i]], self.request.n_best, gap) for i in numbers}

    def _parts(self, piece: SourcePiece, count: int) -> list[str]:
        """Cut a piece into about `count` parts of equal length."""

        def length(text: str) -> int:
            return len(self.tokenizers.src.encode(plain(text)[0]))

        limit = max(1, -(-length(piece.source) * 5 // (count * 4)))
        spans = piece.protected.spans if piece.protected else ()
        return list(split(piece.source, lambda part: length(part) <= limit, whole=spans))


def _flags(hypotheses: Sequence[Hypothesis], looped: bool) -> tuple[str, ...]:
    truncated = bool(hypotheses) and hypotheses[0].truncated
    return (*(["truncated"] if truncated else []), *(["looped"] if looped else []))


def _joined(outputs: Sequence[PieceOutput], n_best: int, gap: str) -> PieceOutput:
    """Join the outputs of the parts of a piece into one."""
    weights = [output.source_tokens + 1 for output in outputs]
    scores = [[hypothesis.score for hypothesis in output.hypotheses] for output in outputs]
    texts, hypotheses = [], []
    for ranks in best_combinations(scores, weights, n_best):
        chosen = [output.hypotheses[k] for output, k in zip(outputs, ranks, strict=True)]
        texts.append(gap.join(filter(None, (output.texts[k] for output, k in zip(outputs, ranks, strict=True)))))
        hypotheses.append(
            Hypothesis(
                [token for each in chosen for token in each.tokens],
                sum(h.logprob for h in chosen),
                mean_score(weights, [h.score for h in chosen]),
                any(h.truncated for h in chosen),
            )
        )
    flags = tuple(dict.fromkeys(flag for output in outputs for flag in output.flags))
    return PieceOutput(texts, hypotheses, sum(output.source_tokens for output in outputs), flags)
