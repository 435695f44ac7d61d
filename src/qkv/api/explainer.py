"""Explainer: attention maps, what-if translations, head importance and word alignment of a trained run."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from qkv.api.loading import LoadedRun
from qkv.console import Advance
from qkv.core.errors import UsageError
from qkv.core.transformer import TranslationModel
from qkv.decoding.search_request import tag_before
from qkv.explain.attention_heads import HeadImportance, HeadName, head_importance
from qkv.explain.attention_maps import AttentionMap, attention_map
from qkv.explain.counterfactuals import WhatIf, edit, what_if
from qkv.explain.decoding_tree import EncodedSource, forced_steps, trace_search
from qkv.explain.word_alignment import Alignment, AlignmentHead, align_pairs, alignment_head


class Changes(TypedDict, total=False):
    """Changes for a what-if translation (`qkv.explain.counterfactuals`)."""

    heads_off: Iterable[HeadName]
    force: tuple[int, str | int] | None
    begin: str | None
    drop: Collection[int]
    replace: Mapping[int, str] | None


class Explainer(LoadedRun[TranslationModel]):
    """A trained translation run and methods that explain its translations; in an ensemble, those of the first run."""

    model_class = TranslationModel

    def attention(self, source: str, target: str | None = None, *, tag: str = "") -> AttentionMap:
        """Return the attention weights of every layer and head for the model's translation, or for `target`.

        The map includes the candidates at each step and, if the translation was searched for, the beam as a tree.
        """
        source, target = source.strip(), None if target is None else target.strip()
        ids = self._sentence(source, tag)
        encoded, beam = EncodedSource(self.model, self.tokenizers, ids, self.device), None
        if target is None:
            decoding = trace_search(encoded, self.config.decode)
            written, steps, beam = decoding.hypotheses[0].tokens, decoding.steps, decoding.beam
        else:
            written = self.tokenizers.tgt.encode(target)
            steps = forced_steps(encoded, written)
        weights = attention_map(self.model, self.tokenizers, source, ids, written, self.device)
        return dataclasses.replace(weights, steps=steps, beam=beam)

    def what_if(self, source: str, *, tag: str = "", beam: int | None = None, **changes: Unpack[Changes]) -> WhatIf:
        """Translate a sentence as it is and with changes: heads muted, another word forced, source words dropped."""
        self._sentence(source := source.strip(), tag)
        edited = edit(self.tokenizers.src, source, changes.get("drop", ()), changes.get("replace") or {})
        self._sentence(edited, tag)
        spec = self.config.replace(decode={} if beam is None else {"beam": beam}).decode
        return what_if(self.model, self.tokenizers, spec, self.device, source, tag=self._prefix(tag), **changes)

    def importance(
        self, sources: Sequence[str], targets: Sequence[str], *, tag: str = "", progress: Advance = lambda done: None
    ) -> list[HeadImportance]:
        """Return the increase of the loss of these translations without each head, most important first."""
        rows = [self._sentence(line, tag, f"line {number}: ") for number, line in enumerate(sources, 1)]
        written = [self.tokenizers.tgt.encode(line.strip()) for line in targets]
        return head_importance(self.model, self.tokenizers, rows, written, self.device, progress)

    def align(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        head: AlignmentHead | None = None,
        rule: str = "marks",
        tag: str = "",
        progress: Advance = lambda done: None,
    ) -> list[Alignment]:
        """Align the words of each translation with those of its source.

        The default head is that of the run's `alignment.json` (`qkv align --find`), else that of guided alignment, else
        the mean of all heads.
        """
        if len(sources) != len(targets):
            raise UsageError(f"{len(sources)} sources but {len(targets)} targets: they must correspond line by line")
        self._prefix(tag)
        head = head or alignment_head(self.run)
        options: dict[str, Any] = {"rule": rule, "tag": tag, "progress": progress}
        return align_pairs(self.model, self.tokenizers, sources, targets, self.device, head, **options)

    def _sentence(self, text: str, tag: str, where: str = "") -> list[int]:
        """Return the ids of one sentence; refuse text that the model cannot read as a whole."""
        ids, limit = self.tokenizers.src.encode(text.strip()), self.config.data.max_length
        if not ids or len(ids) > limit:
            raise UsageError(f"{where}{len(ids)} tokens: give one sentence of 1 to {limit} tokens")
        return self._prefix(tag) + ids

    def _prefix(self, tag: str) -> list[int]:
        return tag_before(tag, self.tokenizers, self.config)
