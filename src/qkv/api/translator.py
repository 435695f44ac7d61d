"""Translator: translates text with a trained run or an ensemble; alternatives, scores, shortlists."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Self, Unpack, overload

import torch
from torch import Tensor

from qkv.api.explainer import Explainer
from qkv.api.loading import check_dtype, fast_engine
from qkv.assembly import Run, open_run, search_engines_for, start_search_for
from qkv.console import Advance, describe_device, say
from qkv.core.dataset import PreparedText
from qkv.core.errors import QkvError, UsageError
from qkv.core.search import Hypothesis
from qkv.core.tokenizer import Tokenizer, one_line
from qkv.core.transformer import Model, StepModel
from qkv.core.translate import TranslatedLine, translate_lines
from qkv.data.subwords import readable_tokens
from qkv.decoding import search_request
from qkv.decoding.ensemble import AVERAGES, Ensemble
from qkv.decoding.search_request import Options, SearchInput, SearchRequest, SearchRunner, score_all, without_spaces
from qkv.decoding.shortlist import FREQUENT, LIKELIEST, Shortlist, Shortlisted
from qkv.evaluation.diagnosis import breaking, find_loop
from qkv.explain.attention_maps import words
from qkv.explain.counterfactuals import NewWordAfterPrefix, WordBoundaries, word_alternatives
from qkv.explain.decoding_tree import EncodedSource
from qkv.segmentation.sentences import Pieces, split
from qkv.worker_pool import ProcessWorkers

CHUNK = 2048  # lines translated together in a stream: enough for batches of similar length
LONGEST_SCORED = 8192  # tokens of a scored text: memory grows with the square


@dataclass(frozen=True)
class Alternative:
    """Another translation of the same text."""

    text: str
    score: float
    logprob: float
    truncated: bool = False


@dataclass(frozen=True)
class Translation:
    """A translation and its scores; `score` is `logprob` under the length penalty.

    For an input translated in pieces both are sums over the pieces.
    """

    text: str
    score: float
    logprob: float
    tokens: list[str]
    alternatives: list[Alternative]
    truncated: bool = False  # the longest length allowed was reached before the model ended
    pieces: int = 1  # how many sentences or parts of long ones were translated; 0 for blank text
    finish_reason: str = "stop"  # stop: the model ended; length: the limit did; blank: there was nothing to translate
    length_ratio: float = 0.0  # tokens of the output for each of the input
    looped: bool = False  # the first output repeated itself; the search was repeated, and this is the better output

    @classmethod
    def of(cls, line: TranslatedLine, tgt: Tokenizer, *, looped: bool = False) -> Self:
        """Return the result of a line, whose pieces were translated one by one."""
        if not line.hypotheses:
            return cls("", 0.0, 0.0, [], [], pieces=0, finish_reason="blank")
        ranks = []
        for text, rank in zip(line.texts, line.hypotheses, strict=True):
            score, logprob = sum(h.score for h in rank), sum(h.logprob for h in rank)
            ranks.append(Alternative(text, score, logprob, any(h.truncated for h in rank)))
        best, written = ranks[0], [token for hypothesis in line.hypotheses[0] for token in hypothesis.tokens]
        return cls(
            **vars(best),
            tokens=readable_tokens(tgt, written),
            alternatives=ranks[1:],
            pieces=len(line.hypotheses[0]),
            finish_reason="length" if best.truncated else "stop",
            length_ratio=len(written) / max(1, line.source_tokens),
            looped=looped,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class OtherWord:
    """Another word at a position of a translation, and the best translation with that word."""

    word: str
    probability: float  # of the word at this position
    text: str
    score: float
    logprob: float


@dataclass(frozen=True)
class Scored:
    """The log-probability of a given translation, in total and of each token, </s> last."""

    logprob: float
    tokens: list[str]
    token_logprobs: list[float]

    @property
    def perplexity(self) -> float:
        return math.exp(min(700.0, -self.logprob / len(self.token_logprobs)))


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
        tags = self._prefix(tag)

        def cut(text: str, number: int) -> tuple[Sequence[str], Callable[[list[str]], str]]:
            constrained = bool(prefixes[number] or required[number])  # … for the text as a whole, not for a sentence
            pieces = self._pieces(text, sentences=split and self.run.by_sentence and not constrained)
            if len(pieces) > 1 and constrained:
                raise UsageError(
                    f"text {first + number + 1} is translated in {len(pieces)} pieces, but a prefix or must_include "
                    f"needs a single piece: split the text into sentences"
                )
            return pieces.pieces, partial(pieces.join, spaces=not without_spaces(self.config.data.tgt_lang))

        looped: set[int] = set()  # texts

        def search(sources: list[list[int]], line_of: list[int]) -> list[list[Hypothesis]]:
            places = [place for _, group in groupby(line_of) for place, _ in enumerate(group)]  # of a piece in its text
            work = SearchInput(
                sources,
                prefixes=[tgt.encode(prefixes[n].rstrip()) for n in line_of],
                required=[request.required(required[n], prefixes[n], tgt) for n in line_of],
                numbers=[((first + n) << 20) + place for n, place in zip(line_of, places, strict=True)],
            )
            self._check_positions(max([request.options.max_length or 0, *map(len, work.prefixes)]))
            missing = Counter(line_of)
            progress(len(texts) - len(missing))

            def finished(indices: Sequence[int]) -> None:
                missing.subtract(line_of[i] for i in indices)
                progress(sum(not missing[n] for n in {line_of[i] for i in indices}))

            hypotheses, repeated = self._search(work, request, finished)
            looped.update(n for n, is_repeated in zip(line_of, repeated, strict=True) if is_repeated)
            return hypotheses

        room = self.config.data.max_length
        lines = translate_lines(texts, self.tokenizers, search, max_length=room, tag=tags, split=cut)
        translations = [Translation.of(line, tgt, looped=number in looped) for number, line in enumerate(lines)]
        if request.avoid is not None:  # the search cannot prevent a phrase across the border of two pieces
            for number, each in enumerate(translations, first + 1):
                found = map(request.avoid.occurs, (each.text, *(other.text for other in each.alternatives)))
                if phrase := next(filter(None, found), None):
                    raise QkvError(
                        f'text {number}: "{phrase}" is forbidden, but arises where translations of two pieces meet: '
                        f"split the text into sentences"
                    )
        return translations

    def _search(
        self, work: SearchInput, request: SearchRequest, progress: Callable[[Sequence[int]], None]
    ) -> tuple[list[list[Hypothesis]], list[bool]]:
        """Search; repeat the search with blocked n-grams for looped outputs. Return n-best lists, and which looped."""
        results = self.runner.run(work, request, progress)
        looped = [False] * len(results)
        repeat: dict[int, list[int]] = {}  # length of the n-grams to block -> sentences
        for i, hypotheses in enumerate(results):
            if (loop := find_loop(hypotheses[0].tokens, work.sources[i])) is not None:
                looped[i] = True
                repeat.setdefault(breaking(loop, request.options.no_repeat_ngram), []).append(i)
        for n, indices in repeat.items():
            options = dataclasses.replace(request.options, no_repeat_ngram=n)
            try:
                second = self.runner.run(work.some(indices), dataclasses.replace(request, options=options))
            except QkvError:  # the constraints need repeated n-grams: keep the first result
                continue
            for i, hypotheses in zip(indices, second, strict=True):
                if find_loop(hypotheses[0].tokens, work.sources[i]) is None:
                    results[i] = hypotheses
        return results, looped

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
        sources = self._pieces(source, sentences=self.run.by_sentence)
        targets = split(translation, lambda piece: True, sentences=True)
        if 1 < len(sources) == len(targets):
            return self._alternatives_in(sources, targets, position, n, tag=tag, beam=beam)
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

    def _pieces(self, line: str, *, sentences: bool) -> Pieces:
        limit = self.config.data.max_length
        return split(line, lambda piece: len(self.tokenizers.src.encode(piece)) <= limit, sentences=sentences)
