"""Segments: protected text is part of the text, and its source comes back exactly once."""

from __future__ import annotations

import html
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.core.errors import UsageError
from qkv.data.alignments import word_spans
from qkv.documents.segments import Segment, TextFormat, Token, make_segment, split_segments

HTML = TextFormat(partial(html.escape, quote=False))


def code(text: str) -> Token:
    return Token("protected", f"<code>{html.escape(text, quote=False)}</code>", text)


def text(content: str) -> Token:
    return Token("text", html.escape(content, quote=False), content)


def bold(*tokens: Token) -> list[Token]:
    return [Token("open", "<b>", name="b"), *tokens, Token("close", "</b>", name="b")]


def segment_of(*tokens: Token) -> Segment:
    segment = make_segment(tokens, HTML)
    assert segment is not None
    return segment


def test_protected_text_is_part_of_the_text() -> None:
    segment = segment_of(text("Run "), code("pip  install\n<x>"), text(" now."))
    assert segment.text == "Run pip install <x> now."
    assert [segment.text[begin:end] for begin, end in segment.protected] == ["pip install <x>"]
    assert not segment.needs_alignment
    assert segment.build("Ora esegui pip install <x> & via.") == (
        "Ora esegui <code>pip  install\n&lt;x&gt;</code> &amp; via."
    )
    assert segment.build(segment.text) == segment.raw


def test_protected_text_alone_is_no_segment() -> None:
    assert make_segment([code("pip"), text(", "), code("x")], HTML) is None
    assert segment_of(code(" "), text("cat")).protected == ()


def test_equal_protected_texts_are_matched_in_order() -> None:
    one, two = Token("protected", "<kbd>a</kbd>", "a"), Token("protected", "<code>a</code>", "a")
    segment = segment_of(text("Use "), one, text(" or "), two, text(" here"))
    assert segment.build("Qui usa a o a") == "Qui usa <kbd>a</kbd> o <code>a</code>"


def test_an_unprotected_equal_word_stays_unprotected() -> None:
    segment = segment_of(text("The pip of "), code("pip"), text("."))
    assert segment.build("Il pip di pip.") == "Il pip di <code>pip</code>."
    # The translation has one more: the alignment decides.
    links = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 6)]
    assert segment.build("Il pip, pip e pip.", links) == "Il pip, <code>pip</code> e pip."


def test_a_whole_word_is_preferred_to_a_part_of_one() -> None:
    segment = segment_of(text("The option "), code("a"), text(" is old"))
    assert segment.build("La vecchia opzione a") == "La vecchia opzione <code>a</code>"
    nested = segment_of(code("ab"), text(" and "), code("a b"), text(" and "), code("a"))
    assert nested.build("a poi a b poi ab") == "<code>a</code> poi <code>a b</code> poi <code>ab</code>"


@pytest.mark.parametrize("links", [None, [(0, 0), (1, 1), (2, 2)]])
def test_a_missing_protected_text_is_not_lost(links: list[tuple[int, int]] | None) -> None:
    segment = segment_of(text("Run "), code("pip"), text(" now"))
    assert segment.build("Esegui questo ora", links) in (
        "Esegui <code>pip</code> questo ora",
        "Esegui questo <code>pip</code> ora",
    )
    first = segment_of(code("pip"), text(" runs"))
    assert first.build("corre", []) == "<code>pip</code> corre"
    twice = segment_of(text("Use "), code("a-b"), text(" or "), code("a-b"))
    assert twice.build("Usa a-b", []).count("<code>a-b</code>") == 2


def test_marks_around_protected_text_follow_the_alignment() -> None:
    segment = segment_of(
        text("The "), *bold(text("red "), code("pip install x")), text(" is "), *bold(text("big")), text(".")
    )
    source, target = segment.text, "Il pip install x rosso è grande."
    assert [source[b:e] for b, e in word_spans(source)] == ["The", "red", "pip", "install", "x", "is", "big", "."]
    links = [(0, 0), (1, 4), (2, 1), (3, 2), (4, 3), (5, 5), (6, 6), (7, 7)]
    assert segment.needs_alignment
    assert segment.build(target, links) == "Il <b><code>pip install x</code> rosso</b> è <b>grande</b>."
    # Links that miss or mislead the protected text do not move it out of its element.
    wrong = [(0, 1), (1, 4), (4, 0), (5, 5), (6, 6), (7, 7)]
    assert segment.build(target, wrong) == "Il <b><code>pip install x</code> rosso</b> è <b>grande</b>."


def test_words_that_share_characters_with_protected_text_are_renumbered() -> None:
    segment = segment_of(text("Two "), code("pip"), text("-s of "), *bold(text("cats")))
    assert [segment.text[b:e] for b, e in word_spans(segment.text)] == ["Two", "pip-s", "of", "cats"]
    links = [(0, 0), (1, 1), (3, 3), (2, 2)]
    assert segment.build("Due pip di gatti", links) == "Due <code>pip</code> di <b>gatti</b>"


def test_links_between_other_texts_are_refused() -> None:
    segment = segment_of(text("a "), code("b"), *bold(text("c")))
    with pytest.raises(UsageError, match="link 7-0: the source has"):
        segment.build("b c", [(7, 0)])


def test_the_length_of_a_tag_does_not_count() -> None:
    link = Token("open", f'<a href="{"x" * 600}">', name="a")
    tokens = [text("one "), link, text("two"), Token("close", "</a>", name="a"), text(" three")]
    (segment,) = [part for part in split_segments(tokens, HTML) if isinstance(part, Segment)]
    assert segment.text == "one two three"


def test_very_many_protected_texts_are_kept() -> None:
    tokens = [token for number in range(1000) for token in (text(f" word{number} "), code(f"c{number}"))]
    parts = list(split_segments([*bold(*tokens), text(" end")], HTML))
    assert "".join(part if isinstance(part, str) else part.raw for part in parts) == "".join(
        token.raw for token in [*bold(*tokens), text(" end")]
    )
    few = list(split_segments([Token("open", "<i>", name="i"), *tokens[:100]], HTML))
    assert [part.text[:14] for part in few if isinstance(part, Segment)] == ["word0 c0 word1"]


words = st.sampled_from(["a", "b", "ab", "a b", "cat", "x.y", "pip", "-s", "日本", "<x0>", "é\u0301", "\ue000"])
piece = st.one_of(words.map(text), words.map(code), st.just(text(" ")), words.map(lambda word: bold(code(word))))


@given(st.lists(piece, max_size=10), st.permutations(range(10)), st.randoms(), st.booleans())
def test_every_protected_text_occurs_exactly_once(
    pieces: list[Token | list[Token]], order: list[int], random: object, align: bool
) -> None:
    tokens: list[Token] = []
    number = 0
    for each in pieces:
        for token in each if isinstance(each, list) else [each]:
            if token.kind == "protected":
                token = Token("protected", f"<code {number}>{token.raw[6:]}", token.text)
                number += 1
            tokens.append(token)
    segment = make_segment(tokens, HTML)
    if segment is None:
        return
    parts = [segment.text[begin:end] for begin, end in segment.protected]
    shuffled = [parts[place] for place in order if place < len(parts)]
    for translation in (" ".join(["Uno", *shuffled, "due"]), "niente", segment.text[::-1]):
        counts = len(word_spans(segment.text)), len(word_spans(translation))
        draw = random.randrange  # type: ignore[attr-defined]
        links = [(draw(counts[0]), draw(counts[1])) for _ in range(8)] if align and all(counts) else None
        built = segment.build(translation, links)
        for each in range(number):
            assert built.count(f"<code {each}>") == 1
        assert built.count("</code>") == number
        assert built.count("<b>") == built.count("</b>")
    stripped = segment.build(" ".join(["Uno", *shuffled, "due"]))
    plain = html.unescape(stripped.replace("<b>", "").replace("</b>", "").replace("</code>", ""))
    for each in range(number):
        plain = plain.replace(f"<code {each}>", "")
    assert plain.strip() == " ".join(["Uno", *shuffled, "due"])


def test_protected_texts_take_linear_time() -> None:
    def seconds(count: int) -> float:
        tokens = [token for number in range(30) for token in (text(f" w{number}" * count), code(f"c{number}"))]
        segment = segment_of(*tokens)
        begin = time.process_time()
        segment.build(f"{segment.text} fine", [(i, i) for i in range(len(word_spans(segment.text)))])
        return time.process_time() - begin

    seconds(10)
    assert seconds(200) < 40 * seconds(20) + 0.5
