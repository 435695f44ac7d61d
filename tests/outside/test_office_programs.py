"""Office files that LibreOffice wrote are translated and opened by it again; books are checked with epubcheck.

A file is converted to text before and after a fake translation: the second text must be the fake translation of the
first one. Needs the Debian packages libreoffice-{writer,calc,impress}-nogui and epubcheck.
"""

from __future__ import annotations

import html
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from office_builders import Generator, members_of
from qkv.documents import read_document

OFFICE = shutil.which("soffice") or shutil.which("libreoffice")
CHECKER, JAVA = shutil.which("epubcheck"), shutil.which("java")
WORDS = "house river lovely winter friends market apples weather sister morning window été größe naïve".split()
FILTERS = {
    "docx": ("html", "HTML (StarWriter)", "docx:MS Word 2007 XML"),
    "odt": ("html", "HTML (StarWriter)", "odt:writer8"),
    "xlsx": ("csv", "", "xlsx:Calc MS Excel 2007 XML"),
    "pptx": ("fodp", "", "pptx:Impress MS PowerPoint 2007 XML"),
}
TEXT = {
    "docx": "txt:Text (encoded):UTF8",
    "odt": "txt:Text (encoded):UTF8",
    "xlsx": "csv:Text - txt - csv (StarCalc):44,34,76",
    "pptx": "fodp",
}
FILES = 5  # of each format
ODP = "urn:oasis:names:tc:opendocument:xmlns:"

needs_office = pytest.mark.skipif(
    OFFICE is None, reason="LibreOffice is not installed: apt-get install libreoffice-writer-nogui …"
)


def convert(files: list[Path], target: str, folder: Path, source: str = "") -> list[Path]:
    """Convert files with one start of the program."""
    assert OFFICE is not None
    profile = f"-env:UserInstallation=file://{folder}/profile"
    filters = [f"--infilter={source}"] if source else []
    command = [OFFICE, profile, "--headless", *filters, "--convert-to", target, "--outdir", str(folder)]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, timeout=240, check=False)
    converted = [folder / f"{file.stem}.{target.partition(':')[0]}" for file in files]
    missing = [path.name for path in converted if not path.exists()]
    assert not missing, f"{missing}: {done.stdout} {done.stderr}"
    return converted


def sentence(choice: random.Random) -> str:
    words = choice.choices(WORDS, k=choice.randint(3, 9))
    return " ".join(words).capitalize() + choice.choice([".", "?", "!", ", 5 & 6."])


def html_page(choice: random.Random) -> str:
    def line() -> str:
        words = sentence(choice).replace("&", "&amp;").split(" ")
        for tag in ("b", "i", 'a href="http://x.y/z"'):
            place = choice.randrange(len(words))
            if "<" not in words[place]:
                words[place] = f"<{tag}>{words[place]}</{tag.split()[0]}>"
        return " ".join(words)

    cells = "".join(f"<tr><td>{line()}</td><td>{line()}</td></tr>" for _ in range(2))
    items = "".join(f"<li>{line()}</li>" for _ in range(3))
    text = "".join(f"<p>{line()} {line()}</p>" for _ in range(4))
    body = f"<h1>{line()}</h1>{text}<ul>{items}</ul><table>{cells}</table>"
    return f"<html><meta charset='utf-8'><body>{body}</body></html>"


def table(choice: random.Random) -> str:
    return "".join(f'"{sentence(choice)}",{row},"{sentence(choice)}",=1+{row}\n' for row in range(6))


def slides(choice: random.Random) -> str:
    names = " ".join(f'xmlns:{name}="{ODP}{name}:1.0"' for name in ("office", "text", "presentation", "style"))
    page = ""
    for number in range(3):
        lines = ""
        for _ in range(2):
            bold = "<text:span text:style-name='T1'>lovely</text:span>"
            lines += f"<text:p>{sentence(choice).replace('&', '&amp;')} {bold}</text:p>"
        place = "svg:x='1cm' svg:y='1cm' svg:width='20cm' svg:height='5cm'"
        box = f"<draw:frame {place}><draw:text-box>{lines}</draw:text-box></draw:frame>"
        page += f"<draw:page draw:name='p{number}' draw:master-page-name='M'>{box}</draw:page>"
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<office:document {names} xmlns:draw="{ODP}drawing:1.0" xmlns:svg="{ODP}svg-compatible:1.0" '
        f'xmlns:fo="{ODP}xsl-fo-compatible:1.0" office:version="1.2" '
        'office:mimetype="application/vnd.oasis.opendocument.presentation"><office:automatic-styles>'
        '<style:style style:name="T1" style:family="text"><style:text-properties fo:font-weight="bold"/></style:style>'
        '<style:page-layout style:name="L"/></office:automatic-styles><office:master-styles><style:master-page '
        f'style:name="M" style:page-layout-name="L"/></office:master-styles><office:body><office:presentation>{page}'
        "</office:presentation></office:body></office:document>"
    )


SOURCES = {"html": html_page, "csv": table, "fodp": slides}


def fake_translation(text: str) -> str:
    """Reverse the letters of every word; the same words stay at the same places."""
    return re.sub(r"[^\W\d_]+", lambda match: match[0][::-1].swapcase(), text)


@needs_office
@pytest.mark.parametrize("kind", FILTERS)
def test_files_of_libreoffice_are_translated_and_opened_again(kind: str, tmp_path: Path) -> None:
    suffix, source_filter, target = FILTERS[kind]
    sources = []
    for number in range(FILES):
        path = tmp_path / f"file{number}.{suffix}"
        path.write_text(SOURCES[suffix](random.Random(f"{kind} {number}")), encoding="utf-8")
        sources.append(path)
    written = convert(sources, target, tmp_path, source_filter)
    translated_files = []
    for path in written:
        data = path.read_bytes()
        document = read_document(path.name, data)
        assert len(document.segments) >= 6
        assert document.build(document.segments) == data
        changed = document.build([fake_translation(segment) for segment in document.segments])
        before, after = members_of(data), members_of(changed)
        assert list(before) == list(after)
        again = read_document(path.name, changed)
        assert again.segments == [fake_translation(segment) for segment in document.segments]
        (tmp_path / "translated").mkdir(exist_ok=True)
        translated_files.append(tmp_path / "translated" / path.name)
        translated_files[-1].write_bytes(changed)
    old, new = texts_of(written, kind, tmp_path / "old"), texts_of(translated_files, kind, tmp_path / "new")
    assert [" ".join(text.split()) for text in new] == [" ".join(fake_translation(text).split()) for text in old]
    assert all(len(text) > 100 for text in old)


def texts_of(files: list[Path], kind: str, folder: Path) -> list[str]:
    """The texts of files, as LibreOffice shows them."""
    folder.mkdir()
    texts = [path.read_text(encoding="utf-8-sig") for path in convert(files, TEXT[kind], folder)]
    if kind != "pptx":
        return texts
    bodies = [text.partition("<office:presentation")[2] for text in texts]
    paragraphs = [re.findall(r"<text:p\b[^>]*>(.*?)</text:p>", body, re.DOTALL) for body in bodies]
    return [html.unescape("\n".join(re.sub("<[^>]*>", "", line) for line in lines)) for lines in paragraphs]


@pytest.mark.skipif(not CHECKER or not JAVA, reason="epubcheck is not installed: apt-get install epubcheck")
def test_translated_books_are_valid(tmp_path: Path) -> None:
    assert CHECKER is not None
    assert JAVA is not None
    packed = Path(CHECKER).read_bytes().startswith(b"PK")  # Debian's command is the archive itself
    command = [JAVA, "-jar", CHECKER] if packed else [CHECKER]
    data = Generator(1).epub()
    document = read_document("a.epub", data)
    book = tmp_path / "a.epub"
    for content in (data, document.build([fake_translation(segment) + " <&" for segment in document.segments])):
        book.write_bytes(content)
        done = subprocess.run([*command, str(book)], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
