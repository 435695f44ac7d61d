"""Generator of the built-in corpus: English sentences with their Italian translations and gold word alignments.

A synchronous grammar builds both sides together, so every pair is a translation by construction and the alignment of
its words is known. English to Italian is a function: one English sentence has one Italian sentence. Where English says
less than Italian needs, a rule decides: you is tu; I, you, we and they are masculine; a subject pronoun is left out.

**The split is by combination.** The combination of a sentence is the set of its content lemmas (nouns, verbs,
adjectives, names, numbers); if it has fewer than two, the personal pronouns it contains are added. A hash of the
combination and the seed decides the split, so a combination of the test set never occurs in training in any form: not
negated, not as a question, not in another tense or construction. Two combinations belong to the test set by decree:
those of `Your cat is a lovely cat.` and `I love you very much.`. Every word of a validation or test sentence, on both
sides, occurs at least `SEEN` times in training.

`python -m demo_corpus FOLDER` writes the files. Those of seed 0 are in src/qkv/data/demo, where `demo:` finds them.
"""

from __future__ import annotations

import lzma
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from demo_corpus import grammar
from demo_corpus.phrase import Phrase, render, words

__all__ = ["SIZES", "Example", "combination", "pharaoh", "splits", "texts", "words", "write"]

SIZES = {"train": 130_000, "valid": 1_000, "test": 2_000}
SEEN = 5
NAMED = ("Your cat is a lovely cat.", "I love you very much.")
DECREED = (("cat", "lovely"), ("love", "~I", "~you"))
_POOL = {"test": 0.022, "valid": 0.012}  # share of the combinations; some of their sentences have words rarer than SEEN


@dataclass(frozen=True, slots=True)
class Example:
    """A sentence pair; the alignment holds (source, target) indices into `words(source)` and `words(target)`."""

    source: str
    target: str
    alignment: tuple[tuple[int, int], ...]


def combination(phrase: Phrase) -> tuple[str, ...]:
    """Return the key of the split: the sorted content lemmas, with the pronouns if there are fewer than two."""
    content = {lemma for lemma in phrase.lemmas if lemma[0] != "~"}
    return tuple(sorted(content if len(content) > 1 else set(phrase.lemmas)))


def split_of(key: tuple[str, ...], seed: int) -> str:
    """Return the split of a combination: train, valid or test."""
    if key in DECREED:
        return "test"
    digest = blake2b("\t".join(key).encode(), digest_size=8, key=str(seed).encode()).digest()
    x = int.from_bytes(digest, "big") / 2**64
    if x < _POOL["test"]:
        return "test"
    return "valid" if x < _POOL["test"] + _POOL["valid"] else "train"


def splits(seed: int = 0) -> dict[str, list[Example]]:
    """Generate the corpus without repeated sentences; the same seed gives the same corpus on every machine."""
    out: dict[str, list[Example]] = {"train": [], "valid": [], "test": []}
    held: dict[str, list[Example]] = {"valid": [], "test": []}
    seen: set[str] = set()
    for phrase in grammar.sentences(seed):
        source, target, alignment = render(phrase)
        if source in seen:
            continue
        seen.add(source)
        example = Example(source, target, alignment)
        split = split_of(combination(phrase), seed)
        if split == "train":
            out["train"].append(example)
            if len(out["train"]) == SIZES["train"]:
                break
        else:
            held[split].append(example)
    counts: Counter[str] = Counter()
    for example in out["train"]:
        counts.update(words(example.source))
        counts.update(words(example.target))
    known = frozenset(w for w, n in counts.items() if n >= SEEN)
    for split, examples in held.items():
        covered = [e for e in examples if known.issuperset(words(e.source) + words(e.target))]
        out[split] = _first(covered, SIZES[split])
    return out


def _first(examples: list[Example], size: int) -> list[Example]:
    """Return the named sentences, then the first of the others, `size` in all."""
    named = [e for e in examples if e.source in NAMED]
    return (named + [e for e in examples if e.source not in NAMED])[:size]


def pharaoh(alignment: tuple[tuple[int, int], ...]) -> str:
    """Return an alignment in Pharaoh format: `0-0 1-2 2-1`."""
    return " ".join(f"{i}-{j}" for i, j in alignment)


def texts(seed: int = 0) -> dict[str, str]:
    """Generate the text of {train,valid,test}.{en,it,align} by file name, one sentence per line."""
    files: dict[str, str] = {}
    for split, examples in splits(seed).items():
        columns = {
            "en": [e.source for e in examples],
            "it": [e.target for e in examples],
            "align": [pharaoh(e.alignment) for e in examples],
        }
        files |= {f"{split}.{suffix}": "".join(f"{line}\n" for line in lines) for suffix, lines in columns.items()}
    return files


def write(folder: Path, seed: int = 0) -> list[Path]:
    """Write {train,valid,test}.{en,it,align}.xz into a folder; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in texts(seed).items():
        paths.append(folder / f"{name}.xz")
        paths[-1].write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    return paths
