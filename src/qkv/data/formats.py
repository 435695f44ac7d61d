"""More input for preparation: .tsv and .jsonl, compressed files, standard input, and the built-in demo corpus.

`find_text` turns the corpora of a config into core's `Corpus`; a new layout is a `ParsedLines` with a function from a
line to the texts of a pair. `unpack` makes plain files of all inputs. `LineReader` reads any of these files one line
after another.
"""

from __future__ import annotations

import bz2
import dataclasses
import difflib
import gzip
import hashlib
import importlib
import io
import json
import lzma
import select
import sys
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

from qkv.core.corpus import (
    LINES,
    Corpus,
    LineFormat,
    ParallelMap,
    Progress,
    TextBlock,
    Texts,
    decode_line,
    find_corpus,
    is_stream,
)
from qkv.core.errors import QkvError, UsageError
from qkv.options import CorpusConfig, DataConfig

DEMO = Path(__file__).with_name("demo")  # the built-in corpus, compressed; benchmarks/demo_corpus generates it
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
READ_BYTES = 1 << 20
SOON = 0.01  # seconds


# ---- layouts of a line -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParsedLines(LineFormat):
    """Layout with all sides in one file: `parse` returns the texts of a line, or raises ValueError."""

    parse: Callable[[str], Texts]

    def texts(self, block: TextBlock, on_bad: str) -> list[Texts | None]:
        pairs: list[Texts | None] = []
        for row, line in enumerate(block.lines(0, on_bad)):
            try:
                texts = None if line is None else self.parse(line)
                "".join(texts or ()).encode()  # JSON can spell half of a character ("\ud800"), which UTF-8 cannot hold
            except UnicodeEncodeError as error:
                if on_bad != "skip":
                    half = f"U+{ord(error.object[error.start]):04X}"
                    remedy = 'repair it, or set data.on_bad = "skip"'
                    raise QkvError(f"{block.where(row)}: {half} is half of a character: {remedy}") from None
                texts = None
            except ValueError as error:
                raise QkvError(f"{block.where(row)}: {error}") from None
            pairs.append(texts)
        return pairs


def parse_tsv(line: str) -> Texts:
    """Return the two columns of a line of tab-separated text."""
    columns = tuple(line.split("\t"))
    if len(columns) != 2:
        raise ValueError(f"expected 2 columns separated by a tab, found {len(columns)}")
    return columns


def parse_jsonl(line: str, *, sides: int, langs: tuple[str, str]) -> Texts:
    """Return the texts of a JSON object: "src" and "tgt", "source" and "target", a "translation", or a "text"."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    texts: tuple[Any, ...] = ()
    if isinstance(values, dict):
        translation = values.get("translation")
        if sides == 1:
            texts = (values.get("text"),)
        elif "src" in values and "tgt" in values:
            texts = values["src"], values["tgt"]
        elif "source" in values and "target" in values:
            texts = values["source"], values["target"]
        elif isinstance(translation, dict):
            texts = tuple(map(translation.get, langs))
    if not texts or not all(isinstance(text, str) for text in texts):
        named = " and ".join(f'"{lang}"' for lang in langs if lang) or "data.src_lang and data.tgt_lang"
        pair = f'"src" and "tgt", "source" and "target", or "translation" with {named}'
        raise ValueError(f"""expected {pair if sides == 2 else 'a string "text"'}""")
    return texts


def layout_of(name: str) -> str:
    """Return the layout that a file name implies: lines, tsv or jsonl."""
    path = Path(name)
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix
    return suffix[1:] if suffix in (".tsv", ".jsonl") else "lines"


# ---- finding and reading files ---------------------------------------------------------------------------------------


def find_text(corpora: Iterable[CorpusConfig], data: DataConfig) -> list[Corpus]:
    """Check the config of each corpus and find its files."""
    found = [_find_corpus(corpus, data) for corpus in corpora]
    if len({corpus.sides for corpus in found}) > 1:
        raise UsageError("some corpora are pairs and some plain text: give one kind only")
    return found


def _find_corpus(corpus: CorpusConfig, data: DataConfig) -> Corpus:
    names = tuple(name for name in (corpus.src, corpus.tgt, corpus.text) if name)
    layouts = [layout_of(name) for name in names] or ["lines"]
    if corpus.text and len(names) > 1:
        raise UsageError(f"corpus {' '.join(names)}: give src and tgt, or text, not both")
    if corpus.src and corpus.tgt and layouts != ["lines", "lines"]:
        raise UsageError(f"corpus {corpus.src} {corpus.tgt}: a .tsv or .jsonl file holds both sides: omit tgt")
    if corpus.text and layouts[0] == "tsv":
        raise UsageError(f"corpus {corpus.text}: plain text cannot be .tsv: give it as src")
    if corpus.text and corpus.tag:
        raise UsageError(f'corpus {corpus.text}: tag "{corpus.tag}" belongs before a source, and plain text has none')
    if corpus.text and corpus.align:
        raise UsageError(f"corpus {corpus.text}: {corpus.align} aligns two sides, and plain text has one")
    layout = "tsv" if corpus.src == "-" and not corpus.tgt else layouts[0]
    langs = (data.src_lang, data.tgt_lang)
    parse_json = partial(parse_jsonl, sides=1 if corpus.text else 2, langs=langs)
    line_format = {
        "lines": LINES,
        "tsv": ParsedLines("tsv", parse_tsv),
        "jsonl": ParsedLines(f"jsonl {langs[0]} {langs[1]}", parse_json),
    }[layout]
    if corpus.text or (corpus.src and layout != "lines"):
        (name,), sides = names, 1 if corpus.text else 2
        found = Corpus(names, (open_text(name, data.root),), sides, corpus.weight, corpus.tag, line_format)
    else:
        found = find_corpus(corpus, data, open_text)
    if corpus.align:
        from qkv.data.alignments import alignment_column

        column = alignment_column("marks" if corpus.align.startswith("demo:") else "spaces")
        names, paths = (*found.names, corpus.align), (*found.paths, open_text(corpus.align, data.root))
        found = dataclasses.replace(found, names=names, paths=paths, column=column)
    if found.names.count("-") > 1:
        raise UsageError("standard input (-) can be only one file")
    return found


def open_text(name: str, root: str = "") -> Path:
    """Return the path of a text file; `-` is standard input, `demo:NAME` a file of the built-in corpus.

    A file that exists in compressed form only is found too: `train.en.xz` as `train.en`.
    """
    if name == "-":
        return Path("-")
    if name.startswith("demo:"):
        shipped = {file.stem: file for file in sorted(DEMO.glob("*.xz"))}
        if (file := shipped.get(name.removeprefix("demo:"))) is None:
            raise UsageError(f"{name}: no such file: the built-in corpus has {', '.join(shipped)}")
        return file
    path = Path(root, name)
    if path.is_dir():
        raise UsageError(f"{path}: is a folder: give a text file")
    if path.exists():
        return path
    compressed = [path.with_name(path.name + suffix) for suffix in COMPRESSED]
    existing = [each for each in compressed if each.exists()]
    if len(existing) > 1:
        raise UsageError(
            f"{path}: no such file; there are {' and '.join(each.name for each in existing)}: name one of them"
        )
    if existing:
        return existing[0]
    names: list[str] = []
    with suppress(OSError):  # the folder may be missing or unreadable
        names = [each.name for each in path.parent.iterdir() if each.is_file()]
    similar = difflib.get_close_matches(path.name, names, n=1)
    raise UsageError(f"{path}: no such file{f': did you mean {path.with_name(similar[0])}?' if similar else ''}")


def read_any_file(path: Path) -> Iterator[bytes]:
    """Read a file, compressed or not, or standard input, in parts."""
    try:
        if path == Path("-"):
            stdin = cast(BufferedReader, sys.stdin.buffer)
            yield from iter(lambda: stdin.read1(READ_BYTES), b"")  # do not wait for more than has come
        elif path.suffix == ".zst":
            yield from _decompress_zstd(path)
        else:
            opener: Any = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(path.suffix, open)
            with cast(IO[bytes], opener(path, "rb")) as file:
                yield from iter(lambda: file.read(READ_BYTES), b"")
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # gzip and bz2 raise it without a number
            raise QkvError(f"{path}: cannot be read: {error.strerror}") from None
        raise QkvError(f"{path}: broken {path.suffix} file ({error}): copy or compress it again") from None


def _decompress_zstd(path: Path) -> Iterator[bytes]:
    try:
        zstd: Any = importlib.import_module("compression.zstd")  # Python 3.14 and later
        new, library_error = zstd.ZstdDecompressor, zstd.ZstdError
    except ImportError:
        try:
            import zstandard
        except ImportError:
            raise UsageError(f"{path}: reading .zst needs the zstandard package: pip install zstandard") from None
        new, library_error = (lambda: zstandard.ZstdDecompressor().decompressobj()), zstandard.ZstdError
    with open(path, "rb") as file:
        decompressor, complete = new(), True
        try:
            for data in iter(lambda: file.read(READ_BYTES >> 3), b""):
                while data:
                    if decompressor.eof:
                        decompressor = new()
                    yield decompressor.decompress(data)
                    data, complete = decompressor.unused_data, decompressor.eof
        except library_error as error:
            raise QkvError(f"{path}: broken .zst file ({error}): copy or compress it again") from None
    if not complete:
        raise EOFError("it ends too early")


def decompress(path: Path, copy: Path) -> tuple[Path, str]:
    """Return a file with the plain content of `path` (itself, or `copy`), and a hash of that content."""
    digest = hashlib.blake2b(digest_size=16)
    plain = path.suffix not in COMPRESSED and not is_stream(path)
    with nullcontext() if plain else open(copy, "wb") as out:
        for part in read_any_file(path):
            digest.update(part)
            if out:
                out.write(part)
    return path if plain else copy, digest.hexdigest()


def unpack(
    corpora: Sequence[Corpus], scratch: Path, parallel_map: ParallelMap, progress: Progress
) -> tuple[list[Corpus], list[str]]:
    """Make plain files of all inputs; return the corpora with these files, and a hash of each file."""
    paths = [path for corpus in corpora for path in corpus.paths]
    tasks = [(path, scratch / f"{number}.txt") for number, path in enumerate(paths)]
    others = parallel_map(decompress, [task for task in tasks if not is_stream(task[0])])
    # Pipes and standard input belong to this process, so they are read here.
    streams = {task: decompress(*task) for task in tasks if is_stream(task[0])}
    plain, digests = list[Path](), list[str]()
    for number, task in enumerate(tasks, 1):
        path, digest = streams[task] if task in streams else next(others)
        plain.append(path)
        digests.append(digest)
        progress("unpack", number, len(tasks))
    files = iter(plain)
    return [dataclasses.replace(each, paths=tuple(next(files) for _ in each.paths)) for each in corpora], digests


class LineReader:
    """Iterate over the lines of a file as they arrive; with on_bad = "skip", a line that is not UTF-8 is empty.

    `bad` counts such lines. `more` is false while no input follows the last line yet: an interactive user or program
    may be waiting for its result.
    """

    def __init__(self, name: str, on_bad: str = "error") -> None:
        self.name, self.on_bad = name, on_bad
        self.number = self.bad = 0
        self.more = True

    def __iter__(self) -> Iterator[str]:
        unfinished: list[bytes] = []  # parts of an unfinished line, joined once
        for part in read_any_file(open_text(self.name)):
            first, *others = part.split(b"\n")
            unfinished.append(first)
            if not others:
                continue
            *whole, rest = others
            lines = [b"".join(unfinished), *whole]
            unfinished = [rest]
            for count, line in enumerate(lines, 1):
                self.more = count < len(lines) or self.name != "-" or _input_is_ready()
                yield self.decode(line)
        if last := b"".join(unfinished):
            yield self.decode(last)

    def decode(self, line: bytes) -> str:
        """Return the next line as text."""
        line = line if self.number else line.removeprefix(BOM_UTF8)
        self.number += 1
        text = decode_line(line, f"{self.name}, line {self.number}", self.on_bad)
        self.bad += text is None
        return text or ""


def _input_is_ready() -> bool:
    """Whether standard input has more to read, or has ended."""
    try:
        return bool(select.select([sys.stdin.buffer], [], [], SOON)[0])
    except io.UnsupportedOperation:  # not backed by a file
        return True


def read_lines(name: str) -> list[str]:
    """Return all lines of a file; one that is not UTF-8 is an error."""
    return list(LineReader(name, on_bad=""))


# ---- languages -------------------------------------------------------------------------------------------------------

# ISO 639-1, and the single languages (not the families) of ISO 639-2, with both codes where a language has two.
LANGUAGE_CODES = frozenset(
    """
    aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo
    es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg
    ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn
    no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta
    te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu

    aar abk ace ach ada ady afh afr ain aka akk alb ale alt amh ang anp ara arc arg arm arn arp arw asm ast ava ave awa
    aym aze bak bal bam ban baq bas bej bel bem ben bho bik bin bis bla bod bos bra bre bua bug bul bur byn cad car cat
    ceb ces cha chb che chg chi chk chm chn cho chp chr chu chv chy cnr cop cor cos cre crh csb cym cze dak dan dar del
    den deu dgr din div doi dsb dua dum dut dyu dzo efi egy eka ell elx eng enm epo est eus ewe ewo fan fao fas fat fij
    fil fin fon fra fre frm fro frr frs fry ful fur gaa gay gba geo ger gez gil gla gle glg glv gmh goh gon gor got grb
    grc gre grn gsw guj gwi hai hat hau haw heb her hil hin hit hmn hmo hrv hsb hun hup hye iba ibo ice ido iii iku ile
    ilo ina ind inh ipk isl ita jav jbo jpn jpr jrb kaa kab kac kal kam kan kas kat kau kaw kaz kbd kha khm kho kik kin
    kir kmb kok kom kon kor kos kpe krc krl kru kua kum kur kut lad lah lam lao lat lav lez lim lin lit lol loz ltz lua
    lub lug lui lun luo lus mac mad mag mah mai mak mal man mao mar mas may mdf mdr men mga mic min mkd mlg mlt mnc mni
    moh mon mos mri msa mus mwl mwr mya myv nap nau nav nbl nde ndo nds nep new nia niu nld nno nob nog non nor nqo nso
    nwc nya nym nyn nyo nzi oci oji ori orm osa oss ota pag pal pam pan pap pau peo per phn pli pol pon por pro pus que
    raj rap rar roh rom ron rum run rup rus sad sag sah sam san sas sat scn sco sel sga shn sid sin slk slo slv sma sme
    smj smn smo sms sna snd snk sog som sot spa sqi srd srn srp srr ssw suk sun sus sux swa swe syc syr tah tam tat tel
    tem ter tet tgk tgl tha tib tig tir tiv tkl tlh tli tmh tog ton tpi tsi tsn tso tuk tum tur tvl twi tyv udm uga uig
    ukr umb urd uzb vai ven vie vol vot wal war was wel wln wol xal xho yao yap yid yor zap zbl zen zgh zha zho zul zun
    zza
    """.split()
)


def infer_languages(data: DataConfig) -> DataConfig:
    """Complete src_lang and tgt_lang from file names such as `train.en` and `train.de`, where they are not given.

    Only corpora with two files that end in two different language codes count. A side on which they disagree stays
    empty.
    """
    pairs = [(_ending(corpus.src), _ending(corpus.tgt)) for corpus in (*data.train, *data.valid)]
    named = [(src, tgt) for src, tgt in pairs if {src, tgt} <= LANGUAGE_CODES and src != tgt]
    if not named:
        return data
    src_lang, tgt_lang = (side.pop() if len(side) == 1 else "" for side in map(set, zip(*named, strict=True)))
    return dataclasses.replace(data, src_lang=data.src_lang or src_lang, tgt_lang=data.tgt_lang or tgt_lang)


def _ending(name: str) -> str:
    """Return the last suffix of a file name without those of compression: en of `train.en.xz`."""
    return next((end[1:] for end in reversed(Path(name).suffixes) if end not in (*COMPRESSED, ".txt")), "")
