"""Paragraphs of Office Open XML: runs with properties and text. Adjacent runs with equal properties are one text.

Word, PowerPoint and Excel share this structure; `RunStory` has a table for the names that differ. Only the paragraph's
outermost elements and the content of its runs are looked at: an element that is not known is a mark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from qkv.documents.office_story import Item, KeptError, Story, Style, kept_item
from qkv.documents.xml_events import Event
from qkv.documents.zip_package import ZipPackage

IGNORED_PROPERTIES = frozenset("w:lang w:noProof ?:lang".split())
IGNORED_ATTRIBUTES = frozenset("lang altLang noProof dirty err".split())
TAG_NAME = re.compile(r"[\s/>]")
EQUATIONS = frozenset("m:oMath m:oMathPara a14:m".split())


class RunStory(Story):
    run: ClassVar[str]
    properties: ClassVar[str]
    text: ClassVar[str]
    containers: ClassVar[frozenset[str]] = frozenset()
    container_properties: ClassVar[frozenset[str]] = frozenset()  # they stay at the beginning of their container
    dropped: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()  # they read as a space
    characters: ClassVar[Mapping[str, str]] = {}  # element: character
    special: ClassVar[re.Pattern[str]] = re.compile("(\t)")  # characters of a text that are not translated
    untranslated: ClassVar[Mapping[str, str]] = {}  # mark: name in `Document.skipped`
    shown: ClassVar[frozenset[str]] = frozenset()  # marks whose text is part of the sentence
    unsupported: ClassVar[Mapping[str, str]] = {}  # element that makes its paragraph a kept one: name
    ranges: ClassVar[Mapping[str, str]] = {}  # start or end mark: name of the pair

    def read_items(self, name: str, events: list[Event], level: int) -> list[Item]:
        items: list[Item] = []
        ends = _ends(events)
        place = 0
        while place < len(events):
            event, end = events[place], ends[place]
            content = events[place : end + 1] if event.kind == "start" and event.name not in self.containers else []
            if event.name in self.unsupported and event.kind == "start":
                raise KeptError(self.unsupported[event.name])
            if event.kind == "text" and not event.text.strip():
                items.append(Item("dropped", event.source))
            elif event.kind == "start" and event.name == self.run:
                items += self._run(content)
            elif event.kind == "start" and event.name == self.text:
                items += self._text(content, Style(prefix=_prefix(event)))
            elif event.kind == "start" and event.name in self.containers and events[end].source:
                begin = place
                if events[place + 1].name in self.container_properties:
                    place = ends[place + 1]
                items.append(self.container(event, _source(events[begin : place + 1])))
                end = place
            elif event.kind == "end":
                items.append(Item("close", event.source))
            else:
                text = "".join(each.text for each in events[place : end + 1])
                items.append(self._mark(event, _source(events[place : end + 1]), text))
            place = end + 1
        return _merge_texts(items)

    def container(self, event: Event, source: str) -> Item:
        return Item("open", source)

    def _mark(self, event: Event, source: str, text: str = "") -> Item:
        if event.name in self.dropped:
            return Item("dropped", source)
        label = "equation" if event.name in EQUATIONS else self.untranslated.get(event.name)
        if label:
            self.skipped[label] += 1
        if event.name in self.shown:
            return kept_item(source, text)
        identifier = event.attributes.get("w:id", "")
        pair = f"{self.ranges[event.name]} {identifier}" if event.name in self.ranges else ""
        return Item("mark", source, " " if event.name in self.breaks else "", pair=pair)

    def _run(self, events: list[Event]) -> list[Item]:
        """The items of a run: its texts, and each other element as a run of its own."""
        start, ends = events[0].source, _ends(events)
        if not events[-1].source:
            return [Item("mark", start)]
        prefix = _prefix(events[0])
        style = Style((), start, events[-1].source, prefix)
        items: list[Item] = []
        place = 1
        while place < len(events) - 1:
            event, content = events[place], events[place : ends[place] + 1]
            source = _source(content)
            if event.kind == "start" and event.name == self.properties:
                style = Style(_properties_key(content), start + source, events[-1].source, prefix)
            elif event.kind == "start" and event.name == self.text:
                items += self._text(content, style)
            elif event.kind == "start" and event.name in self.characters:
                character = self.characters[event.name]
                kind = "character" if character.isspace() else "text"
                items.append(Item(kind, style.before + source + style.after, character, style))
            elif event.kind == "text" and not event.text.strip():
                pass
            elif event.kind == "start" and event.name in self.dropped:
                items.append(Item("dropped", ""))
            else:
                item = self._mark(event, style.before + source + style.after)
                item.field = self.field_edge(event)
                item.text = "".join(each.text for each in content) if item.field == "instruction" else item.text
                items.append(item)
            place = ends[place] + 1
        return items

    def field_edge(self, event: Event) -> str:
        return ""

    def _text(self, events: list[Event], style: Style) -> list[Item]:
        text = self.visible_text(events[0], "".join(event.text for event in events))
        if any(event.kind == "other" for event in events):
            return [Item("mark", style.before + _source(events) + style.after)]
        items = []
        for number, stretch in enumerate(self.special.split(text)):
            if stretch:
                kind = "character" if number % 2 else "text"
                items.append(Item(kind, self.write_text(style, stretch), stretch, style))
        return items

    def visible_text(self, event: Event, text: str) -> str:
        return text


def _source(events: list[Event]) -> str:
    return "".join(event.source for event in events)


def _prefix(event: Event) -> str:
    """The prefix of a tag's name with its colon."""
    return event.source[1:].split(":")[0] + ":" if ":" in TAG_NAME.split(event.source[1:], maxsplit=1)[0] else ""


def _ends(events: list[Event]) -> list[int]:
    """The place of the end tag for each start tag, and the own place of every other event."""
    ends = [*range(len(events))]
    opened: list[int] = []
    for place, event in enumerate(events):
        if event.kind == "start":
            opened.append(place)
        elif event.kind == "end" and opened:
            ends[opened.pop()] = place
    return ends


def _properties_key(events: list[Event]) -> tuple[object, ...]:
    """What the properties of a run look like, without language and spelling."""
    key: list[object] = []
    ends, place = _ends(events), 0
    while place < len(events):
        event = events[place]
        if event.name in IGNORED_PROPERTIES and event.kind == "start":
            place = ends[place]
        elif event.kind in ("start", "end"):
            shown = {name: value for name, value in event.attributes.items() if name not in IGNORED_ATTRIBUTES}
            key.append((event.kind, event.name, tuple(sorted(shown.items()))))
        place += 1
    return tuple(key[1:-1]) if len(key) == 2 and not key[0][2] else tuple(key)  # type: ignore[index]


def _merge_texts(items: list[Item]) -> list[Item]:
    """Make one item of adjacent texts with equal styles."""
    merged: list[Item] = []
    run: list[Item] = []

    def finish() -> None:
        if run:
            sources, texts = ("".join(each.source for each in run), "".join(each.text for each in run))
            merged.append(Item("text", sources, texts, run[0].style))
            run.clear()

    for item in items:
        same_style = item.kind == "text" and (not run or run[0].style.key == item.style.key)
        if same_style or (item.kind == "dropped" and run):
            run.append(item)
        else:
            finish()
            (run if item.kind == "text" else merged).append(item)
    finish()
    return merged


def part_types(package: ZipPackage) -> dict[str, str]:
    """The content type of each member, in the archive's order."""
    member = "[Content_Types].xml"
    if member not in package:
        raise package.error(f"not {package.kind}")
    by_suffix: dict[str, str] = {}
    by_name: dict[str, str] = {}
    for event in package.xml(member).events():
        if event.kind == "start" and event.name == "types:Default":
            by_suffix[event.attributes.get("Extension", "").lower()] = event.attributes.get("ContentType", "")
        elif event.kind == "start" and event.name == "types:Override":
            name = event.attributes.get("PartName", "").removeprefix("/").casefold()
            by_name[name] = event.attributes.get("ContentType", "")
    return {
        name: by_name.get(name.casefold()) or by_suffix.get(name.rpartition(".")[2].lower(), "")
        for name in package.names
    }


def is_main(types: Mapping[str, str], *markers: str) -> bool:
    """Whether the main part of the archive is of the format with one of these markers in its content types."""
    return any(kind.endswith(".main+xml") and any(each in kind for each in markers) for kind in types.values())


def count_untranslated(package: ZipPackage, types: Mapping[str, str]) -> dict[str, int]:
    """Count the parts whose text is not translated: charts, diagrams, embedded files, comments."""
    labels = {"chart": ".chart+xml", "diagram": ".diagramData+xml"}
    counts = {label: sum(kind.endswith(end) for kind in types.values()) for label, end in labels.items()}
    counts["embedded file"] = sum("/embeddings/" in f"/{name}" for name in types)
    counts["comment"] = 0
    for name, kind in types.items():
        if kind.lower().endswith(("comments+xml", "threadedcomments+xml")):
            tags = ("comment", "cm", "threadedComment")
            events = package.xml(name).events()
            counts["comment"] += sum(e.kind == "start" and e.name.rpartition(":")[2] in tags for e in events)
    return {label: count for label, count in counts.items() if count}
