"""Explainer: attention maps, what-if translations, head importance and word alignment of a trained run."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypedDict, Unpack

from qkv.api.loading import LoadedRun
from qkv.console import Advance
from qkv.core.errors import UsageError
from qkv.core.transformer import TranslationModel
from qkv.data.alignments import join_alignments, word_spans
from qkv.decoding.search_request import tag_before
from qkv.explain.attention_heads import HeadImportance, HeadName, head_importance
from qkv.explain.attention_maps import AttentionMap, attention_map
from qkv.explain.counterfactuals import WhatIf, edit, what_if
from qkv.explain.decoding_tree import EncodedSource, forced_steps, trace_search
from qkv.explain.word_alignment import Alignment, AlignmentHead, align_pairs, alignment_head
from qkv.segmentation.sentences import WORD, Pieces
from qkv.segmentation.sentences import split as cut_sentences
from qkv.segmentation.special_spaces import unwrapped
from qkv.segmentation.text_cutter import TextCutter

SHOWN = 60  # characters of a piece in an error message


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

    @cached_property
    def cutter(self) -> TextCutter:
        """Return what cuts texts into pieces as long as the lines of the training text."""
        return self.run.cutter

    def paired_pieces(self, source: str, target: str) -> tuple[Pieces, Pieces] | None:
        """Return a text and its translation in pieces that correspond; None if it is one piece, or they do not."""
        sources = self.cutter.cut(source).pieces
        if len(sources) < 2:
            return None
        language = self.config.data.tgt_lang
        targets = cut_sentences(target, lambda piece: True, sentences=self.cutter.sentences, language=language)
        return (sources, targets) if len(sources) == len(targets) else None

    def attention(self, source: str, target: str | None = None, *, tag: str = "", split: bool = True) -> AttentionMap:
        """Return the attention weights of every layer and head for the model's translation, or for `target`.

        The map includes the candidates at each step and, if the translation was searched for, the beam as a tree. It
        is that of one piece: a text of several is refused (`attention_maps` takes it), unless `split` is false.
        """
        return self._attention(self._one_piece(source, split), target, tag)

    def attention_maps(
        self, source: str, target: str | None = None, *, tag: str = "", split: bool = True
    ) -> list[AttentionMap]:
        """Return an attention map for each piece of a text, with the model's translation, or with that in `target`.

        A `target` that is not cut into as many pieces as the source is explained as a whole, as without `split`.
        """
        if target is not None and split and (paired := self.paired_pieces(source, target)):
            return [self._attention(unwrapped(a), b, tag) for a, b in zip(*paired, strict=True)]
        if target is None and split and (sources := self.cutter.cut(source).sources):
            return [self._attention(piece, None, tag) for piece in sources]
        return [self._attention(unwrapped(source.strip()), target, tag)]

    def _attention(self, source: str, target: str | None, tag: str) -> AttentionMap:
        source, target = unicodedata.normalize("NFC", source), None if target is None else target.strip()
        ids = self._sentence(source, tag)
        encoded, beam = EncodedSource(self.model, self.tokenizers, ids, self.device), None
        if target is None:
            decoding = trace_search(encoded, self.config.decode)
            written, steps, beam = decoding.hypotheses[0].tokens, decoding.steps, decoding.beam
        else:
            written = self.tokenizers.tgt.encode(target)
            steps = forced_steps(encoded, written)
        weights = attention_map(self.model, self.tokenizers, source, ids, written, self.device)
        unaligned = self._unaligned(source, weights.translation, tag) if weights.has_cross_attention else None
        return dataclasses.replace(weights, steps=steps, beam=beam, unaligned=unaligned)

    def _unaligned(self, source: str, translation: str, tag: str) -> list[tuple[int, int]]:
        """Return the spans of the source words that no word of the translation is aligned with; marks are no words."""
        (links,) = self.align([source], [translation], tag=tag, split=False)
        aligned = {i for i, _ in links}
        spans = enumerate(word_spans(source))
        return [(begin, end) for i, (begin, end) in spans if i not in aligned and WORD.search(source, begin, end)]

    def what_if(
        self, source: str, *, tag: str = "", beam: int | None = None, split: bool = True, **changes: Unpack[Changes]
    ) -> WhatIf:
        """Translate a sentence as it is and with changes: heads muted, another word forced, source words dropped.

        Words and steps are numbered in one piece: a text of several is refused, unless `split` is false.
        """
        self._sentence(source := self._one_piece(source, split), tag)
        edited = edit(self.tokenizers.src, source, changes.get("drop", ()), changes.get("replace") or {})
        self._sentence(edited, tag)
        spec = self.config.replace(decode={} if beam is None else {"beam": beam}).decode
        return what_if(self.model, self.tokenizers, spec, self.device, source, tag=self._prefix(tag), **changes)

    def importance(
        self, sources: Sequence[str], targets: Sequence[str], *, tag: str = "", progress: Advance = lambda done: None
    ) -> list[HeadImportance]:
        """Return the increase of the loss of these translations without each head, most important first.

        Lines are not cut.
        """
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
        split: bool = True,
        progress: Advance = lambda done: None,
    ) -> list[Alignment]:
        """Align the words of each translation with those of its source.

        A text of several sentences is aligned piece by piece if its translation has as many pieces, and as a whole if
        not, or if `split` is false. Words are numbered in the whole text.

        The default head is that of the run's `alignment.json` (`qkv align --find`), else that of guided alignment, else
        the mean of all heads.
        """
        if len(sources) != len(targets):
            raise UsageError(f"{len(sources)} sources but {len(targets)} targets: they must correspond line by line")
        self._prefix(tag)
        options: dict[str, Any] = {"head": head or alignment_head(self.run), "rule": rule, "tag": tag}
        if not split:
            return self._align(sources, targets, progress=progress, **options)
        parts = [self._word_pieces(*pair, rule) for pair in zip(sources, targets, strict=True)]
        pieces = [pair for of_text in parts for pair in of_text]
        links = iter(self._align(*_columns(pieces), progress=_of_texts(progress, parts), **options))
        aligned = []
        for source, target, of_text in zip(sources, targets, parts, strict=True):
            own = [sorted(next(links)) for _ in of_text]
            aligned.append(Alignment(join_alignments(source, target, *_columns(of_text), own, rule) or ()))
        return aligned

    def _align(
        self, sources: Sequence[str], targets: Sequence[str], *, head: AlignmentHead, **options: Any
    ) -> list[Alignment]:
        return align_pairs(self.model, self.tokenizers, sources, targets, self.device, head, **options)

    def _word_pieces(self, source: str, target: str, rule: str) -> list[tuple[str, str]]:
        """Return the pieces of a pair that correspond, or the whole pair if a cut would change the number of words."""
        if paired := self.paired_pieces(source, target):
            counts = [sum(len(word_spans(piece, rule)) for piece in pieces) for pieces in paired]
            if counts == [len(word_spans(text, rule)) for text in (source, target)]:
                return list(zip(*paired, strict=True))
        return [(source, target)]

    def _one_piece(self, text: str, split: bool) -> str:
        """Return a text as the model reads it; refuse one that is translated in several pieces."""
        sources = self.cutter.cut(text).sources if split else ()
        if len(sources) > 1:
            shown = " ".join(f'"{each[:SHOWN]}…"' if len(each) > SHOWN else f'"{each}"' for each in sources[:5])
            raise UsageError(
                f"the text is translated in {len(sources)} pieces, {shown}{' …' if len(sources) > 5 else ''}: give one "
                f"of them, one sentence of 1 to {self.config.data.max_length} tokens"
            )
        return sources[0] if sources else unwrapped(text.strip())

    def _sentence(self, text: str, tag: str, where: str = "") -> list[int]:
        """Return the ids of one sentence; refuse text that the model cannot read as a whole."""
        ids, limit = self.tokenizers.src.encode(text.strip()), self.config.data.max_length
        if not ids or len(ids) > limit:
            raise UsageError(f"{where}{len(ids)} tokens: give one sentence of 1 to {limit} tokens")
        return self._prefix(tag) + ids

    def _prefix(self, tag: str) -> list[int]:
        return tag_before(tag, self.tokenizers, self.config)


def _columns(pairs: Sequence[tuple[str, str]]) -> tuple[list[str], list[str]]:
    return [source for source, _ in pairs], [target for _, target in pairs]


def _of_texts(progress: Advance, parts: Sequence[Sequence[object]]) -> Callable[[int], None]:
    """Return a progress of pieces that reports as large a share of the texts."""
    total, done, told = sum(map(len, parts)), 0, 0

    def advance(count: int) -> None:
        nonlocal done, told
        done += count
        if (texts := done * len(parts) // total) > told:
            progress(texts - told)
            told = texts

    return advance
