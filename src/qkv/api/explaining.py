"""What can be asked about a translation: the attention behind it, what would change it, which words correspond."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from qkv.api.loading import Loaded
from qkv.core.errors import UsageError
from qkv.core.transformer import TranslationModel
from qkv.decoding.search_request import tag_before
from qkv.explain.attention_hooks import HeadName
from qkv.explain.attention_maps import AttentionMap, attention_map
from qkv.explain.counterfactuals import WhatIf, edit, what_if
from qkv.explain.decoding_tree import forced_steps, trace_search
from qkv.explain.head_analysis import HeadImportance, head_importance
from qkv.explain.word_alignment import Alignment, AlignmentHead, align_pairs, alignment_head


class Changes(TypedDict, total=False):
    """What to change about a translation (`qkv.explain.counterfactuals`)."""

    heads_off: Iterable[HeadName]
    force: tuple[int, str | int] | None
    begin: str | None
    drop: Collection[int]
    replace: Mapping[int, str] | None


class Explained(Loaded[TranslationModel]):
    """A trained run that translates, and tells how; an ensemble tells how its first run does."""

    model_class = TranslationModel

    def attention(self, source: str, target: str | None = None, *, tag: str = "") -> AttentionMap:
        """The weights of every layer and head while the model writes its translation, or the given one.

        With them the steps of the decoding, with the candidates at each, and the beam as a tree; a translation that is
        given was not searched for, so it has no beam.
        """
        ids = self._sentence(source, tag)
        beam = None
        if target is None:
            found = trace_search(self.model, self.tokenizers, ids, self.config.decode, self.device)
            written, steps, beam = found.hypotheses[0].tokens, found.steps, found.beam
        else:
            written = self.tokenizers.tgt.encode(target)
            steps = forced_steps(self.model, self.tokenizers, ids, written, self.device)
        recorded = attention_map(self.model, self.tokenizers, source, ids, written, self.device)
        return dataclasses.replace(recorded, steps=steps, beam=beam)

    def what_if(self, source: str, *, tag: str = "", beam: int | None = None, **changes: Unpack[Changes]) -> WhatIf:
        """Translate a sentence as it is and with something changed: heads off, another word forced, words dropped."""
        self._sentence(source, tag)
        edited = edit(self.tokenizers.src, source, changes.get("drop", ()), changes.get("replace") or {})
        self._sentence(edited, tag)
        spec = self.config.replace(decode={} if beam is None else {"beam": beam}).decode
        return what_if(self.model, self.tokenizers, spec, self.device, source, tag=self._prefix(tag), **changes)

    def importance(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        tag: str = "",
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[HeadImportance]:
        """What every head is worth: how much the loss of these translations grows without it, most important first."""
        rows = [self._sentence(line, tag, f"line {number}: ") for number, line in enumerate(sources, 1)]
        return head_importance(
            self.model,
            self.tokenizers,
            rows,
            [self.tokenizers.tgt.encode(line) for line in targets],
            self.device,
            progress,
        )

    def align(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        head: AlignmentHead | None = None,
        rule: str = "marks",
        tag: str = "",
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Alignment]:
        """Which words of each translation come from which words of its source.

        By default through the head that the run's `alignment.json` names (`qkv align --find`), or that guided alignment
        taught, or else the mean of all heads.
        """
        if len(sources) != len(targets):
            raise UsageError(f"{len(sources)} sources but {len(targets)} targets: they must correspond line by line")
        self._prefix(tag)
        chosen = head or alignment_head(self.run)
        options: dict[str, Any] = {"rule": rule, "tag": tag, "progress": progress}
        return align_pairs(self.model, self.tokenizers, sources, targets, self.device, chosen, **options)

    def _sentence(self, text: str, tag: str, where: str = "") -> list[int]:
        """The ids of one sentence that the model can read as a whole."""
        ids = self._prefix(tag) + self.tokenizers.src.encode(text)
        limit = self.config.data.max_length
        if not text.strip() or len(ids) > limit:
            raise UsageError(f"{where}this is for one sentence of 1 to {limit} tokens, and here are {len(ids)}")
        return ids

    def _prefix(self, tag: str) -> list[int]:
        return tag_before(tag, self.tokenizers, self.config)
