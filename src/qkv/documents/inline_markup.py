"""Inline markup carried over to a translation: each tag goes to the words that its source words are aligned with.

The model sees and writes text without tags. A target word takes the innermost element that its source words stand in;
an element whose words are torn apart is repeated, and one whose words have no translation is kept, empty, in its place.
So every element of the source is in the result, which is well-formed and, without its tags, the translation unchanged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from qkv.core.errors import UsageError
from qkv.data.links import Link, word_spans

TAG = re.compile(r"<(?P<close>/?)(?P<name>[A-Za-z][\w:.-]*)(?:\s[^<>]*?)?(?P<alone>/?)>")
ALONE = frozenset("br hr img input wbr".split())  # HTML's elements that are never closed


@dataclass(eq=False)
class Element:
    """An element of the source, or the whole of it; begin and end count the characters of the text without tags."""

    opening: str = ""
    name: str = ""
    begin: int = 0
    end: int = 0
    parent: Element | None = None
    children: list[Element] = field(default_factory=list)
    alone: bool = False

    @property
    def path(self) -> list[Element]:
        """The elements this one stands in, from the outermost, and itself; the whole is not one of them."""
        return [] if self.parent is None else [*self.parent.path, self]

    @property
    def closing(self) -> str:
        return "" if self.alone else f"</{self.name}>"

    def empty(self) -> str:
        """The element and those in it, without text."""
        return self.opening + "".join(child.empty() for child in self.children) + self.closing

    def descendants(self) -> Iterable[Element]:
        """All elements in this one, in the order in which they begin."""
        for child in self.children:
            yield child
            yield from child.descendants()


def strip_markup(text: str) -> str:
    """The text without its tags: what is to be translated."""
    return TAG.sub("", text)


def place_markup(source: str, translation: str, alignment: Iterable[Link], *, rule: str = "marks") -> str:
    """The translation of `strip_markup(source)` with the source's tags; the alignment counts words as `rule` says."""
    plain, whole = _parse(source)
    links, given, spans = sorted(alignment), word_spans(plain, rule), word_spans(translation, rule)
    owners = _owners(links, _places(whole, given), len(spans), whole)
    before, after = _points(whole, [begin for begin, _ in given], links, owners)
    return _render(translation, spans, owners, before, after)


def _parse(source: str) -> tuple[str, Element]:
    """The text without tags, and the tree of its elements; tags that do not match are refused."""
    whole = here = Element()
    plain, done = "", 0
    for tag in TAG.finditer(source):
        plain += source[done : tag.start()]
        done = tag.end()
        if tag["close"]:
            if here.parent is None or here.name != tag["name"]:
                raise UsageError(f"{tag[0]} closes no open tag: give text whose tags are balanced")
            here.end, here = len(plain), here.parent
            continue
        alone = bool(tag["alone"]) or tag["name"].lower() in ALONE
        child = Element(tag[0], tag["name"], len(plain), len(plain), here, alone=alone)
        here.children.append(child)
        here = here if alone else child
    if here.parent is not None:
        raise UsageError(f"{here.opening} is not closed: give text whose tags are balanced")
    plain += source[done:]
    whole.end = len(plain)
    return plain, whole


def _places(whole: Element, words: list[tuple[int, int]]) -> list[Element]:
    """The element each source word stands in: the innermost that holds most of its characters."""
    innermost = [whole] * whole.end
    for element in whole.descendants():  # an inner one comes after those around it
        innermost[element.begin : element.end] = [element] * (element.end - element.begin)
    counts = [Counter(innermost[begin:end]) for begin, end in words]
    return [max(count, key=lambda element: (count[element], len(element.path))) for count in counts]


def _owners(links: list[Link], places: list[Element], words: int, whole: Element) -> list[Element]:
    """The element of each target word: the innermost that one of its source words stands in.

    A target word without a link stands in what its neighbours have in common.
    """
    linked: list[list[Element]] = [[] for _ in range(words)]
    for i, j in links:
        if i >= len(places) or j >= words:
            raise UsageError(f"link {i}-{j}: the source has {len(places)} words and the translation {words}")
        linked[j].append(places[i])
    counts = [Counter(found) for found in linked]
    owners = [max(count, key=lambda element: (len(element.path), count[element]), default=None) for count in counts]
    filled: list[Element] = []
    for j, owner in enumerate(owners):
        if owner is None:
            right = next((other for other in owners[j + 1 :] if other is not None), whole)
            owner = ([whole, *_common(filled[-1].path, right.path)] if filled else [whole])[-1]
        filled.append(owner)
    return filled


def _common(one: list[Element], other: list[Element]) -> list[Element]:
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] is other[shared]:
        shared += 1
    return one[:shared]


Points = dict[int, list[Element]]  # by target word


def _points(whole: Element, starts: list[int], links: list[Link], owners: list[Element]) -> tuple[Points, Points]:
    """Where the elements stand that no target word is in: before which target word, or after which.

    It is behind the last word that translates what stands before them in the element around them, if there is one.
    """
    alive = {element for owner in owners for element in owner.path} | {whole}
    inside = {element: [j for j, owner in enumerate(owners) if element in (whole, *owner.path)] for element in alive}
    before: Points = {}
    after: Points = {}
    for element in whole.descendants():
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


def _render(text: str, spans: list[tuple[int, int]], owners: list[Element], before: Points, after: Points) -> str:
    """The text with tags set directly around words: opened before the first of a run, closed behind its last."""
    out, done = "", 0
    opened: list[Element] = []

    def settle(path: list[Element]) -> str:
        kept = _common(opened, path)
        tags = "".join(element.closing for element in reversed(opened[len(kept) :]))
        tags += "".join(element.opening for element in path[len(kept) :])
        opened[:] = path
        return tags

    def points(elements: list[Element]) -> str:
        return "".join(settle(element.path[:-1]) + element.empty() for element in elements)

    for j, (begin, end) in enumerate(spans):
        path = owners[j].path
        out += settle(_common(opened, path)) + text[done:begin] + points(before.pop(j, []))
        out += settle(path) + text[begin:end] + points(after.pop(j, []))
        done = end
    out += settle([]) + points(before.pop(0, []))  # a translation without words
    return out + text[done:]
