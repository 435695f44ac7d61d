"""Languages by name, and which one a text is in."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

NAMES = dict(
    pair.split(":")
    for pair in """
        af:Afrikaans am:Amharic ar:Arabic az:Azerbaijani be:Belarusian bg:Bulgarian bn:Bengali bs:Bosnian ca:Catalan
        cs:Czech cy:Welsh da:Danish de:German el:Greek en:English eo:Esperanto es:Spanish et:Estonian eu:Basque
        fa:Persian fi:Finnish fr:French ga:Irish gl:Galician gu:Gujarati he:Hebrew hi:Hindi hr:Croatian hu:Hungarian
        hy:Armenian id:Indonesian is:Icelandic it:Italian ja:Japanese ka:Georgian kk:Kazakh km:Khmer ko:Korean
        ky:Kyrgyz la:Latin lb:Luxembourgish lo:Lao lt:Lithuanian lv:Latvian mk:Macedonian ml:Malayalam mn:Mongolian
        mr:Marathi ms:Malay mt:Maltese nb:Bokmål ne:Nepali nl:Dutch nn:Nynorsk no:Norwegian pa:Punjabi pl:Polish
        pt:Portuguese ro:Romanian ru:Russian si:Sinhala sk:Slovak sl:Slovenian sq:Albanian sr:Serbian sv:Swedish
        sw:Swahili ta:Tamil te:Telugu th:Thai tl:Tagalog tr:Turkish uk:Ukrainian ur:Urdu uz:Uzbek vi:Vietnamese
        xh:Xhosa zh:Chinese zu:Zulu
    """.split()
)
LONGEST = 4000  # characters that are looked at: more do not make it surer


def name(code: str) -> str:
    """What a language is called, as far as known."""
    return NAMES.get(code.split("-")[0].split("_")[0].lower(), code)


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # type: ignore[import-untyped]

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def detect(text: str, among: Collection[str] = (), most: int = 3) -> list[tuple[str, float]]:
    """The likeliest languages of a text, with their probabilities in per cent; `among` leaves only these."""
    if not text.strip():
        return []
    ranked = [(code, 100 * float(likely)) for code, likely in _identifier().rank(text[:LONGEST])]
    known = [(code, likely) for code, likely in ranked if not among or code in among]
    return [(code, round(likely, 2)) for code, likely in known[:most] if among or likely >= 1 or code == ranked[0][0]]
