"""Italian morphology: plurals, agreement, conjugation, and the forms that depend on the next word.

A word that depends on the next word is written as a mark, `@il.ms` (definite article, masculine singular). `settle`
turns it into il, lo or l' once the sentence is in its final order. The same pass contracts prepositions with
articles (in + lo → nello) and adds the euphonic d (a Anna → ad Anna).
"""

from __future__ import annotations

from collections.abc import Sequence

Token = tuple[str, tuple[int, ...]]
"""A word and its links: words of the two languages that share a link are aligned."""

VOWELS = "aeiouàèéìòù"
PERSONS = ("1s", "2s", "3s", "1p", "2p", "3p")

DEFINITE = {"ms": ("il", "lo", "l'"), "mp": ("i", "gli", "gli"), "fs": ("la", "la", "l'"), "fp": ("le", "le", "le")}
INDEFINITE = {"ms": ("un", "uno", "un"), "fs": ("una", "una", "un'")}
QUELLO = {
    "ms": ("quel", "quello", "quell'"),
    "mp": ("quei", "quegli", "quegli"),
    "fs": ("quella", "quella", "quell'"),
    "fp": ("quelle", "quelle", "quelle"),
}
BELLO = {
    "ms": ("bel", "bello", "bell'"),
    "mp": ("bei", "begli", "begli"),
    "fs": ("bella", "bella", "bella"),
    "fp": ("belle", "belle", "belle"),
}
QUESTO = {
    "ms": ("questo", "questo", "quest'"),
    "mp": ("questi", "questi", "questi"),
    "fs": ("questa", "questa", "quest'"),
    "fp": ("queste", "queste", "queste"),
}
BUONO = {
    "ms": ("buon", "buono", "buon"),
    "mp": ("buoni", "buoni", "buoni"),
    "fs": ("buona", "buona", "buona"),
    "fp": ("buone", "buone", "buone"),
}
MARKS = {"il": DEFINITE, "un": INDEFINITE, "quello": QUELLO, "questo": QUESTO, "bello": BELLO, "buono": BUONO}

_STEMS = {"di": "de", "a": "a", "da": "da", "in": "ne", "su": "su"}
_ENDS = {"il": "l", "lo": "llo", "l'": "ll'", "la": "lla", "i": "i", "gli": "gli", "le": "lle"}


def onset(word: str) -> int:
    """How a word begins, for the choice of article: 0 plain consonant, 1 s + consonant, z, gn, ps …, 2 vowel."""
    word = word.lower()
    if word[0] in VOWELS:
        return 2
    heavy = word[0] in "zxy" or word[:2] in ("gn", "ps", "pn") or (word[0] == "s" and word[1] not in VOWELS)
    return 1 if heavy else 0


def before(mark: str, agreement: str, following: str) -> str:
    """The form of a mark before a word: `before("il", "ms", "zaino")` is "lo"."""
    return MARKS[mark][agreement][onset(following)]


def contract(preposition: str, article: str) -> str:
    """Preposition and definite article in one word: `contract("su", "lo")` is "sullo"."""
    return _STEMS[preposition] + _ENDS[article]


def settle(tokens: Sequence[Token]) -> list[Token]:
    """Give every mark its form, contract, and add the euphonic d; right to left, as forms hang on the next."""
    out: list[Token] = []  # reversed
    article = False  # whether the word after this one is a definite article
    for text, links in reversed(tokens):
        following = out[-1][0] if out else ""
        if text[0] == "@":
            mark, _, agreement = text[1:].partition(".")
            if mark == "uno":  # ventuno, trentuno …: cut before a noun (ventun libri), whole at the end
                text = agreement if following[0] in ".,?!" or onset(following) == 1 else agreement[:-1]
            else:
                text = before(mark, agreement, following)
            article = mark == "il"
        else:
            if article and text in _STEMS:
                out[-1] = (contract(text, following), links + out[-1][1])
                article = False
                continue
            if text in ("a", "e") and following and following[0].lower() == text:
                text += "d"
            article = False
        out.append((text, links))
    out.reverse()
    return out


def plural_noun(noun: str, gender: str) -> str:
    """The regular plural; nouns in -co and -go keep the hard sound, and exceptions are given in the lexicon."""
    if noun[-1] in "àèéìòù" or noun[-1] not in VOWELS:
        return noun
    if gender == "f" and noun.endswith(("cia", "gia")):
        return noun[:-2] + "e" if noun[-4] not in VOWELS else noun[:-1] + "e"
    if gender == "f" and noun.endswith(("ca", "ga")):
        return noun[:-1] + "he"
    if gender == "f" and noun.endswith("a"):
        return noun[:-1] + "e"
    if noun.endswith(("co", "go", "ca", "ga")):
        return noun[:-1] + "hi"
    if noun.endswith("io"):
        return noun[:-1]
    return noun[:-1] + "i"


_SOFT = ("simpatico", "selvatico", "economico", "greco")  # -ci in the plural, where stanco has -chi


def adjective(base: str, gender: str, plural: bool) -> str:
    """An adjective made to agree: four endings for -o, two for -e, one for blu, rosa, viola."""
    if base in ("blu", "rosa", "viola"):
        return base
    if base.endswith("e"):
        return base[:-1] + "i" if plural else base
    if gender == "m":
        if not plural:
            return base
        return base[:-1] + "i" if base in _SOFT else plural_noun(base, "m")
    if not plural:
        return base[:-1] + "a"
    return base[:-1] + ("he" if base.endswith(("co", "go")) else "e")


_PRESENT = {
    "essere": "sono sei è siamo siete sono",
    "avere": "ho hai ha abbiamo avete hanno",
    "andare": "vado vai va andiamo andate vanno",
    "venire": "vengo vieni viene veniamo venite vengono",
    "fare": "faccio fai fa facciamo fate fanno",
    "dare": "do dai dà diamo date danno",
    "stare": "sto stai sta stiamo state stanno",
    "bere": "bevo bevi beve beviamo bevete bevono",
    "volere": "voglio vuoi vuole vogliamo volete vogliono",
    "potere": "posso puoi può possiamo potete possono",
    "dovere": "devo devi deve dobbiamo dovete devono",
    "sapere": "so sai sa sappiamo sapete sanno",
    "dire": "dico dici dice diciamo dite dicono",
    "scegliere": "scelgo scegli sceglie scegliamo scegliete scelgono",
    "spegnere": "spengo spegni spegne spegniamo spegnete spengono",
    "piacere": "piaccio piaci piace piacciamo piacete piacciono",
}
_FUTURE = {
    "essere": "sar", "avere": "avr", "andare": "andr", "vedere": "vedr", "venire": "verr", "fare": "far",
    "dare": "dar", "stare": "star", "bere": "berr", "volere": "vorr", "potere": "potr", "dovere": "dovr",
    "sapere": "sapr", "cadere": "cadr",
}  # fmt: skip
_STEM = {"fare": "fac", "bere": "bev", "dire": "dic"}
_IMPERATIVE = {"fare": "fai", "dare": "dai", "andare": "vai", "stare": "stai", "dire": "di'"}
_ENDINGS = {"a": "o i a iamo ate ano", "e": "o i e iamo ete ono", "i": "o i e iamo ite ono"}
_CONJUGATIONS = {"are": "a", "ere": "e", "ire": "i"}


def _fit(stem: str, ending: str) -> str:
    """Stem and ending of a verb in -are, spelled so that the sound stays: paghi, mangi, mangerò, studierò."""
    if ending[0] in "ie" and stem[-1] in "cg":
        return stem + "h" + ending
    if ending[0] == "i" and stem[-1] == "i":
        return stem + ending[1:]
    if ending[0] == "e" and stem.endswith(("ci", "gi")):
        return stem[:-1] + ending
    return stem + ending


def present(infinitive: str, isc: bool = False) -> tuple[str, ...]:
    """The six persons of the present indicative; `isc` marks verbs like pulire, pulisco."""
    if infinitive in _PRESENT:
        return tuple(_PRESENT[infinitive].split())
    stem, kind = infinitive[:-3], _CONJUGATIONS[infinitive[-3:]]
    endings = _ENDINGS[kind].split()
    if kind == "a":
        return tuple(_fit(stem, e) for e in endings)
    return tuple(stem + ("isc" if isc and i in (0, 1, 2, 5) else "") + e for i, e in enumerate(endings))


def imperfect(infinitive: str) -> tuple[str, ...]:
    """The six persons of the imperfect."""
    if infinitive == "essere":
        return ("ero", "eri", "era", "eravamo", "eravate", "erano")
    kind = "e" if infinitive in _STEM else _CONJUGATIONS[infinitive[-3:]]
    stem = _STEM.get(infinitive, infinitive[:-3]) + kind
    return tuple(stem + e for e in ("vo", "vi", "va", "vamo", "vate", "vano"))


def future(infinitive: str) -> tuple[str, ...]:
    """The six persons of the future."""
    stem = _FUTURE.get(infinitive)
    if stem is None:
        kind = _CONJUGATIONS[infinitive[-3:]]
        stem = _fit(infinitive[:-3], "er") if kind == "a" else infinitive[:-1]
    return tuple(stem + e for e in ("ò", "ai", "à", "emo", "ete", "anno"))


def gerund(infinitive: str) -> str:
    """The gerund, as in sto leggendo."""
    if infinitive in _STEM:
        return _STEM[infinitive] + "endo"
    return infinitive[:-3] + ("ando" if infinitive.endswith("are") else "endo")


def participle(infinitive: str) -> str:
    """The regular past participle; irregular ones are in the lexicon."""
    return infinitive[:-3] + {"a": "ato", "e": "uto", "i": "ito"}[_CONJUGATIONS[infinitive[-3:]]]


def imperative(infinitive: str, isc: bool = False) -> str:
    """The imperative of tu: mangia, leggi, pulisci."""
    if infinitive in _IMPERATIVE:
        return _IMPERATIVE[infinitive]
    return present(infinitive, isc)[2 if infinitive.endswith("are") else 1]


_UNITS = "zero uno due tre quattro cinque sei sette otto nove dieci undici dodici tredici quattordici quindici sedici"
_TEENS = "diciassette diciotto diciannove"
_LOW = (_UNITS + " " + _TEENS).split()
_TENS = "venti trenta quaranta cinquanta sessanta settanta ottanta novanta".split()


def cardinal(n: int) -> str:
    """The cardinal number from 0 to 1000, round hundreds above 100."""
    if n < 20:
        return _LOW[n]
    if n >= 100:
        return "mille" if n == 1000 else ("" if n == 100 else _LOW[n // 100]) + "cento"
    tens, unit = _TENS[n // 10 - 2], n % 10
    if unit == 0:
        return tens
    if unit in (1, 8):
        return tens[:-1] + _LOW[unit]
    return tens + ("tré" if unit == 3 else _LOW[unit])
