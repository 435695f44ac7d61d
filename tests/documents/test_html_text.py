"""HTML of the translation API: split into parts without loss."""

from __future__ import annotations

import html as standard

from hypothesis import given
from hypothesis import strategies as st

from qkv.documents import html_text

pieces = st.sampled_from(
    [
        "<p>",
        "</p>",
        "<b>",
        "</b>",
        "<br>",
        "<br/>",
        "&lt;",
        "&amp;",
        "cat",
        " ",
        "\n",
        "<",
        ">",
        "<!-- x -->",
        "<a href='y'>",
    ]
    + ["</a>", "<script>if (a<b) x()</script>", "a & b", "<img src=x>", "<p", "é", "<style>"]
)


@given(st.lists(pieces, max_size=12).map("".join))
def test_split_html_loses_nothing(source: str) -> None:
    """Kept parts are kept byte for byte; the others have the same text, also after a split at their tags."""
    parts = html_text.split_html(source)

    def same(parts: list[html_text.HtmlPart]) -> str:
        return "".join(
            p.text if p.kept else f"{p.before}{p.text.translate(html_text.ENTITIES)}{p.after}" for p in parts
        )

    assert standard.unescape(same(parts)) == standard.unescape(source)
    for part in parts:
        if not part.kept:
            assert part.text == part.text.strip()
            assert standard.unescape(same(part.split_at_tags())) == standard.unescape(same([part]))
            assert all(piece.kept or not piece.has_tags for piece in part.split_at_tags())


def test_html_is_split_at_block_elements() -> None:
    parts = html_text.split_html("<h1>One <b>two</b></h1><p>three &lt; four<br>five</p>")
    assert [part.text.translate(html_text.UNESCAPES) for part in parts if not part.kept] == [
        "One <b>two</b>",
        "three < four",
        "five",
    ]
    assert [part.is_balanced for part in parts if not part.kept] == [True] * 3
    assert not html_text.split_html("a <b>c")[0].is_balanced
    assert not html_text.split_html("a <b><i>c</b></i>")[0].is_balanced


def test_very_many_tags_are_not_placed() -> None:
    """Placing them would take too long, or exceed the depth of recursion; the text is split at them."""
    source = "<b>" * 1500 + "cat" + "</b>" * 1500
    (part,) = html_text.split_html(source)
    assert not part.is_balanced
    assert [each.text for each in part.split_at_tags() if not each.kept] == ["cat"]
    (few,) = html_text.split_html("<b>" * 100 + "cat" + "</b>" * 100)
    assert few.is_balanced
    assert few.build("gatto", [(0, 0)]) == "<b>" * 100 + "gatto" + "</b>" * 100
