"""Markdown: markdown-it says what is markup; what is not translated stays to the byte."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from qkv.documents import Document, read_document


def parse(text: str) -> Document:
    return read_document("a.md", text.encode())


def changed(text: str, change: Callable[[str], str] = str.upper) -> str:
    """Translate by a change of all text that is not protected."""
    document = parse(text)
    translations = []
    for segment, spans in zip(document.segments, document.protected, strict=True):
        translation = change(segment)
        for begin, end in spans:
            translation = translation[:begin] + segment[begin:end] + translation[end:]
        translations.append(translation)
    return document.build(translations).decode()


def protected(text: str) -> list[str]:
    document = parse(text)
    pairs = zip(document.segments, document.protected, strict=True)
    return [segment[begin:end] for segment, spans in pairs for begin, end in spans]


# ---- inline markup ---------------------------------------------------------------------------------------------------


def test_code_formulas_and_autolinks_are_protected() -> None:
    text = "Run `` pip `x` `` at <http://x.y/a_b> or <me@x.org>, $a_b + c$ and **see `y`**.\n"
    assert parse(text).segments == ["Run pip `x` at http://x.y/a_b or me@x.org, $a_b + c$ and see y."]
    assert protected(text) == ["pip `x`", "http://x.y/a_b", "me@x.org", "$a_b + c$", "y"]
    assert changed(text) == "RUN `` pip `x` `` AT <http://x.y/a_b> OR <me@x.org>, $a_b + c$ AND **SEE `y`**.\n"
    document = parse("Run [the `x` tool](u) in **red**.")
    links = [(0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1), (6, 6)]
    assert document.build(["in rosso esegui lo x strumento."], [links]).decode() == (
        "in **rosso** esegui [lo `x` strumento](u)."
    )


def test_prices_are_no_formulas() -> None:
    assert protected("It costs $5 and $6, or US$7 each.") == []


def test_elements_in_markdown_are_protected() -> None:
    text = 'Press <kbd>Ctrl *C*</kbd> or <span translate="no">Red `x`</span>, <code>un, <b>two</b> <!-- x --> 3</code>.'
    assert parse(text).segments == ["Press Ctrl C or Red x, un, two 3."]
    assert protected(text) == ["Ctrl C", "Red x", "un, two 3"]
    assert changed(text) == text.replace("Press", "PRESS").replace(" or ", " OR ")
    assert parse("a <code> *b* <i>c</i>").segments == ["a b c"]
    assert parse("a <code> b  \nc </code> d").segments == ["a b", "c", "d"]


@pytest.mark.parametrize(
    "text",
    [
        "A *b **c** d* and ***e*** f __g__ h ~~i~~ j.",
        "A \\*b\\* \\<c> \\&amp; d_e.",
        'A [b *c*](<u v> "t") [d][ref] [e][] ![f *g*](h.png) i.\n\n[ref]: u\n[e]: v',
        "A ![b](c)[d](e) [f ![g](h) i](j)*k*.",
        "A <b class='*x*'>b</b> <!-- *c* --> <br/> d.",
        "A [^1] b[^c] d.\n\n[^1]: The e *f*.\n\n[^c]:\n    In a block.\n\n    And two.",
        "* a\n  * b *c*\n\n    d\n1. e `F`\n\n> g\n> > h **i**\n",
        "| a | b \\| c |\n|---|:-:|\n| `D\\|E` f | **g \\| h** |\n\ni",
        "A line\\\nbroken *here  \nand* there  \nagain",
        "a\n=\n\nb *c*\n---\n\n### d # e ###\n#\n\n- # f\n",
    ],
)
def test_markup_stays_where_it_was(text: str) -> None:
    """The translation changes the case of letters alone."""
    assert parse(text).build(parse(text).segments).decode() == text
    written = changed(text, str.swapcase)
    expected = text.replace("[e][]", "[e][e]")  # a short reference is written in full
    assert written.lower() == expected.lower()
    assert changed(written, str.swapcase) == expected
    assert not parse(text).skipped.get("text not found in the source")


def test_escapes_and_entities_are_read() -> None:
    assert parse("A \\*b\\* &amp; &lt;c&gt; d\\_e.").segments == ["A *b* & <c> d_e."]
    assert changed("A &lt;b&gt; c") == "A \\<B> C"
    # the first backtick is kept between two boundaries, and must not find a partner
    assert parse(changed("`<br>\\\nword ``` here")).segments == parse("`<br>\\\nWORD ``` HERE").segments


def test_marks_that_cross_a_hard_break_stay() -> None:
    text = "> one *two  \n> three* four\n"
    assert parse(text).segments == ["one", "two", "three", "four"]
    assert changed(text) == "> ONE *TWO  \n> THREE* FOUR\n"


def test_a_wrapped_paragraph_becomes_one_line() -> None:
    text = "> one **two\n> three** four `a\n> b`\n>\n> five\n"
    assert parse(text).segments == ["one two three four a b", "five"]
    assert changed(text) == "> ONE **TWO THREE** FOUR `a\n> b`\n>\n> FIVE\n"


def test_code_in_a_table_keeps_its_escaped_bar() -> None:
    text = "| see `a\\|b` now | c |\n|---|---|\n"
    assert protected(text) == ["a|b"]
    assert changed(text) == "| SEE `a\\|b` NOW | C |\n|---|---|\n"


# ---- blocks ----------------------------------------------------------------------------------------------------------


def test_admonitions() -> None:
    text = '!!! note "A title"\n    Some text\n    here.\n\n???+ tip\n    More.\n\n!!! Warning\n    End.\n'
    assert parse(text).segments == ["A title", "Some text here.", "More.", "End."]
    written = changed(text, lambda each: f'{each} "x"')
    assert written.startswith('!!! note "A title &quot;x&quot;"\n    Some text here. "x"\n\n???+ tip\n    More. "x"')
    assert '!!! Warning\n    End. "x"' in written


def test_github_alerts() -> None:
    text = "> [!NOTE]\n> The *text*\n> here.\n\n> [!tip] A title\n> More.\n\n- [ ] a task\n- [x] done\n"
    assert parse(text).segments == ["The text here.", "A title", "More.", "a task", "done"]
    assert changed(text) == ("> [!NOTE]\n> THE *TEXT* HERE.\n\n> [!tip] A TITLE\n> MORE.\n\n- [ ] A TASK\n- [x] DONE\n")


def test_formulas_front_matter_and_html_are_kept() -> None:
    text = (
        "---\ntitle: x\n---\n\none\n\n$$\na = b\n$$\n\n$$c$$ (d)\n\n<div>\nkept\n</div>\n\n<!-- kept -->\n\n"
        "![alt](x) two^[three]\n"
    )
    document = parse(text)
    assert document.segments == ["one", "two"]
    assert document.skipped == {"front matter": 1, "HTML block": 1, "image text": 1, "inline footnote": 1}
    assert changed(text) == text.replace("one", "ONE").replace("two", "TWO")


@pytest.mark.parametrize("text", ["\tone\n- a\n\n\t\tb *c*\n", "a\u2028b\n", "- a\r\n  b\r\r\n c", "\ufeff# a"])
def test_unusual_white_space(text: str) -> None:
    document = parse(text)
    assert document.build(document.segments).decode() == text
    assert not document.skipped
    assert changed(text).lower().split() == text.lower().split()


@pytest.mark.parametrize(
    "translated",
    ["costs $x$ now", "$$", "!!! note", "??? tip", "a $b$", "[^1]", "~~x~~", "&amp; &#38;", "____a __ b__"],
)
def test_a_translation_adds_no_markup(translated: str) -> None:
    written = changed("Some text.\n", lambda _: translated)
    assert parse(written).protected in ([()], [])
    escaped = translated.replace("&", "&amp;")
    assert MarkdownIt("commonmark").enable("strikethrough").render(written) == f"<p>{escaped}</p>\n"


# ---- any input -------------------------------------------------------------------------------------------------------

PIECES = r"""
    * ** *** _ __ ` `` ~~ [ ] ( ) ![ [^1] [^1]: ^[ $ $$ \ \* \| &amp; &#35; < > <b> </b> <code> </code> <br> <!-- -->
    <http://a.b> [x](y) [x] [x]: # ## > > - 1. | |---| --- ``` !!! ???+ "t" [!NOTE] = === word Wort été 日本 .
""".split()
SPACES = [" ", "  ", "\n", "\n\n", "\r\n", "\r", "\t", "    ", "\n> ", "  \n", "\\\n", "\n    "]


@given(st.lists(st.sampled_from([*PIECES, *SPACES]), max_size=25).map("".join))
def test_every_byte_is_kept(text: str) -> None:
    document = parse(text)
    assert document.build(document.segments).decode() == text
    for segment, spans in zip(document.segments, document.protected, strict=True):
        assert segment == segment.strip()
        assert all(segment[begin:end].strip() for begin, end in spans)
    document.build([f"{segment[::-1]} <x0> more" for segment in document.segments])
    quiet = "".join(character for character in changed(text).lower() if character.isalnum())
    assert quiet.startswith("".join(c for c in text.lower() if c.isalnum())[:1])


@pytest.mark.parametrize(
    "unit",
    [
        "[",
        "![",
        "`",
        "`a``b",
        "**a ",
        "_",
        "*a_",
        "<b>",
        "<a",
        "<!--",
        "[a](",
        "[a][",
        "$",
        "$a ",
        "^[",
        "[^",
        "\\",
        "&",
    ]
    + ["~~a ", "<code>", "<kbd>x</kbd> ", "a  \n", "> ", "- ", "!!! a\n    ", "|a", "| a | b\n|-|-\n", "# a\n\n"]
    + ["[x](y) ", "*a* ", "[^a]: x\n\n", "word\n", "> a\n", "$$\n", "---\n", "`x` word ", "a | b\n-|-\nc | d\n\n"],
)
def test_reading_takes_linear_time(unit: str) -> None:
    """Quadratic time would be a hundred times as long for ten times the text."""

    def seconds(size: int) -> float:
        text = "a " + unit * (size // len(unit)) + " word"
        begin = time.process_time()
        document = parse(text)
        assert document.build(document.segments).decode() == text
        return time.process_time() - begin

    seconds(100)
    assert seconds(20_000) < 30 * seconds(2_000) + 0.5
