"""Translator: text in one language in, text in another out."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from qkv.api.explaining import Explained
from qkv.api.loading import checked, engine
from qkv.api.results import OtherWord, Scored
from qkv.assembly import Run, open_run, search_engines_for, start_search_for
from qkv.console import describe_device, say
from qkv.core.dataset import PreparedText
from qkv.core.errors import QkvError, UsageError
from qkv.core.search import Hypothesis
from qkv.core.transformer import Model, StepModel
from qkv.core.translate import Translation, score_all, translate_lines
from qkv.decoding import search_request
from qkv.decoding.ensemble import AVERAGES, Ensemble
from qkv.decoding.search_request import Options, SearchInput, SearchRequest, SearchRunner, without_spaces
from qkv.decoding.shortlist import FREQUENT, LIKELIEST, Shortlist, Shortlisted
from qkv.evaluation.diagnosis import breaking, find_loop
from qkv.explain.attention_maps import words
from qkv.explain.counterfactuals import NewWordAfterPrefix, WordBoundaries, word_alternatives
from qkv.segmentation.sentences import Pieces, split
from qkv.worker_pool import ProcessWorkers

CHUNK = 2048  # lines translated together when a file streams through: enough to sort by length
LONGEST_SCORED = 8192  # tokens of a pair that is scored as a whole: memory grows with the square


class Translator(Explained):
    """A trained run, ready to translate.

    With `others` it is an ensemble of several runs that share their tokenizers, of whatever kinds they are, whose
    probabilities (or "logprobs") are averaged. `dtype` is what the matrices are computed in: auto, fp32, bf16 or int8;
    `workers` is how many processes translate, on a CPU.
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
        self.members = [self, *(Explained(other, weights=weights, device=device) for other in others)]
        for other in self.members[1:]:
            if other.tokenizers.fingerprint != self.tokenizers.fingerprint:
                raise UsageError(
                    f"{self.run.path} and {other.run.path} have different vocabularies: only runs that were trained "
                    f"with the same tokenizer can decide together"
                )
        if average not in AVERAGES:
            raise UsageError(f'average = "{average}": must be one of {", ".join(AVERAGES)}')
        if others and workers not in (None, 1):
            raise UsageError("an ensemble translates in one process: leave out workers")
        self.average = average
        self.dtype = checked(dtype, self.device)
        self.workers = None
        if workers not in (None, 1) and self.device.type == "cpu":
            self.workers = ProcessWorkers(workers, open_run, str(self.run.path), weights, dtype)

    @cached_property
    def engines(self) -> list[StepModel[Any, Any]]:
        """The models as they compute fastest, made when they are first used."""
        return [engine(member.model, self.dtype, self.device) for member in self.members]

    @property
    def engine(self) -> str:
        """What computes, in words: `fp32 on avx512f, threads: 2`."""
        first = self.engines[0]
        if self.device.type == "cpu":
            threads = f"processes: {self.workers.count}" if self.workers else f"threads: {torch.get_num_threads()}"
            return f"{getattr(first, 'engine', 'fp32')}, {threads}"
        return f"{'bf16' if first is not self.model else 'fp32'} on {describe_device(self.device)}"

    @cached_property
    def runner(self) -> SearchRunner:
        """Does the searches."""
        model, plain = self._together(self.engines), self._together([member.model for member in self.members])
        return SearchRunner(
            model,
            plain,
            self.tokenizers,
            self.device,
            self.config.data.tgt_lang,
            start=start_search_for(self.device),
            engines=search_engines_for(model, self.tokenizers, self.device, self.workers),
        )

    def _together(self, models: Sequence[StepModel[Any, Any]]) -> StepModel[Any, Any]:
        return Ensemble(models, self.average) if len(models) > 1 else models[0]

    @overload  # a str is a Sequence[str] too, but comes first
    def translate(self, text: str, **options: Unpack[Options]) -> Translation: ...  # type: ignore[overload-overlap]

    @overload
    def translate(self, text: Sequence[str], **options: Unpack[Options]) -> list[Translation]: ...

    def translate(self, text: str | Sequence[str], **options: Unpack[Options]) -> Translation | list[Translation]:
        """Translate a text, or each of several; what is left out of the options is as the run's config has it.

        Blank text stays empty without asking the model. Every sentence is translated by itself (unless the run's
        training text had several to a line, or `split` is false), and one longer than the model was trained on in
        pieces; they are put together with the white space of the source. `progress` is told of every finished text.
        """
        if isinstance(text, str):
            (only,) = self._translate([text], **options)
            return only
        return self._translate(list(text), **options)

    def stream(self, lines: Iterable[str], *, chunk: int = CHUNK, **options: Unpack[Options]) -> Iterator[Translation]:
        """Translate lines as they come, in order and in bounded memory: `chunk` lines at a time."""
        if chunk < 1:
            raise UsageError(f"chunk = {chunk}: must be at least 1")
        rest, first = iter(lines), options.get("first", 0)
        while some := list(islice(rest, chunk)):
            options["first"] = first
            yield from self._translate(some, **options)
            first += len(some)

    def _translate(
        self,
        texts: Sequence[str],
        *,
        prefix: str | Sequence[str] = "",
        must_include: Sequence[str] | Sequence[Sequence[str]] = (),
        tag: str = "",
        first: int = 0,
        split: bool = True,
        progress: Callable[[int], None] = lambda done: None,
        **options: Any,
    ) -> list[Translation]:
        begun, wanted = search_request.prefixes(prefix, len(texts)), search_request.phrases(must_include, len(texts))
        every = list(dict.fromkeys(phrase for phrases in wanted for phrase in phrases))
        request = SearchRequest.of(self.config, self.tokenizers.tgt, must_include=every, **options)
        if request.shortlist and (any(begun) or every or request.avoid):
            raise UsageError(
                "a shortlist has what the source can need and nothing else: leave it out with a prefix or phrases"
            )
        if request.shortlist and self.runner.narrow is None:
            self._use(Shortlist.load(self._shortlist_path(), self.tokenizers))
        tags = self._prefix(tag)

        def cut(text: str, number: int) -> tuple[Sequence[str], Callable[[list[str]], str]]:
            # Which of the sentences a prefix or required phrases are for is not known.
            own = bool(begun[number] or wanted[number])
            pieces = self._pieces(text, len(tags), sentences=split and self.run.by_sentence and not own)
            if len(pieces) > 1 and own:
                raise UsageError(
                    f"text {first + number + 1} is translated in {len(pieces)} pieces, and nobody knows which of them "
                    f"the prefix or must_include is for: split it into sentences"
                )
            return pieces.pieces, partial(self._join, pieces)

        looped: set[int] = set()  # texts

        def search(sources: list[list[int]], line_of: list[int]) -> list[list[Hypothesis]]:
            places = [place for _, own in groupby(line_of) for place, _ in enumerate(own)]  # of a piece in its text
            work = SearchInput(
                sources,
                prefixes=[self.tokenizers.tgt.encode(begun[n].rstrip()) for n in line_of],
                required=[request.required(wanted[n], begun[n], self.tokenizers.tgt) for n in line_of],
                numbers=[((first + n) << 20) + place for n, place in zip(line_of, places, strict=True)],
            )
            self._check_positions(max([request.options.max_length or 0, *map(len, work.prefixes)]))
            missing = Counter(line_of)
            progress(len(texts) - len(missing))

            def finished(indices: Sequence[int]) -> None:
                missing.subtract(line_of[i] for i in indices)
                progress(sum(not missing[n] for n in {line_of[i] for i in indices}))

            found, again = self._search(work, request, finished)
            looped.update(n for n, is_looped in zip(line_of, again, strict=True) if is_looped)
            return found

        room = self.config.data.max_length
        translations = translate_lines(texts, self.tokenizers, search, max_length=room, tag=tags, split=cut)
        for number in looped:
            translations[number] = dataclasses.replace(translations[number], looped=True)
        for number, translation in enumerate(translations, first + 1):
            self._check(translation, request, f"text {number}")
        return translations

    def _search(
        self, work: SearchInput, request: SearchRequest, progress: Callable[[Sequence[int]], None]
    ) -> tuple[list[list[Hypothesis]], list[bool]]:
        """The n best hypotheses of each sentence, and whether it ran in a loop at first."""
        found = self.runner.run(work, request, progress)
        looped = [False] * len(found)
        again: dict[int, list[int]] = {}  # by the length of the n-grams that break the loop
        for i, hypotheses in enumerate(found):
            if (loop := find_loop(hypotheses[0].tokens, work.sources[i])) is not None:
                looped[i] = True
                again.setdefault(breaking(loop, request.options.no_repeat_ngram), []).append(i)
        for n, indices in again.items():
            options = dataclasses.replace(request.options, no_repeat_ngram=n)
            try:
                second = self.runner.run(work.some(indices), dataclasses.replace(request, options=options))
            except QkvError:  # what must be written cannot be without repetition: the first stays
                continue
            for i, hypotheses in zip(indices, second, strict=True):
                if find_loop(hypotheses[0].tokens, work.sources[i]) is None:
                    found[i] = hypotheses
        return found, looped

    def _check_positions(self, longest: int) -> None:
        """What the config allows fits into learned positions; what a call asks for may not."""
        for member in self.members:
            spec = member.config.model
            positions = getattr(spec, "max_positions", 0) if getattr(spec, "positions", "") == "learned" else 0
            if positions and longest + 2 > positions:
                raise UsageError(
                    f"an output of {longest} tokens: {member.run.path} learned {positions} positions, <s> and </s> "
                    f"among them: lower max_length, or give a shorter prefix"
                )

    def _check(self, translation: Translation, request: SearchRequest, where: str) -> None:
        """Phrases are forbidden in pieces; where two pieces meet, one may arise after all."""
        for text in (translation.text, *(other.text for other in translation.alternatives)):
            if request.avoid is not None and (phrase := request.avoid.occurs(text)) is not None:
                raise QkvError(f'{where}: "{phrase}" is to be avoided, but arises where two pieces of the text meet')

    def alternatives(
        self, source: str, translation: str, position: int, n: int = 5, *, tag: str = "", beam: int | None = None
    ) -> list[OtherWord]:
        """The n likeliest other words at a place of a translation, each with the best way to go on from there.

        `position` counts the words of the translation, or of its beginning, from 0, punctuation apart; the one behind
        the last is the word that would come next. Of a text of several sentences the one with that word goes on, if the
        translation has as many.
        """
        sources = self._pieces(source, len(self._prefix(tag)), sentences=self.run.by_sentence)
        targets = split(translation, lambda piece: True, sentences=True)
        if 1 < len(sources) == len(targets):
            return self._alternatives_in(sources, targets, position, n, tag=tag, beam=beam)
        request = SearchRequest.of(self.config, self.tokenizers.tgt, beam=beam)
        ids, tgt = self._sentence(source, tag), self.tokenizers.tgt
        written = tgt.encode(translation)
        spans = words(tgt.tokens(written))
        if not 0 <= position <= len(spans):
            raise UsageError(
                f"position {position}: give 0 to {len(spans)}, of which the last is the word that would come next"
            )
        begin, end = spans[position] if position < len(spans) else (len(written), len(written))
        before, there = written[:begin], tgt.decode(written[begin:end]).strip()
        borders = WordBoundaries(tgt)
        fed = torch.tensor([[*ids, self.tokenizers.src.eos]], device=self.device)
        likely = word_alternatives(self.runner.plain, fed, before, borders, n + 1)
        others = [(tokens, logprob) for tokens, logprob in likely if tgt.decode(tokens).strip() != there][:n]
        options = dataclasses.replace(request.options, processors=(NewWordAfterPrefix(borders),))
        request = dataclasses.replace(request, options=options)
        starts = [[*before, *tokens] for tokens, _ in others]
        work = SearchInput([ids] * len(starts), starts, [None] * len(starts), list(range(len(starts))))
        found = []
        for (tokens, logprob), (best,) in zip(others, self.runner.run(work, request), strict=True):
            text = tgt.decode(best.tokens).replace("\n", " ").strip()
            found.append(OtherWord(tgt.decode(tokens).strip(), math.exp(logprob), text, best.score, best.logprob))
        return found

    def _alternatives_in(
        self, sources: Pieces, targets: Pieces, position: int, n: int, **options: Any
    ) -> list[OtherWord]:
        """`alternatives` in the sentence that the word belongs to, put together with the others."""
        tgt, number = self.tokenizers.tgt, 0
        counts = [len(words(tgt.tokens(tgt.encode(piece)))) for piece in targets]
        while number + 1 < len(counts) and position >= counts[number]:
            position, number = position - counts[number], number + 1
        found = self.alternatives(sources.pieces[number], targets.pieces[number], position, n, **options)
        before, after = targets.pieces[:number], targets.pieces[number + 1 :]
        return [dataclasses.replace(each, text=targets.join([*before, each.text, *after])) for each in found]

    def learn_shortlist(self, *, likeliest: int = LIKELIEST, frequent: int = FREQUENT) -> Path | None:
        """Learn from the training pairs which target tokens each source token can need, and keep it in the run folder.

        From then on `translate(…, shortlist=True)` looks only at these, and at the `frequent` most frequent. Where the
        folder cannot be written, as under a server, nothing is kept: it lasts as long as this translator.
        """
        learned = Shortlist.learn(
            PreparedText.open(self.run.store).train, self.tokenizers, likeliest=likeliest, frequent=frequent
        )
        self._use(learned)
        try:
            learned.save(self._shortlist_path(), self.tokenizers)
        except QkvError as error:
            say(f"{error}; the shortlist is in memory, for this time only")
            return None
        return self._shortlist_path()

    def _use(self, shortlist: Shortlist) -> None:
        def narrow(tokens: Tensor) -> StepModel[Any, Any]:
            pairs = zip(self.engines, self.members, strict=True)
            # A packed model has its matrix in a form of its own, any other in the numbers that it computes with.
            weights = [(each if isinstance(each, Model) else own.model).output.weight for each, own in pairs]
            models = zip(self.engines, weights, strict=True)
            return self._together([Shortlisted(each, weight, shortlist, tokens) for each, weight in models])

        self.runner = dataclasses.replace(self.runner, narrow=narrow, shortlist=shortlist)

    def _shortlist_path(self) -> Path:
        return self.run.path / "shortlist.safetensors"

    @overload
    def score(  # type: ignore[overload-overlap]
        self, source: str, target: str, *, tag: str = "", progress: Callable[[int], None] = ...
    ) -> Scored: ...

    @overload
    def score(
        self, source: Sequence[str], target: Sequence[str], *, tag: str = "", progress: Callable[[int], None] = ...
    ) -> list[Scored]: ...

    def score(
        self,
        source: str | Sequence[str],
        target: str | Sequence[str],
        *,
        tag: str = "",
        progress: Callable[[int], None] = lambda done: None,
    ) -> Scored | list[Scored]:
        """Forced decoding: how likely the model finds the given translation of each source.

        Both are taken as a whole: which part of a target translates which part of a source is not known. So a pair that
        is endless is refused.
        """
        if isinstance(source, str) and isinstance(target, str):
            (only,) = self.score([source], [target], tag=tag, progress=progress)
            return only
        if isinstance(source, str) or isinstance(target, str):
            raise UsageError("one text and a list of texts cannot correspond: give two texts, or two lists")
        if len(source) != len(target):
            raise UsageError(f"{len(source)} sources but {len(target)} targets: they must correspond line by line")
        src, tgt = self.tokenizers.src, self.tokenizers.tgt
        prefix = self._prefix(tag)
        sources = [prefix + src.encode(line) for line in source]
        targets = [tgt.encode(line) for line in target]
        for number, pair in enumerate(zip(sources, targets, strict=True), 1):
            if (length := max(map(len, pair))) > LONGEST_SCORED:
                raise UsageError(
                    f"line {number}: {length:,} tokens: a pair is scored as a whole, at most {LONGEST_SCORED:,}: "
                    f"split it into sentences"
                )
        model = self.runner.plain
        logprobs = score_all(model, sources, targets, self.tokenizers, device=self.device, progress=progress)
        return [Scored(sum(row), [*tgt.tokens(ids), "</s>"], row) for ids, row in zip(targets, logprobs, strict=True)]

    def _pieces(self, line: str, prefix: int, *, sentences: bool) -> Pieces:
        room = self.config.data.max_length - prefix
        return split(line, lambda piece: len(self.tokenizers.src.encode(piece)) <= room, sentences=sentences)

    def _join(self, pieces: Pieces, texts: list[str]) -> str:
        """Put the translations of pieces together with the white space of the source."""
        if not without_spaces(self.config.data.tgt_lang):
            return pieces.join(texts, " ")
        # One space between sentences belongs to the way the source is written.
        return Pieces(pieces.pieces, tuple("" if gap == " " else gap for gap in pieces.separators)).join(texts)
