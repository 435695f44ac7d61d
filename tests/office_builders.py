"""Small office files, built from XML with zipfile."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Mapping
from itertools import count

XML = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\r\n'
ECMA = "http://schemas.openxmlformats.org/"
W = f'xmlns:w="{ECMA}wordprocessingml/2006/main"'
WORD_NAMESPACES = (
    f'{W} xmlns:m="{ECMA}officeDocument/2006/math" xmlns:mc="{ECMA}markup-compatibility/2006" '
    f'xmlns:r="{ECMA}officeDocument/2006/relationships" xmlns:v="urn:schemas-microsoft-com:vml"'
)
A = f'xmlns:a="{ECMA}drawingml/2006/main"'
P = f'xmlns:p="{ECMA}presentationml/2006/main" {A}'
S = f'xmlns="{ECMA}spreadsheetml/2006/main"'
ODF = "urn:oasis:names:tc:opendocument:xmlns:"
ODF_NAMES = " ".join(f'xmlns:{name}="{ODF}{name}:1.0"' for name in ("office", "text", "table", "style"))
ODF_NAMES += f' xmlns:draw="{ODF}drawing:1.0" xmlns:xlink="http://www.w3.org/1999/xlink"'
DATE = (2001, 2, 3, 4, 5, 6)
CONTENT = "application/vnd.openxmlformats-officedocument."
WORDS = "one two red lovely cats houses été naïve Tom & Jerry < > 中文 Ärger e-mail CO".split()


def zip_of(members: Mapping[str, str | bytes], stored: tuple[str, ...] = ("mimetype",)) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name, DATE)
            info.compress_type = zipfile.ZIP_STORED if name in stored else zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
        archive.comment = b"kept"
    return out.getvalue()


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def package(parts: Mapping[str, tuple[str, str]], others: Mapping[str, str | bytes] | None = None) -> bytes:
    """An Open Packaging archive; each part has a content type and its XML."""
    overrides = "".join(
        f'<Override PartName="/{name}" ContentType="{kind if "/" in kind else CONTENT + kind}"/>'
        for name, (kind, _) in parts.items()
    )
    types = f'<Types xmlns="{ECMA}package/2006/content-types"><Default Extension="xml" ContentType="application/xml"/>'
    members: dict[str, str | bytes] = {"[Content_Types].xml": f"{XML}{types}{overrides}</Types>"}
    members |= {"media/picture.png": bytes(range(256)), **(others or {})}
    return zip_of(members | {name: xml for name, (_, xml) in parts.items()}, stored=("media/picture.png",))


def docx(body: str, **parts: str) -> bytes:
    """A Word document; further parts by name: header, footer, footnotes, endnotes, comments."""
    main = f"{XML}<w:document {WORD_NAMESPACES}><w:body>{body}<w:sectPr/></w:body></w:document>"
    files = {"word/document.xml": ("wordprocessingml.document.main+xml", main)}
    for name, xml in parts.items():
        root = {"header": "hdr", "footer": "ftr"}.get(name, name)
        whole = f"{XML}<w:{root} {WORD_NAMESPACES}>{xml}</w:{root}>"
        files[f"word/{name}.xml"] = (f"wordprocessingml.{name}+xml", whole)
    return package(files)


def pptx(*slides: str, **notes: str) -> bytes:
    files = {"ppt/presentation.xml": ("presentationml.presentation.main+xml", f"{XML}<p:presentation {P}/>")}
    for number, xml in enumerate(slides, 1):
        slide = f"{XML}<p:sld {P}><p:sp><p:txBody>{xml}</p:txBody></p:sp></p:sld>"
        files[f"ppt/slides/slide{number}.xml"] = ("presentationml.slide+xml", slide)
    for name, xml in notes.items():
        files[f"ppt/notesSlides/{name}.xml"] = ("presentationml.notesSlide+xml", f"<p:notes {P}>{xml}</p:notes>")
    return package(files)


def xlsx(strings: str, sheet: str = "", table: str = "") -> bytes:
    files = {
        "xl/workbook.xml": ("spreadsheetml.sheet.main+xml", f'<workbook {S}><sheet name="My sheet"/></workbook>'),
        "xl/worksheets/sheet1.xml": ("spreadsheetml.worksheet+xml", f"<worksheet {S}>{sheet}</worksheet>"),
        "xl/sharedStrings.xml": ("spreadsheetml.sharedStrings+xml", f"{XML}<sst {S}>{strings}</sst>"),
    }
    if table:
        files["xl/tables/table1.xml"] = ("spreadsheetml.table+xml", f"<table {S}>{table}</table>")
    return package(files)


def odt(body: str, styles: str = "", manifest: str = "") -> bytes:
    content = f"<office:document-content {ODF_NAMES}><office:body><office:text>{body}</office:text></office:body>"
    return zip_of(
        {
            "mimetype": "application/vnd.oasis.opendocument.text",
            "content.xml": f'<?xml version="1.0" encoding="UTF-8"?>\n{content}</office:document-content>',
            "styles.xml": f"<office:document-styles {ODF_NAMES}>{styles}</office:document-styles>",
            "Pictures/a.png": bytes(range(256)),
            "META-INF/manifest.xml": f'<m:manifest xmlns:m="{ODF}manifest:1.0">{manifest}</m:manifest>',
        }
    )


def epub(*chapters: str, title: str = "A title", encryption: str = "") -> bytes:
    """A valid EPUB 3 book with a navigation document and a table of contents of EPUB 2."""
    names = [f"c{number}.xhtml" for number in range(1, len(chapters) + 1)]
    page = '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml"{}>{}</html>\n'
    items = "".join(f'<item id="i{i}" href="{n}" media-type="application/xhtml+xml"/>' for i, n in enumerate(names))
    spine = "".join(f'<itemref idref="i{i}"/>' for i in range(len(names)))
    links = "".join(f'<li><a href="{name}">Chapter of {name[:-6]}</a></li>' for name in names)
    points = "".join(
        f'<navPoint id="n{i}" playOrder="{i + 1}"><navLabel><text>Chapter &amp; {i}</text></navLabel>'
        f'<content src="{name}"/></navPoint>'
        for i, name in enumerate(names)
    )
    opf = (
        '<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="id"><metadata '
        'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:identifier id="id">urn:uuid:12345678-1234-1234-1234-'
        f"123456789abc</dc:identifier><dc:title>{title}</dc:title><dc:language>en</dc:language>"
        '<meta property="dcterms:modified">2020-01-01T00:00:00Z</meta></metadata><manifest><item id="nav" '
        'href="nav.xhtml" properties="nav" media-type="application/xhtml+xml"/><item id="ncx" href="toc.ncx" '
        f'media-type="application/x-dtbncx+xml"/>{items}</manifest><spine toc="ncx">{spine}</spine></package>'
    )
    nav = f"<head><title>Contents</title></head><body><nav epub:type='toc'><ol>{links}</ol></nav></body>"
    members = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": '<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">'
        '<rootfiles><rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles>'
        "</container>",
        "OEBPS/book.opf": '<?xml version="1.0" encoding="UTF-8"?>\n' + opf,
        "OEBPS/nav.xhtml": page.format(' xmlns:epub="http://www.idpf.org/2007/ops"', nav),
        "OEBPS/toc.ncx": '<?xml version="1.0" encoding="UTF-8"?>\n<ncx xmlns="http://www.daisy.org/z3986/2005/ncx/" '
        'version="2005-1"><head><meta name="dtb:uid" content="urn:uuid:12345678-1234-1234-1234-123456789abc"/></head>'
        f"<docTitle><text>{title}</text></docTitle><navMap>{points}</navMap></ncx>",
    }
    for name, body in zip(names, chapters, strict=True):
        members[f"OEBPS/{name}"] = page.format("", f"<head><title>{title}</title></head><body>{body}</body>")
    if encryption:
        members["META-INF/encryption.xml"] = encryption
    return zip_of(members)


# ---- random files ----------------------------------------------------------------------------------------------------


class Generator:
    """Random paragraphs. `protected` are the sources that must occur exactly once in the translated file."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = count(1)
        self.protected: list[str] = []

    def words(self) -> str:
        chosen = self.random.choices(WORDS, k=self.random.randint(1, 4))
        return " ".join(chosen).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

    def keep(self, source: str) -> str:
        source = source.replace("#", str(next(self.numbers)))
        self.protected.append(source)
        return source

    def run(self, style: str = "") -> str:
        style = style or self.random.choice(
            ["", "", '<w:rPr><w:b/><w:lang w:val="en-US"/></w:rPr>', "<w:rPr><w:i/></w:rPr>"]
        )
        return f'<w:r w:rsidR="00A">{style}<w:t xml:space="preserve"> {self.words()} </w:t></w:r>'

    def field(self, instruction: str, shown: str) -> str:
        edges = [f'<w:r><w:fldChar w:fldCharType="{e}"/></w:r>' for e in ("begin", "separate", "end")]
        return f"{edges[0]}<w:r><w:instrText>{instruction}</w:instrText></w:r>{edges[1]}{shown}{edges[2]}"

    def word_item(self, level: int = 0) -> str:
        number = str(next(self.numbers))
        text_box = f'<w:txbxContent id="{number}"><w:p>{self.run()}{self.run()}</w:p></w:txbxContent>'
        choices = [
            lambda: self.run(),
            lambda: self.run(),
            lambda: f'<w:hyperlink r:id="rId{number}">{self.run()}{self.run()}</w:hyperlink>',
            lambda: (
                self.keep(f'<w:bookmarkStart w:id="{number}" w:name="b{number}"/>')
                + self.run()
                + self.keep(f'<w:bookmarkEnd w:id="{number}"/>')
            ),
            lambda: "<w:r>" + self.keep("<w:footnoteReference w:id='#'/>") + "</w:r>",
            lambda: (
                "<w:r><w:t xml:space='preserve'> CO</w:t></w:r><w:r><w:rPr><w:vertAlign/></w:rPr><w:t>2</w:t></w:r>"
            ),
            lambda: (
                "<w:r><w:t xml:space='preserve'> left</w:t><w:tab/><w:t>right</w:t><w:br/>"
                "<w:t xml:space='preserve'>below </w:t></w:r>"
            ),
            lambda: self.keep("<m:oMath><m:r><m:t>x+#</m:t></m:r></m:oMath>"),
            lambda: self.field(self.keep(" PAGE #_ "), "<w:r><w:t>7</w:t></w:r>"),
            lambda: self.field(f' HYPERLINK "http://x.y/{number}" ', self.run()),
            lambda: self.keep(
                f'<w:sdt><w:sdtPr><w:id w:val="#"/></w:sdtPr><w:sdtContent>{self.run()}</w:sdtContent></w:sdt>'
            ),
            lambda: f"<w:smartTag w:element='{number}'><w:smartTagPr/>{self.run()}</w:smartTag>",
            lambda: "<w:r>" + self.keep("<w:drawing><pic id='#'/></w:drawing>") + "</w:r>",
            lambda: f"<w:proofErr w:type='spellStart'/>{self.run()}<w:proofErr w:type='spellEnd'/>",
            lambda: (
                f"<w:r><mc:AlternateContent><mc:Choice Requires='wps'>{text_box}</mc:Choice><mc:Fallback>"
                f"<v:textbox>{text_box}</v:textbox></mc:Fallback></mc:AlternateContent></w:r>"
            ),
        ]
        return self.random.choice(choices)()

    def word_paragraph(self) -> str:
        items = "".join(self.word_item() for _ in range(self.random.randint(1, 6)))
        return f'<w:p w:rsidR="001"><w:pPr><w:jc w:val="left"/></w:pPr>{items}</w:p>'

    def docx(self) -> bytes:
        table = f"<w:tbl><w:tr><w:tc>{self.word_paragraph()}</w:tc></w:tr></w:tbl>"
        ins = self.keep(
            f'<w:p><w:ins w:id="#">{self.run()}</w:ins><w:del><w:r><w:delText>x</w:delText></w:r></w:del></w:p>'
        )
        body = "\n  ".join(self.word_paragraph() for _ in range(4)) + table + ins
        note = f'<w:footnote w:id="1">{self.word_paragraph()}</w:footnote>'
        comment = f'<w:comment w:id="1">{self.keep("<w:p><w:r><w:t>a comment #</w:t></w:r></w:p>")}</w:comment>'
        return docx(body, header=self.word_paragraph(), footnotes=note, comments=comment)

    def slide_paragraph(self) -> str:
        choices = [
            lambda: f"<a:r><a:rPr lang='en' dirty='0'/><a:t>{self.words()} </a:t></a:r>",
            lambda: f"<a:r><a:rPr lang='it' b='1'/><a:t>{self.words()} </a:t></a:r>",
            lambda: "<a:br><a:rPr lang='en'/></a:br>",
            lambda: self.keep("<a:fld id='#' type='slidenum'><a:rPr/><a:t>5</a:t></a:fld>"),
        ]
        items = "".join(self.random.choice(choices)() for _ in range(self.random.randint(1, 6)))
        return f"<a:p><a:pPr lvl='1'/>{items}<a:endParaRPr lang='en'/></a:p>"

    def pptx(self) -> bytes:
        return pptx(*("".join(self.slide_paragraph() for _ in range(3)) for _ in range(2)), note=self.slide_paragraph())

    def cell(self) -> str:
        choices = [
            lambda: f"<t>{self.words()}</t>",
            lambda: f'<t xml:space="preserve">{self.words()}\n{self.words()}</t>',
            lambda: f"<r><t>{self.words()} </t></r><r><rPr><b/></rPr><t>{self.words()}</t></r>",
            lambda: self.keep("<t>kanji</t><rPh sb='0' eb='#'><t>yomi</t></rPh>"),
            lambda: f"<t>{self.words()}_x000D_</t>",
        ]
        return self.random.choice(choices)()

    def xlsx(self) -> bytes:
        formula = self.keep('<c t="str"><f>CONCAT("a#")</f><v>text</v></c>')
        sheet = f'<sheetData><row>{formula}<c t="inlineStr"><is>{self.cell()}</is></c></row></sheetData>'
        return xlsx("".join(f"<si>{self.cell()}</si>" for _ in range(8)), sheet)

    def odt_paragraph(self) -> str:
        choices = [
            lambda: self.words() + " ",
            lambda: f'<text:span text:style-name="T1">{self.words()} </text:span>',
            lambda: f'<text:a xlink:href="http://x.y/{next(self.numbers)}">{self.words()} </text:a>',
            lambda: "a<text:s/>b<text:tab/>c<text:line-break/>",
            lambda: self.keep("<text:page-number>#</text:page-number>"),
            lambda: self.keep('<text:bookmark text:name="m#"/>'),
            lambda: (
                f'<text:note text:id="n{next(self.numbers)}"><text:note-citation>1</text:note-citation>'
                f"<text:note-body><text:p>{self.words()}</text:p></text:note-body></text:note>"
            ),
            lambda: self.keep("<office:annotation><text:p>comment #</text:p></office:annotation>"),
        ]
        items = "".join(self.random.choice(choices)() for _ in range(self.random.randint(1, 6)))
        return f'<text:p text:style-name="P1">{items}</text:p>'

    def odt(self) -> bytes:
        region = "<text:changed-region><text:p>gone #</text:p></text:changed-region>"
        deleted = self.keep(f"<text:tracked-changes>{region}</text:tracked-changes>")
        contents = self.keep("<text:table-of-content><text:p>contents #</text:p></text:table-of-content>")
        header = f"<style:header>{self.odt_paragraph()}</style:header>"
        return odt(deleted + "".join(self.odt_paragraph() for _ in range(4)) + contents, header)

    def epub(self) -> bytes:
        def chapter() -> str:
            code = self.keep("<code>kept #</code>")
            return f"<h1>{self.words()}</h1><p>Text {self.words()} <em>{self.words()}</em> {code} end<br/>more</p>"

        return epub(chapter(), chapter())
