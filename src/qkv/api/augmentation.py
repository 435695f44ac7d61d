"""A trained model and text make a corpus to train on: back-translation, self-training, distillation.

One side of every pair is a given line, the other the model's translation of it. Back-translation (Sennrich et al.,
2016) puts the translation on the source side: the target stays what people wrote. Self-training and distillation (Kim
and Rush, 2016) put it on the target side; with references, of several translations the one closest to the reference is
taken. Pairs that would teach something wrong are left out, and every line that was read is counted
(`qkv.api.pair_filters`).

Files of any size go through `qkv.api.file_translation`: in bounded memory, resumed after a kill, shared by several
processes. What becomes of a line depends on nothing but the line, its number and its chunk.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from qkv import __version__
from qkv.api.file_translation import Chunk, ProcessGroup, Work, fingerprint, translate_file, translate_stream
from qkv.api.pair_filters import FATES, Filters, Noise, Settled, beside, settle
from qkv.api.translator import CHUNK, Translator
from qkv.assembly import Run
from qkv.console import writer
from qkv.core.corpus import COMPRESSED, is_stream
from qkv.core.errors import UsageError
from qkv.core.preparation import is_even
from qkv.core.translate import Alternative, Translation
from qkv.core.validation import bleu_tokenizer
from qkv.data.formats import LineReader, layout_of, open_text
from qkv.decoding.mbr import UTILITIES, utilities
from qkv.decoding.search_request import Options, without_spaces
from qkv.engines.cpu.native_search import worker_count
from qkv.evaluation.diagnosis import find_loop

KINDS = ("back-translation", "self-training", "distillation")
GARBLED = "\ufffd"  # what the tokenizer makes of bytes that are not UTF-8
BYTES_A_TOKEN = 4  # about, in European languages


@dataclass(frozen=True)
class Pair:
    """A line and what was made of it, as source and target; `fate` is "kept", or why the pair is left out."""

    line: int  # its number, from 1
    src: str
    tgt: str
    logprob: float | None  # of a token, on average; None: there is nothing, or too much, to tell it of
    fate: str


@dataclass(frozen=True)
class Augmented:
    """How many lines were read and what became of them."""

    output: str
    counts: Mapping[str, int]
    tabs: int = 0  # pairs in which a tab became a space, as in .tsv it would end a column

    @property
    def lines(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        rows = [f"{self.output}: {self.lines:,} lines read, {self.counts.get('kept', 0):,} pairs kept"]
        left_out = [(name, self.counts[name]) for name in FATES if name != "kept" and self.counts.get(name)]
        rows += [f"  left out: {count:,} {FATES[name]} ({name})" for name, count in left_out]
        if self.tabs:
            rows.append(f"  in {self.tabs:,} pairs tabs became spaces, which end columns of .tsv: .jsonl keeps them")
        return "\n".join(rows)


# ---- pairs out -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Augmenter:
    """Makes pairs of lines; `kind` says which side of a pair the translation is.

    `options` are the translator's. The noise is always on the source side, after the filters. `back` translates the
    other way: with it, a pair is as likely as `back` finds the given line when it reads the translation (round trip).
    `closest_by` is chrf or bleu, by which the translation closest to a reference is chosen.
    """

    translator: Translator
    kind: str
    noise: Noise = field(default_factory=Noise)
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
        if own := {"n_best", "first", "progress", "seed"} & set(self.options):
            raise UsageError(f"{', '.join(sorted(own))}: not among the options here: a line makes one pair at most")

    def pairs(
        self,
        lines: Sequence[str],
        references: Sequence[str] | None = None,
        *,
        first: int = 0,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Pair]:
        """A pair for each line, kept or not; `first` is how many lines came before."""
        if references is not None and self.kind != "distillation":
            raise UsageError(f"references are for distillation, and this is {self.kind}: leave them out")
        fates = [line.fate if isinstance(line, Settled) else "" if line.strip() else "blank" for line in lines]
        asked = ["" if fate else str(line) for line, fate in zip(lines, fates, strict=True)]
        found = self.translator.translate(asked, **self._how(references is not None), first=first, progress=progress)
        made = [_best(each) for each in found]
        if references is not None:
            made = [self._closest(each, wanted) for each, wanted in zip(found, references, strict=True)]
        judged = [
            self._judged(number, line, translation, best, fate)
            for number, (line, translation, best, fate) in enumerate(
                zip(map(str, lines), found, made, fates, strict=True), first + 1
            )
        ]
        return [self._oriented(pair) for pair in self._ranked(self._round_trip(judged))]

    def _how(self, several: bool) -> dict[str, Any]:
        how = dict(self.options)
        if how.get("sample"):
            how["seed"] = self.seed
        if several:
            if how.get("rerank"):
                raise UsageError("rerank and references both choose among candidates: leave out one")
            how["n_best"] = how.pop("candidates", None) or how.get("beam") or self.translator.config.decode.beam
        return how

    def _closest(self, found: Translation, reference: str) -> Alternative:
        """Of several translations the one closest to the reference; of equally close ones the likeliest."""
        every = [_best(found), *found.alternatives]
        tokenizer = bleu_tokenizer(self.translator.config.data.tgt_lang)
        scores = utilities([reference, *(each.text for each in every)], self.closest_by, tokenizer)[1:, 0]
        return every[int(scores.round(9).argmax())]

    def _judged(self, number: int, line: str, found: Translation, best: Alternative, fate: str) -> Pair:
        """A line and its translation, in this order, and its fate so far."""
        both = self.translator.tokenizers
        read, written = (both.src.encode(line), both.tgt.encode(best.text)) if best.text else ([], [])
        lengths = [len(read), len(written)]
        reasons = {
            "empty": not best.text,
            "garbled": GARBLED in best.text and GARBLED not in line,
            "unfinished": best.truncated,
            "looped": (found.looped and best.text == found.text) or find_loop(written, read) is not None,
            "copy": _letters(line) == _letters(best.text),
            "ratio": not is_even(lengths, ratio=self.filters.max_ratio),
        }
        fate = fate or next((name for name, holds in reasons.items() if holds and name not in self.filters.allow), "")
        # The model has also said, of every piece, that it ends here.
        return Pair(number, line, best.text, best.logprob / (lengths[1] + found.pieces) if best.text else None, fate)

    def _round_trip(self, pairs: list[Pair]) -> list[Pair]:
        """With the log-probability of the way back, for those that are still to be had and not too long to tell."""
        if self.back is None:
            return pairs
        both, limit = self.back.tokenizers, self.back.config.data.max_length
        told = [
            place
            for place, pair in enumerate(pairs)
            if not pair.fate and max(len(both.src.encode(pair.tgt)), len(both.tgt.encode(pair.src))) <= limit
        ]
        scored = self.back.score([pairs[place].tgt for place in told], [pairs[place].src for place in told])
        values = {place: each.logprob / len(each.tokens) for place, each in zip(told, scored, strict=True)}
        return [replace(pair, logprob=values.get(place)) for place, pair in enumerate(pairs)]

    def _ranked(self, pairs: list[Pair]) -> list[Pair]:
        """With the fates that depend on how likely pairs are."""
        least, keep = self.filters.min_logprob, self.filters.keep

        def likely(pair: Pair) -> float:
            return -math.inf if pair.logprob is None else pair.logprob

        if least is not None:
            pairs = [pair if pair.fate or likely(pair) >= least else replace(pair, fate="unlikely") for pair in pairs]
        left = sorted((pair for pair in pairs if not pair.fate), key=lambda pair: -likely(pair))
        best = {pair.line for pair in left[: math.ceil(round(keep * len(left), 9))]}
        return [replace(pair, fate=pair.fate or ("kept" if pair.line in best else "worse")) for pair in pairs]

    def _oriented(self, pair: Pair) -> Pair:
        """The pair as source and target, with noise on the source."""
        spec, backwards = self.translator.config.data, self.kind == "back-translation"
        src, tgt = (pair.tgt, pair.src) if backwards else (pair.src, pair.tgt)
        if pair.fate == "kept":
            spaces = not without_spaces(spec.tgt_lang if backwards else spec.src_lang)
            src = self.noise.text(src, pair.line, self.seed, spaces=spaces)
        return replace(pair, src=src, tgt=tgt)


def _best(found: Translation) -> Alternative:
    return Alternative(found.text, found.score, found.logprob, found.truncated)


def _letters(text: str) -> str:
    """What is left of a text without case, spaces and punctuation."""
    return "".join(c for c in unicodedata.normalize("NFC", text).casefold() if c.isalnum()) or text.strip()


# ---- files -----------------------------------------------------------------------------------------------------------


def augment(
    run: str | Path | Run,
    text: str | Path,
    output: str | Path,
    *,
    kind: str,
    references: str | Path | None = None,
    noise: Noise | None = None,
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
    """Translate a text file with a run, and write the pairs to a .tsv or .jsonl file that training reads.

    `kind` is back-translation, self-training or distillation; see `Augmenter` and `Filters` for what may be asked,
    `qkv.decoding.search_request.Options` for how to translate; the seed, 1 unless given, is that of samples and of
    noise. The same call goes on with what was stopped or killed. `others` are runs that decide together with this one;
    `-` is standard input or output, which is .tsv.
    """
    group, text, output = ProcessGroup.from_environment(), str(text), str(output)
    how: dict[str, Any] = {**options}
    seed, progress, filters = how.pop("seed", None), how.pop("progress", _unheard), filters or Filters()
    names = [text, *([] if references is None else [str(references)])]
    form = _check_files(names, output, group)
    if back is not None and not filters.ranked and form != "jsonl":
        raise UsageError("a round trip tells how likely pairs are, and nothing asks: set min_logprob or keep")
    if workers is None and not others and group.world == 1:
        workers = worker_count(Path(text).stat().st_size // BYTES_A_TOKEN if Path(text).is_file() else 0)
    where = group.device(device)
    translator = Translator(run, weights=weights, device=where, dtype=dtype, workers=workers, others=others)
    way_back = None if back is None else Translator(back, device=where, dtype=dtype)
    augmenter = Augmenter(
        translator, kind, noise or Noise(), filters, way_back, closest_by, 1 if seed is None else seed, how
    )
    files = [LineReader(name, on_bad) for name in names]
    lines = settle(beside(files), lambda: sum(each.bad for each in files), "repeated" not in filters.allow)
    work = _work(augmenter, form, references is not None, progress)
    if _passes_on(output):
        with writer(output) as write:
            counts = translate_stream(lines, lambda rows: rows and write(rows.removesuffix("\n")), work, size=CHUNK)
    else:
        task = _task(augmenter, weights, dtype=dtype, form=form, references=references is not None)
        about = {"command": command, "input": text}
        counts = translate_file(
            lines, Path(output), work, size=CHUNK, task=task, about=about, group=group, progress=progress
        )
    return Augmented(output, {name: counts[name] for name in FATES if counts[name]}, counts["tabs"])


def _unheard(done: int) -> None:
    """No progress shown."""


def _check_files(names: Sequence[str], output: str, group: ProcessGroup) -> str:
    """How the output is laid out, if it and the files to read are what this can work with."""
    if Path(output).suffix in COMPRESSED:
        raise UsageError(f"{output}: what is written is plain text: name it without {Path(output).suffix}")
    if (form := layout_of(output)) == "lines" and not _passes_on(output):
        raise UsageError(f"{output}: pairs are written as .tsv or .jsonl, as training reads them: name it so")
    for name in names:
        if (given := layout_of(name)) != "lines":
            raise UsageError(f"{name}: a .{given} file holds pairs: give a file with a sentence in each line")
    streams = [name for name in names if is_stream(open_text(name, ""))]
    if streams.count("-") > 1:
        raise UsageError("standard input (-) can be only one file")
    if group.world > 1 and (_passes_on(output) or streams):
        raise UsageError("several processes can share neither standard input nor output: give two files")
    return form


def _passes_on(output: str) -> bool:
    """Whether the output is a terminal, a pipe or a device: what is written there is gone."""
    return output == "-" or (Path(output).exists() and not Path(output).is_file() and not Path(output).is_dir())


def _work(augmenter: Augmenter, form: str, referenced: bool, progress: Callable[[int], None]) -> Work:
    """What is done with every chunk."""

    def work(chunk: Chunk) -> tuple[str, dict[str, int]]:
        lines: list[str] = list(chunk.lines)
        references = None
        if referenced:
            halves = [line.partition("\n") for line in lines]
            lines = [
                Settled(half, line.fate) if isinstance(line, Settled) else half
                for line, (half, _, _) in zip(lines, halves, strict=True)
            ]
            references = [reference for _, _, reference in halves]
        pairs = augmenter.pairs(lines, references, first=chunk.first, progress=progress)
        kept = [pair for pair in pairs if pair.fate == "kept"]
        counts = Counter(pair.fate for pair in pairs)
        if form != "jsonl":
            counts["tabs"] = sum("\t" in pair.src or "\t" in pair.tgt for pair in kept)
        return "".join(f"{_shown(pair, form)}\n" for pair in kept), dict(counts)

    return work


def _shown(pair: Pair, form: str) -> str:
    """A pair as a line of a .jsonl or .tsv file."""
    if form == "jsonl":
        logprob = pair.logprob and round(pair.logprob, 4)
        return json.dumps({"src": pair.src, "tgt": pair.tgt, "line": pair.line, "logprob": logprob}, ensure_ascii=False)
    return "\t".join(side.replace("\t", " ") for side in (pair.src, pair.tgt))


def _task(augmenter: Augmenter, weights: str, **how: Any) -> dict[str, Any]:
    """All that decides what is written; an unfinished file is only gone on with if it was begun with the same."""
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
        "by_sentence": [member.run.by_sentence for member in translator.members],
        **how,
    }
