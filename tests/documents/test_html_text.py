"""HTML: one reader for documents and for the translation API, exact to the byte."""

from __future__ import annotations

import builtins
import html as standard
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.core.errors import UsageError
from qkv.documents import html_text, read_document
from qkv.documents.html_text import HtmlText

FORMS = [{}, {"sentences": True}, {"sentences": True, "fits": lambda text: len(text) < 8}]


def texts(source: str, **options: Any) -> list[str]:
    return [segment.text for segment in HtmlText(source, **options).segments]


def upper(source: str) -> str:
    """Translate by upper-casing, except protected text."""
    page = HtmlText(source)
    built = []
    for segment in page.segments:
        translation = segment.text.upper()
        for begin, end in segment.protected:
            translation = translation[:begin] + segment.text[begin:end] + translation[end:]
        built.append(segment.build(translation))
    return page.write(built)


# ---- the source stays ------------------------------------------------------------------------------------------------

PIECES = """
    <p> </p> <b> </b> <br> <br/> &lt; &amp; cat. Dog < > <!--x--> <!--> <!--a--!> <a¦href='y'> <a¦title="a>b"> </a> é
    <script>if(a<b)x()</script> <img¦src=x¦alt=cat> <img¦alt='the¦&quot;cat'> <p <style> </style> <code> </code>
    <pre> </pre> <div¦translate=no> <i¦class='x¦notranslate'> </i> </div> <title> </title> <svg> </svg> <![CDATA[x]]>
    <?x¦y> </3> </> </ <textarea¦placeholder=Name> </textarea> <noscript> </noscript> <li¦translate="no"> <math/>
    <template> \ue000 \ue0001\ue000 <plaintext> <x-y> <!doctype¦html> " ' = \x00 <td> <select> <option>
""".split()
sources = st.lists(st.sampled_from([*(p.replace("¦", " ") for p in PIECES), " ", "  ", "\n", "\r\n", "\t"])).map(
    "".join
)


@given(sources, st.sampled_from(FORMS))
def test_every_byte_is_kept(source: str, form: dict[str, Any]) -> None:
    page = HtmlText(source, **form)
    assert page.write([None] * len(page.segments)) == source
    assert page.write([segment.build(segment.text) for segment in page.segments]) == source
    for segment in page.segments:
        assert segment.text == segment.text.strip(" \t\r\n\f")
        assert all(segment.text[begin:end].strip() for begin, end in segment.protected)
    page.write([segment.build(f"{segment.text[::-1]} <x0> more") for segment in page.segments])


@given(sources)
def test_pieces_agree_with_the_parser(source: str) -> None:
    """The places come from hooks in justhtml's tokenizer; its public stream must show the same."""
    from justhtml import stream

    source = source.replace("\x00", "").replace("noscript", "nav")
    pieces = html_text.scan(source)
    assert "".join(source[piece.begin : piece.end] for piece in pieces) == source
    events = list(stream(source))
    tags = [piece for piece in pieces if piece.kind in ("start", "end")]
    expected = [data if isinstance(data, str) else data[0] for kind, data in events if kind in ("start", "end")]
    assert [piece.name for piece in tags] == expected
    for piece in tags:
        begin = "<" if piece.kind == "start" else "</"
        assert source[piece.begin : piece.end].lower().startswith(begin + piece.name)
    if not any(name in source for name in ("<script", "<style", "<svg", "<math", "<plaintext")):
        text = "".join(standard.unescape(source[p.begin : p.end]) for p in pieces if p.kind == "text")
        assert text.replace("\r\n", "\n") == "".join(data for kind, data in events if kind == "text")


def test_a_greater_than_sign_in_an_attribute_does_not_end_the_tag() -> None:
    source = "<p title=\"a>b\" data-x='c>d'>One <b class='>'>two</b></p>"
    assert texts(source) == ["One two", "a>b"]
    assert upper(source) == "<p title=\"A&gt;B\" data-x='c>d'>ONE <b class='>'>TWO</b></p>"


def test_untouched_parts_of_a_messy_page_stay() -> None:
    source = (
        "\ufeff<!DOCTYPE html>\r\n<TABLE><tr>misplaced<td>One</table>\r\n<p>a <B>bold</P> &nbsp;<p>next<br/>&hellip;"
        "<script>x = '<p>one</p>'</script><!-- one --><a href=http://x/?a=1&copy=2>two</a> <i>three <u>four</i>"
        " five</u>"
    )
    changed = upper(source)
    assert changed.lower() == source.lower().replace("&hellip;", "&hellip;")
    assert "http://x/?a=1&copy=2" in changed
    assert "'<p>one</p>'" in changed
    assert "<!-- one -->" in changed
    assert "MISPLACED<td>ONE</table>" in changed


# ---- what is translated ----------------------------------------------------------------------------------------------


def test_attributes_with_text_are_segments() -> None:
    source = (
        '<p>See <a href="x" title="The cat">this</a> and <img src="a.png" alt=\'It&#39;s &lt;red&gt;\' /> now.</p>'
        '<input placeholder=Name type="text" alt="" title="42"><textarea placeholder="Your text">kept</textarea>'
    )
    assert texts(source) == ["See this and now.", "The cat", "It's <red>", "Name", "42", "Your text"]
    page = HtmlText(source)
    changed = page.write([s.build(f'{s.text[:-1]} & "x"') for s in page.segments])
    assert 'title="The ca &amp; &quot;x&quot;"' in changed
    assert "alt='It&#x27;s &lt;red &amp; &quot;x&quot;'" in changed
    assert 'placeholder="Nam &amp; &quot;x&quot;"' in changed
    assert ">kept</textarea>" in changed
    assert page.skipped == {"textarea": 1}
    words = texts(
        '<img alt="" title><link title="Print"><td alt="no"><p title="no" translate="no">x</p><a title="a" title="b">'
    )
    assert words == ["a"]


def test_a_tag_that_is_repeated_has_its_translated_attribute_each_time() -> None:
    page = HtmlText('<p>one <b title="big">two three</b></p>')
    built = [page.segments[0].build("due uno tre", [(0, 1), (1, 0), (2, 2)]), page.segments[1].build("grande")]
    assert page.write(built) == '<p><b title="grande">due</b> uno <b title="grande">tre</b></p>'


def test_titles_buttons_options_and_labels_are_translated() -> None:
    source = (
        "<title>A &amp; b</title><button>Save</button><select><optgroup><option>One<option selected>Two</select>"
        "<label><input type=checkbox> I agree</label><noscript><p>No script</p></noscript>"
    )
    assert texts(source) == ["A & b", "Save", "One", "Two", "I agree", "No script"]
    assert upper(source).startswith("<title>A &amp; B</title><button>SAVE</button>")


def test_preformatted_code_is_kept_and_prose_is_not() -> None:
    poem = "<pre>\n  A red cat\nwent &amp; <b>slept</b>.\n\n  The end\n</pre>"
    assert texts(poem) == ["A red cat", "went & slept.", "The end"]
    assert upper(poem) == "<pre>\n  A RED CAT\nWENT &amp; <b>SLEPT</b>.\n\n  THE END\n</pre>"
    for code in ("<pre><code>a cat</code></pre>", "<pre>x = 1</pre>", "<pre>a  b</pre>", "<pre>a\tb</pre>"):
        assert texts(code) == []
        assert HtmlText(code).skipped == {"preformatted text": 1}


def test_code_in_a_sentence_is_protected() -> None:
    source = "<p>Run <code class=x>pip <b>install</b> a&lt;b</code> or <kbd>Enter</kbd>.</p>"
    (segment,) = HtmlText(source).segments
    assert segment.text == "Run pip install a<b or Enter."
    assert [segment.text[begin:end] for begin, end in segment.protected] == ["pip install a<b", "Enter"]
    assert upper(source) == "<p>RUN <code class=x>pip <b>install</b> a&lt;b</code> OR <kbd>Enter</kbd>.</p>"
    # inside a link, and bold beside it
    (linked,) = HtmlText('<b>Red</b> <a href="u">the <code>x</code></a> cat').segments
    links = [(0, 3), (1, 0), (2, 1), (3, 2)]
    assert linked.build("il x gatto rosso", links) == '<a href="u">il <code>x</code></a> gatto <b>rosso</b>'


def test_text_that_is_not_to_be_translated() -> None:
    source = (
        '<p>The <span translate="no">Red Cat</span> and <i class="a notranslate">Blue <b>Dog</b></i> sleep.</p>'
        '<div translate=no><p>Keep</p> this</div><ul><li translate="NO">Keep<li>Read</ul>'
        '<p data-translate="no">Read too</p>'
    )
    page = HtmlText(source)
    assert [segment.text for segment in page.segments] == ["The Red Cat and Blue Dog sleep.", "Read", "Read too"]
    first = page.segments[0]
    assert [first.text[begin:end] for begin, end in first.protected] == ["Red Cat", "Blue Dog"]
    assert page.skipped == {'translate="no"': 2}
    assert '<span translate="no">Red Cat</span> AND <i class="a notranslate">Blue <b>Dog</b></i>' in upper(source)


def test_an_unfinished_element_does_not_hide_the_page() -> None:
    assert texts("<p>Run <code>x</p><p>Read</p>") == ["Run x", "Read"]
    assert texts("<video><p>Read</p><template>This") == ["Read", "This"]
    assert texts("<p>One<code><p>Two") == ["One", "Two"]
    assert texts("<p>One <b") == ["One"]
    assert HtmlText("a <b>one two</b").segments[-1].build("due uno") == "due uno"


def test_formulas_and_drawings_stay_in_their_sentence() -> None:
    source = "<p>The <svg><title>t</title><g/></svg> cat <math><mi>x</mi></math> sleeps.</p>"
    assert texts(source) == ["The cat sleeps."]
    assert upper(source) == source.replace("The", "THE").replace("cat", "CAT").replace("sleeps", "SLEEPS")


# ---- the API's runs --------------------------------------------------------------------------------------------------


def test_html_is_split_at_block_elements() -> None:
    assert texts("<h1>One <b>two</b></h1><p>three &lt; four<br>five</p>") == ["One two", "three < four", "five"]
    assert [s.needs_alignment for s in HtmlText("a <b>c</b><p>d <code>e</code>").segments] == [True, False]
    assert texts("a <b>c") == ["a", "c"]
    assert texts("a <b><i>c</b></i>") == ["a", "c"]


def test_sentences_are_cut_outside_of_elements() -> None:
    source = "<p><b>One</b> cat.\n Two <i>dogs. Three</i> mice.  <i>Four.</i> Five <code>a. B</code> six</p>"
    page = HtmlText(source, sentences=True)
    assert [segment.raw for segment in page.segments] == [
        "<b>One</b> cat.",
        "Two <i>dogs. Three</i> mice.",
        "Four.",
        "Five <code>a. B</code> six",
    ]
    assert page.write([s.build(s.text.replace("o", "0")) for s in page.segments]).startswith("<p><b>One</b> cat.\n Tw0")
    # the end of a line is no end of a sentence
    assert texts("<p>My <b>friend</b> buys\na book.</p>", sentences=True) == ["My friend buys a book."]


def test_a_run_that_is_too_long_is_split_at_its_tags() -> None:
    source = "one two <b>three four</b> five <code>x</code> six"
    assert texts(source, fits=lambda text: len(text) < 10) == ["one two", "three four", "five x six"]
    assert texts(source, fits=lambda text: len(text) < 100) == ["one two three four five x six"]
    # a tag has no length
    linked = f'one <a href="{"x" * 600}">two</a> three'
    assert texts(linked, fits=lambda text: len(text) < 100) == ["one two three"]


def test_very_many_tags_are_not_placed() -> None:
    """Placing them would take too long, or exceed the depth of recursion; the text is split at them."""
    assert texts("a" + "<b>" * 1500 + "cat" + "</b>" * 1500) == ["a", "cat"]
    few = HtmlText("a " + "<b>" * 100 + "cat" + "</b>" * 100)
    assert few.segments[0].build("un gatto", [(0, 0), (1, 1)]) == "un " + "<b>" * 100 + "gatto" + "</b>" * 100


# ---- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "unit",
    [
        "<a ",
        '<a title="x',
        "<b>x</b>",
        "<b>",
        "<!-- a -->x",
        "<!--",
        "</a>",
        '</a">',
        "<code><p>",
        "<pre>",
        "<pre>a</pre>",
    ]
    + [
        "<video><i>",
        "<p translate=no>",
        "<script>",
        "<![CDATA[",
        "&amp;",
        "word. ",
        "</>",
        "<?",
        "<img alt=a>",
        "<svg>",
    ]
    + [
        "<title>",
        "<title></titl",
        "<i><b></i>",
        "<a a=b " * 9 + ">",
        "<li>x",
        "<textarea>",
        "\n",
        "<b>x </b>y. ",
        "<x/>",
    ],
)
def test_reading_takes_linear_time(unit: str) -> None:
    """Quadratic time would be a hundred times as long for ten times the text."""

    def seconds(size: int) -> float:
        source = unit * (size // len(unit)) + " word"
        begin = time.process_time()
        page = HtmlText(source, sentences=True)
        assert page.write([None] * len(page.segments)) == source
        return time.process_time() - begin

    seconds(100)
    assert seconds(40_000) < 30 * seconds(4_000) + 0.2


def test_a_missing_parser_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *others: Any) -> Any:
        if name.startswith("justhtml"):
            raise ImportError(name)
        return real(name, *others)

    html_text._position_scanner.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match=r"^page.html: HTML needs justhtml: pip install 'qkv\[documents\]'$"):
        read_document("page.html", b"<p>One")


def test_code_at_a_word_is_not_doubled_where_the_same_text_is_no_code() -> None:
    document = read_document("a.html", b"<p>cat<code>x_y</code> x_y <code>x_y</code> end</p>")
    assert document.segments == ["catx_y x_y x_y end"]
    built = document.build(["fine catx_y x_y x_y"]).decode()
    assert (built.count("x_y"), built.count("<code>x_y</code>")) == (3, 2)
