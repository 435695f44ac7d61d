"""The options of a translation: what a call may ask for, checked, and made into what the search takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from qkv import config as configs
from qkv.core.errors import UsageError
from qkv.decode.phrases import Avoid, Required, check_conflict, clean
from qkv.decode.rerank import UTILITIES
from qkv.decode.rules import Rules
from qkv.decode.sampling import Sampling
from qkv.text import Tokenizer, Tokenizers

CANDIDATES = 16  # among which `rerank` chooses, unless told
SPACELESS = {"zh", "zho", "cmn", "yue", "ja", "jpn", "th", "tha", "lo", "lao", "km", "khm", "my", "mya"}


class Options(TypedDict, total=False):
    """How to translate; None is as the run's config has it, or not at all.

    `n_best` translations of each text come back. `beam`, `length_penalty` and `alpha` are those of the config; lengths
    are in tokens. With `sample` each is drawn, seeded for each text alone, instead of searched for; what is said of
    drawing is in `qkv.decode.sampling.Sampling`, of the rules in `qkv.decode.rules.Rules`.

    Every translation begins with `prefix`, has the phrases `must_include`, in this order if `ordered`, and none of
    `avoid` (`qkv.decode.phrases`); for several texts, `prefix` and `must_include` may be lists with one entry for each.
    `shortlist` looks only at words that the source's can need. `rerank` is chrf or bleu: of so many `candidates` the
    one that the others agree with most. `first` is how many texts of the same input came before, for the seeds.
    """

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
class Asked:
    """What the search is asked for in a call, the same for all its texts."""

    spec: configs.DecodeConfig
    rules: Rules
    n_best: int
    candidates: int  # hypotheses searched for, of which n_best come back
    rerank: str | None
    avoid: Avoid | None
    whole_words: bool
    ordered: bool
    shortlist: bool

    @classmethod
    def of(
        cls,
        config: configs.Config,
        tokenizer: Tokenizer,
        *,
        beam: int | None = None,
        n_best: int = 1,
        length_penalty: str | None = None,
        alpha: float | None = None,
        sample: bool = False,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        must_include: Sequence[str] = (),
        ordered: bool = False,
        avoid: Sequence[str] = (),
        shortlist: bool = False,
        rerank: str | None = None,
        candidates: int | None = None,
        **rules: Any,
    ) -> Asked:
        """The options of a call, with all phrases that any text must have; those of `Rules` go there as they are."""
        if n_best < 1:
            raise UsageError(f"n_best = {n_best}: must be at least 1")
        if sample and beam is not None:
            raise UsageError("sample and beam exclude each other: samples are drawn one by one")
        searched = {"beam": beam, "length_penalty": length_penalty, "alpha": alpha}
        given = {name: value for name, value in searched.items() if value is not None}
        drawn: dict[str, Any] = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
        }
        how = {name: value for name, value in drawn.items() if value is not None}
        if how and not sample:
            raise UsageError(f"{', '.join(how)}: for samples only: ask for them too (sample, --sample)")
        spec, own = (config.replace(decode=given) if given else config).decode, Rules(**rules)
        if "diversity" in rules and own.groups == 1:
            raise UsageError("diversity: for groups of beams only: ask for them too (groups, --groups 2)")
        if alpha is not None and spec.length_penalty != "gnmt":
            raise UsageError(f"alpha: for the gnmt penalty only, and this is {spec.length_penalty}: leave it out")
        if ordered and not must_include:
            raise UsageError("ordered: for required phrases only: give them too (must_include, --must-include)")
        if shortlist and own.coverage:
            raise UsageError("coverage looks at attention, which the model of a shortlist does not tell: leave out one")
        whole_words = not without_spaces(config.data.tgt_lang)
        spelt = Required.of(must_include, tokenizer, whole_words=whole_words).spelt
        never = Avoid(avoid, tokenizer, whole_words, exempt=spelt) if avoid else None
        return cls(
            spec=spec,
            rules=Rules(**rules, sampling=Sampling(**how) if sample else None, forbid=(never,) if never else ()),
            n_best=n_best,
            candidates=_candidates(rerank, candidates, n_best),
            rerank=rerank,
            avoid=never,
            whole_words=whole_words,
            ordered=ordered,
            shortlist=shortlist,
        )

    def required(self, phrases: Sequence[str], prefix: str, tokenizer: Tokenizer) -> Required | None:
        """The phrases that one text must have, if they can be had."""
        if self.avoid is not None:
            check_conflict(clean(phrases, "must_include"), prefix, self.avoid)
        if not phrases:
            return None
        if self.rules.sampling is not None or self.rules.groups > 1:
            raise UsageError("must_include is for one beam: leave out sample and groups")
        return Required.of(phrases, tokenizer, ordered=self.ordered, whole_words=self.whole_words)


def _candidates(rerank: str | None, candidates: int | None, n_best: int) -> int:
    """How many hypotheses to search for."""
    if rerank is None:
        if candidates is not None:
            raise UsageError("candidates are for choosing among them: say by what (rerank, --rerank chrf)")
        return n_best
    if rerank not in UTILITIES:
        raise UsageError(f'rerank = "{rerank}": must be one of {", ".join(UTILITIES)}')
    if candidates is not None and candidates < n_best:
        raise UsageError(f"candidates = {candidates}: must be at least n_best, {n_best}")
    return max(n_best, CANDIDATES) if candidates is None else candidates


def tag_before(tag: str, tokenizers: Tokenizers, config: configs.Config) -> list[int]:
    """The ids before every source: the language tag, which a model trained with tags alone cannot do without."""
    if tag:
        return [tokenizers.src.tag(tag)]
    if tokenizers.src.tags and all(corpus.tag for corpus in config.data.train):
        known = ", ".join(tokenizers.src.tags)
        raise UsageError(f"this model was trained with language tags: give one of them as tag (--tag): {known}")
    return []


def prefixes(prefix: str | Sequence[str], texts: int) -> list[str]:
    """The beginning that is asked for of each text."""
    if isinstance(prefix, str):
        return [prefix] * texts
    if len(prefix) != texts:
        raise UsageError(f"{len(prefix)} prefixes for {texts} texts: give one for all, or one for each")
    return list(prefix)


def phrases(must_include: Sequence[str] | Sequence[Sequence[str]], texts: int) -> list[list[str]]:
    """The phrases that are asked for of each text: one list for all, or a list for each."""
    if isinstance(must_include, str):
        raise UsageError("must_include takes a list of phrases: put the phrase in brackets")
    if all(isinstance(each, str) for each in must_include):
        return [[str(each) for each in must_include]] * texts
    if len(must_include) != texts or any(isinstance(each, str) for each in must_include):
        raise UsageError(f"must_include has {len(must_include)} lists for {texts} texts: give one for each")
    return [list(each) for each in must_include]
