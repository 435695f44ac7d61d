"""How the texts of one model are cut: what a line of its training text was like decides what a piece is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from qkv.core.errors import UsageError
from qkv.segmentation.protected_text import Protected, find_protected, without_protected
from qkv.segmentation.sentences import Pieces, Span, split, tiles
from qkv.segmentation.special_spaces import unwrapped

SEVERAL = 0.1  # from this share of training lines with several sentences on, pieces have several too
USUAL = 0.95  # share of the training lines that have at most as many sentences as a piece
LONG = 0.999  # share of the training lines that are at most as long as a piece
SHORTEST = 32  # tokens that a piece may always have


@dataclass(frozen=True)
class LineStatistics:
    """What the source lines of a training text were like: share of lines by number of sentences, and lengths."""

    sentences: Mapping[str, float]  # "1": 0.93, "2": 0.05 …
    tokens: int  # length of a long line
    lines: int  # in the sample of which the sentences were counted

    @classmethod
    def of(cls, lines: Iterable[str], tokens: int, language: str) -> Self:
        """Count the sentences of a sample of lines; `tokens` is the length that a share LONG of all lines has."""
        counts = Counter(max(1, len(split(line, _always, sentences=1, language=language))) for line in lines)
        total = sum(counts.values())
        return cls({str(n): round(count / total, 4) for n, count in sorted(counts.items())}, tokens, total)

    @classmethod
    def read(cls, plain: Any) -> Self | None:
        """Return the statistics that a run folder holds; None if it has none."""
        try:
            shares = {str(int(n)): float(share) for n, share in plain["sentences"].items()}
            return cls(shares, int(plain["tokens"]), int(plain["lines"]))
        except (TypeError, KeyError, ValueError, AttributeError):
            return None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def usual(self) -> int:
        """The number of sentences of a piece: 1, or as many as all but a few of the training lines had."""
        shares = sorted((int(n), share) for n, share in self.sentences.items())
        if sum(share for n, share in shares if n > 1) < SEVERAL:
            return 1
        covered = 0.0
        for n, share in shares:
            covered += share
            if covered >= USUAL:
                return n
        return shares[-1][0]


def _always(piece: str) -> bool:
    return True


@dataclass(frozen=True)
class CutText:
    """A text in pieces, each also as one line, and the protected texts of each."""

    pieces: Pieces
    sources: tuple[str, ...]
    protected: tuple[Protected | None, ...]

    @property
    def spans(self) -> list[Span]:
        """The spans of the pieces, with the white space after them, which tile the text."""
        return tiles(self.pieces.pieces, self.pieces.separators)


@dataclass(frozen=True)
class TextCutter:
    """Cuts texts for one model: into pieces of so many sentences and at most so many tokens of `encode`."""

    encode: Callable[[str], Sequence[int]]
    max_tokens: int  # that the model reads
    language: str
    statistics: LineStatistics | None = None

    @property
    def sentences(self) -> int:
        return self.statistics.usual if self.statistics else 1

    def cut(
        self, text: str, *, sentences: bool = True, newlines: str = "join", protected: Iterable[Span] = ()
    ) -> CutText:
        """Cut a text; without `sentences` only where it is too long for the model.

        `newlines` says whether a line that ends without a mark goes on in the next one ("join", hard-wrapped text) or
        every line break ends a piece ("keep"). `protected` are spans beside those that `find_protected` finds.
        """
        if newlines not in ("join", "keep"):
            raise UsageError(f'newlines = "{newlines}": must be join or keep')
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"U+{ord(text[error.start]):04X} at character {error.start + 1}"
            raise UsageError(f"the text holds {half}, half of a character: repair or remove it") from None
        spans = find_protected(text, protected)
        longest = self.max_tokens
        if sentences and self.statistics:
            longest = min(longest, max(SHORTEST, self.statistics.tokens))

        def fits(piece: str) -> bool:
            """Whether the model can read a piece, and its words without protected text are no longer than usual."""
            length, short = len(self.encode(piece)), without_protected(piece) if spans else piece
            return length <= longest or (
                short is not piece and length <= self.max_tokens and len(self.encode(short)) <= longest
            )

        pieces = split(
            text,
            fits,
            sentences=self.sentences if sentences else 0,
            language=self.language,
            join_lines=newlines == "join",
            whole=spans,
        )
        sources = tuple(map(unwrapped, pieces))
        if not spans:
            return CutText(pieces, sources, (None,) * len(pieces))
        return CutText(pieces, sources, tuple(_protected_in(pieces, sources, spans)))


def _protected_in(pieces: Pieces, sources: Sequence[str], spans: Sequence[Span]) -> Iterator[Protected | None]:
    """Yield the protected texts of each piece; of one that a cut divides, each part is protected."""
    at = 0
    for piece, source, begin in zip(pieces, sources, pieces.begins, strict=True):
        end, inside = begin + len(piece), []
        while at < len(spans) and spans[at][0] < end:
            first, last = max(spans[at][0], begin), min(spans[at][1], end)
            if piece[max(0, first - begin) : max(0, last - begin)].strip():
                inside.append((first - begin, last - begin))
            if spans[at][1] > end:
                break
            at += 1
        if source != piece:  # lines were joined: look for the same texts
            inside = _located(source, [unwrapped(piece[first:last]).strip() for first, last in inside])
        yield Protected(source, tuple(inside)) if inside else None


def _located(text: str, parts: Sequence[str]) -> list[Span]:
    """Return the spans of texts that occur in this order."""
    spans, at = [], 0
    for part in parts:
        begin = text.index(part, at)
        at = begin + len(part)
        spans.append((begin, at))
    return spans
