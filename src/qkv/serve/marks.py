"""Text beside tags: characters that could be taken for one are written as others, which Unicode keeps out of texts."""

from __future__ import annotations

MARKS = {"<": "\ufdd0", ">": "\ufdd1", "&": "\ufdd2"}
AWAY = {ord(usual): other for usual, other in MARKS.items()}
BACK = {ord(other): usual for usual, other in MARKS.items()}


def swap(text: str) -> str:
    """The text with other characters in place of <, > and &."""
    return text.translate(AWAY)


def swap_back(text: str) -> str:
    """The text with its <, > and & again."""
    return text.translate(BACK)
