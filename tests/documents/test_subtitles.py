"""Subtitles: only the words of cues change, in as many lines, in linear time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.core.errors import UsageError
from qkv.documents import Document, read_document
from qkv.documents.subtitles import wrap_lines

TIMES = "00:00:01,000 --> 00:00:02,000"

FILM = """WEBVTT - a film
Kind: captions

STYLE
::cue(b) { color: red }

NOTE One line, and
another --> one

1 - intro
00:01.000 --> 00:02.500 position:10% line:1
<v Mary Ann>Hello <i>there</i> &amp; welcome.</v>
<v Bob>It is <c.loud.big>5 &lt; 6</c>, I
<00:01.500>think.

00:00:03.000 --> 00:00:04.000
One &nbsp;line

and after a blank line.

NOTE kept

id
00:05.000 --> 00:06.000
<ruby>the cat<rt>kept</rt></ruby> sleeps
"""


def parse(name: str, text: str) -> Document:
    return read_document(name, text.encode())


def built(name: str, text: str, change: Callable[[str], str]) -> str:
    document = parse(name, text)
    return document.build([change(segment) for segment in document.segments]).decode()


# ---- what is translated ----------------------------------------------------------------------------------------------


def test_webvtt_keeps_everything_but_words() -> None:
    document = parse("a.vtt", FILM)
    assert document.segments == [
        "Hello there & welcome.",
        "It is 5 < 6, I think.",
        "One \u00a0line",
        "and after a blank line.",
        "the cat sleeps",
    ]
    assert document.media_type == "text/vtt; charset=utf-8"
    assert document.skipped == {"note": 2, "ruby annotation": 1}
    assert document.build(document.segments).decode() == FILM
    changed = FILM
    for words in ("Hello", "there", "welcome.", "It is", "I\n", "think", "the cat", "sleeps", "and after a blank line"):
        changed = changed.replace(words, words.upper())
    expected = changed.replace("One &nbsp;line", "ONE \u00a0LINE")
    expected = expected.replace("5 &lt; 6</c>, I\n<00:01.500>THINK", "5 &lt;\n6</c>, I<00:01.500> THINK")
    assert built("a.vtt", FILM, str.upper) == expected


def test_a_webvtt_file_is_read_under_both_names() -> None:
    assert parse("a.srt", FILM).segments == parse("a.vtt", FILM).segments == parse("a.vtt", "\ufeff" + FILM).segments
    assert read_document("-", FILM.encode(), "vtt").segments == parse("a.vtt", FILM).segments


def test_special_characters_are_written_as_entities_in_webvtt() -> None:
    cue = "WEBVTT\n\n00:01.000 --> 00:02.000\nOne\n"
    assert built("a.vtt", cue, lambda _: "a < b --> c &") == cue.replace("One", "a &lt; b --&gt; c &amp;")


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_a_blank_line_does_not_end_a_cue(newline: str) -> None:
    text = f"1\n{TIMES}\nfirst\n \nsecond\n\n\n1984\n\n2\n{TIMES}\n\nthird\n{TIMES}\nfourth\n3\n{TIMES}\n"
    text = text.replace("\n", newline)
    document = parse("a.srt", text)
    assert document.segments == ["first", "second", "1984", "third", "fourth"]
    changed = text
    for word in ("first", "second", "third", "fourth"):
        changed = changed.replace(word, word.upper())
    assert built("a.srt", text, str.upper) == changed


@pytest.mark.parametrize(
    "times",
    [
        "00:00:01,000 --> 00:00:02,000",
        "0:00:01.0-->0:00:02.0",
        "  100:00:01,00   -->   100:00:02,00  X1:1 X2:2",
        "00:01.000 --> 00:02.000 align:start",
        "00:00:01 --> 00:00:02",
    ],
)
def test_times_are_found(times: str) -> None:
    assert parse("a.srt", f"1\n{times}\nOne.\n\n2\n{times}\n").segments == ["One."]


@pytest.mark.parametrize(
    ("cue", "segments"),
    [
        ("- Yes?\n- No\nand no.", ["Yes?", "No and no."]),
        ("-Yes?\n–No.", ["Yes?", "No."]),
        ("<i>- Yes?</i>\n{\\an8}<i>- No.</i>", ["Yes?", "No."]),
        ("It was\n-5 degrees.", ["It was -5 degrees."]),
        ("I <3 you < b\n<unknown> tag", ["I <3 you < b <unknown> tag"]),
        ("<font color='red'>a</font> {\\i1}b", ["a b"]),
        ("これは\n猫です。", ["これは猫です。"]),
        ("♪ la ♪", ["♪ la ♪"]),
        ("- \n♪", []),
    ],
)
def test_cues_are_cut_by_speaker(cue: str, segments: list[str]) -> None:
    text = f"1\n{TIMES}\n{cue}\n\n"
    document = parse("a.srt", text)
    assert document.segments == segments
    assert document.build(document.segments).decode() == text
    changed = built("a.srt", text, str.swapcase)
    assert changed.casefold().split() == text.casefold().split() or "{" in text  # a mark takes a space along
    assert parse("a.srt", changed).segments == [segment.swapcase() for segment in segments]


def test_a_translation_cannot_begin_a_cue() -> None:
    text = f"1\n{TIMES}\nOne\ntwo\n"
    changed = built("a.srt", text, lambda _: f"{'word ' * 6}{TIMES} {TIMES}")
    assert changed.count("-->") == 3
    assert len(parse("a.srt", changed).segments) == 1


# ---- lines -----------------------------------------------------------------------------------------------------------


def longest(lines: list[str]) -> int:
    return max(len(re.sub(r"<[^<>]*>|\{\\[^{}]*\}", "", line)) for line in lines)


def shortest_possible(words: list[str], lines: int) -> int:
    """The least width of the longest line, by trying every layout."""
    if lines == 1:
        return len(" ".join(words))
    return min(
        max(len(" ".join(words[:cut])), shortest_possible(words[cut:], lines - 1))
        for cut in range(1, len(words) - lines + 2)
    )


@given(st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=9), st.integers(1, 5))
def test_the_longest_line_is_as_short_as_possible(words: list[str], count: int) -> None:
    lines = wrap_lines(" ".join(words), count, "\n").split("\n")
    assert " ".join(lines) == " ".join(words)
    assert len(lines) == min(count, len(words))
    assert longest(lines) == shortest_possible(words, len(lines))


@pytest.mark.parametrize(
    ("text", "count", "lines"),
    [
        ("one two three four", 2, ["one two", "three four"]),
        ("a a a a a a", 3, ["a a", "a a", "a a"]),
        (
            '<font color="a b c d e f g">one two</font> three four',
            2,
            ['<font color="a b c d e f g">one two</font>', "three four"],
        ),
        ("{\\pos 1 2}one two", 2, ["{\\pos 1 2}one", "two"]),
        ("one", 3, ["one"]),
        ("", 2, [""]),
        ("one  two ", 2, ["one", "two"]),
        ("これは猫です。とても小さい。", 2, ["これは猫です。", "とても小さい。"]),
        ("これは「猫」です", 2, ["これは", "「猫」です"]),
    ],
)
def test_lines_are_balanced(text: str, count: int, lines: list[str]) -> None:
    assert wrap_lines(text, count, "\r\n").split("\r\n") == lines


def test_a_translation_has_as_many_lines_as_its_source() -> None:
    text = f"1\n{TIMES}\nOne\ntwo\nthree.\n\n2\n{TIMES}\n- One\nline.\n- Two.\n"
    changed = built("a.srt", text, lambda segment: "word " * 6 + "end")
    assert changed == (
        f"1\n{TIMES}\nword word\nword word\nword word end\n\n2\n{TIMES}\n"
        "- word word word\nword word word end\n- word word word word word word end\n"
    )


# ---- any input -------------------------------------------------------------------------------------------------------

PIECES = r"""
    - – -a <i> </i> <b> </b> <v Bob> </v> <c.x> </c> <rt> </rt> <00:01.000> {\an8} {\ { } < > & &amp; &lt; word Wort
    été 1 22 NOTE STYLE --> これ 。
""".split()
PIECES += [
    f"\n{TIMES}\n",
    f"\n\n2\n{TIMES}\n",
    "\n00:01.000 --> 00:02.000\n",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    "\t",
]
text = st.lists(st.sampled_from(PIECES)).map("".join)
heads = st.sampled_from(["WEBVTT\n\n", "WEBVTT\n", f"1\n{TIMES}\n", f"{TIMES}\n\n"])


@given(heads, text)
def test_any_file_is_rebuilt(head: str, text: str) -> None:
    document = parse("a.srt", head + text)
    assert document.build(document.segments).decode() == head + text
    translations = [segment.swapcase() for segment in document.segments]
    changed = document.build(translations)
    assert read_document("a.srt", changed).segments == translations
    times = [re.findall(r"(?m)^.*\d -->.*$", each) for each in (head + text, changed.decode())]
    assert times[0] == times[1]
    document.build([segment[::-1] + " more <b> -->" for segment in document.segments])


@given(st.text())
def test_any_text_is_rebuilt(content: str) -> None:
    data = f"WEBVTT\n\n{content}".encode("utf-8", "ignore").replace(b"\0", b"")
    document = read_document("a.vtt", data)
    assert document.build(document.segments) == data


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.srt", b"<html><p>one</p></html>", "a.srt: no times such as"),
        ("a.srt", b"%PDF-1.7\none\n", "no times such as"),
        ("a.vtt", b"1\n00:00:01,000 --> 00:00:02,000\nOne\n", "a.vtt: the first line is not WEBVTT"),
        ("a.vtt", b"WEBVTTX\n", "the first line is not WEBVTT"),
        ("a.vtt", "WEBVTT\n\n00:01.000 --> 00:02.000\nOn\xe9".encode("latin-1"), "line 4: not UTF-8"),
        ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\nOne".encode("utf-16-le"), "contains NUL characters"),
        ("a.srt", b"1\n00:00:01,000 --> 00:00:02,000\n\xed\xa0\x80\n", "line 3: not UTF-8"),
    ],
)
def test_a_file_that_is_no_subtitles_is_refused(name: str, data: bytes, why: str) -> None:
    with pytest.raises(UsageError, match=why) as error:
        read_document(name, data)
    assert "\n" not in str(error.value)


def test_a_file_without_cues_is_kept() -> None:
    for name, data in (("a.srt", b""), ("a.srt", b"\n\n"), ("a.vtt", b"WEBVTT"), ("a.vtt", b"WEBVTT\n\nNOTE x\n")):
        document = read_document(name, data)
        assert (document.segments, document.build([])) == ([], data)


# ---- linear time -----------------------------------------------------------------------------------------------------


def seconds(text: str) -> float:
    """The best of some measurements of reading and writing a file."""
    times = []
    for _ in range(2):
        begin = time.process_time()
        document = parse("a.vtt" if text.startswith("WEBVTT") else "a.srt", text)
        document.build([segment[::-1] for segment in document.segments])
        times.append(time.process_time() - begin)
    return min(times)


CUES = "".join(f"{i}\n{TIMES}\nCat number {i}\nsees.\n\n" for i in range(100_000))


def test_a_hundred_thousand_cues_are_read_and_written() -> None:
    document = parse("a.srt", CUES)
    assert len(document.segments) == 100_000
    assert document.build(document.segments) == CUES.encode()


@pytest.mark.parametrize(
    "unit",
    [
        "a line of text\n",
        "<i>a line</i> of <b>text</b>\n",
        "word ",
        "<a ",
        "<i>",
        "</i>",
        "<rt>",
        "{\\",
        "<",
        "- a\n",
        "-",
        "\n",
        "a\n\n",
        "0",
        "0:",
        " ",
        "猫",
        f"{TIMES}\n",
        "00:00:01,000 -->",
        "&amp",
        "<v x>",
        "NOTE\n\n",
    ],
)
@pytest.mark.parametrize("head", [f"1\n{TIMES}\n", "WEBVTT\n\n00:01.000 --> 00:02.000\n"], ids=["srt", "vtt"])
def test_time_is_linear(head: str, unit: str) -> None:
    """Ten times the input takes at most twelve times as long; the smaller one is long enough to be measured."""
    count = 30_000 // len(unit)
    small = seconds(f"{head}{unit * (count // 10)} word\nend")
    assert seconds(f"{head}{unit * count} word\nend") < 12 * small + 0.5
