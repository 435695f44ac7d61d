"""Byte-pair encoding: text to ids and exactly back, the library's ids, reproducible learning, and the file."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given
from hypothesis import strategies as st

from qkv.core import tokenizer as module
from qkv.core.config import TokenizerConfig
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import Tokenizer, TokenizerPair, learn_bpe, learn_tokenizers
from tokenizer_texts import AWKWARD, ENGLISH, GERMAN, TAGS, nfc


@cache
def learned(shared: bool = True) -> TokenizerPair:
    return learn(ENGLISH, GERMAN, shared=shared)


def learn(*sides: Iterable[str], vocab: int = 0, shared: bool = True, tags: Sequence[str] = TAGS) -> TokenizerPair:
    return learn_tokenizers(sides, TokenizerConfig(vocab=vocab, shared=shared), tags, pairs=15, learner=learn_bpe)


# ---- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
@given(
    text=st.one_of(st.text(), st.text(alphabet=" a\u0301é<s>▁Ġ日.1\n"), st.sampled_from([*AWKWARD, *ENGLISH, *GERMAN]))
)
def test_any_text_is_read_back(shared: bool, text: str) -> None:
    for side in (learned(shared).src, learned(shared).tgt):
        ids = side.encode(text)
        assert side.decode(ids) == nfc(text)
        assert all(side.offset <= i < side.size for i in ids), "text never becomes a special token"
        assert b"".join(map(side.bytes_of, ids)).removeprefix(b" ") == nfc(text).encode()
        assert np.frombuffer(side.pack(text), side.dtype).tolist() == ids


@pytest.mark.parametrize("shared", [True, False])
def test_a_saved_tokenizer_is_loaded_again(shared: bool, tmp_path: Path) -> None:
    ours = learned(shared)
    ours.save(tmp_path / "tokenizers.json")
    theirs = TokenizerPair.load(tmp_path / "tokenizers.json")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizers.json"]
    assert theirs.fingerprint == ours.fingerprint
    assert theirs.shared == ours.shared == shared
    for text in (*AWKWARD, *ENGLISH, *GERMAN):
        assert theirs.src.encode(text) == ours.src.encode(text)
        assert theirs.tgt.encode(text) == ours.tgt.encode(text)


@given(text=st.text(alphabet=" abcdelovytKatzschön.,-!?0123éÜ日本語🙂\n\t“”", min_size=1))
def test_ids_are_those_of_the_library_on_the_whole_text(text: str) -> None:
    ours = learned().src
    whole = library.Tokenizer(ours.library.model)
    whole.pre_tokenizer = module.pre_tokenizer()
    whole.normalizer = library.normalizers.Sequence([library.normalizers.NFC(), library.normalizers.Prepend(" ")])
    assert [number + ours.offset for number in whole.encode(text).ids] == ours.encode(text)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the text holds U\+D800, half of a character: repair or remove it"):
        learned().src.encode("half \ud800")


def test_layout_of_the_vocabulary() -> None:
    side = learned().src
    assert (side.pad, side.bos, side.eos) == (0, 1, 2)
    assert side.special_names == ("<pad>", "<s>", "</s>", "<2de>", "<2fr>")
    assert [side.tag(name) for name in TAGS] == [3, 4]
    assert [side.bytes_of(i) for i in range(5)] == [b""] * 5
    assert b"".join(map(side.bytes_of, range(5, 5 + 256))) == bytes(range(256))
    assert side.size == 5 + 256 + len(side.pieces)
    assert side.max_token_bytes == max(len(side.bytes_of(i)) for i in range(side.size))
    assert side.index[side.pieces[7]] == 256 + 7
    assert side.dtype == np.dtype("<u2")
    with pytest.raises(UsageError, match=r'"it" is not in the vocabulary; known tags: de, fr'):
        side.tag("it")
    with pytest.raises(UsageError, match=r"known tags: none"):
        Tokenizer("bpe", []).tag("it")


@pytest.mark.parametrize(("pieces", "width"), [(65_536 - 3 - 256, 2), (65_536 - 3 - 256 + 1, 4)])
def test_ids_have_the_fewest_bytes_that_hold_them(pieces: int, width: int) -> None:
    tokenizer = Tokenizer("word", [f"w{number}" for number in range(pieces)])
    assert tokenizer.dtype.itemsize == width
    last = tokenizer.encode("x")[:1] + [tokenizer.size - 1]
    assert np.array(last, tokenizer.dtype).tolist() == last
    assert len(tokenizer.pack("ab")) == 3 * width


def test_a_piece_occurs_once() -> None:
    with pytest.raises(ValueError, match="a piece occurs twice"):
        Tokenizer("bpe", ["ab", "ab"])


def test_words_and_characters_are_looked_up() -> None:
    word, char = Tokenizer("word", ["Ġcat", "!!"]), Tokenizer("char", ["Ã¼"])
    assert word.encode("cat!!") == [word.offset + 256, word.offset + 257]
    assert word.encode("cow") == [word.offset + byte for byte in b" cow"]
    assert char.encode("ü") == [char.offset + ord(" "), char.offset + 256]


def test_unigram_prefers_the_likelier_pieces() -> None:
    scores = [-10.0] * 256 + [-1.0, -5.0, -1.0]
    side = Tokenizer("unigram", ["Ġa", "Ġab", "bc"], scores=scores)
    assert side.encode("abc") == [side.offset + 256, side.offset + 258]
    assert Tokenizer.from_dict(side.to_dict()).encode("abc") == side.encode("abc")
    assert side.to_dict()["scores"] == scores
    assert "merges" not in side.to_dict()


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_learning_repeats_itself(shared: bool) -> None:
    assert learn(iter(ENGLISH), iter(GERMAN), shared=shared).fingerprint == learned(shared).fingerprint


def test_separate_vocabularies_are_learned_from_their_own_side() -> None:
    both = learned(shared=False)
    assert len(both.tgt.encode("Katze")) < len(both.src.encode("Katze"))
    assert len(both.src.encode("lovely")) < len(both.tgt.encode("lovely"))
    assert learned(shared=False).fingerprint != learned().fingerprint


def test_one_side_alone_has_one_vocabulary() -> None:
    one = learn(GERMAN)
    assert one.shared
    assert one.tgt.decode(one.tgt.encode(GERMAN[0])) == GERMAN[0]


def test_the_vocabulary_has_the_requested_size_or_the_text_is_named() -> None:
    assert learn(ENGLISH, GERMAN, vocab=300).src.size == 300
    with pytest.raises(
        UsageError, match=r"vocab = 260: .* alone are 261: set tokenizer.vocab to at least 261, or to 0"
    ):
        learn(ENGLISH, GERMAN, vocab=260)
    with pytest.raises(
        UsageError, match=r"vocab = 32000: the text supports only \d+ tokens: set .* to at most"
    ) as caught:
        learn(ENGLISH, GERMAN, vocab=32_000)
    supported = int(str(caught.value).split("supports only ")[1].split()[0])
    assert learn(ENGLISH, GERMAN, vocab=supported).src.size == learn(ENGLISH, GERMAN).src.size == supported
    assert learn(ENGLISH, vocab=256 + 3, tags=()).src.pieces == ()


def test_an_endless_word_teaches_no_more_than_its_beginning() -> None:
    """Learning from the whole word would take hours; its beginning gives the same vocabulary."""
    lines = ["one two three one two three"] * 3
    endless, cut = ["ab" * 500_000], ["ab" * 128]
    assert learn([*lines, *endless], lines).fingerprint == learn([*lines, *cut], lines).fingerprint


def test_the_unicode_form_of_the_text_does_not_change_the_vocabulary() -> None:
    lines = ["schöne Grüße"] * 3
    apart = [unicodedata.normalize("NFD", line) for line in lines]
    assert apart != lines
    assert learn(apart).fingerprint == learn(lines).fingerprint


def test_a_full_cache_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = learned().src
    expected = [plain.encode(text) for text in (*ENGLISH, *GERMAN)]
    monkeypatch.setattr(module, "CACHE_SIZE", 4)
    small = Tokenizer.from_dict(plain.to_dict())
    assert [small.encode(text) for text in (*ENGLISH, *GERMAN)] == expected
    assert small._cached.cache_info().currsize == 4
    before = small._cached.cache_info().misses
    small.encode("a" * (module.CACHED_LENGTH + 1))
    assert small._cached.cache_info().misses == before  # too long to be kept


def test_decode_skips_special_tokens_and_repairs_bytes() -> None:
    side = learned().src
    ids = side.encode("Ich liebe dich")
    assert side.decode([side.tag("de"), side.bos, *ids, side.eos, side.pad]) == "Ich liebe dich"
    assert side.decode([side.offset + 0xE2]) == "\ufffd"
    assert side.decode([]) == ""


def test_letters_digits_and_punctuation_do_not_share_a_token() -> None:
    side = learned().src
    for text in (*ENGLISH, *GERMAN):
        for token in side.encode(text):
            spelled = side.bytes_of(token).decode("utf-8", "ignore").removeprefix(" ")
            shapes = {(c.isalpha(), c.isdigit()) for c in spelled}
            assert len(shapes) <= 1, token


def test_default_sizes() -> None:
    sizes: list[int] = []

    def learner(lines: Iterable[str], size: int, tags: Sequence[str]) -> Tokenizer:
        sizes.append(size + 256 + 3)
        return Tokenizer("char", [])

    for pairs in (1, 4_999, 5_000, 29_000, 149_999, 150_000, 999_999, 1_000_000, 10**9):
        learn_tokenizers([["a"]], TokenizerConfig(), (), pairs=pairs, learner=learner)
    assert sizes == [2_000, 2_000, 4_000, 8_000, 8_000, 16_000, 16_000, 32_000, 32_000]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ('{"format": "qkv-tok', "not JSON"),
        ("[]", "not a qkv tokenizer"),
        ('{"model": {"type": "BPE"}}', "not a qkv tokenizer"),
        ('{"format": "qkv-tokenizer", "version": 99}', "version 99"),
        ('{"format": "qkv-tokenizer", "version": 1}', "damaged"),
        ('{"format": "qkv-tokenizer", "version": 1, "sides": [{"kind": "bpe"}]}', "damaged"),
        ('{"format": "qkv-tokenizer", "version": 1, "sides": [{"kind": "x", "tags": [], "pieces": []}]}', "damaged"),
    ],
)
def test_other_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizers.json"
    path.write_text(content)
    with pytest.raises(QkvError, match=message) as caught:
        TokenizerPair.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_fingerprint_is_that_of_earlier_versions() -> None:
    """Prepared text names it: another one for the same tokenizer would make every stored text useless."""
    side = Tokenizer("bpe", ["Ġt", "he"], ["dé"], merges=[("Ġ", "t"), ("h", "e")])
    assert TokenizerPair(side, side).fingerprint == "d137b977ac3ca00597d9499764a2777f"


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "tokenizers.json"
    learned().save(path)
    plain = json.loads(path.read_text(encoding="utf-8"))
    plain["sides"][0]["merges"][0] = "never seen"
    path.write_text(json.dumps(plain))
    with pytest.raises(QkvError, match="damaged"):
        TokenizerPair.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QkvError, match="not JSON"):
        TokenizerPair.load(path)
    with pytest.raises(UsageError, match="No such file"):
        TokenizerPair.load(tmp_path / "missing.json")
    with pytest.raises(QkvError, match=r"tokenizers\.json: cannot be written: (Not a directory|File exists)"):
        learned().save(path / "tokenizers.json")  # a file is no folder
