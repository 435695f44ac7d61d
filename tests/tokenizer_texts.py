"""Texts to learn vocabularies from, and texts that are hard to encode: for tests of tokenizers."""

from __future__ import annotations

import unicodedata

ENGLISH = [
    "Your cat is a lovely cat.",
    "I love you very much.",
    "The cats of the house are sleeping in the garden, aren't they?",
    "In 1999 there were 12,345 lovely houses here.",
    "He said: “naïve café” – twice!",
] * 3
GERMAN = [
    "Deine Katze ist eine schöne Katze.",
    "Ich liebe dich sehr.",
    "Die Katzen des Hauses schlafen im Garten, nicht wahr?",
    "1999 gab es hier 12.345 schöne Häuser.",
    "日本語 und 日本 sind für größere Übungen.",
] * 3
TAGS = ("de", "fr")
AWKWARD = [
    "",
    " ",
    "   ",
    " leading and trailing ",
    "two  spaces   and more",
    "<s> </s> <pad> <2de> <0x41>",
    "▁Ġ Ġ▁ĊÂ",
    "tab\tnewline\ncarriage\rnull\0bell\x07",
    "line\u2028paragraph\u2029next\x85",
    "e\u0301 is é, \u1112\u1161\u11ab is 한",
    "\u0301 a mark alone, a space and a mark \u0301\u0301",
    "𝒳 🏳️‍🌈 👩‍👩‍👧 \U0010ffff \ufeff",
    "\u00a0non-breaking\u00a0and\u3000wide",
    "x" * 300,
]


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)
