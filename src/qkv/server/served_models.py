"""The runs that are served, as the listening process knows them: what they are called, and which texts they take."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from qkv import config as configs
from qkv.assembly import Run
from qkv.core.errors import UsageError
from qkv.segmentation.sentences import Pieces, split
from qkv.server.middleware import Refusal
from qkv.text import Tokenizers

NAME = re.compile(r"[\w.-]{1,64}")
SOURCE, TARGET = "source", "target"  # of a run that does not know its languages


@dataclass(frozen=True)
class Served:
    """One run: a pair of languages, several with tags, or a language model."""

    name: str
    path: str
    translates: bool
    source: str
    targets: tuple[str, ...]
    tags: tuple[str, ...]
    longest: int
    tokenizers: Tokenizers
    begun: str

    @classmethod
    def open(cls, name: str, path: str | Path) -> Served:
        run = Run.open(path)
        data, model = run.config.data, run.config.model
        if not isinstance(model, configs.TranslationConfig | configs.DecoderOnlyConfig):
            raise UsageError(f"{path}: an encoder fills gaps, and nobody asks a server for that: leave it out")
        run.weights()  # which says what is missing
        # Where some of the text had none, a tag marks where a pair came from (qkv augment), not a language.
        tagged = isinstance(model, configs.TranslationConfig) and all(corpus.tag for corpus in data.train)
        tags = tuple(run.tokenizers.src.tags) if tagged else ()
        return cls(
            name=name,
            path=str(run.path),
            translates=isinstance(model, configs.TranslationConfig),
            source=data.src_lang or SOURCE,
            targets=tags or (data.tgt_lang or TARGET,),
            tags=tags,
            longest=data.max_length,
            tokenizers=run.tokenizers,
            begun=str(run.about.get("begun", "")),
        )

    @property
    def knows_languages(self) -> bool:
        """Whether its languages have names; a language model needs none."""
        return not self.translates or (self.source != SOURCE and TARGET not in self.targets)

    def writes(self, target: str) -> bool:
        """Whether it translates into this language; if none is said, it does."""
        return not target or target in self.targets

    def tag(self, target: str) -> str:
        """The tag that asks for a language, of a model that has tags."""
        return (target or self.tags[0]) if self.tags else ""

    def pieces(self, text: str) -> tuple[Pieces, list[int]]:
        """The text in parts that the model can read as a whole, as `Translator` cuts it, and how long each is."""
        encode, room = self.tokenizers.src.encode, self.longest - (1 if self.tags else 0)
        lengths: dict[str, int] = {}

        def fits(piece: str) -> bool:
            lengths[piece] = len(encode(piece))
            return lengths[piece] <= room

        pieces = split(text, fits)
        return pieces, [1 + (lengths[piece] if piece in lengths else len(encode(piece))) for piece in pieces]

    def join(self, pieces: Pieces, texts: list[str], spaces: bool) -> str:
        """The translations of all parts as one text, as `Translator` joins them; `spaces`: between words."""
        if not spaces:
            pieces = Pieces(pieces.pieces, tuple("" if gap == " " else gap for gap in pieces.separators))
        return pieces.join(texts, " " if spaces else "").strip()


class Models(dict[str, Served]):
    """All runs by name, and the right one for what is asked."""

    @classmethod
    def open(cls, paths: Iterable[str | Path]) -> Models:
        """Open runs; the name is the folder's, or what stands before = in NAME=RUN."""
        models = cls()
        for given in map(str, paths):
            name, _, path = given.partition("=") if "=" in given and not Path(given).exists() else ("", "", given)
            name = name or Path(path).resolve().name
            if not NAME.fullmatch(name) or name in models:
                raise UsageError(f"{given}: a second model called {name}, or no name for one: call it NAME={path}")
            models[name] = Served.open(name, path)
        if not models:
            raise UsageError("no run folder given: name at least one")
        return models

    def choose(self, source: str, target: str, texts: Iterable[str], name: str | None = None) -> tuple[Served, float]:
        """The model for a text, and how sure its language is, in per cent, where that is to be recognised (`auto`)."""
        if source != "auto":
            return self.pair(source, target, name), 0.0
        fitting = self.translating(name)
        known = [model.source for model in fitting if model.writes(target)]
        if not known:
            there = ", ".join(dict.fromkeys(each for model in fitting for each in model.targets)) or "none"
            why = f"{_quoted(target)} is not available as a target language: there is {there}"
            raise Refusal(400, why, pointer="/target")
        guesses = detect(" ".join(texts), among=known, most=1)
        source, sure = guesses[0] if guesses else (known[0], 0.0)
        return self.pair(source, target, name), sure

    def pair(self, source: str, target: str, name: str | None = None) -> Served:
        """The model that translates between two languages, or the named one if it does; no target is any."""
        fitting = self.translating(name)
        known = [model for model in fitting if model.source == source]
        if not known:
            there = ", ".join(dict.fromkeys(model.source for model in fitting)) or "none"
            why = f"{_quoted(source)} is not supported as a source language: there is {there}"
            raise Refusal(400, why, pointer="/source")
        for model in known:
            if model.writes(target):
                return model
        there = ", ".join(dict.fromkeys(each for model in known for each in model.targets))
        why = f"{_quoted(target)} is not available as a target language from {source}: there is {there}"
        raise Refusal(400, why, pointer="/target")

    def translating(self, name: str | None = None) -> list[Served]:
        """The models that translate, or the named one of them."""
        return [self.named(name, translates=True)] if name else [each for each in self.values() if each.translates]

    def named(self, name: str | None, *, translates: bool | None = None) -> Served:
        """The named model, or the first that does what is wanted."""
        fitting = [model for model in self.values() if translates in (None, model.translates)]
        what = {None: "model", True: "translation model", False: "language model"}[translates]
        if name is None and fitting:
            return fitting[0]
        for model in fitting:
            if model.name == name:
                return model
        known = ", ".join(model.name for model in fitting) or "none, until qkv serve is started with one"
        raise Refusal(404, f"there is no {what} {_quoted(name or '')} here: there is {known}", pointer="/model")

    def languages(self) -> Mapping[str, list[str]]:
        """Every language, and those that it is translated into."""
        found: dict[str, list[str]] = {}
        for model in self.translating():
            found.setdefault(model.source, []).extend(t for t in model.targets if t not in found[model.source])
            for target in model.targets:
                found.setdefault(target, [])
        return found


def _quoted(text: str) -> str:
    return repr(text[:40])


def card_of(model: Served, card: Mapping[str, Any]) -> dict[str, Any]:
    """A model for people: what its process said of it, or as much as is known while that is loading."""
    known = {"name": model.name, "does": "translate" if model.translates else "complete", "targets": model.targets}
    return {**card, **known, "source": model.source if model.translates else ""}


# ---- Languages by name, and which one a text is in -------------------------------------------------------------------


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
