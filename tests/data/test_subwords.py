"""Text to ids and exactly back for any text; the same ids as the library; reproducible learning."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given
from hypothesis import strategies as st

from qkv.core import tokenizer as module
from qkv.core.dataset import Rows
from qkv.core.errors import UsageError
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.data import subwords as subwords
from qkv.data.subwords import VARIANTS, BpeDropout, learn, pair_dropout, readable_tokens, unique_names
from qkv.interop.huggingface import library_tokenizer
from qkv.options import TokenizerConfig
from tokenizer_texts import AWKWARD, ENGLISH, GERMAN, TAGS, nfc

KINDS = ("bpe", "unigram", "word", "char")
SEEDS = st.integers(0, 1 << 63)


@cache
def learned(kind: str, shared: bool = True) -> TokenizerPair:
    return learn(ENGLISH, GERMAN, TokenizerConfig(kind=kind, shared=shared), TAGS)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", KINDS)
class TestRoundTrip:
    @given(text=st.one_of(st.text(), st.text(alphabet=" a\u0301é<s>▁Ġ日.1\n")))
    def test_any_text(self, kind: str, shared: bool, text: str) -> None:
        for side in (learned(kind, shared).src, learned(kind, shared).tgt):
            assert side.decode(side.encode(text)) == nfc(text)

    @pytest.mark.parametrize("text", [*AWKWARD, *ENGLISH[:5], *GERMAN[:5]])
    def test_awkward_text(self, kind: str, shared: bool, text: str) -> None:
        for side in (learned(kind, shared).src, learned(kind, shared).tgt):
            ids = side.encode(text)
            assert side.decode(ids) == nfc(text)
            assert all(i >= len(module.SPECIALS) + len(TAGS) for i in ids), "text never becomes a special token"
            assert sum(len(side.decode([i]).encode()) for i in ids if i >= side.offset + 256) <= len(nfc(text).encode())
            assert np.frombuffer(side.pack(text), side.dtype).tolist() == ids

    def test_saved_and_loaded(self, kind: str, shared: bool, tmp_path: Path) -> None:
        ours = learned(kind, shared)
        ours.save(tmp_path / "tokenizers.json")
        theirs = TokenizerPair.load(tmp_path / "tokenizers.json")
        assert [path.name for path in tmp_path.iterdir()] == ["tokenizers.json"]
        assert theirs.fingerprint == ours.fingerprint
        assert theirs.shared == ours.shared == shared
        for text in (*AWKWARD, *ENGLISH, *GERMAN):
            assert theirs.src.encode(text) == ours.src.encode(text)
            assert theirs.tgt.encode(text) == ours.tgt.encode(text)

    def test_learning_repeats_itself(self, kind: str, shared: bool) -> None:
        again = learn(iter(ENGLISH), iter(GERMAN), TokenizerConfig(kind=kind, shared=shared), TAGS)
        assert again.fingerprint == learned(kind, shared).fingerprint


# ---- the library -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@given(text=st.text(alphabet=" abcdelovytKatzschön.,-!?0123éÜ日本語🙂\n\t“”", min_size=1))
def test_same_ids_as_the_library(kind: str, text: str) -> None:
    ours = learned(kind).src
    whole = pipeline(kind)
    for line in (text, ENGLISH[2] + text + GERMAN[4]):
        assert [number + ours.offset for number in whole.encode(line).ids] == ours.encode(line)


@cache
def pipeline(kind: str) -> library.Tokenizer:
    whole = library.Tokenizer(learned(kind).src.library.model)
    whole.pre_tokenizer = module.pre_tokenizer()
    whole.normalizer = library.normalizers.Sequence([library.normalizers.NFC(), library.normalizers.Prepend(" ")])
    return whole


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.one_of(st.text(), st.text(alphabet=" a\u0301é<s>▁Ġ日.1\n"), st.sampled_from(AWKWARD)))
def test_the_librarys_own_file_gives_the_same_ids_and_text(kind: str, text: str) -> None:
    ours, theirs = learned(kind).src, saved(kind)
    ids = ours.encode(text)
    assert theirs.encode(text).ids == [*ids, ours.eos]
    assert theirs.encode(text).tokens == [unique_names(ours)[i] for i in (*ids, ours.eos)]
    assert saved(kind, "fr").encode(text).ids == [ours.tag("fr"), *ids, ours.eos]
    assert theirs.decode(ids) == nfc(text)


@cache
def saved(kind: str, tag: str = "") -> library.Tokenizer:
    """The saved tokenizer, opened by the `tokenizers` library."""
    return library.Tokenizer.from_str(library_tokenizer(learned(kind).src, tag).to_str())


# ---- vocabulary ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_layout(kind: str) -> None:
    side = learned(kind).src
    assert (side.pad, side.bos, side.eos) == (0, 1, 2)
    assert readable_tokens(side, range(5)) == ["<pad>", "<s>", "</s>", "<2de>", "<2fr>"]
    assert [side.tag(name) for name in TAGS] == [3, 4]
    assert b"".join(side._bytes[5 : 5 + 256]) == bytes(range(256))
    assert side.size == len(side._bytes) > 5 + 256
    assert side.max_token_bytes == max(map(len, side._bytes))
    with pytest.raises(UsageError, match=r'"it".*known tags: de, fr'):
        side.tag("it")


def test_tokens_are_readable() -> None:
    side = learned("bpe").src
    assert "".join(readable_tokens(side, side.encode("a lovely cat."))) == "▁a▁lovely▁cat."
    assert readable_tokens(side, [side.offset + 0xE2, side.offset + 0x0A]) == ["<0xE2>", "<0x0A>"]
    cut = Tokenizer("bpe", ["Ġæ"], merges=[("Ġ", "æ")])
    assert readable_tokens(cut, cut.encode("日")) == ["▁<0xE6>", "<0x97>", "<0xA5>"]
    for text in AWKWARD:
        ids = side.encode(text)
        assert len(readable_tokens(side, ids)) == len(ids)
        assert all(token and token.isprintable() for token in readable_tokens(side, ids))


def test_a_lone_surrogate_is_refused() -> None:
    for kind in KINDS:
        with pytest.raises(UsageError, match=r"U\+D800"):
            learned(kind).src.encode("half \ud800")


def test_characters_and_words_are_single_tokens() -> None:
    char, word = learned("char").src, learned("word").src
    assert len(char.encode("schöne Katze, 日")) == 1 + len("schöne Katze, 日")
    assert readable_tokens(word, word.encode("Deine Katze.")) == ["▁Deine", "▁Katze", "."]
    assert word.encode("Zug") == [word.offset + byte for byte in b" Zug"]


# ---- BPE-dropout -----------------------------------------------------------------------------------------------------


def cut(dropout: BpeDropout, texts: list[str], seeds: list[int]) -> list[list[int]]:
    """The ids of texts, tokenised again."""
    rows = [dropout.tokenizer.encode(text) for text in texts]
    ids = np.array([token for row in rows for token in row], dropout.tokenizer.dtype)
    made, lengths = dropout.segment(ids, np.array(list(map(len, rows))), np.array(seeds, np.uint64))
    assert made.dtype == ids.dtype
    return [part.tolist() for part in np.split(made, np.cumsum(lengths)[:-1])]


@given(texts=st.lists(st.text(), min_size=1, max_size=4), dropout=st.sampled_from([0.0, 0.1, 0.5, 1.0]), seed=SEEDS)
def test_dropout_keeps_the_text(texts: list[str], dropout: float, seed: int) -> None:
    side = learned("bpe").src
    seeds = [seed + number for number in range(len(texts))]
    together = cut(BpeDropout(side, dropout), texts, seeds)
    assert [side.decode(ids) for ids in together] == list(map(nfc, texts))
    alone = [cut(BpeDropout(side, dropout), [text], [own])[0] for text, own in zip(texts, seeds, strict=True)]
    assert alone == together, "a sentence is cut by its own seed, whatever is beside it or came before"


def test_dropout_extremes() -> None:
    side = learned("bpe").src
    for text in (*ENGLISH, *GERMAN, *AWKWARD[:-1]):
        assert cut(BpeDropout(side, 0.0), [text], [7]) == [side.encode(text)], (
            "merging by hand is merging by the library"
        )
        spelled = (" " + nfc(text)).encode() if text else b""
        assert cut(BpeDropout(side, 1.0), [text], [7]) == [[side.offset + byte for byte in spelled]]


def test_dropout_leaves_tags_where_they_are() -> None:
    side = Tokenizer("bpe", ["ab"], ["de"], merges=[("a", "b")])
    ids = np.array([side.tag("de"), *side.encode("ab")], side.dtype)
    made, lengths = BpeDropout(side, 1.0).segment(ids, np.array([len(ids)]), np.array([3], np.uint64))
    assert made.tolist() == [side.tag("de"), *(side.offset + byte for byte in b" ab")]
    assert lengths.tolist() == [4]


def test_bpe_dropout_varies_but_does_not_depend_on_earlier_lines() -> None:
    side = learned("bpe").src
    seeds = list(range(200))
    cuts = cut(BpeDropout(side, 0.3), ["lovely"] * 200, seeds)
    assert 5 < len(set(map(tuple, cuts))) <= VARIANTS
    fresh = BpeDropout(Tokenizer.from_dict(side.to_dict()), 0.3)
    assert cut(fresh, ["lovely"] * 200, seeds[::-1]) == cuts[::-1]
    assert side.encode("lovely") in cuts
    repeated = cut(BpeDropout(side, 0.3), [" ".join(["lovely"] * 200)], [1])[0]
    assert repeated not in ([*ids] * 200 for ids in cuts), "each word of a sentence is cut by itself"


def test_bpe_dropout_skips_the_given_share_of_merges() -> None:
    # One merge, tried once in each of 64 variants: about half of the variants lack it.
    side = Tokenizer("bpe", ["ab"], merges=[("a", "b")])
    cuts = cut(BpeDropout(side, 0.5), ["ab"] * 2000, list(range(2000)))
    lengths = [len(ids) for ids in cuts]
    assert set(lengths) == {2, 3}
    assert 0.3 < lengths.count(3) / len(lengths) < 0.7


def test_dropout_remembers_a_bounded_number_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subwords, "CACHED_CHUNKS", 10)
    dropout = BpeDropout(learned("bpe").src, 0.5)
    texts = [f"w{number}" for number in range(100)]
    first = cut(dropout, texts, list(range(100)))
    assert dropout._cached.cache_info().currsize == 10
    assert cut(dropout, texts, list(range(100))) == first


def test_threads_sharing_a_dropout_do_not_affect_each_other() -> None:
    side = learned("bpe").src
    texts = [" ".join(ENGLISH[number:] + ENGLISH[:number]) for number in range(8)]
    seeds = [[turn * 100 + number for number in range(8)] for turn in range(8)]
    alone = [cut(BpeDropout(side, 0.3), texts, own) for own in seeds]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns inside of words
    try:
        shared = BpeDropout(side, 0.3)
        with ThreadPoolExecutor(len(seeds)) as threads:
            assert list(threads.map(lambda own: cut(shared, texts, own), seeds)) == alone
    finally:
        sys.setswitchinterval(before)


def test_dropout_keeps_the_length_limit() -> None:
    """A sentence that would exceed the limit keeps its stored tokens; the others are not affected."""
    side = learned("bpe").src
    texts = ["the cat sleeps in a lovely garden " * 9, "the cat sleeps", "small birds sing"]
    rows = [side.encode(text) for text in texts]
    ids, lengths = np.array([i for row in rows for i in row], side.dtype), np.array(list(map(len, rows)))
    seeds = np.array([5, 6, 7], np.uint64)
    _, free = BpeDropout(side, 0.5).segment(ids, lengths, seeds)
    limit = int(lengths[0]) + 3
    assert free[0] > limit > free[1]
    limited, new_lengths = BpeDropout(side, 0.5, max_length=limit).segment(ids, lengths, seeds)
    assert new_lengths.tolist() == [lengths[0], free[1], free[2]]
    assert limited[: lengths[0]].tolist() == rows[0]
    assert [side.decode(row) for row in np.split(limited, np.cumsum(new_lengths)[:-1])] == texts
    _, short = BpeDropout(side, 0.5, max_length=1).segment(ids, lengths, seeds)
    assert short.tolist() == lengths.tolist(), "a stored sentence that is longer stays as it is"


@pytest.mark.parametrize("shared", [True, False])
def test_dropout_of_pairs_keeps_the_length_limit_on_both_sides(shared: bool) -> None:
    both, indices = learned("bpe", shared), np.array([0])
    texts = ["the cat sleeps in a lovely garden " * 4, "die Katze schläft im Garten " * 4]
    ids = [both.src.encode(texts[0]), both.tgt.encode(texts[1])]
    rows = [Rows(np.array(row, both.src.dtype), np.array([len(row)])) for row in ids]
    limit = max(map(len, ids))
    free, limited = (pair_dropout(both, 0.8, most)(rows, indices, (1, 0, 0)) for most in (0, limit))
    assert all(int(row.lengths[0]) > limit for row in free)
    assert [row.ids.tolist() for row in limited] == ids, "the stored tokens stay"


def test_dropout_is_for_bpe() -> None:
    with pytest.raises(UsageError, match='kind "bpe", not "unigram"'):
        BpeDropout(learned("unigram").src, 0.1)


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_larger_than_the_text_supports(kind: str) -> None:
    with pytest.raises(UsageError, match="supports only") as caught:
        learn(ENGLISH, GERMAN, TokenizerConfig(kind=kind, vocab=32_000))
    supported = int(str(caught.value).split("supports only ")[1].split()[0])
    assert learn(ENGLISH, GERMAN, TokenizerConfig(kind=kind, vocab=supported)).src.size == supported
    assert learn(ENGLISH, GERMAN, TokenizerConfig(kind=kind)).src.size == supported


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word"])
def test_the_vocabulary_has_the_requested_size(kind: str) -> None:
    assert learn(ENGLISH, GERMAN, TokenizerConfig(kind=kind, vocab=300), TAGS).src.size == 300
    with pytest.raises(UsageError, match="at least 261"):
        learn(ENGLISH, GERMAN, TokenizerConfig(kind=kind, vocab=260), TAGS)


def test_separate_vocabularies_are_learned_from_their_own_side() -> None:
    both = learned("word", False)
    assert "▁Katze" in readable_tokens(both.tgt, both.tgt.encode("Katze"))
    assert "▁Katze" not in readable_tokens(both.src, both.src.encode("Katze"))


def test_plain_text_has_one_vocabulary() -> None:
    one = learn((), GERMAN, TokenizerConfig())
    assert one.shared
    assert one.tgt.decode(one.tgt.encode(GERMAN[0])) == GERMAN[0]


# ---- the file --------------------------------------------------------------------------------------------------------


def test_fingerprints_tell_vocabularies_apart() -> None:
    prints = {learned(kind, shared).fingerprint for kind in KINDS for shared in (True, False)}
    assert len(prints) == 2 * len(KINDS)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, qkv.data.subwords, qkv.data.text_preparation; assert not {'torch', 'zstandard'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word", "char"])
def test_an_endless_word_teaches_no_more_than_its_beginning(kind: str) -> None:
    """Learning from the whole word would take hours; its beginning gives the same vocabulary."""
    spec = TokenizerConfig(kind=kind)
    lines = ["one two three one two three"] * 3
    endless, cut = ["ab" * 500_000], ["ab" * 128]
    assert learn([*lines, *endless], lines, spec).fingerprint == learn([*lines, *cut], lines, spec).fingerprint
