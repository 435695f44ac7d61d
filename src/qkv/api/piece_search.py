"""The pieces of a call's texts through the search, and again where a translation lost something.

A piece is searched once. It is searched again if its output loops (with blocked n-grams), if a protected text is not in
it (with stand-ins, then under a constraint), or if it seems to leave something out (in smaller pieces).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qkv.api.omission import OmissionCheck
from qkv.api.translation import PieceOutput
from qkv.core.errors import QkvError
from qkv.core.search import Hypothesis, Ids
from qkv.core.tokenizer import TokenizerPair
from qkv.core.translate import translate_lines
from qkv.decoding.constraints import MustInclude
from qkv.decoding.search_request import SearchInput, SearchRequest, SearchRunner
from qkv.evaluation.diagnosis import breaking, find_loop
from qkv.segmentation.protected_text import Protected
from qkv.segmentation.sentences import split
from qkv.segmentation.special_spaces import plain, restore

UNLIKELY = -2.5  # mean log-probability of a token below which an output is not to be trusted
RETRIES = 2  # searches of a piece in smaller and smaller parts


class SourcePiece(NamedTuple):
    """A piece to translate: the number of its text in the call, its place in the text, its source."""

    text: int
    place: int
    source: str
    protected: Protected | None


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
        read = [plain(piece.source)[0] for piece in pieces]
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
        """Take care that each protected text is in its output once.

        A piece with such texts is also searched with stand-ins. Of the two outputs, the likelier one that has every
        text wins. If neither has, the texts become required phrases; if that fails too, or gives an output that the
        model would never write, the missing texts are inserted and the output is flagged.
        """
        bound = [i for i, piece in enumerate(pieces) if piece.protected]
        by_stand_ins = dict(self._by_stand_ins(pieces, bound))
        lacking = []
        for i in bound:
            whole = [o for o in (outputs[i], by_stand_ins.get(i)) if o is not None and not _lacks(pieces[i], o)]
            if whole:
                outputs[i] = max(whole, key=_likelihood)
            if not whole or _likelihood(outputs[i]) < UNLIKELY:
                lacking.append(i)
        for i, output in self._by_constraint(pieces, lacking):
            before = -math.inf if _lacks(pieces[i], outputs[i]) else _likelihood(outputs[i])
            if _likelihood(output) > max(UNLIKELY, before):
                outputs[i] = output
        for i in bound:
            protected, output = pieces[i].protected, outputs[i]
            sure = not _lacks(pieces[i], output) and _likelihood(output) >= UNLIKELY
            flags = output.flags if sure else (*output.flags, "protected")
            texts = [protected.repair(text) for text in output.texts] if protected else output.texts
            outputs[i] = output._replace(texts=texts, flags=flags)

    def _by_constraint(self, pieces: Sequence[SourcePiece], lacking: Sequence[int]) -> list[tuple[int, PieceOutput]]:
        """Search pieces with their protected texts as required phrases; return the outputs that have each once."""
        request = self.request
        if not lacking or request.options.sampling is not None or request.options.groups > 1 or request.shortlist:
            return []
        some = [pieces[i] for i in lacking]
        phrases = [list(dict.fromkeys(piece.protected.texts)) if piece.protected else [] for piece in some]
        try:
            found = self._searched(some, phrases)
        except QkvError:  # forbidden, or longer than an output may be
            return []
        return [(i, o) for i, o in zip(lacking, found, strict=True) if not _lacks(pieces[i], o)]

    def _by_stand_ins(self, pieces: Sequence[SourcePiece], lacking: Sequence[int]) -> list[tuple[int, PieceOutput]]:
        """Search pieces with stand-ins; return the outputs in which each of them came back."""
        substituted = [(i, given) for i in lacking if (given := self._substitute(pieces[i])) is not None]
        outputs = self._searched([pieces[i]._replace(source=text) for i, (text, _) in substituted])
        found = []
        for (i, (_, words)), output in zip(substituted, outputs, strict=True):
            protected = pieces[i].protected
            texts = [protected.put_back(text, words) for text in output.texts] if protected else []
            kept = [(text, h) for text, h in zip(texts, output.hypotheses, strict=True) if text is not None]
            if texts and texts[0] is not None:
                found.append((i, output._replace(texts=[t for t, _ in kept], hypotheses=[h for _, h in kept])))
        return found

    def _substitute(self, piece: SourcePiece) -> tuple[str, list[str]] | None:
        given = piece.protected.stand_in(self.stand_ins) if piece.protected else None
        return given if given and len(self.tokenizers.src.encode(given[0])) <= self.max_length else None

    # ---- omissions ---------------------------------------------------------------------------------------------------

    def _without_omissions(self, pieces: Sequence[SourcePiece], outputs: list[PieceOutput]) -> None:
        """Search a piece that seems to leave something out in smaller parts; flag it if that is no better."""
        check = self.omission
        if check is None or any(self.required) or any(self.prefixes):
            return
        suspects = check.suspects([(plain(p.source)[0], o.texts[0]) for p, o in zip(pieces, outputs, strict=True)])
        for attempt in range(1, RETRIES + 1):
            if not suspects:
                return
            parts = {i: self._parts(pieces[i], 2**attempt) for i in suspects}
            some = [pieces[i]._replace(source=part) for i in suspects for part in parts[i]]
            found = iter(self._searched(some))
            joined = {i: _joined(parts[i], [next(found) for _ in parts[i]]) for i in suspects}
            still = check.suspects([(plain(pieces[i].source)[0], joined[i].texts[0]) for i in suspects])
            failed = {suspects[k] for k in still}
            for i in suspects:
                protected = pieces[i].protected
                complete = protected is None or not protected.missing(joined[i].texts[0])
                if i not in failed and complete:
                    outputs[i] = joined[i]
                else:
                    failed.add(i)
            suspects = [i for i in suspects if i in failed]
        for i in suspects:
            outputs[i] = outputs[i]._replace(flags=(*outputs[i].flags, "omission"))

    def _parts(self, piece: SourcePiece, count: int) -> list[str]:
        """Cut a piece into about `count` parts of equal length."""
        encode = self.tokenizers.src.encode
        text = plain(piece.source)[0]
        limit = max(1, -(-len(encode(text)) * 5 // (count * 4)))
        spans = piece.protected.spans if piece.protected and text == piece.source else ()
        return list(split(text, lambda part: len(encode(part)) <= limit, whole=spans))


def _flags(hypotheses: Sequence[Hypothesis], looped: bool) -> tuple[str, ...]:
    truncated = bool(hypotheses) and hypotheses[0].truncated
    return (*(["truncated"] if truncated else []), *(["looped"] if looped else []))


def _lacks(piece: SourcePiece, output: PieceOutput) -> bool:
    return piece.protected is not None and bool(output.texts) and bool(piece.protected.missing(output.texts[0]))


def _likelihood(output: PieceOutput) -> float:
    """Return the mean log-probability of a token, </s> included."""
    best = output.hypotheses[0]
    return best.logprob / (len(best.tokens) + 1)


def _joined(parts: Sequence[str], outputs: Sequence[PieceOutput]) -> PieceOutput:
    """Join the outputs of the parts of a piece into one."""
    best = [output.hypotheses[0] for output in outputs]
    weights = [output.source_tokens + 1 for output in outputs]
    hypothesis = Hypothesis(
        [token for each in best for token in each.tokens],
        sum(h.logprob for h in best),
        sum(w * h.score for w, h in zip(weights, best, strict=True)) / sum(weights),
        any(h.truncated for h in best),
    )
    flags = tuple(dict.fromkeys(flag for output in outputs for flag in output.flags))
    text = " ".join(output.texts[0] for output in outputs if output.texts[0])
    return PieceOutput([text], [hypothesis], sum(output.source_tokens for output in outputs), flags)
