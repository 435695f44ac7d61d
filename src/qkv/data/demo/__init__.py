"""The built-in corpus: English sentences with their Italian translations and gold word alignments.

A synchronous grammar builds both sides together, so every pair is a translation by construction and every word knows
what it stands for. English to Italian is a function: one English sentence has one Italian sentence. Where English says
less than Italian needs, a rule decides: you is tu; I, you, we and they are masculine; a subject pronoun is left out.

**The split is by combination.** The combination of a sentence is the set of its content lemmas (nouns, verbs,
adjectives, names, numbers); if it has fewer than two, the personal pronouns it contains are added. A hash of the
combination and the seed decides the split, so a combination of the test set never occurs in training in any form: not
negated, not as a question, not in another tense or construction. Two combinations belong to the test set by decree:
those of `Your cat is a lovely cat.` and `I love you very much.`. Every word of a validation or test sentence, on both
sides, occurs at least `SEEN` times in training.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from qkv.core import files
from qkv.core.errors import UsageError
from qkv.data.demo import grammar
from qkv.data.demo.phrase import Phrase, render, words

__all__ = ["SIZES", "Example", "combination", "find", "pharaoh", "splits", "words", "write"]

SIZES = {"train": 130_000, "valid": 1_000, "test": 2_000}
SEEN = 5
NAMED = ("Your cat is a lovely cat.", "I love you very much.")
DECREED = (("cat", "lovely"), ("love", "~I", "~you"))
_POOL = {"test": 0.022, "valid": 0.012}  # share of the combinations, with room for what SEEN leaves out


@dataclass(frozen=True, slots=True)
class Example:
    """A sentence pair; the alignment holds (source, target) indices into `words(source)` and `words(target)`."""

    source: str
    target: str
    alignment: tuple[tuple[int, int], ...]


def combination(phrase: Phrase) -> tuple[str, ...]:
    """What the split is decided by: the sorted content lemmas, with the pronouns if there are fewer than two."""
    content = {lemma for lemma in phrase.lemmas if lemma[0] != "~"}
    return tuple(sorted(content if len(content) > 1 else set(phrase.lemmas)))


def split_of(key: tuple[str, ...], seed: int) -> str:
    """The split a combination belongs to."""
    if key in DECREED:
        return "test"
    digest = blake2b("\t".join(key).encode(), digest_size=8, key=str(seed).encode()).digest()
    x = int.from_bytes(digest, "big") / 2**64
    if x < _POOL["test"]:
        return "test"
    return "valid" if x < _POOL["test"] + _POOL["valid"] else "train"


def splits(seed: int = 0) -> dict[str, list[Example]]:
    """The whole corpus, without repeated sentences; the same seed gives the same corpus on every machine."""
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
    """The named sentences, then the first of the others."""
    named = [e for e in examples if e.source in NAMED]
    return (named + [e for e in examples if e.source not in NAMED])[:size]


def pharaoh(alignment: tuple[tuple[int, int], ...]) -> str:
    """An alignment as text: `0-0 1-2 2-1`."""
    return " ".join(f"{i}-{j}" for i, j in alignment)


def write(folder: Path, seed: int = 0) -> dict[str, Path]:
    """Write {train,valid,test}.{en,it,align}, one sentence a line; returns the path of each file by its name."""
    paths: dict[str, Path] = {}
    for split, examples in splits(seed).items():
        columns = {
            "en": [e.source for e in examples],
            "it": [e.target for e in examples],
            "align": [pharaoh(e.alignment) for e in examples],
        }
        for suffix, lines in columns.items():
            path = folder / f"{split}.{suffix}"
            files.write_text(path, "".join(line + "\n" for line in lines))
            paths[path.name] = path
    return paths


def find(name: str) -> Path:
    """The file of the corpus with that name, e.g. test.it: written to the user's cache folder when first asked for."""
    names = [f"{split}.{suffix}" for split in SIZES for suffix in ("en", "it", "align")]
    if name not in names:
        raise UsageError(f"demo:{name}: no such file: the built-in corpus has {', '.join(names)}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "qkv" / f"demo-{_edition()}"
    if not (folder / names[-1]).exists():  # written last
        write(folder)
    return folder / name


def _edition() -> str:
    """A name for the grammar as it stands: a changed grammar makes a new corpus beside the old one."""
    digest = blake2b(digest_size=6)
    for module in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(module.read_bytes())
    return digest.hexdigest()
