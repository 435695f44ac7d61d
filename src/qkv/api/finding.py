"""From the sources of a call to its hypotheses: the right search for each, then what is done with what was found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv.api.asking import Asked
from qkv.core.errors import QkvError
from qkv.decode.batched import score_all, search_all
from qkv.decode.board import Hypothesis, Ids
from qkv.decode.phrases import Required, constrained
from qkv.decode.rerank import rerank
from qkv.decode.shortlist import Shortlist, search_short
from qkv.decode.step import length_penalty
from qkv.decode.workers import search_in
from qkv.engines.cuda_decoding.continuous_batching import Pool
from qkv.evaluate.metrics import tokenizer_for
from qkv.models.attention import is_watched
from qkv.models.state import StepModel
from qkv.text import Tokenizers
from qkv.worker_pool import ProcessWorkers

Heard = Callable[[Sequence[int]], None]


@dataclass(frozen=True)
class Work:
    """Sentences to translate, and what each of them has of its own."""

    sources: list[list[int]]
    prefixes: list[list[int]]
    required: list[Required | None]
    numbers: list[int]  # in the whole input: draws are seeded by them

    def some(self, indices: Sequence[int]) -> Work:
        """The sentences of these places."""
        return Work(*([getattr(self, each.name)[i] for i in indices] for each in dataclasses.fields(self)))


@dataclass(frozen=True)
class Finder:
    """A model and everything it searches with."""

    model: StepModel[Any, Any]
    plain: StepModel[Any, Any]  # the same as it was trained, whose attention can be recorded
    tokenizers: Tokenizers
    device: torch.device
    tgt_lang: str = ""
    narrow: Callable[[Tensor], StepModel[Any, Any]] | None = None  # the same with these tokens alone, …
    shortlist: Shortlist | None = None  # … which it chooses
    pool: Pool | None = None
    workers: ProcessWorkers[Any] | None = None

    def find(self, work: Work, asked: Asked, progress: Heard = lambda finished: None) -> list[list[Hypothesis]]:
        """The n best hypotheses of each sentence, by score, or by `rerank`."""
        free = [i for i, required in enumerate(work.required) if required is None]
        bound = [i for i, required in enumerate(work.required) if required is not None]
        found: list[list[Hypothesis]] = [[] for _ in work.sources]

        def heard(indices: list[int]) -> Heard:
            def tell(finished: Sequence[int]) -> None:
                progress([indices[i] for i in finished])

            return tell

        for indices in (free, bound):
            if indices:
                for i, hypotheses in zip(indices, self._search(work.some(indices), asked, heard(indices)), strict=True):
                    found[i] = hypotheses
        if asked.rules.groups > 1:
            found = [_distinct(hypotheses) for hypotheses in found]
        if asked.shortlist:
            found = self._rescored(work, found, asked)
        self._check(work, found)
        if asked.rerank is not None:
            found = [self._reranked(hypotheses[: asked.candidates], asked) for hypotheses in found]
        return [hypotheses[: asked.n_best] for hypotheses in found]

    def _search(self, work: Work, asked: Asked, progress: Heard) -> list[list[Hypothesis]]:
        """Sentences that all have required phrases, or none of which has."""
        # Groups may find the same: of all that they find, the best that differ are kept.
        wanted = max(asked.candidates, asked.spec.beam) if asked.rules.groups > 1 else asked.candidates
        options: dict[str, Any] = {
            "n_best": wanted,
            "choice": asked.rules.choice(),
            "max_length": asked.rules.max_length,
            "progress": progress,
        }
        each: dict[str, Sequence[Any]] = {"prefixes": work.prefixes, "numbers": work.numbers}
        required = [own for own in work.required if own is not None]
        # Only the plain model tells its attention, and lets heads be muted.
        watched = bool(asked.rules.coverage) or is_watched()
        if self.workers is not None and not (required or asked.shortlist or asked.avoid or watched):
            return search_in(self.workers, work.sources, asked.spec, each=each, **options)
        if required:
            options["kind"] = lambda batch: constrained([required[i] for i in batch])
        else:
            options["pool"] = self.pool
        where: dict[str, Any] = {"device": self.device, **options, **each}
        if asked.shortlist and self.narrow is not None and self.shortlist is not None:
            del where["pool"], where["prefixes"]
            return search_short(self.narrow, self.shortlist, work.sources, asked.spec, self.tokenizers, **where)
        model = self.plain if watched else self.model
        return search_all(model, work.sources, asked.spec, self.tokenizers, **where)

    def _rescored(self, work: Work, found: list[list[Hypothesis]], asked: Asked) -> list[list[Hypothesis]]:
        """With the model's own log-probabilities: over a shortlist all are larger."""
        sources: list[Ids] = [source for source, each in zip(work.sources, found, strict=True) for _ in each]
        targets = [hypothesis.tokens for each in found for hypothesis in each]
        rows = iter(score_all(self.model, sources, targets, self.tokenizers, device=self.device))

        def again(old: Hypothesis) -> Hypothesis:
            logprob = sum(next(rows))
            gain = (logprob - old.logprob) / float(length_penalty(len(old.tokens) + 1.0, asked.spec))
            return dataclasses.replace(old, logprob=logprob, score=old.score + gain)

        return [sorted((again(old) for old in hypotheses), key=lambda h: -h.score) for hypotheses in found]

    def _reranked(self, hypotheses: list[Hypothesis], asked: Asked) -> list[Hypothesis]:
        texts = [self.tokenizers.tgt.decode(hypothesis.tokens) for hypothesis in hypotheses]
        scores = [hypothesis.score for hypothesis in hypotheses]
        drawn = asked.rules.sampling is not None
        logprobs = None if drawn else [hypothesis.logprob for hypothesis in hypotheses]
        order = rerank(texts, scores, asked.rerank or "", tokenizer_for(self.tgt_lang), logprobs)
        return [hypotheses[place] for place in order]

    def _check(self, work: Work, found: list[list[Hypothesis]]) -> None:
        """What was required is there: the search sees to it, and the text is the proof."""
        for required, hypotheses in zip(work.required, found, strict=True):
            for hypothesis in hypotheses if required is not None else ():
                text = self.tokenizers.tgt.decode(hypothesis.tokens).replace("\n", " ")
                if required is not None and (missing := required.missing(text)):
                    raise QkvError(f'must_include: "{required.phrases[missing[0]]}" was not met in "{text}"')


def _distinct(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """The first of each that are alike."""
    first = {tuple(hypothesis.tokens): hypothesis for hypothesis in reversed(hypotheses)}
    return sorted(first.values(), key=lambda hypothesis: -hypothesis.score)
