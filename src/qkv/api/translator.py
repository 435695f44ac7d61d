"""Translator: translates text with a trained run or an ensemble; alternatives, scores, shortlists."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from qkv.api.document_translation import DocumentTranslation, translate_document
from qkv.api.explainer import Explainer
from qkv.api.loading import check_dtype, fast_engine
from qkv.api.omission import Checks, OmissionCheck
from qkv.api.piece_search import PieceSearch, SourcePiece
from qkv.api.translation import OtherWord, PieceOutput, Scored, Translation
from qkv.assembly import Run, open_run, search_engines_for, start_search_for
from qkv.console import Advance, describe_device, say
from qkv.core.dataset import PreparedText
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import one_line
from qkv.core.transformer import Model, StepModel
from qkv.data.alignments import Link, join_alignments
from qkv.data.subwords import readable_tokens
from qkv.decoding import search_request
from qkv.decoding.constraints import Avoid
from qkv.decoding.ensemble import AVERAGES, Ensemble
from qkv.decoding.search_request import Options, SearchInput, SearchRequest, SearchRunner, score_all, without_spaces
from qkv.decoding.shortlist import FREQUENT, LIKELIEST, Shortlist, Shortlisted
from qkv.explain.attention_maps import words
from qkv.explain.counterfactuals import NewWordAfterPrefix, WordBoundaries, word_alternatives
from qkv.explain.decoding_tree import EncodedSource
from qkv.segmentation.sentences import Pieces, Span
from qkv.segmentation.special_spaces import plain, unwrapped
from qkv.segmentation.text_cutter import CutText
from qkv.worker_pool import ProcessWorkers

CHUNK = 2048  # lines translated together in a stream: enough for batches of similar length
LONGEST_SCORED = 8192  # tokens of a scored text: memory grows with the square


class Translator(Explainer):
    """A trained run that translates text.

    With `others` it is an ensemble: runs of any kind with the same tokenizers, whose probabilities (or "logprobs") are
    averaged. `dtype` is the type of matrix products: auto, fp32, bf16 or int8; `workers` is the number of processes, on
    a CPU.
    """

    def __init__(
        self,
        run: str | Path | Run,
        *,
        weights: str = "",
        device: str = "auto",
        dtype: str = "auto",
        workers: int | None = None,
        others: Sequence[str | Path | Run] = (),
        average: str = "probabilities",
    ) -> None:
        super().__init__(run, weights=weights, device=device)
        self.members = [self, *(Explainer(other, weights=weights, device=device) for other in others)]
        for other in self.members[1:]:
            if other.tokenizers.fingerprint != self.tokenizers.fingerprint:
                raise UsageError(
                    f"{self.run.path} and {other.run.path} have different vocabularies: an ensemble needs runs trained "
                    f"with the same tokenizer"
                )
        if average not in AVERAGES:
            raise UsageError(f'average = "{average}": must be one of {", ".join(AVERAGES)}')
        if others and workers not in (None, 1):
            raise UsageError("an ensemble translates in one process: omit workers")
        self.average = average
        check_dtype(dtype, self.device)
        self.dtype = dtype
        self.workers = None
        if workers not in (None, 1) and self.device.type == "cpu":
            self.workers = ProcessWorkers(workers, open_run, str(self.run.path), weights, dtype)

    @cached_property
    def engines(self) -> list[StepModel]:
        """Return the fastest forms of the models, built on first use."""
        return [fast_engine(member.model, self.dtype, self.device) for member in self.members]

    @property
    def engine(self) -> str:
        """Return a description of the engine: `fp32 on avx512f, threads: 2`."""
        first = self.engines[0]
        if self.device.type == "cpu":
            threads = f"processes: {self.workers.count}" if self.workers else f"threads: {torch.get_num_threads()}"
            return f"{getattr(first, 'engine', 'fp32')}, {threads}"
        return f"{'bf16' if first is not self.model else 'fp32'} on {describe_device(self.device)}"

    @cached_property
    def runner(self) -> SearchRunner:
        model, plain = self._combined(self.engines), self._combined([member.model for member in self.members])
        return SearchRunner(
            model,
            plain,
            self.tokenizers,
            self.device,
            self.config.data.tgt_lang,
            start=start_search_for(self.device),
            engines=search_engines_for(model, self.tokenizers, self.device, self.workers),
        )

    def _combined(self, models: Sequence[StepModel]) -> StepModel:
        return Ensemble(models, self.average) if len(models) > 1 else models[0]

    @overload  # a str is a Sequence[str] too, but comes first
    def translate(self, text: str, **options: Unpack[Options]) -> Translation: ...  # type: ignore[overload-overlap]

    @overload
    def translate(self, text: Sequence[str], **options: Unpack[Options]) -> list[Translation]: ...

    def translate(self, text: str | Sequence[str], **options: Unpack[Options]) -> Translation | list[Translation]:
        """Translate one text or several; options that are not given are those of the run's config.

        Blank text stays blank without running the model. Sentences are translated one by one (unless the run's training
        text had several to a line, or `split` is false), and a sentence longer than those in training in pieces; the
        translations are joined with the white space of the source. `progress` is called with the number of finished
        texts.
        """
        if isinstance(text, str):
            return self._translate([text], **options)[0]
        return self._translate(list(text), **options)

    def stream(self, lines: Iterable[str], *, chunk: int = CHUNK, **options: Unpack[Options]) -> Iterator[Translation]:
        """Translate lines as they arrive, in order and in bounded memory, `chunk` lines at a time."""
        if chunk < 1:
            raise UsageError(f"chunk = {chunk}: must be at least 1")
        remaining, first = iter(lines), options.get("first", 0)
        while texts := list(islice(remaining, chunk)):
            options["first"] = first
            yield from self._translate(texts, **options)
            first += len(texts)

    def _translate(
        self,
        texts: Sequence[str],
        *,
        prefix: str | Sequence[str] = "",
        must_include: Sequence[str] | Sequence[Sequence[str]] = (),
        tag: str = "",
        first: int = 0,
        split: bool = True,
        newlines: str = "join",
        protected: Sequence[Sequence[Span]] = (),
        check: bool = True,
        progress: Advance = lambda done: None,
        **options: Any,
    ) -> list[Translation]:
        tgt = self.tokenizers.tgt
        prefixes = search_request.prefixes(prefix, len(texts))
        required = search_request.phrases(must_include, len(texts))
        phrases = list(dict.fromkeys(phrase for of_text in required for phrase in of_text))
        request = SearchRequest.of(self.config, tgt, must_include=phrases, **options)
        if request.shortlist and (any(prefixes) or phrases or request.avoid):
            raise UsageError("a shortlist may lack tokens of a prefix or of phrases: omit the shortlist")
        if request.shortlist and self.runner.narrow is None:
            self._use_shortlist(Shortlist.load(self._shortlist_path(), self.tokenizers))
        if protected and len(protected) != len(texts):
            raise UsageError(f"protected has {len(protected)} lists for {len(texts)} texts: give one for each")
        cuts = []
        for number, text in enumerate(texts):
            constrained = bool(prefixes[number] or required[number])  # … for the text as a whole, not for a sentence
            spans = protected[number] if protected else ()
            cuts.append(self.cutter.cut(text, sentences=split and not constrained, newlines=newlines, protected=spans))
            if len(cuts[-1].pieces) > 1 and constrained:
                raise UsageError(
                    f"text {first + number + 1} is translated in {len(cuts[-1].pieces)} pieces, but a prefix or "
                    f"must_include needs a single piece: split the text into sentences"
                )
        if split and any(len(cut.pieces) > 1 for cut in cuts):
            self._tell_of_sentences()
        pieces = [
            SourcePiece(number, place, source, own)
            for number, cut in enumerate(cuts)
            for place, (source, own) in enumerate(zip(cut.sources, cut.protected, strict=True))
        ]
        search = PieceSearch(
            self.runner,
            self.tokenizers,
            request,
            self.config.data.max_length,
            self._prefix(tag),
            [tgt.encode(prefix.rstrip()) for prefix in prefixes],
            required,
            first,
            self._check_positions,
            progress,
            stand_ins=self.checks.copied if self.checks else (),
            omission=self._omission_check(tag) if check else None,
        )
        outputs = iter(search(pieces, len(texts)))
        translations = [
            self._joined(text, cut, list(islice(outputs, len(cut.pieces))), request.n_best)
            for text, cut in zip(texts, cuts, strict=True)
        ]
        if request.avoid is not None:
            _check_avoided(request.avoid, translations, cuts, first)
        return translations

    def _joined(self, text: str, cut: CutText, outputs: Sequence[PieceOutput], n_best: int) -> Translation:
        if not any(output.source_tokens for output in outputs):
            return Translation.blank(text)
        spaces = not without_spaces(self.config.data.tgt_lang)
        dropped = plain(text)[1]
        return Translation.of(cut, outputs, self.tokenizers.tgt, n_best=n_best, spaces=spaces, dropped=dropped)

    # ---- what the run folder knows of its text -----------------------------------------------------------------------

    @cached_property
    def checks(self) -> Checks | None:
        """Return the limits of translations without omissions, measured at the end of the training."""
        return Checks.read(self.run.path)

    @property
    def needs_tag(self) -> bool:
        """Whether every source needs a language tag."""
        return bool(self.tokenizers.src.tags) and all(corpus.tag for corpus in self.config.data.visited)

    def token_lengths(self, source: str, output: str) -> tuple[int, int]:
        return len(self.tokenizers.src.encode(source)), len(self.tokenizers.tgt.encode(output))

    def _omission_check(self, tag: str) -> OmissionCheck | None:
        if self.checks is None:
            return None
        return OmissionCheck(self.checks, lambda *sides: self.align(*sides, tag=tag, split=False))

    @cached_property
    def _told(self) -> set[str]:
        return set()

    def _tell_of_sentences(self) -> None:
        """Say once that texts are cut into sentences for want of a record of the training text."""
        if self.cutter.statistics is None and not self._told:
            self._told.add("sentences")
            say(
                f"{self.run.path}: no record of how many sentences a line of its training text had: texts are "
                f"translated sentence by sentence (--no-split: as a whole)"
            )

    def _check_positions(self, longest: int) -> None:
        """Refuse outputs longer than the learned positions; only options of a call can request such lengths."""
        for member in self.members:
            spec = member.config.model
            positions = getattr(spec, "max_positions", 0) if getattr(spec, "positions", "") == "learned" else 0
            if positions and longest + 2 > positions:
                raise UsageError(
                    f"an output of {longest} tokens: {member.run.path} learned {positions} positions, including <s> "
                    f"and </s>: lower max_length, or give a shorter prefix"
                )

    def alternatives(
        self, source: str, translation: str, position: int, n: int = 5, *, tag: str = "", beam: int | None = None
    ) -> list[OtherWord]:
        """Return the n most probable other words at a position of a translation, each with its best continuation.

        `position` is the index of a word of the translation, or of its beginning, with punctuation marks as words; the
        index after the last word means the next word. In a text of several sentences only the sentence with that word
        is continued, if the translation has as many sentences.
        """
        if paired := self.paired_pieces(source, translation):
            return self._alternatives_in(*paired, position, n, tag=tag, beam=beam)
        request = SearchRequest.of(self.config, self.tokenizers.tgt, beam=beam)
        ids, tgt = self._sentence(source, tag), self.tokenizers.tgt
        written = tgt.encode(translation.strip())
        spans = words(readable_tokens(tgt, written))
        if not 0 <= position <= len(spans):
            raise UsageError(
                f"position {position}: give 0 to {len(spans) - 1} for a word, or {len(spans)} for the next word"
            )
        begin, end = spans[position] if position < len(spans) else (len(written), len(written))
        before, present = written[:begin], tgt.decode(written[begin:end]).strip()
        boundaries = WordBoundaries(tgt)
        encoded = EncodedSource(self.runner.plain, self.tokenizers, ids, self.device)
        candidates = word_alternatives(encoded, before, boundaries, n + 1)
        others = [(tokens, logprob) for tokens, logprob in candidates if tgt.decode(tokens).strip() != present][:n]
        options = dataclasses.replace(request.options, processors=(NewWordAfterPrefix(boundaries),))
        request = dataclasses.replace(request, options=options)
        starts = [[*before, *tokens] for tokens, _ in others]
        work = SearchInput([ids] * len(starts), starts, [None] * len(starts), list(range(len(starts))))
        results = []
        for (tokens, logprob), (best,) in zip(others, self.runner.run(work, request), strict=True):
            text = one_line(tgt.decode(best.tokens)).strip()
            results.append(OtherWord(tgt.decode(tokens).strip(), math.exp(logprob), text, best.score, best.logprob))
        return results

    def _alternatives_in(
        self, sources: Pieces, targets: Pieces, position: int, n: int, **options: Any
    ) -> list[OtherWord]:
        """Return `alternatives` in the sentence of the word, joined with the other sentences."""
        tgt, number = self.tokenizers.tgt, 0
        counts = [len(words(readable_tokens(tgt, tgt.encode(piece)))) for piece in targets]
        while number + 1 < len(counts) and position >= counts[number]:
            position, number = position - counts[number], number + 1
        others = self.alternatives(sources.pieces[number], targets.pieces[number], position, n, **options)
        before, after = targets.pieces[:number], targets.pieces[number + 1 :]
        return [dataclasses.replace(each, text=targets.join([*before, each.text, *after])) for each in others]

    def links(
        self, sources: Sequence[str], translations: Sequence[Translation], *, tag: str = ""
    ) -> list[list[Link] | None]:
        """Return links from the words of each source to those of its translation; None if a piece cannot be aligned."""
        pairs = [
            (unwrapped(source[slice(*piece.source)]), each.text[slice(*piece.target)])
            for source, each in zip(sources, translations, strict=True)
            for piece in each.pieces
        ]
        found = iter(self._piece_links(pairs, tag))
        links, rest = [], iter(pairs)
        for source, each in zip(sources, translations, strict=True):
            of_text = [next(rest) for _ in each.pieces]
            read, written = [pair[0] for pair in of_text], [pair[1] for pair in of_text]
            links.append(join_alignments(source, each.text, read, written, [next(found) for _ in of_text]))
        return links

    def _piece_links(self, pairs: Sequence[tuple[str, str]], tag: str) -> list[list[Link] | None]:
        """Align pieces; one that cannot be aligned, because it is too long, has no links."""
        try:
            sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
            return [sorted(each) for each in self.align(sources, targets, tag=tag, split=False)]
        except QkvError:
            if len(pairs) < 2:
                return [None] * len(pairs)
            half = len(pairs) // 2
            return [*self._piece_links(pairs[:half], tag), *self._piece_links(pairs[half:], tag)]

    def translate_document(self, source: str | Path | bytes, **options: Any) -> DocumentTranslation:
        """Translate a document: see `qkv.api.document_translation.translate_document`."""
        return translate_document(self, source, **options)

    def learn_shortlist(self, *, likeliest: int = LIKELIEST, frequent: int = FREQUENT) -> Path | None:
        """Learn a vocabulary shortlist from the training pairs, and save it in the run folder.

        `translate(…, shortlist=True)` then computes only the `likeliest` target tokens of each source token and the
        `frequent` most frequent ones. If the folder cannot be written, the shortlist is used in memory only.
        """
        shortlist = Shortlist.learn(
            PreparedText.open(self.run.store).train, self.tokenizers, likeliest=likeliest, frequent=frequent
        )
        self._use_shortlist(shortlist)
        try:
            shortlist.save(self._shortlist_path(), self.tokenizers)
        except QkvError as error:
            say(f"{error}; the shortlist is in memory only")
            return None
        return self._shortlist_path()

    def _use_shortlist(self, shortlist: Shortlist) -> None:
        def narrow(tokens: Tensor) -> StepModel:
            models = []
            for engine, member in zip(self.engines, self.members, strict=True):
                # A packed model stores its matrix in its own format: take the plain model's.
                weight = (engine if isinstance(engine, Model) else member.model).output.weight
                models.append(Shortlisted(engine, weight, shortlist, tokens))
            return self._combined(models)

        self.runner = dataclasses.replace(self.runner, narrow=narrow, shortlist=shortlist)

    def _shortlist_path(self) -> Path:
        return self.run.path / "shortlist.safetensors"

    @overload
    def score(  # type: ignore[overload-overlap]
        self, source: str, target: str, *, tag: str = "", progress: Advance = ...
    ) -> Scored: ...

    @overload
    def score(
        self, source: Sequence[str], target: Sequence[str], *, tag: str = "", progress: Advance = ...
    ) -> list[Scored]: ...

    def score(
        self,
        source: str | Sequence[str],
        target: str | Sequence[str],
        *,
        tag: str = "",
        progress: Advance = lambda done: None,
    ) -> Scored | list[Scored]:
        """Return the log-probability of the given translation of each source, by teacher forcing.

        Texts are not cut into sentences, because the correspondence of their parts is unknown; very long ones are
        refused.
        """
        if isinstance(source, str) and isinstance(target, str):
            return self.score([source], [target], tag=tag, progress=progress)[0]
        if isinstance(source, str) or isinstance(target, str):
            raise UsageError("a text and a list of texts cannot correspond: give two texts, or two lists")
        if len(source) != len(target):
            raise UsageError(f"{len(source)} sources but {len(target)} targets: they must correspond line by line")
        src, tgt = self.tokenizers.src, self.tokenizers.tgt
        prefix = self._prefix(tag)
        sources = [prefix + src.encode(line.strip()) for line in source]
        targets = [tgt.encode(line.strip()) for line in target]
        for number, pair in enumerate(zip(sources, targets, strict=True), 1):
            if (length := max(map(len, pair))) > LONGEST_SCORED:
                raise UsageError(
                    f"line {number}: {length:,} tokens, more than the {LONGEST_SCORED:,} that can be scored: "
                    f"split it into sentences"
                )
        model = self.runner.plain
        logprobs = score_all(model, sources, targets, self.tokenizers, device=self.device, progress=progress)
        return [
            Scored(sum(row), [*readable_tokens(tgt, ids), "</s>"], row)
            for ids, row in zip(targets, logprobs, strict=True)
        ]


def _check_avoided(avoid: Avoid, translations: Sequence[Translation], cuts: Sequence[CutText], first: int) -> None:
    """Refuse forbidden phrases that the search cannot prevent: in protected text, and where two pieces meet."""
    for number, (each, cut) in enumerate(zip(translations, cuts, strict=True), first + 1):
        found = map(avoid.occurs, (each.text, *(other.text for other in each.alternatives)))
        if phrase := next(filter(None, found), None):
            kept = (text for own in cut.protected if own for text in own.texts)
            if any(avoid.occurs(text) == phrase for text in kept):
                problem = "is in protected text of the source, which must not change: remove it from avoid (--avoid)"
            else:
                problem = "arises where translations of two pieces meet: split the text into sentences"
            raise QkvError(f'text {number}: "{phrase}" is forbidden, but {problem}')
