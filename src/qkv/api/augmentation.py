"""Synthetic training pairs from a trained model and text: back-translation, self-training, distillation.

One side of a pair is a given line, the other its translation. Back-translation (Sennrich et al., 2016) puts the
translation on the source side, so that the target is human text. Self-training and distillation (Kim and Rush, 2016)
put it on the target side; with references, distillation takes the n-best translation closest to the reference. Faulty
pairs are dropped, and every input line is counted (`qkv.api.pair_filters`).

Files are translated by `qkv.api.file_translation`: in bounded memory, resumable, by several processes if wanted. The
result for a line is a function of the line, its number and its chunk.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from qkv import __version__
from qkv.api.file_translation import (
    Chunk,
    ProcessGroup,
    Work,
    check_files,
    default_workers,
    fingerprint,
    is_stream_output,
    translate_text,
)
from qkv.api.pair_filters import DISPOSITIONS, FilteredLine, Filters, WordNoise, filter_lines, zip_lines
from qkv.api.translation import Alternative, Translation
from qkv.api.translator import CHUNK, Translator
from qkv.assembly import Run
from qkv.console import Advance
from qkv.core.errors import UsageError
from qkv.core.preparation import is_even
from qkv.data.formats import LineReader, layout_of
from qkv.decoding.mbr import UTILITIES, utilities
from qkv.decoding.search_request import Options, without_spaces
from qkv.evaluation.diagnosis import find_loop
from qkv.evaluation.metrics import bleu_tokenizer

KINDS = ("back-translation", "self-training", "distillation")
GARBLED = "\ufffd"  # the tokenizer's replacement of bytes that are not UTF-8


@dataclass(frozen=True)
class Pair:
    """A synthetic pair; `disposition` is "kept", or the filter that drops it."""

    line: int  # number of the input line, from 1
    src: str
    tgt: str
    logprob: float | None  # mean per token; None for an empty translation, or a round trip that is too long
    disposition: str


@dataclass(frozen=True)
class Augmented:
    """The number of input lines by disposition."""

    output: str
    counts: Mapping[str, int]
    tabs: int = 0  # pairs in which tabs were replaced by spaces, because a tab separates columns of .tsv

    @property
    def lines(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        rows = [f"{self.output}: {self.lines:,} lines read, {self.counts.get('kept', 0):,} pairs kept"]
        left_out = [(name, self.counts[name]) for name in DISPOSITIONS if name != "kept" and self.counts.get(name)]
        rows += [f"  left out: {count:,} {DISPOSITIONS[name]} ({name})" for name, count in left_out]
        if self.tabs:
            rows.append(f"  tabs replaced by spaces in {self.tabs:,} pairs of the .tsv: write .jsonl to keep them")
        return "\n".join(rows)


# ---- pairs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Augmenter:
    """Generator of synthetic pairs; `kind` determines the side of the translation.

    `options` are those of `Translator.translate`. Noise is added to the source side, after the filters. `back` is a
    translator of the opposite direction: the log-probability of a pair is then that of the given line as a translation
    of its translation (round trip). `closest_by`, chrf or bleu, selects the translation closest to a reference.
    """

    translator: Translator
    kind: str
    noise: WordNoise = field(default_factory=WordNoise)
    filters: Filters = field(default_factory=Filters)
    back: Translator | None = None
    closest_by: str = "bleu"
    seed: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f'kind = "{self.kind}": must be one of {", ".join(KINDS)}')
        if self.closest_by not in UTILITIES:
            raise UsageError(f'closest_by = "{self.closest_by}": must be one of {", ".join(UTILITIES)}')
        if refused := {"n_best", "first", "progress", "seed"} & set(self.options):
            raise UsageError(
                f"{', '.join(sorted(refused))}: not an option here, a line makes at most one pair: omit it"
            )

    def pairs(
        self,
        lines: Sequence[str],
        references: Sequence[str] | None = None,
        *,
        first: int = 0,
        progress: Advance = lambda done: None,
    ) -> list[Pair]:
        """Return a pair for each line, kept or not; `first` is the number of lines before these."""
        if references is not None and self.kind != "distillation":
            raise UsageError(f"references are for distillation, and this is {self.kind}: omit them")
        filtered = [
            line.disposition if isinstance(line, FilteredLine) else "" if line.strip() else "blank" for line in lines
        ]
        sources = ["" if name else str(line) for line, name in zip(lines, filtered, strict=True)]
        options = dict(self.options)
        if options.get("sample"):
            options["seed"] = self.seed
        if references is not None:
            if options.get("rerank"):
                raise UsageError("rerank and references both choose among candidates: omit one")
            beam = options.get("beam") or self.translator.config.decode.beam
            options["n_best"] = options.pop("candidates", None) or beam
        translations = self.translator.translate(sources, **options, first=first, progress=progress)
        outputs = [Alternative(each.text, each.score, each.logprob, each.truncated) for each in translations]
        if references is not None:
            tokenizer = bleu_tokenizer(self.translator.config.data.tgt_lang)
            for i, (translation, reference) in enumerate(zip(translations, references, strict=True)):
                n_best = [outputs[i], *translation.alternatives]  # best first: of equally close ones the first is taken
                texts = [unicodedata.normalize("NFC", text) for text in (reference, *(each.text for each in n_best))]
                scores = utilities(texts, self.closest_by, tokenizer)[1:, 0]
                outputs[i] = n_best[int(scores.round(9).argmax())]
        rows = zip(map(str, lines), translations, outputs, filtered, strict=True)
        pairs = [self._filtered(number, *row) for number, row in enumerate(rows, first + 1)]
        return [self._oriented(pair) for pair in self._ranked(self._round_trip(pairs))]

    def _filtered(self, number: int, line: str, translation: Translation, output: Alternative, filtered: str) -> Pair:
        """Return line and translation as a pair; its disposition is `filtered` or the first filter that drops it."""
        src, tgt = self.translator.tokenizers.src, self.translator.tokenizers.tgt
        read, written = (src.encode(line), tgt.encode(output.text)) if output.text else ([], [])
        lengths = [len(read), len(written)]
        reasons = {
            "empty": not output.text,
            "garbled": GARBLED in output.text and GARBLED not in line,
            "unfinished": output.truncated,
            "looped": (translation.looped and output.text == translation.text) or find_loop(written, read) is not None,
            "copy": _letters(line) == _letters(output.text),
            "ratio": not is_even(lengths, ratio=self.filters.max_ratio),
        }
        allowed = self.filters.allow
        disposition = filtered or next((name for name, holds in reasons.items() if holds and name not in allowed), "")
        # Each piece ends with </s>, which is a token of the log-probability too.
        logprob = output.logprob / (lengths[1] + max(1, len(translation.pieces))) if output.text else None
        return Pair(number, line, output.text, logprob, disposition)

    def _round_trip(self, pairs: list[Pair]) -> list[Pair]:
        """Replace log-probabilities by those of `back`, for pairs that pass so far and are not too long."""
        if self.back is None:
            return pairs
        src, tgt, limit = self.back.tokenizers.src, self.back.tokenizers.tgt, self.back.config.data.max_length
        scorable = [
            i
            for i, pair in enumerate(pairs)
            if not pair.disposition and max(len(src.encode(pair.tgt)), len(tgt.encode(pair.src))) <= limit
        ]
        scores = self.back.score([pairs[i].tgt for i in scorable], [pairs[i].src for i in scorable])
        logprobs = {i: each.logprob / len(each.tokens) for i, each in zip(scorable, scores, strict=True)}
        return [replace(pair, logprob=logprobs.get(i)) for i, pair in enumerate(pairs)]

    def _ranked(self, pairs: list[Pair]) -> list[Pair]:
        """Apply the filters that need log-probabilities; the remaining pairs are kept."""
        least, keep = self.filters.min_logprob, self.filters.keep

        def logprob(pair: Pair) -> float:
            return -math.inf if pair.logprob is None else pair.logprob

        likely = [pair for pair in pairs if not pair.disposition and (least is None or logprob(pair) >= least)]
        likely.sort(key=lambda pair: -logprob(pair))
        dispositions = dict.fromkeys((pair.line for pair in likely), "worse")
        dispositions |= {pair.line: "kept" for pair in likely[: math.ceil(round(keep * len(likely), 9))]}
        return [
            replace(pair, disposition=pair.disposition or dispositions.get(pair.line, "unlikely")) for pair in pairs
        ]

    def _oriented(self, pair: Pair) -> Pair:
        """Return the pair as source and target, with noise on the source."""
        data, backwards = self.translator.config.data, self.kind == "back-translation"
        src, tgt = (pair.tgt, pair.src) if backwards else (pair.src, pair.tgt)
        if pair.disposition == "kept":
            spaces = not without_spaces(data.tgt_lang if backwards else data.src_lang)
            src = self.noise.text(src, pair.line, self.seed, spaces=spaces)
        return replace(pair, src=src, tgt=tgt)


def _letters(text: str) -> str:
    """Return the text in lower case without spaces and punctuation."""
    return "".join(c for c in unicodedata.normalize("NFC", text).casefold() if c.isalnum()) or text.strip()


# ---- files -----------------------------------------------------------------------------------------------------------


def augment(
    run: str | Path | Run,
    text: str | Path,
    output: str | Path,
    *,
    kind: str,
    references: str | Path | None = None,
    noise: WordNoise | None = None,
    filters: Filters | None = None,
    back: str | Path | Run | None = None,
    closest_by: str = "bleu",
    others: Sequence[str | Path | Run] = (),
    weights: str = "",
    device: str = "auto",
    dtype: str = "auto",
    workers: int | None = None,
    on_bad: str = "error",
    command: str = "",
    **options: Unpack[Options],
) -> Augmented:
    """Translate a text file and write the synthetic pairs to a .tsv or .jsonl file for training.

    `kind` is back-translation, self-training or distillation. `Augmenter` and `Filters` explain the arguments,
    `qkv.decoding.search_request.Options` the options of the search; the seed (default 1) is for sampling and noise. An
    interrupted call is resumed by repeating it. `others` are further runs of an ensemble. `-` is standard input or
    output; standard output is .tsv.
    """
    group, text, output = ProcessGroup.from_environment(), str(text), str(output)
    search: dict[str, Any] = {**options}
    seed, progress = search.pop("seed", None), search.pop("progress", lambda done: None)
    filters = filters or Filters()
    names = [text, *([] if references is None else [str(references)])]
    if (form := layout_of(output)) == "lines" and not is_stream_output(output):
        raise UsageError(f"{output}: pairs are written as .tsv or .jsonl: choose a name with one of these suffixes")
    check_files(names, output, group)
    if back is not None and not filters.ranked and form != "jsonl":
        raise UsageError("the log-probabilities of back are not used: set min_logprob or keep, or write .jsonl")
    if workers is None and not others:
        workers = default_workers(text, group)
    here = group.device(device)
    translator = Translator(run, weights=weights, device=here, dtype=dtype, workers=workers, others=others)
    backward = None if back is None else Translator(back, device=here, dtype=dtype)
    seed = 1 if seed is None else seed
    augmenter = Augmenter(translator, kind, noise or WordNoise(), filters, backward, closest_by, seed, search)
    files = [LineReader(name, on_bad) for name in names]
    lines = filter_lines(zip_lines(files), lambda: sum(each.bad for each in files), "repeated" not in filters.allow)
    work = _chunk_work(augmenter, form, references is not None, progress)
    task = partial(_task, augmenter, weights, dtype=dtype, form=form, references=references is not None)
    about = {"command": command, "input": text}
    counts = translate_text(lines, output, work, task, size=CHUNK, about=about, group=group, progress=progress)
    return Augmented(output, {name: counts[name] for name in DISPOSITIONS if counts[name]}, counts["tabs"])


def _chunk_work(augmenter: Augmenter, form: str, with_references: bool, progress: Advance) -> Work:
    """Return the function that makes the output of a chunk."""

    def work(chunk: Chunk) -> tuple[str, dict[str, int]]:
        lines: list[str] = list(chunk.lines)
        references = None
        if with_references:
            halves = [line.partition("\n") for line in lines]
            lines = [
                FilteredLine(half, line.disposition) if isinstance(line, FilteredLine) else half
                for line, (half, _, _) in zip(lines, halves, strict=True)
            ]
            references = [reference for _, _, reference in halves]
        pairs = augmenter.pairs(lines, references, first=chunk.first, progress=progress)
        kept = [pair for pair in pairs if pair.disposition == "kept"]
        counts = Counter(pair.disposition for pair in pairs)
        if form != "jsonl":
            counts["tabs"] = sum("\t" in pair.src or "\t" in pair.tgt for pair in kept)
        return "".join(f"{_formatted(pair, form)}\n" for pair in kept), dict(counts)

    return work


def _formatted(pair: Pair, form: str) -> str:
    """Return a pair as a line of a .jsonl or .tsv file."""
    if form == "jsonl":
        logprob = pair.logprob and round(pair.logprob, 4)
        return json.dumps({"src": pair.src, "tgt": pair.tgt, "line": pair.line, "logprob": logprob}, ensure_ascii=False)
    return "\t".join(side.replace("\t", " ") for side in (pair.src, pair.tgt))


def _task(augmenter: Augmenter, weights: str, **rest: Any) -> dict[str, Any]:
    """Return everything that determines the output; an unfinished file is resumed only for an equal task."""
    translator, back = augmenter.translator, augmenter.back
    return {
        "qkv": __version__,
        "models": [fingerprint(member.run, weights) for member in translator.members],
        "back": back and fingerprint(back.run),
        "device": translator.device.type,
        "kind": augmenter.kind,
        **asdict(augmenter.noise),
        **asdict(augmenter.filters),
        "closest_by": augmenter.closest_by,
        "seed": augmenter.seed,
        **augmenter.options,
        "sentences": [member.run.cutter.sentences for member in translator.members],
        **rest,
    }
