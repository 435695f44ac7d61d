"""Special spaces: the model reads plain spaces, and a translation gets the special ones back where they belong.

No-break, thin and figure spaces become spaces, and so does a line break inside a sentence. A no-break space comes back
if the words on both sides of it stand side by side in the translation (`10 km`). Zero-width spaces, byte-order marks
and soft hyphens say where a word may break: the model does not see them, and they do not come back.
"""

from __future__ import annotations

import re

SPECIAL = "\u00a0\u202f\u2007\u2009\u200a\u2002\u2003\u2004\u2005\u2006\u2008"
DROPPED = "\u200b\u2060\ufeff\u00ad"
ANY = re.compile(f"[{SPECIAL}{DROPPED}]")
DROP = re.compile(f"[{DROPPED}]")
AS_SPACE = str.maketrans(dict.fromkeys(SPECIAL, " "))
BEFORE, AFTER = re.compile(r"[\w][\w.,'’]*$|\S$"), re.compile(r"\w+|\S")
NEAR = 64  # characters on each side in which a neighbour is looked for


def plain(text: str) -> tuple[str, int]:
    """Return a piece as the model reads it, and the number of characters left out."""
    if not ANY.search(text):
        return text, 0
    kept, dropped = DROP.subn("", text)
    return kept.translate(AS_SPACE), dropped


def unwrapped(text: str) -> str:
    """Return a piece of several lines as one line."""
    if "\n" not in text and "\r" not in text:
        return text
    return " ".join(line.strip(" \t") for line in text.replace("\r", "\n").split("\n") if line.strip(" \t"))


def restore(piece: str, translation: str) -> str:
    """Return a translation with the special spaces of the piece, where both neighbours of one meet in it."""
    if not any(space in piece for space in SPECIAL):
        return translation
    piece, at = DROP.sub("", piece), 0
    for match in re.finditer(f"[{SPECIAL}]", piece):
        before = BEFORE.search(piece[max(0, match.start() - NEAR) : match.start()])
        after = AFTER.match(piece[match.end() : match.end() + NEAR])
        if not before or not after:
            continue
        for start in (at, 0):
            place = _beside(translation, before[0], after[0], start)
            if place >= 0:
                translation = f"{translation[:place]}{match[0]}{translation[place + 1 :]}"
                at = place + 1
                break
    return translation


def _beside(text: str, before: str, after: str, start: int) -> int:
    """Return the place of the space between two whole words; -1 if they do not stand side by side."""
    wanted = f"{before} {after}"
    place = text.find(wanted, start)
    while place >= 0:
        end = place + len(wanted)
        starts = place == 0 or not _in_word(text[place - 1])
        if starts and not (after[0].isalnum() and _in_word(text[end : end + 1])):
            return place + len(before)
        place = text.find(wanted, place + 1)
    return -1


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_"
