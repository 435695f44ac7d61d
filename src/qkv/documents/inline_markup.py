"""Inline markup placed in a translation: each tag encloses the words aligned with the words it enclosed in the source.

The model reads and writes text without tags. A target word belongs to the innermost element of its source words. If
the words of an element are no longer adjacent, its tags are repeated; an element without a translated word is kept,
empty, at its place. So every element of the source occurs in the result, which is well-formed, and without its tags
the result equals the translation.

Protected text, such as inline code, is one atomic word while tags are placed: `match_protected` finds it in the
translation, and `Atoms` numbers the words of the alignment anew.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise

from qkv.core.errors import UsageError
from qkv.data.alignments import Link, word_spans

Span = tuple[int, int]  # begin and end of a word, or of a part of one
TAG = re.compile(r"<(?P<close>/?)(?P<name>[A-Za-z][\w:.-]*)(?:\s[^<>]*?)?(?P<empty>/?)>")
# HTML's void elements that occur in running text. Others (link, source …) are left out: in XML they may have content.
UNPAIRED = frozenset("br hr img input wbr".split())


@dataclass(eq=False)
class Element:
    """An element of the source, or the root; `begin` and `end` are offsets in the text without tags."""

    opening: str = ""
    name: str = ""
    begin: int = 0
    end: int = 0
    parent: Element | None = None
    children: list[Element] = field(default_factory=list)
    unpaired: bool = False

    @cached_property
    def path(self) -> list[Element]:
        """The element and its ancestors, outermost first, without the root."""
        return [] if self.parent is None else [*self.parent.path, self]

    @property
    def closing(self) -> str:
        return "" if self.unpaired else f"</{self.name}>"

    def empty(self) -> str:
        """The tags of the element and its descendants, without text."""
        return self.opening + "".join(child.empty() for child in self.children) + self.closing

    def descendants(self) -> Iterable[Element]:
        """All elements inside this one, in document order."""
        for child in self.children:
            yield child
            yield from child.descendants()


def split_at(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, re.Match[str] | None]]:
    """Yield the text before each match with the match, and the text after the last one with None."""
    done = 0
    for match in pattern.finditer(text):
        yield text[done : match.start()], match
        done = match.end()
    yield text[done:], None


def strip_markup(text: str) -> str:
    """Remove the tags; the result is the text to translate."""
    return TAG.sub("", text)


def place_markup(source: str, translation: str, alignment: Iterable[Link] | None) -> str:
    """Add the source's tags to a translation of `strip_markup(source)`.

    The alignment links words as counted by `word_spans`; None links words by their relative position in the text.
    """
    plain, root = parse_markup(source)
    innermost = [root] * root.end  # the element of each character
    for element in root.descendants():  # inner elements follow the outer ones
        innermost[element.begin : element.end] = [element] * (element.end - element.begin)
    words = word_spans(plain), word_spans(translation)
    links = diagonal_links(*map(len, words)) if alignment is None else alignment
    source_spans, target_spans, links = _split_words(*words, sorted(links), innermost)
    starts = [begin for begin, _ in source_spans]
    owners = _target_elements(links, [innermost[begin] for begin in starts], len(target_spans), root)
    before, after = _empty_elements(root, starts, links, owners)
    return _render(translation, target_spans, owners, before, after)


def parse_markup(source: str) -> tuple[str, Element]:
    """Return the text without tags and the tree of elements; unbalanced tags are an error."""
    root = current = Element()
    plain = ""
    for text, tag in split_at(TAG, source):
        plain += text
        if tag is None:
            break
        if tag["close"]:
            if current.parent is None or current.name != tag["name"]:
                raise UsageError(f"{tag[0]} closes no open tag: give text with balanced tags")
            current.end, current = len(plain), current.parent
            continue
        unpaired = bool(tag["empty"]) or tag["name"].lower() in UNPAIRED
        child = Element(tag[0], tag["name"], len(plain), len(plain), current, unpaired=unpaired)
        current.children.append(child)
        current = current if unpaired else child
    if current.parent is not None:
        raise UsageError(f"{current.opening} is not closed: give text with balanced tags")
    root.end = len(plain)
    return plain, root


def diagonal_links(source_words: int, target_words: int) -> set[Link]:
    """Link words by their relative position."""
    if not source_words or not target_words:
        return set()
    longest = max(source_words, target_words)
    middles = range(1, 2 * longest, 2)
    return {(m * source_words // (2 * longest), m * target_words // (2 * longest)) for m in middles}


def _split_words(
    source: list[Span], target: list[Span], links: list[Link], innermost: list[Element]
) -> tuple[list[Span], list[Span], list[Link]]:
    """Split words where an element begins or ends inside them; a translation of one word is split in proportion.

    So an element that contains a part of a word, such as the 2 of CO2, does not become empty.
    """
    parts, target_parts = [], [[span] for span in target]
    for begin, end in source:
        edges = [at for at in range(begin + 1, end) if innermost[at] is not innermost[at - 1]]
        parts.append([*pairwise([begin, *edges, end])])
    source_counts, target_counts = Counter(i for i, _ in links), Counter(j for _, j in links)
    for i, j in links:
        if i >= len(source) or j >= len(target):
            sizes = f"the source has {len(source)} words and the translation {len(target)}"
            raise UsageError(f"link {i}-{j}: {sizes}: give the alignment of these texts")
        (begin, end), (first, last) = source[i], target[j]
        stops = [first + round((stop - begin) * (last - first) / (end - begin)) for _, stop in parts[i]]
        split = [*pairwise([first, *stops])]
        if source_counts[i] == target_counts[j] == 1 and all(a < b for a, b in split):
            target_parts[j] = split
    numbers = [[*accumulate(map(len, each), initial=0)] for each in (parts, target_parts)]
    split_links = [
        (numbers[0][i] + a, numbers[1][j] + b)
        for i, j in links
        for a in range(len(parts[i]))
        for b in range(len(target_parts[j]))
        if a == b or len(target_parts[j]) == 1
    ]
    return [*chain(*parts)], [*chain(*target_parts)], split_links


def _target_elements(links: list[Link], places: list[Element], words: int, root: Element) -> list[Element]:
    """For each target word the innermost element of its source words.

    A word without a link belongs to the innermost element that its two neighbours share.
    """
    linked: list[list[Element]] = [[] for _ in range(words)]
    for i, j in links:
        linked[j].append(places[i])
    counts = [Counter(elements) for elements in linked]
    owners = [max(count, key=lambda element: (len(element.path), count[element]), default=None) for count in counts]
    filled: list[Element] = []
    for j, owner in enumerate(owners):
        if owner is None:
            right = next((other for other in owners[j + 1 :] if other is not None), root)
            owner = ([root, *_common_prefix(filled[-1].path, right.path)] if filled else [root])[-1]
        filled.append(owner)
    return filled


def _common_prefix(one: list[Element], other: list[Element]) -> list[Element]:
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] is other[shared]:
        shared += 1
    return one[:shared]


ElementsByWord = dict[int, list[Element]]  # target word -> elements to insert there


def _empty_elements(
    root: Element, starts: list[int], links: list[Link], owners: list[Element]
) -> tuple[ElementsByWord, ElementsByWord]:
    """Elements without a target word, by the target word before or after which they are inserted.

    An element follows the last word, within its parent, that translates a source word to its left.
    """
    alive = {element for owner in owners for element in owner.path} | {root}
    inside = {element: [j for j, owner in enumerate(owners) if element in (root, *owner.path)] for element in alive}
    before: ElementsByWord = {}
    after: ElementsByWord = {}
    for element in root.descendants():
        parent = element.parent
        if element in alive or parent not in alive:
            continue
        assert parent is not None
        members = set(inside[parent])
        earlier = [(i, j) for i, j in links if starts[i] < element.begin and j in members]
        if earlier:
            after.setdefault(max(earlier)[1], []).append(element)
        else:
            before.setdefault(min(members, default=0), []).append(element)
    return before, after


def _render(
    text: str, spans: list[tuple[int, int]], owners: list[Element], before: ElementsByWord, after: ElementsByWord
) -> str:
    """Write the text with tags directly around words: opened before a run's first word, closed after its last."""
    out, done = "", 0
    opened: list[Element] = []

    def move_to(path: list[Element]) -> str:
        kept = _common_prefix(opened, path)
        tags = "".join(element.closing for element in reversed(opened[len(kept) :]))
        tags += "".join(element.opening for element in path[len(kept) :])
        opened[:] = path
        return tags

    def insert(elements: list[Element]) -> str:
        return "".join(move_to(element.path[:-1]) + element.empty() for element in elements)

    for j, (begin, end) in enumerate(spans):
        path = owners[j].path
        out += move_to(_common_prefix(opened, path)) + text[done:begin] + insert(before.pop(j, []))
        out += move_to(path) + text[begin:end] + insert(after.pop(j, []))
        done = end
    out += move_to([]) + insert(before.pop(0, []))  # a translation without words
    return out + text[done:]


# ---- protected text in a translation ---------------------------------------------------------------------------------


TAKEN = "\ud800"  # a character that no decoded text contains


def match_protected(
    source: str, protected: Sequence[Span], translation: str, links: Iterable[Link] | None
) -> list[tuple[int, Span]]:
    """Find each protected span of `source` in the translation; returns (its number, the span found), in target order.

    Longer texts are found first, and whole words before parts of words. Equal texts are matched from left to right. If
    a text occurs more often than it is protected, the occurrences with the same rank as in the source are taken, else
    those that the alignment links.
    """
    numbers: dict[str, list[int]] = {}
    for number, (begin, end) in enumerate(protected):
        numbers.setdefault(source[begin:end], []).append(number)
    pairs = None if links is None else list(links)
    free = {"source": list(source), "target": list(translation)}
    matches: list[tuple[int, Span]] = []
    for text in sorted(numbers, key=len, reverse=True):
        wanted = [protected[number] for number in numbers[text]]
        found = _occurrences(text, translation, free["target"], len(wanted))
        in_source = _occurrences(text, source, free["source"], len(wanted))
        if len(found) == len(in_source):
            ranked = [span for span, own in zip(found, in_source, strict=True) if own in wanted]
            found = ranked if len(ranked) == len(wanted) else found
        elif len(found) > len(wanted) and pairs is not None:
            found = _most_linked(found, wanted, source, translation, pairs)
        for number, span in zip(numbers[text], found, strict=False):
            matches.append((number, span))
            free["target"][span[0] : span[1]] = TAKEN * len(text)
        for begin, end in wanted:
            free["source"][begin:end] = TAKEN * len(text)
    return sorted(matches, key=lambda match: match[1])


def _occurrences(text: str, within: str, free: list[str], wanted: int) -> list[Span]:
    """Find `text` where no other protected text was found; parts of words count only if whole words are too few."""
    remaining = "".join(free)
    spans: list[Span] = []
    begin = remaining.find(text)
    while begin >= 0:
        spans.append((begin, begin + len(text)))
        begin = remaining.find(text, begin + len(text))
    whole = [(begin, end) for begin, end in spans if not _inside_word(within, begin, end)]
    return whole if len(whole) >= wanted else spans


def _inside_word(text: str, begin: int, end: int) -> bool:
    return any(text[at - 1].isalnum() and text[at].isalnum() for at in (begin, end) if 0 < at < len(text))


def _most_linked(
    found: list[Span], wanted: list[Span], source: str, translation: str, links: Sequence[Link]
) -> list[Span]:
    """Choose as many occurrences as wanted: those with the most links to the wanted spans, in order."""
    words, target_words = word_spans(source), word_spans(translation)
    inside = {i for span in wanted for i in _overlapping(words, span)}
    linked = [j for i, j in links if i in inside]
    counts = {span: sum(j in _overlapping(target_words, span) for j in linked) for span in found}
    return sorted(sorted(found, key=lambda span: (-counts[span], span))[: len(wanted)])


def _overlapping(words: Sequence[Span], span: Span) -> range:
    """Numbers of the words that share a character with the span."""
    first = bisect_right(words, span[0], key=lambda word: word[1])
    return range(first, max(first, bisect_left(words, span[1], key=lambda word: word[0])))


@dataclass(frozen=True)
class Atoms:
    """Protected texts of a source that each became the word `atom`.

    `pairs` are (number, span in the translation) of those that the translation repeats; the others are linked to no
    word, so that their element is placed as an empty one.
    """

    source: str
    translation: str
    masked_source: str  # the source with atoms
    protected: Sequence[Span]
    pairs: Sequence[tuple[int, Span]]
    atom: str

    @cached_property
    def masked(self) -> str:
        """The translation with atoms."""
        parts, done = [], 0
        for _, (begin, end) in self.pairs:
            parts += [self.translation[done:begin], self.atom]
            done = end
        return "".join(parts) + self.translation[done:]

    def renumber(self, links: Iterable[Link] | None) -> list[Link]:
        """Return an alignment of the texts with atoms; an atom is linked to its own occurrence and nothing else."""
        words = word_spans(self.masked_source), word_spans(self.masked)
        if links is None:
            renumbered = diagonal_links(len(words[0]), len(words[1]))
        else:
            spans = self.protected, [span for _, span in self.pairs]
            sides = zip((self.source, self.translation), words, spans, strict=True)
            moved = [_renumbered_words(word_spans(text), new, replaced) for text, new, replaced in sides]
            sizes = f"the source has {len(moved[0])} words and the translation {len(moved[1])}"
            renumbered = set()
            for i, j in links:
                if i >= len(moved[0]) or j >= len(moved[1]):
                    raise UsageError(f"link {i}-{j}: {sizes}: give the alignment of these texts")
                renumbered |= {(a, b) for a in moved[0][i] for b in moved[1][j]}
        places = [
            [number for number, (begin, _) in enumerate(side) if text[begin] == self.atom]
            for text, side in zip((self.masked_source, self.masked), words, strict=True)
        ]
        taken = set(places[0]), set(places[1])
        kept = [(i, j) for i, j in renumbered if i not in taken[0] and j not in taken[1]]
        return kept + [(places[0][number], places[1][place]) for place, (number, _) in enumerate(self.pairs)]


def _renumbered_words(old: Sequence[Span], new: Sequence[Span], replaced: Sequence[Span]) -> list[range]:
    """For each word the words that its characters belong to after each replaced span became one character."""
    numbers: list[range] = []
    passed, shrunk = 0, 0  # spans that end before the place, and the characters that they lost

    def moved(at: int) -> int:
        """The place of a character border of the old text in the new one; a border inside a span moves to its begin."""
        nonlocal passed, shrunk
        while passed < len(replaced) and replaced[passed][1] <= at:
            shrunk += replaced[passed][1] - replaced[passed][0] - 1
            passed += 1
        inside = passed < len(replaced) and replaced[passed][0] < at
        return (replaced[passed][0] if inside else at) - shrunk

    for begin, end in old:
        first = moved(begin)
        last = moved(end - 1) + 1  # the last character, or the atom that replaced it
        numbers.append(_overlapping(new, (first, max(first + 1, last))))
    return numbers
