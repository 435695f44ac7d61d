"""English morphology: plurals, verb forms, comparatives, numbers, and a or an."""

from __future__ import annotations

from collections.abc import Sequence

from demo_corpus.italian import Token

VOWELS = "aeiou"


def settle(tokens: Sequence[Token]) -> list[Token]:
    """Turn each `@a` into a or an by the sound of the next word."""
    out = list(tokens)
    for i, (text, links) in enumerate(tokens):
        if text == "@a":
            following = tokens[i + 1][0].lower()
            vowel = following[0] in VOWELS and not following.startswith(("uni", "use", "euro", "one"))
            out[i] = ("an" if vowel or following.startswith(("hour", "honest")) else "a", links)
    return out


def _s(word: str) -> str:
    if word.endswith("y") and word[-2] not in VOWELS:
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "z", "ch", "sh")) else "s")


def plural(noun: str) -> str:
    """The regular plural; exceptions are in the lexicon."""
    return _s(noun)


def third(verb: str) -> str:
    """The third person singular of the present."""
    irregular = {"have": "has", "go": "goes", "do": "does"}
    return irregular.get(verb) or _s(verb)


def _double(verb: str) -> bool:
    one_syllable = sum(c in VOWELS for c in verb) == 1
    return one_syllable and len(verb) > 2 and verb[-1] not in "wxyaeiou" and verb[-2] in VOWELS


def ing(verb: str) -> str:
    """The form in -ing: reading, writing, running."""
    if verb.endswith("ie"):
        return verb[:-2] + "ying"
    if verb.endswith("e") and not verb.endswith("ee"):
        return verb[:-1] + "ing"
    return verb + (verb[-1] if _double(verb) or verb in ("begin", "forget", "travel") else "") + "ing"


def past(verb: str) -> str:
    """The regular past; irregular ones are in the lexicon."""
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in VOWELS:
        return verb[:-1] + "ied"
    return verb + (verb[-1] if _double(verb) else "") + "ed"


_LOW = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_ORDINAL = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}


def cardinal(n: int) -> str:
    """The cardinal number from 0 to 1000, round hundreds above 100."""
    if n < 20:
        return _LOW[n]
    if n >= 100:
        return "one thousand" if n == 1000 else _LOW[n // 100] + " hundred"
    return _TENS[n // 10 - 2] + ("-" + _LOW[n % 10] if n % 10 else "")


def ordinal(n: int) -> str:
    """The ordinal number of a day of the month."""
    head, dash, unit = cardinal(n).rpartition("-")
    if unit in _ORDINAL:
        return head + dash + _ORDINAL[unit]
    if unit.endswith("y"):
        return head + dash + unit[:-1] + "ieth"
    return head + dash + (unit[:-2] + "fth" if unit == "twelve" else unit + "th")
