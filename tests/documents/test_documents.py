"""Documents: only words change, and a document built from its own segments is equal byte for byte."""

from __future__ import annotations

import html
import html.parser
import itertools
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from qkv.core.errors import UsageError
from qkv.documents import FORMATS, Document, read_document

PAGE = """<!doctype html>
<html><head><title>Tom &amp; Jerry</title><style>p { color: red }</style>
<script>if (a < b) write("<p>keep</p>")</script></head>
<body><h1>The cat</h1>
<p class="x">Your <b>cat</b> is a <a href="u?a=1&b=2">lovely
   red cat</a>.</p>
<!-- a comment --><p><em>All of it</em></p><pre>keep  this</pre>
<div>One<br>two <img src="x.png" alt="no"> three &lt;b&gt; four</div>
<p>Run <code>a b</code> now.</p><p translate="no">Keep this</p>
<b><p>across</p></b><i>one <u>two</i> three</u><p>1 < 2</p>
"""

NOTES = """---
title: keep
---

# A *nice* title #

Some **bold text** and `code here`, see [the docs](http://a.b/c "t"), [ref] and
a second line.\\
After a break: a \\* star, snake_case and <http://x.y>.

> A quote over
> two lines

- [ ] a task
- an item
  that goes on

```py
code = "keep"
```

    indented code

| a head | b \\| c |
|---|---|
| one **two** | three |

Setext
======

A footnote.[^1]

[^1]: The note.

[ref]: http://e.f

<div>
kept html
</div>
"""

TITLES = (
    "\ufeff1\r\n00:00:01,000 --> 00:00:02,500\r\n<i>Hello there my\r\ngood friend.</i>\r\n\r\n"
    "2\r\n00:00:03,000 --> 00:00:04,000 X1:1\r\n- Yes?\r\n- {\\an8}No & no.\r\n\r\n"
    "3\r\n00:00:05,000 --> 00:00:06,000\r\n\r\n"
)

SAMPLES = {"a.txt": " One line.\r\n\r\n\ttwo <b>\n", "a.md": NOTES, "a.html": PAGE, "a.srt": TITLES}


def parse(name: str, text: str) -> Document:
    return read_document(name, text.encode())


def translated(document: Document, change: Callable[[str], str]) -> list[str]:
    """Change the segments, except their protected text."""
    translations = []
    for segment, protected in zip(document.segments, document.protected, strict=True):
        edges = [0, *(edge for span in protected for edge in span), len(segment)]
        parts = [segment[begin:end] for begin, end in itertools.pairwise(edges)]
        translations.append("".join(part if place % 2 else change(part) for place, part in enumerate(parts)))
    return translations


def built(name: str, text: str, change: Callable[[str], str]) -> str:
    document = parse(name, text)
    return document.build(translated(document, change)).decode()


# ---- the same document -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_own_segments_rebuild_the_document(name: str) -> None:
    document = parse(name, SAMPLES[name])
    assert document.segments
    assert document.build(document.segments) == SAMPLES[name].encode()
    assert len(document.has_markup) == len(document.segments)
    assert document.name == name


def plain(content: str) -> str:
    """The characters of a document in lower case, without white space and escapes."""
    return "".join(html.unescape(content).lower().split())


@pytest.mark.parametrize("name", SAMPLES)
def test_a_translation_is_written_into_the_same_document(name: str) -> None:
    """The translation changes the case alone, so `build` has to write all markup back where it was."""
    document = parse(name, SAMPLES[name])
    translations = translated(document, str.swapcase)
    content = document.build(translations).decode()
    again = parse(name, content)
    assert again.segments == translations
    assert again.build(document.segments).decode().lower() == content.lower()
    # Markdown has other markup between wrapped lines ("> ") and writes short links in full ("[ref][ref]").
    original = SAMPLES[name].replace("\n> two", " two").replace("[ref] and", "[ref][ref] and")
    assert plain(content) == plain(original)


PIECES = r"""
    * _ ** *** ` ``` ~~ [ ] ( ) ! # > - 1. | |---| --- \ {\an8} [x](y) [a]: < > & " ' = word Wort été http://a.b
    <b> </b> <i> </i> <p> </p> <br> <a href='x'> </a> <script> </script> <!-- --> <code> </code> &amp; &lt;
    00:00:01,000-->00:00:02,000
""".split()
SPACES = [" ", "  ", "\n", "\n\n", "\r\n", "\r", "\t", "    ", "\ufeff", "\u2028", "\x0c"]
text = st.lists(st.sampled_from([*PIECES, *SPACES]))


@given(text.map("".join), st.sampled_from(["txt", "md", "html"]))
def test_any_mix_of_markup_is_rebuilt(content: str, kind: str) -> None:
    document = read_document(f"a.{kind}", content.encode())
    assert document.build(document.segments) == content.encode()
    assert all(any(c.isalnum() for c in segment) and "\n" not in segment for segment in document.segments)
    document.build([segment[::-1] + " more <b>" for segment in document.segments])  # places any markup


@given(text.map("".join), st.sampled_from(["txt", "md", "html"]))
def test_any_mix_of_markup_is_kept_around_a_translation(content: str, kind: str) -> None:
    # A mark may move a \u2028 to the end of a line, where Markdown drops it.
    assume(kind != "md" or "\u2028" not in content)
    document = read_document(f"a.{kind}", content.encode())
    translations = translated(document, str.swapcase)
    changed = document.build(translations)
    assert read_document(f"a.{kind}", changed).segments == translations
    if kind != "md":  # which escapes characters of the translation
        assert plain(changed.decode()) == plain(content)


@given(st.text(), st.sampled_from(["txt", "md", "html"]))
def test_any_text_is_rebuilt(content: str, kind: str) -> None:
    data = content.encode("utf-8", "ignore").replace(b"\0", b"")
    document = read_document(f"a.{kind}", data)
    assert document.build(document.segments) == data


# ---- translated and kept text ----------------------------------------------------------------------------------------


def test_lines_of_text() -> None:
    assert parse("a.txt", SAMPLES["a.txt"]).segments == ["One line.", "two <b>"]
    assert built("a.txt", SAMPLES["a.txt"], str.upper) == " ONE LINE.\r\n\r\n\tTWO <B>\n"


def test_html_keeps_tags_scripts_and_code() -> None:
    document = parse("a.html", PAGE)
    assert document.segments[:4] == ["Tom & Jerry", "The cat", "Your cat is a lovely red cat.", "All of it"]
    assert document.segments[4:8] == ["One", "two three <b> four", "Run a b now.", "across"]
    assert document.segments[8:] == ["one", "two", "three", "1 < 2", "no"]
    assert document.skipped == {'translate="no"': 1, "preformatted text": 1}
    changed = built("a.html", PAGE, str.upper)
    for kept in ("<title>TOM &amp; JERRY</title>", 'write("<p>keep</p>")', "p { color: red }", "<!-- a comment -->"):
        assert kept in changed
    for kept in ("<pre>keep  this</pre>", "ONE<br>TWO", "&lt;B&gt;", "<code>a b</code>", ">Keep this<", "<p>1 < 2</p>"):
        assert kept in changed
    assert tags(changed) == tags(PAGE.replace('alt="no"', 'alt="NO"'))


def tags(page: str) -> list[str]:
    tag_list: list[str] = []
    reader = html.parser.HTMLParser()
    reader.handle_starttag = lambda tag, attrs: tag_list.append(f"{tag} {attrs}")  # type: ignore[method-assign]
    reader.handle_endtag = lambda tag: tag_list.append(f"/{tag}")  # type: ignore[method-assign]
    reader.feed(page)
    return tag_list


def test_special_characters_are_not_confused_with_markup() -> None:
    page = "<p>a &#xE000; &lt;x0&gt; \ue001 <b>b</b> \ufdd0</p>"
    assert parse("a.html", page).segments == ["a \ue000 <x0> \ue001 b \ufdd0"]
    changed = built("a.html", page, lambda text: text.replace("a", "un \ue002 <x1>"))
    assert changed.replace("<b>", "").replace("</b>", "") == (
        "<p>un \ue002 &lt;x1&gt; \ue000 &lt;x0&gt; \ue001 b \ufdd0</p>"
    )


def test_markup_follows_its_aligned_words() -> None:
    document = parse("a.html", '<p>a <b>lovely</b> <a href="x">cat</a>.</p>')
    assert document.has_markup == [True]
    links = [(0, 0), (1, 2), (2, 1), (3, 3)]
    assert document.build(["un gatto adorabile."], [links]) == b'<p>un <a href="x">gatto</a> <b>adorabile</b>.</p>'
    # without an alignment, by relative position
    assert document.build(["un adorabile gatto."]) == b'<p>un <b>adorabile</b> <a href="x">gatto</a>.</p>'


def test_markup_inside_a_word_keeps_its_part_of_the_word() -> None:
    assert built("a.md", "a [x](y)word", str.upper) == "A [X](y)WORD"
    assert built("a.html", "<p>CO<sub>2</sub> <b>W</b>ords</p>", str.upper) == "<p>CO<sub>2</sub> <b>W</b>ORDS</p>"
    document = parse("a.md", "See [under](u)lined w**or**d here.")
    assert document.build(["Vedi sottolineata parola qui."]) == b"Vedi [sottol](u)ineata pa**ro**la qui."
    links = [(0, 0), (1, 1), (1, 2), (2, 3), (3, 4), (4, 5)]  # two words translate the one with the link
    assert document.build(["Vedi linea sotto parola qui."], [links]) == b"Vedi [linea sotto](u) pa**ro**la qui."


def test_markdown_keeps_its_structure() -> None:
    document = parse("a.md", NOTES)
    assert document.segments == [
        "A nice title",
        "Some bold text and code here, see the docs, ref and a second line.",
        "After a break: a * star, snake_case and http://x.y.",
        "A quote over two lines",
        "a task",
        "an item that goes on",
        "a head",
        "b | c",
        "one two",
        "three",
        "Setext",
        "A footnote.",
        "The note.",
    ]
    changed = built("a.md", NOTES, str.upper)
    for kept in (
        "title: keep\n",
        "# A *NICE* TITLE #\n",
        "**BOLD TEXT**",
        "`code here`",
        '[THE DOCS](http://a.b/c "t")',
    ):
        assert kept in changed
    for kept in ("[REF][ref]", "\\* STAR", "<http://x.y>", "> A QUOTE OVER TWO LINES\n", "- [ ] A TASK\n"):
        assert kept in changed
    for kept in ('code = "keep"', "    indented code", "| A HEAD | B \\| C |", "|---|---|", "ONE **TWO** | THREE |"):
        assert kept in changed
    for kept in ("SETEXT\n======", "A FOOTNOTE.[^1]", "[^1]: THE NOTE.\n", "[ref]: http://e.f", "kept html"):
        assert kept in changed


@pytest.mark.parametrize("translated", ["# not a heading", "- no list", "1. no", "*no* [link](x) `code` <b>", "> no"])
def test_a_translation_is_escaped_for_markdown(translated: str) -> None:
    from markdown_it import MarkdownIt

    written = built("a.md", "Some text.\n", lambda _: translated)
    rendered = MarkdownIt("commonmark").render(written)
    plain = translated.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert rendered == f"<p>{plain}</p>\n"


def test_subtitles_keep_numbers_and_times() -> None:
    assert parse("a.srt", TITLES).segments == ["Hello there my good friend.", "Yes?", "No & no."]
    changed = built("a.srt", TITLES, str.upper)
    assert changed == TITLES.replace("Hello there my", "HELLO THERE MY").replace("good friend", "GOOD FRIEND").replace(
        "Yes", "YES"
    ).replace("No & no", "NO & NO")


def test_a_translation_is_one_line() -> None:
    assert built("a.txt", "one\ntwo\n", lambda text: f"{text}\n{text}") == "one one\ntwo two\n"


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.pdf", b"x", "send one of txt, md"),
        ("noend", b"x", "send one of txt, md"),
        ("a.txt", b"one\ntwo\xff", "line 2: not UTF-8"),
    ],
)
def test_unreadable_documents_are_refused_with_a_reason(name: str, data: bytes, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_document(name, data)


def test_every_segment_needs_a_translation() -> None:
    with pytest.raises(UsageError, match="2 segments, but 1 translations"):
        parse("a.txt", "one\ntwo").build(["uno"])


def test_formats_are_named() -> None:
    text = {"txt", "md", "html", "htm", "srt", "vtt"}
    assert set(FORMATS) == text | {"docx", "pptx", "xlsx", "odt", "epub"}


@pytest.mark.parametrize(
    "unit", ["<a", '</a">"', "<!--", "[", "`", "``` ", "**a ", "_", "<b>", "<b>x", "<code>", "![", "\n"]
)
@pytest.mark.parametrize("kind", ["md", "html"])
def test_hostile_markup_takes_linear_time(kind: str, unit: str) -> None:
    """Quadratic time would take minutes here."""
    data = (unit * 10_000 + " word").encode()
    document = read_document(f"a.{kind}", data)
    assert document.build(document.segments) == data
    document.build([segment[::-1] for segment in document.segments])
