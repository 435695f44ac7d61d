"""Paragraphs of office files: what is translated, what is kept and counted, and where marks go."""

from __future__ import annotations

import re

import pytest

from office_builders import ODF, docx, epub, members_of, odt, pptx, xlsx, zip_of
from qkv.documents import Document, read_document

RUN = "<w:r>{}<w:t xml:space='preserve'>{}</w:t></w:r>"
BOLD = "<w:rPr><w:b/></w:rPr>"
EDGE = "<w:r><w:fldChar w:fldCharType='{}'/></w:r>"


def runs(*texts: str, style: str = "") -> str:
    return "".join(RUN.format(style, text) for text in texts)


def field(instruction: str, shown: str) -> str:
    code = f"<w:r><w:instrText>{instruction}</w:instrText></w:r>"
    return EDGE.format("begin") + code + EDGE.format("separate") + shown + EDGE.format("end")


def word(body: str, **parts: str) -> Document:
    return read_document("a.docx", docx(body, **parts))


def body_of(document: Document, translations: list[str], links: list[tuple[int, int]] | None = None) -> str:
    data = document.build(translations, None if links is None else [links] * len(translations))
    xml = members_of(data)["word/document.xml"].decode()
    return xml.partition("<w:body>")[2].partition("<w:sectPr/>")[0].replace(' xml:space="preserve"', "")


def test_formatting_follows_its_aligned_words() -> None:
    document = word("<w:p>" + runs("a ") + runs("love", "ly", style=BOLD) + runs(" cat.") + "</w:p>")
    assert document.segments == ["a lovely cat."]
    assert document.has_markup == [True]
    translated = body_of(document, ["un gatto adorabile."], [(0, 0), (1, 2), (2, 1), (3, 3)])
    assert translated == (
        f"<w:p><w:r><w:t>un gatto </w:t></w:r><w:r>{BOLD}<w:t>adorabile</w:t></w:r><w:r><w:t>.</w:t></w:r></w:p>"
    )


def test_a_run_is_not_split_by_language_or_spelling() -> None:
    language = "<w:rPr><w:lang w:val='en'/><w:noProof/></w:rPr>"
    paragraph = f"<w:p>{runs('one ')}<w:proofErr w:type='spellStart'/>{runs('two', style=language)}</w:p>"
    assert word(paragraph).has_markup == [False]


def test_every_text_of_a_word_document_is_read() -> None:
    paragraph = "<w:p>" + runs("{}") + "</w:p>"
    cell = "<w:tbl><w:tr><w:tc>" + paragraph.replace("{}", "in a cell") + "</w:tc></w:tr></w:tbl>"
    control = f"<w:sdt><w:sdtContent>{paragraph.replace('{}', 'in a control')}</w:sdtContent></w:sdt>"
    note = "<w:footnote><w:p><w:r><w:footnoteRef/><w:t> a note</w:t></w:r></w:p></w:footnote>"
    parts = {name: paragraph.replace("{}", name) for name in ("header", "footer", "endnotes")}
    document = word(cell + control, footnotes=note, **parts)
    assert document.segments == ["in a cell", "in a control", "a note", "header", "footer", "endnotes"]
    assert not document.skipped


def test_text_boxes_are_equal_in_both_branches() -> None:
    box = f"<w:txbxContent><w:p>{runs('in the box')}</w:p></w:txbxContent>"
    branches = f"<mc:Choice Requires='wps'>{box}</mc:Choice><mc:Fallback><v:textbox>{box}</v:textbox></mc:Fallback>"
    shape = f"<w:r><mc:AlternateContent>{branches}</mc:AlternateContent></w:r>"
    document = word(f"<w:p>{runs('before ')}{shape}{runs(' after')}</w:p>")
    assert sorted(document.segments) == ["before after", "in the box"]
    translated = body_of(document, [segment.upper() for segment in document.segments])
    assert translated.count("IN THE BOX") == 2
    assert translated.index("BEFORE") < translated.index("IN THE BOX") < translated.index("AFTER")


def test_bookmarks_keep_their_order() -> None:
    marked = f"<w:bookmarkStart w:id='1' w:name='b'/>{runs('red')}<w:bookmarkEnd w:id='1'/>"
    document = word(f"<w:p>{runs('a ')}{marked}{runs(' cat here')}</w:p>")
    for links in ([(0, 3), (1, 0), (2, 1), (3, 2)], [(0, 0), (1, 3), (2, 1), (3, 2)], [], None):
        translated = body_of(document, ["gatto rosso qui un"], links)
        assert translated.count("bookmark") == 2
        assert translated.index("bookmarkStart") < translated.index("bookmarkEnd")


def test_hyperlinks_are_translated_and_other_fields_are_kept() -> None:
    page = field(" PAGE ", runs("7"))
    link = field(' HYPERLINK "http://x.y" ', runs("the docs", style=BOLD))
    document = word(f"<w:p>{runs('See ')}{link}{runs(' on page ')}{page}{runs('.')}</w:p>")
    assert document.segments == ["See the docs on page 7."]
    assert document.skipped == {"field": 1}
    translated = body_of(document, ["VEDI I DOCUMENTI A PAGINA 7."])
    assert "I DOCUMENTI" in re.sub("<[^>]*>", "", translated)
    assert translated.count("PAGE") == 1
    assert translated.count("begin") == translated.count("end'/") == 2


def test_a_table_of_contents_is_kept() -> None:
    begin = EDGE.format("begin") + "<w:r><w:instrText>TOC</w:instrText></w:r>" + EDGE.format("separate")
    lines = f"<w:p>{begin}{runs('First 1')}</w:p><w:p>{runs('Second 2')}</w:p><w:p>{EDGE.format('end')}</w:p>"
    document = word(lines + f"<w:p>{runs('First')}</w:p>")
    assert document.segments == ["First"]
    assert document.skipped == {"field": 2}
    assert lines in body_of(document, ["PRIMO"])


def test_a_paragraph_with_an_edge_of_a_field_in_a_content_control_is_kept() -> None:
    begin, end = (f'<w:r><w:fldChar w:fldCharType="{edge}"/></w:r>' for edge in ("begin", "end"))
    inside = "<w:sdt><w:sdtContent>{}</w:sdtContent></w:sdt>"
    for body in (begin + runs("cat") + inside.format(end), inside.format(begin) + runs("cat") + end):
        document = word(f"<w:p>{runs('A ')}{body}{runs(' sat')}</w:p><w:p>{runs('dog')}</w:p>")
        assert document.segments == ["dog"]
        assert b"cat" in members_of(document.build(["cane"]))["word/document.xml"]
        assert document.skipped["field"] == 1


@pytest.mark.parametrize("change", ["ins", "del", "moveFrom", "moveTo"])
def test_paragraphs_with_tracked_changes_are_kept(change: str) -> None:
    paragraph = f"<w:p>{runs('one ')}<w:{change} w:id='1'>{runs('two')}</w:{change}></w:p>"
    marked = f"<w:p><w:pPr><w:rPr><w:ins w:id='2'/></w:rPr></w:pPr>{runs('read')}</w:p>"  # a new paragraph mark
    document = word(paragraph + marked)
    assert document.segments == ["read"]
    assert document.skipped == {"tracked change": 1}
    assert paragraph in body_of(document, ["LETTO"])


def test_equations_controls_and_comments_are_counted() -> None:
    control = f"<w:sdt><w:sdtContent>{runs('Tom')}</w:sdtContent></w:sdt>"
    equation = "<m:oMathPara><m:oMath><m:r><m:t>E=m</m:t></m:r></m:oMath></m:oMathPara>"
    comments = "<w:comment><w:p><w:r><w:t>why?</w:t></w:r></w:p></w:comment>" * 2
    document = word(f"<w:p>{runs('Dear ')}{control}{runs(', so:')}{equation}</w:p>", comments=comments)
    assert document.segments == ["Dear Tom, so:"]
    assert document.protected == [((5, 8),)]
    assert document.skipped == {"equation": 1, "content control": 1, "comment": 2}
    translated = body_of(document, ["CARO Tom, COSÌ:"])
    assert translated.index("CARO") < translated.index(control) < translated.index("COSÌ") < translated.index(equation)


def test_tabs_and_hyphens_of_word_are_kept() -> None:
    inner = "<w:t>a</w:t><w:tab/><w:t>non</w:t><w:noBreakHyphen/><w:t>stop</w:t><w:br/><w:t>train</w:t>"
    document = word(f"<w:p><w:r>{inner}</w:r></w:p>")
    assert document.segments == ["a non\u2011stop train"]
    translated = body_of(document, ["A NON\u2011STOP TRAIN"])
    assert re.sub("<w:(tab|noBreakHyphen|br)/>", r"[\1]", translated).count("[") == 3
    assert re.sub("<[^>]*>", "", translated.replace("<w:noBreakHyphen/>", "-")).split() == ["A", "NON-STOP", "TRAIN"]


def test_words_around_marks_are_not_joined() -> None:
    mark = "<w:r><w:footnoteReference w:id='1'/></w:r>"
    document = word(f"<w:p>{runs('one ')}{mark}{mark}{runs('two', style=BOLD)}{mark}{runs(' three')}</w:p>")
    assert document.segments == ["one two three"]


def test_a_paragraph_with_very_many_marks_is_translated_in_pieces() -> None:
    document = word("<w:p>" + "".join(runs(f"word{i} ", style=BOLD if i % 2 else "") for i in range(2000)) + "</w:p>")
    assert len(document.segments) == 2000
    translated = body_of(document, [text.upper() for text in document.segments[:-1]] + document.segments[-1:])
    assert "WORD0 </w:t>" in translated
    assert "WORD1998 </w:t>" in translated
    assert "word1999 </w:t>" in translated


def test_other_prefixes_and_encodings_are_kept() -> None:
    data = docx(f"<w:p>{runs('Caf&#233; &#x4e2d;')}</w:p>")
    members = dict(members_of(data))
    xml = members["word/document.xml"].decode().replace("w:", "x:").replace(":w=", ":x=")
    for encoding in ("utf-16", "iso-8859-1", "utf-8-sig"):
        declared = xml.replace("UTF-8", encoding.removesuffix("-sig"))
        files: dict[str, str | bytes] = {**members, "word/document.xml": declared.encode(encoding)}
        document = read_document("a.docx", zip_of(files))
        assert document.segments == ["Café 中"]
        written = members_of(document.build(["CAFÉ 中 文"]))["word/document.xml"]
        assert '<x:t xml:space="preserve">CAFÉ ' in written.decode(encoding)
        assert read_document("a.docx", zip_of({**files, "word/document.xml": written})).segments == ["CAFÉ 中 文"]


# ---- PowerPoint, Excel, OpenDocument, EPUB ---------------------------------------------------------------------------


def test_slides_notes_and_tables() -> None:
    line = "<a:p><a:r><a:rPr lang='en' b='{}'/><a:t>{}</a:t></a:r></a:p>"
    table = f"<a:tbl><a:tr><a:tc><a:txBody>{line.format(0, 'in a cell')}</a:txBody></a:tc></a:tr></a:tbl>"
    number = "<a:p><a:fld type='slidenum'><a:t>1</a:t></a:fld></a:p>"
    document = read_document("a.pptx", pptx(line.format(1, "A title") + table + number, note=line.format(0, "A note")))
    assert document.segments == ["A title", "in a cell", "A note"]
    assert document.skipped == {"field": 1}
    slide = members_of(document.build(["UN TITOLO", "x", "y"]))["ppt/slides/slide1.xml"].decode()
    assert "<a:rPr lang='en' b='1'/><a:t>UN TITOLO</a:t>" in slide


def test_formulas_and_headers_of_tables_are_kept() -> None:
    cell = '<c t="str"><f>IF(A1="Yes",1)</f><v>Yes</v></c><c t="inlineStr"><is><t>inline</t></is></c>'
    margins = (
        '<headerFooter><oddHeader>&amp;C&amp;"Arial"&amp;P</oddHeader><oddFooter>Page &amp;P</oddFooter></headerFooter>'
    )
    strings = "<si><t>Unit\nprice</t></si><si><t>Yes</t></si><si><t>two\nlines</t></si><si><t>漢<rPh/></t></si>"
    strings = strings.replace("漢<rPh/></t>", "漢</t><rPh sb='0' eb='1'><t>kan</t></rPh>")
    table = '<tableColumns><tableColumn id="1" name="Unit_x000a_price"/></tableColumns>'
    document = read_document("a.xlsx", xlsx(strings, f"<row>{cell}</row>{margins}", table))
    assert document.segments == ["inline", "Yes", "two lines"]
    assert document.skipped == {"table header": 1, "phonetic guide": 1, "header or footer": 1}
    written = members_of(document.build(["IN LINEA", "Sì", "DUE RIGHE"]))
    assert b'<f>IF(A1="Yes",1)</f><v>Yes</v>' in written["xl/worksheets/sheet1.xml"]
    shared = written["xl/sharedStrings.xml"].decode()
    assert '<t xml:space="preserve">Sì</t>' in shared
    assert '<t xml:space="preserve">DUE\n RIGHE</t>' in shared or '<t xml:space="preserve">DUE \nRIGHE</t>' in shared
    assert b'name="My sheet"' in written["xl/workbook.xml"]


def test_open_documents() -> None:
    span = '<text:span text:style-name="T{}">{}</text:span>'
    note = "<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>a note</text:p>"
    body = (
        "<text:tracked-changes><text:changed-region><text:p>deleted</text:p></text:changed-region></text:tracked-changes>"
        f"<text:p>a {span.format(1, 'red')}{span.format(1, 'dish')} cat{note}</text:note-body></text:note>.</text:p>"
        "<text:table-of-content><text:p>Contents</text:p></text:table-of-content>"
        "<text:p>Page <text:page-number>3</text:page-number>"
        "<office:annotation><text:p>why?</text:p></office:annotation></text:p>"
    )
    objects = '<m:file-entry m:media-type="application/vnd.oasis.opendocument.formula" m:full-path="Object 1/"/>'
    document = read_document("a.odt", odt(body, "<style:footer><text:p>foot</text:p></style:footer>", objects))
    assert sorted(document.segments) == ["Page 3", "a note", "a reddish cat.", "foot"]
    names = {"tracked change", "table of contents", "field", "comment", "equation"}
    assert document.skipped == dict.fromkeys(names, 1)
    content = members_of(document.build([text.upper() for text in document.segments]))["content.xml"].decode()
    assert f"A {span.format(1, 'REDDISH')} CAT<text:note>" in content
    assert "<text:p>A NOTE</text:p>" in content
    assert "<text:p>deleted</text:p>" in content
    assert ODF in content


def test_an_old_manifest_declares_its_namespace_in_a_dtd_only() -> None:
    members: dict[str, str | bytes] = {**members_of(odt("<text:p>text</text:p>"))}
    doctype = '<!DOCTYPE m:manifest PUBLIC "x" "Manifest.dtd">'
    members["META-INF/manifest.xml"] = f"{doctype}<m:manifest><m:file-entry/></m:manifest>"
    assert read_document("a.odt", zip_of(members)).segments == ["text"]


def test_books_stay_xhtml() -> None:
    chapter = "<h1>Hello</h1><p>One<br/>two &amp; <em>three</em> <img src='a.png' alt='x'/> four.</p>"
    data = epub(chapter, "<p>Second &#160; chapter</p>", title="A &amp; B")
    document = read_document("book.epub", data)
    assert document.segments.count("A & B") >= 2  # metadata and table of contents
    assert {"Hello", "Chapter of c1", "Chapter & 0"} <= {*document.segments}
    translated = document.build([text.upper() + " <&" for text in document.segments])
    assert translated.startswith(data[:58])  # mimetype, stored
    assert b"<dc:title>A &amp; B &lt;&amp;</dc:title><dc:language>en<" in members_of(translated)["OEBPS/book.opf"]
    assert b"<br/>" in members_of(translated)["OEBPS/c1.xhtml"]
    assert read_document("book.epub", translated).segments == [text.upper() + " <&" for text in document.segments]


def test_a_chapter_that_is_not_xhtml_is_kept() -> None:
    document = read_document("book.epub", epub("<p>good</p>", "<p>bad"))
    assert document.skipped["chapter"] == 1
    assert "good" in document.segments
    assert "bad" not in document.segments
