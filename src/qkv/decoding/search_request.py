"""The options of a translation call, checked, and the search that follows from them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor

from qkv.core.attention import wrappers
from qkv.core.batches import Batch, collate
from qkv.core.errors import QkvError, UsageError
from qkv.core.search import Hypothesis, Ids, SearchOptions, StartSearch, length_penalty, start_search
from qkv.core.tokenizer import Tokenizer, TokenizerPair, one_line
from qkv.core.transformer import StepModel
from qkv.core.translate import by_length, search_all
from qkv.decoding.beam_variants import DecodingOptions
from qkv.decoding.constraints import Avoid, MustInclude, check_conflict, clean
from qkv.decoding.logits_processors import Sampling
from qkv.decoding.mbr import UTILITIES, rerank
from qkv.decoding.shortlist import Shortlist, search_short
from qkv.evaluation.metrics import bleu_tokenizer
from qkv.options import Config

CANDIDATES = 16  # default number of hypotheses for `rerank`
SPACELESS = {"zh", "zho", "cmn", "yue", "ja", "jpn", "th", "tha", "lo", "lao", "km", "khm", "my", "mya"}


class Options(TypedDict, total=False):
    """How to translate; None is as the run's config has it, or not at all.

    `n_best` translations of each text come back. `beam`, `length_penalty` and `alpha` are those of the config; lengths
    are in tokens. With `sample` each is drawn, seeded for each text alone, instead of searched for
    (`qkv.decoding.logits_processors.Sampling`); the other options are in `qkv.decoding.beam_variants.DecodingOptions`.

    Every translation begins with `prefix`, has the phrases `must_include`, in this order if `ordered`, and none of
    `avoid` (`qkv.decoding.constraints`); for several texts, `prefix` and `must_include` may be lists with one entry for
    each. `shortlist` looks only at words that the source's can need. `rerank` is chrf or bleu: of so many `candidates`
    the one that the others agree with most. `first` is how many texts of the same input came before, for the seeds.

    With `split` a text is translated in pieces of as many sentences as a line of the training text had, mostly one;
    without it a text is cut only where it is longer than the model can read. `newlines` is join (a line without a mark
    at its end goes on in the next one) or keep. Of these options, lengths, sampling and penalties are those of a piece;
    n_best, avoid and the score are those of the text; a text with a `prefix` or with `must_include` is one piece.
    `protected` has, for each text, spans that must come back unchanged, beside URLs, placeholders, tags and the like.
    `check` is false to accept translations that may leave something out (`qkv.api.omission`).
    """

    split: bool
    newlines: str
    protected: Sequence[Sequence[tuple[int, int]]]
    check: bool
    beam: int | None
    n_best: int
    length_penalty: str | None
    alpha: float | None
    min_length: int
    max_length: int | None
    coverage: float
    repetition_penalty: float
    no_repeat_ngram: int
    groups: int
    diversity: float
    sample: bool
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    prefix: str | Sequence[str]
    must_include: Sequence[str] | Sequence[Sequence[str]]
    ordered: bool
    avoid: Sequence[str]
    shortlist: bool
    rerank: str | None
    candidates: int | None
    tag: str
    first: int
    progress: Callable[[int], None]


def without_spaces(language: str) -> bool:
    """Whether a language, by its code, is written without spaces between words."""
    return re.split(r"[-_]", language.lower())[0] in SPACELESS


@dataclass(frozen=True)
class SearchRequest:
    """The checked options of a call, the same for all its texts."""

    options: DecodingOptions
    n_best: int
    candidates: int  # hypotheses to search for; n_best of them are returned
    rerank: str | None
    avoid: Avoid | None
    whole_words: bool
    ordered: bool
    shortlist: bool

    @classmethod
    def of(
        cls,
        config: Config,
        tokenizer: Tokenizer,
        *,
        beam: int | None = None,
        n_best: int = 1,
        length_penalty: str | None = None,
        alpha: float | None = None,
        sample: bool = False,
        must_include: Sequence[str] = (),
        ordered: bool = False,
        avoid: Sequence[str] = (),
        shortlist: bool = False,
        rerank: str | None = None,
        candidates: int | None = None,
        **rules: Any,
    ) -> SearchRequest:
        """Check the options of a call; `must_include` are the phrases of all texts.

        `rules` are the fields of `Sampling` and of `DecodingOptions`.
        """
        if n_best < 1:
            raise UsageError(f"n_best = {n_best}: must be at least 1")
        if sample and beam is not None:
            raise UsageError("sample and beam exclude each other: samples are drawn one by one")
        searched = {"beam": beam, "length_penalty": length_penalty, "alpha": alpha}
        given = {name: value for name, value in searched.items() if value is not None}
        drawn = {each.name: rules.pop(each.name, None) for each in dataclasses.fields(Sampling)}
        how = {name: value for name, value in drawn.items() if value is not None}
        if how and not sample:
            raise UsageError(f"{', '.join(how)}: for samples only: add sample (--sample)")
        spec = (config.replace(decode=given) if given else config).decode
        own = DecodingOptions(**vars(spec), sampling=Sampling(**how) if sample else None, **rules)
        if "diversity" in rules and own.groups == 1:
            raise UsageError("diversity: for groups of beams only: add groups (--groups 2)")
        if alpha is not None and spec.length_penalty != "gnmt":
            raise UsageError(f"alpha: for the gnmt penalty only, and this is {spec.length_penalty}: omit it")
        if ordered and not must_include:
            raise UsageError("ordered: for required phrases only: give them too (must_include, --must-include)")
        if shortlist and own.coverage:
            raise UsageError(
                "coverage needs attention weights, which a search with a shortlist does not have: omit one of the two"
            )
        whole_words = not without_spaces(config.data.tgt_lang)
        spelt = MustInclude.of(must_include, tokenizer, whole_words=whole_words).spelt
        never = Avoid(avoid, tokenizer, whole_words, exempt=spelt) if avoid else None
        wanted = _candidates(rerank, candidates, n_best)
        # Groups may find the same: of all that they find, the best that differ are kept.
        searched_for = max(wanted, spec.beam) if own.groups > 1 else wanted
        return cls(
            options=dataclasses.replace(own, n_best=searched_for, processors=(never,) if never else ()),
            n_best=n_best,
            candidates=wanted,
            rerank=rerank,
            avoid=never,
            whole_words=whole_words,
            ordered=ordered,
            shortlist=shortlist,
        )

    def required(self, phrases: Sequence[str], prefix: str, tokenizer: Tokenizer) -> MustInclude | None:
        """Return the required phrases of one text; conflicts with other options are refused."""
        if self.avoid is not None:
            check_conflict(clean(phrases, "must_include"), prefix, self.avoid)
        if not phrases:
            return None
        if self.options.sampling is not None or self.options.groups > 1:
            raise UsageError("must_include is for one beam: omit sample and groups")
        return MustInclude.of(phrases, tokenizer, ordered=self.ordered, whole_words=self.whole_words)


def _candidates(rerank: str | None, candidates: int | None, n_best: int) -> int:
    """How many hypotheses to search for."""
    if rerank is None:
        if candidates is not None:
            raise UsageError("candidates need a metric to choose by: add rerank (--rerank chrf)")
        return n_best
    if rerank not in UTILITIES:
        raise UsageError(f'rerank = "{rerank}": must be one of {", ".join(UTILITIES)}')
    if candidates is not None and candidates < n_best:
        raise UsageError(f"candidates = {candidates}: must be at least n_best, {n_best}")
    return max(n_best, CANDIDATES) if candidates is None else candidates


def tag_before(tag: str, tokenizers: TokenizerPair, config: Config) -> list[int]:
    """The ids before every source: the language tag, which a model trained with tags alone cannot do without."""
    if tag:
        return [tokenizers.src.tag(tag)]
    if tokenizers.src.tags and all(corpus.tag for corpus in config.data.visited):
        known = ", ".join(tokenizers.src.tags)
        raise UsageError(f"this model was trained with language tags: give one of them as tag (--tag): {known}")
    return []


def prefixes(prefix: str | Sequence[str], texts: int) -> list[str]:
    """Return the prefix of each text."""
    if isinstance(prefix, str):
        return [prefix] * texts
    if len(prefix) != texts:
        raise UsageError(f"{len(prefix)} prefixes for {texts} texts: give one for all, or one for each")
    return list(prefix)


def phrases(must_include: Sequence[str] | Sequence[Sequence[str]], texts: int) -> list[list[str]]:
    """Return the required phrases of each text: given as one list for all, or a list for each."""
    if isinstance(must_include, str):
        raise UsageError("must_include takes a list of phrases: put the phrase in brackets")
    if all(isinstance(each, str) for each in must_include):
        return [[str(each) for each in must_include]] * texts
    if len(must_include) != texts or any(isinstance(each, str) for each in must_include):
        raise UsageError(f"must_include has {len(must_include)} lists for {texts} texts: give one for each")
    return [list(each) for each in must_include]


# ---- the search for all sentences of a call --------------------------------------------------------------------------


Progress = Callable[[Sequence[int]], None]  # gets the places of the sentences that are finished


class DecodingEngine(Protocol):
    """Replaces `search_all` for the options that it supports: processes, or slots on a GPU."""

    def supports(self, options: SearchOptions) -> str | None:
        """Return None, or the reason why `search_all` has to do it."""
        ...

    def search_all(
        self,
        sources: Sequence[Ids],
        options: SearchOptions,
        *,
        prefixes: Sequence[Ids] | None = None,
        numbers: Sequence[int] | None = None,
        progress: Progress = lambda finished: None,
    ) -> list[list[Hypothesis]]:
        """Return the n best hypotheses of each source, in the order of the sources."""
        ...


@dataclass(frozen=True)
class SearchInput:
    """Sentences to translate, with the options that differ from sentence to sentence."""

    sources: list[list[int]]
    prefixes: list[list[int]]
    required: list[MustInclude | None]
    numbers: list[int]  # in the whole input: they seed samples

    def some(self, indices: Sequence[int]) -> SearchInput:
        """Return the sentences of these places."""
        return SearchInput(*([getattr(self, each.name)[i] for i in indices] for each in dataclasses.fields(self)))


@dataclass(frozen=True)
class SearchRunner:
    """A model with everything that its searches use."""

    model: StepModel
    plain: StepModel  # the model before packing: its attention can be recorded
    tokenizers: TokenizerPair
    device: torch.device
    tgt_lang: str = ""
    narrow: Callable[[Tensor], StepModel] | None = None  # the model with these output tokens alone …
    shortlist: Shortlist | None = None  # … which are chosen here
    start: StartSearch = start_search  # an engine's is faster
    engines: Sequence[DecodingEngine] = ()  # the first that supports the options does the search

    def run(
        self, work: SearchInput, request: SearchRequest, progress: Progress = lambda finished: None
    ) -> list[list[Hypothesis]]:
        """Return the n best hypotheses of each sentence, by score, or by `rerank`."""
        found: list[list[Hypothesis]] = [[] for _ in work.sources]
        bound = [i for i, required in enumerate(work.required) if required is not None]
        free = [i for i, required in enumerate(work.required) if required is None]
        for indices in (free, bound):
            if indices:
                reached = _renumbered(progress, indices)
                for i, hypotheses in zip(indices, self._search(work.some(indices), request, reached), strict=True):
                    found[i] = hypotheses
        if request.options.groups > 1:
            found = [_distinct(hypotheses) for hypotheses in found]
        if request.shortlist:
            found = self._rescored(work, found, request)
        self._check(work, found)
        if request.rerank is not None:
            found = [self._reranked(hypotheses[: request.candidates], request) for hypotheses in found]
        return [hypotheses[: request.n_best] for hypotheses in found]

    def _search(self, work: SearchInput, request: SearchRequest, progress: Progress) -> list[list[Hypothesis]]:
        """Search for sentences: all of them have required phrases, or none has."""
        required = {n: own for n, own in zip(work.numbers, work.required, strict=True) if own is not None}
        options = dataclasses.replace(request.options, required=required or None)
        each: dict[str, Any] = {"numbers": work.numbers, "progress": progress}
        # Attention is recorded, and heads are muted, in the plain model alone.
        watched = bool(options.coverage) or bool(wrappers.get())
        if request.shortlist and self.narrow is not None and self.shortlist is not None:
            each |= {"device": self.device, "start": self.start}
            return search_short(self.narrow, self.shortlist, work.sources, options, self.tokenizers, **each)
        each["prefixes"] = work.prefixes
        if not (required or watched):
            for engine in self.engines:
                if engine.supports(options) is None:
                    return engine.search_all(work.sources, options, **each)
        each |= {"device": self.device, "start": self.start}
        model = self.plain if watched else self.model
        return search_all(model, work.sources, options, self.tokenizers, **each)

    def _rescored(
        self, work: SearchInput, found: list[list[Hypothesis]], request: SearchRequest
    ) -> list[list[Hypothesis]]:
        """Score the hypotheses with the whole vocabulary: over a shortlist all log-probabilities are larger."""
        sources: list[Ids] = [source for source, each in zip(work.sources, found, strict=True) for _ in each]
        targets = [hypothesis.tokens for each in found for hypothesis in each]
        rows = iter(score_all(self.model, sources, targets, self.tokenizers, device=self.device))

        def again(old: Hypothesis) -> Hypothesis:
            logprob = sum(next(rows))
            gain = (logprob - old.logprob) / float(length_penalty(len(old.tokens) + 1.0, request.options))
            return dataclasses.replace(old, logprob=logprob, score=old.score + gain)

        return [sorted((again(old) for old in hypotheses), key=lambda h: -h.score) for hypotheses in found]

    def _reranked(self, hypotheses: list[Hypothesis], request: SearchRequest) -> list[Hypothesis]:
        texts = [self.tokenizers.tgt.decode(hypothesis.tokens) for hypothesis in hypotheses]
        scores = [hypothesis.score for hypothesis in hypotheses]
        drawn = request.options.sampling is not None
        logprobs = None if drawn else [hypothesis.logprob for hypothesis in hypotheses]
        order = rerank(texts, scores, request.rerank or "", bleu_tokenizer(self.tgt_lang), logprobs)
        return [hypotheses[place] for place in order]

    def _check(self, work: SearchInput, found: list[list[Hypothesis]]) -> None:
        """Check in the text that required phrases are there."""
        for required, hypotheses in zip(work.required, found, strict=True):
            for hypothesis in hypotheses if required is not None else ():
                text = one_line(self.tokenizers.tgt.decode(hypothesis.tokens))
                if required is not None and (missing := required.missing(text)):
                    raise QkvError(f'must_include: "{required.phrases[missing[0]]}" was not met in "{text}"')


def _renumbered(progress: Progress, indices: list[int]) -> Progress:
    """Return the progress of some sentences as that of all: place i among them is `indices[i]`."""
    return lambda finished: progress([indices[i] for i in finished])


def _distinct(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Return the first of each that are equal, by score."""
    first = {tuple(hypothesis.tokens): hypothesis for hypothesis in reversed(hypotheses)}
    return sorted(first.values(), key=lambda hypothesis: -hypothesis.score)


# ---- forced decoding -------------------------------------------------------------------------------------------------


def pair_batches(
    sources: Sequence[Ids], targets: Sequence[Ids], tokenizers: TokenizerPair, device: torch.device, tokens: int = 2048
) -> Iterator[tuple[list[int], Batch]]:
    """Yield all pairs in batches for teacher forcing, each with the places of its pairs.

    A batch is small because the logits of all its tokens exist at once: 300 MB with a vocabulary of 37,000.
    """
    lengths = [max(len(s), len(t)) + 1 for s, t in zip(sources, targets, strict=True)]
    for indices in by_length(lengths, tokens):
        source, target = ([np.asarray(side[i], np.int64) for i in indices] for side in (sources, targets))
        yield indices, collate(source, target, tokenizers).to(device)


@torch.inference_mode()
def token_logprobs(model: StepModel, batch: Batch, pad: int, encoded: Any = None) -> list[list[float]]:
    """Return log p of each label, </s> last, for each row; their sum is the log-probability of the target.

    `encoded` is the encoder's output for the batch, if it is already computed.
    """
    encoded = model.encode(batch.source, batch.lengths) if encoded is None else encoded
    logits, _ = model.step(batch.target, model.start(encoded))
    log_probs = logits.float().log_softmax(-1)  # (batch, target, vocab)
    chosen: Tensor = log_probs.gather(-1, batch.labels[:, :, None]).squeeze(-1)
    real = (batch.labels != pad).sum(1).tolist()
    return [row[:count] for row, count in zip(chosen.tolist(), real, strict=True)]


def score_all(
    model: StepModel,
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    tokenizers: TokenizerPair,
    *,
    device: torch.device,
    tokens: int = 2048,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[float]]:
    """Return log p of each token of each target, </s> last; `progress` gets how many more are done."""
    results: list[list[float]] = [[] for _ in sources]
    for indices, batch in pair_batches(sources, targets, tokenizers, device, tokens):
        for i, logprobs in zip(indices, token_logprobs(model, batch, tokenizers.tgt.pad), strict=True):
            results[i] = logprobs
        progress(len(indices))
    return results
