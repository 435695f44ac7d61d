"""The served runs as the listening process needs them: names, languages and sentence splitting, without the weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from qkv.assembly import Run
from qkv.core.errors import UsageError
from qkv.core.tokenizer import TokenizerPair
from qkv.options import DecoderOnlyConfig, TranslationConfig
from qkv.segmentation.sentences import Span
from qkv.segmentation.text_cutter import CutText, TextCutter
from qkv.server.middleware import Refusal

MODEL_NAME = re.compile(r"[\w.-]{1,64}")
SOURCE, TARGET = "source", "target"  # language codes of a run without configured languages


@dataclass(frozen=True)
class ServedModel:
    """One run: a translation model for a pair of languages or (with tags) several targets, or a language model."""

    name: str
    path: str
    translates: bool
    source: str
    targets: tuple[str, ...]
    tags: tuple[str, ...]
    max_length: int
    cutter: TextCutter
    tokenizers: TokenizerPair
    created: str

    @classmethod
    def open(cls, name: str, path: str | Path) -> ServedModel:
        run = Run.open(path)
        data, model = run.config.data, run.config.model
        if not isinstance(model, TranslationConfig | DecoderOnlyConfig):
            raise UsageError(f"{path}: an encoder-only model has no route on the server: remove it from the command")
        run.weights()  # raises if the weights are missing
        # Tags are target languages only if all text has them; otherwise they mark synthetic pairs (qkv augment).
        tagged = isinstance(model, TranslationConfig) and all(corpus.tag for corpus in data.visited)
        tags = tuple(run.tokenizers.src.tags) if tagged else ()
        return cls(
            name=name,
            path=str(run.path),
            translates=isinstance(model, TranslationConfig),
            source=data.src_lang or SOURCE,
            targets=tags or (data.tgt_lang or TARGET,),
            tags=tags,
            max_length=data.max_length,
            cutter=run.cutter,
            tokenizers=run.tokenizers,
            created=str(run.about.get("begun", "")),
        )

    @property
    def has_languages(self) -> bool:
        """Whether the languages are configured; a language model needs none."""
        return not self.translates or (self.source != SOURCE and TARGET not in self.targets)

    def supports_target(self, target: str) -> bool:
        """Whether the model translates into a language; an empty code means any."""
        return not target or target in self.targets

    def tag(self, target: str) -> str:
        """The tag for a target language, or an empty string if the model has no tags."""
        return (target or self.tags[0]) if self.tags else ""

    def split(self, text: str, protected: Sequence[Span] = ()) -> tuple[CutText, list[int]]:
        """Split a text into pieces, as `Translator` does, and return their costs."""
        encode, lengths = self.tokenizers.src.encode, dict[str, int]()

        def counted(piece: str) -> list[int]:
            ids = encode(piece)
            lengths[piece] = len(ids)
            return ids

        cut = dataclasses.replace(self.cutter, encode=counted).cut(text, protected=protected)
        return cut, [1 + (lengths[piece] if piece in lengths else len(encode(piece))) for piece in cut.pieces]


class ServedModels(dict[str, ServedModel]):
    """All served runs by name, and the selection of one for a request."""

    @classmethod
    def open(cls, paths: Iterable[str | Path]) -> ServedModels:
        """Open runs given as FOLDER or NAME=FOLDER."""
        models = cls()
        for given in map(str, paths):
            name, _, path = given.partition("=") if "=" in given and not Path(given).exists() else ("", "", given)
            name = name or Path(path).resolve().name
            if not MODEL_NAME.fullmatch(name) or name in models:
                problem = f"a second model called {name}" if name in models else f"{name!r} is not a valid model name"
                raise UsageError(f"{given}: {problem}: choose a name with NAME={path}")
            models[name] = ServedModel.open(name, path)
        if not models:
            raise UsageError("no run folder given: name at least one")
        return models

    def choose(
        self, source: str, target: str, texts: Iterable[str], name: str | None = None
    ) -> tuple[ServedModel, float]:
        """Return the first (or the named) model for a pair of languages; an empty target means any.

        The source "auto" is detected in the texts, with a confidence in per cent.
        """
        candidates, confidence = self.translation_models(name), 0.0
        if source == "auto":
            sources = [model.source for model in candidates if model.supports_target(target)]
            if not sources:
                raise _unavailable("target", f"{_quote(target)} is not available as a target language", candidates)
            guesses = detect_languages(" ".join(texts), among=sources, limit=1)
            source, confidence = guesses[0] if guesses else (sources[0], 0.0)
        with_source = [model for model in candidates if model.source == source]
        if not with_source:
            raise _unavailable("source", f"{_quote(source)} is not supported as a source language", candidates)
        for model in with_source:
            if model.supports_target(target):
                return model, confidence
        reason = f"{_quote(target)} is not available as a target language from {source}"
        raise _unavailable("target", reason, with_source)

    def translation_models(self, name: str | None = None) -> list[ServedModel]:
        """All translation models, or only the named one."""
        return [self.by_name(name, translates=True)] if name else [each for each in self.values() if each.translates]

    def by_name(self, name: str | None, *, translates: bool | None = None) -> ServedModel:
        """Return the named model, or the first; `translates` restricts the kind."""
        candidates = [model for model in self.values() if translates in (None, model.translates)]
        kind = {None: "model", True: "translation model", False: "language model"}[translates]
        if name is None and candidates:
            return candidates[0]
        for model in candidates:
            if model.name == name:
                return model
        available = ", ".join(model.name for model in candidates) or "none"
        given = f" {_quote(name)}" if name else ""
        raise Refusal(404, f"no {kind}{given} on this server: available: {available}", pointer="/model")

    def languages(self) -> Mapping[str, list[str]]:
        """Every language with its target languages."""
        targets: dict[str, list[str]] = {}
        for model in self.translation_models():
            known = targets.setdefault(model.source, [])
            known.extend(target for target in model.targets if target not in known)
            for target in model.targets:
                targets.setdefault(target, [])
        return targets


def _unavailable(side: Literal["source", "target"], reason: str, models: Iterable[ServedModel]) -> Refusal:
    """The refusal of a language; it names those of the models."""
    codes = [code for model in models for code in ((model.source,) if side == "source" else model.targets)]
    return Refusal(400, f"{reason}: available: {', '.join(dict.fromkeys(codes)) or 'none'}", pointer=f"/{side}")


def _quote(text: str) -> str:
    return repr(text[:40])


# ---- names and detection of languages --------------------------------------------------------------------------------

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
MAX_DETECTED = 4000  # characters of a text that the detector reads; more do not improve the result


def language_name(code: str) -> str:
    """The English name of a language, or its code if the name is unknown."""
    return NAMES.get(code.split("-")[0].split("_")[0].lower(), code)


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # type: ignore[import-untyped]

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def detect_languages(text: str, among: Collection[str] = (), limit: int = 3) -> list[tuple[str, float]]:
    """The most likely languages of a text with probabilities in per cent; `among` restricts the candidates."""
    if not text.strip():
        return []
    ranked = [(code, 100 * float(probability)) for code, probability in _identifier().rank(text[:MAX_DETECTED])]
    known = [(code, percent) for code, percent in ranked if not among or code in among]
    likely = [(code, percent) for code, percent in known[:limit] if among or percent >= 1 or code == ranked[0][0]]
    return [(code, round(percent, 2)) for code, percent in likely]
