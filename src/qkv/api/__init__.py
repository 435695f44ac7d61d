"""The Python API: load a run, evaluate and compare runs. Training, translation and the rest are in its modules.

`qkv` exports the public names; a class is imported when it is used, so that a training does not load a translator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from qkv.assembly import Run
from qkv.core.errors import UsageError
from qkv.options import DecoderOnlyConfig, TranslationConfig

if TYPE_CHECKING:
    from qkv.api.completer import LanguageModel
    from qkv.api.text_encoder import Encoder
    from qkv.api.translation import Translation
    from qkv.api.translator import Translator
    from qkv.decoding.search_request import Options
    from qkv.evaluation import metrics
    from qkv.evaluation.diagnosis import Diagnosis

    Evaluated = tuple[metrics.Scores, list[Translation]]


def load(
    run: str | Path | Run | Sequence[str | Path | Run],
    *,
    weights: str = "",
    device: str = "auto",
    dtype: str = "auto",
    workers: int | None = None,
) -> Translator | LanguageModel | Encoder:
    """Open a run folder; the class of the result follows from the kind of model. Several translation runs: ensemble."""
    from qkv.api.completer import LanguageModel
    from qkv.api.text_encoder import Encoder
    from qkv.api.translator import Translator

    runs = [run] if isinstance(run, str | Path | Run) else list(run)
    if not runs:
        raise UsageError("no run folder given: name at least one")
    opened = runs[0] if isinstance(runs[0], Run) else Run.open(runs[0])
    if isinstance(opened.config.model, TranslationConfig):
        return Translator(opened, weights=weights, device=device, dtype=dtype, workers=workers, others=runs[1:])
    if len(runs) > 1 or dtype not in ("auto", "fp32") or workers is not None:
        raise UsageError(f"{opened.path}: is not a translation model: omit dtype, workers and other runs")
    if isinstance(opened.config.model, DecoderOnlyConfig):
        return LanguageModel(opened, weights=weights, device=device)
    return Encoder(opened, weights=weights, device=device)


def evaluate(
    run: str | Path | Run | Translator,
    src: Sequence[str],
    ref: Sequence[str],
    **options: Unpack[Options],
) -> Evaluated:
    """Translate source lines and score the translations against raw references; return scores and translations.

    If lines were cut into sentences, those alone are also translated without (`split=False`): `scores.uncut` has the
    scores of both.
    """
    from qkv.api.translator import Translator
    from qkv.evaluation import metrics

    translator = run if isinstance(run, Translator) else Translator(run)
    if len(src) != len(ref):
        raise UsageError(f"{len(src)} source lines but {len(ref)} reference lines: they must correspond line by line")
    translations = translator.translate(src, **options)
    language, texts = translator.config.data.tgt_lang, [each.text for each in translations]
    scores = metrics.score(texts, ref, tgt_lang=language)
    if options.get("split", True) and (cut := _cut_lines(translator, src, translations, options)):
        for i, translation in zip(cut, _translate_whole(translator, src, cut, **options), strict=True):
            texts[i] = translation.text
        uncut = metrics.score(texts, ref, tgt_lang=language, bootstrap=0, ter=False)
        scores = dataclasses.replace(scores, uncut=metrics.Uncut.of(scores, uncut, len(cut)))
    return scores, translations


def _translate_whole(
    translator: Translator, src: Sequence[str], places: Sequence[int], **options: Any
) -> list[Translation]:
    """Translate the lines in these places without cutting them."""
    options.pop("progress", None)  # every line is already counted
    for name in ("prefix", "must_include", "protected"):
        each = options.get(name, "")
        if not isinstance(each, str) and len(each) == len(src):  # one entry for each line
            options[name] = [each[i] for i in places]
    return translator.translate([src[i] for i in places], **{**options, "split": False})


def _cut_lines(
    translator: Translator, src: Sequence[str], translations: Sequence[Translation], options: Options
) -> list[int]:
    """Return the places of the lines that would be in fewer pieces without `split`."""
    newlines, protected = options.get("newlines", "join"), options.get("protected", ())
    cut = []
    for i, (line, translation) in enumerate(zip(src, translations, strict=True)):
        if (count := len(translation.pieces)) > 1:
            spans = protected[i] if protected else ()
            whole = translator.cutter.cut(line, sentences=False, newlines=newlines, protected=spans)
            if len(whole.pieces) < count:
                cut.append(i)
    return cut


def compare(
    run: str | Path | Run | Translator,
    against: str | Path | Run | Translator,
    src: Sequence[str],
    ref: Sequence[str],
    **options: Unpack[Options],
) -> tuple[Evaluated, Evaluated, metrics.Comparison]:
    """Evaluate two runs on the same lines, with a significance test of their difference."""
    from qkv.api.translator import Translator
    from qkv.evaluation import metrics

    translator = run if isinstance(run, Translator) else Translator(run)
    first = evaluate(translator, src, ref, **options)
    second = evaluate(against, src, ref, **options)
    a, b = ([each.text for each in translations] for _, translations in (first, second))
    return first, second, metrics.compare(a, b, ref, tgt_lang=translator.config.data.tgt_lang)


def diagnose(
    src: Sequence[str], translations: Sequence[Translation], ref: Sequence[str], *, tgt_lang: str = ""
) -> Diagnosis:
    """Flag faulty translations: loops, hallucinations, copies, wrong lengths; find the worst sentences."""
    from qkv.evaluation.diagnosis import diagnose as diagnose_texts

    return diagnose_texts(
        src,
        [each.text for each in translations],
        ref,
        tgt_lang=tgt_lang,
        truncated=[each.truncated for each in translations],
        retried=[each.looped for each in translations],
    )
