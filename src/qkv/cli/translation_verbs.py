"""The verb translate: what is typed or piped, or a file of any size."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from qkv import __version__
from qkv.cli import arguments
from qkv.core.errors import UsageError

if TYPE_CHECKING:
    from qkv.api import Translation, Translator
    from qkv.api.file_translation import Chunk, Crew, Work
    from qkv.data.lines import Lines

BYTES_A_TOKEN = 4  # about, in European languages
# Options that say what to translate, where to and on what; all others say how, and are handed on to the translator.
AROUND = "run file output as_json others weights dtype device workers on_bad".split()


def translate(
    context: typer.Context,
    run: arguments.RunArgument,
    file: arguments.TextFile = "-",
    output: arguments.Output = "-",
    as_json: arguments.AsJson = False,
    beam: arguments.Beam = None,
    n_best: arguments.NBest = None,
    length_penalty: arguments.Penalty = None,
    alpha: arguments.Alpha = None,
    coverage: arguments.Coverage = None,
    min_length: arguments.MinLength = None,
    max_length: arguments.MaxLength = None,
    repetition_penalty: arguments.RepetitionPenalty = None,
    no_repeat_ngram: arguments.NoRepeatNgram = None,
    groups: arguments.Groups = None,
    diversity: arguments.Diversity = None,
    sample: arguments.Sample = False,
    temperature: arguments.Temperature = None,
    top_k: arguments.TopK = None,
    top_p: arguments.TopP = None,
    min_p: arguments.MinP = None,
    seed: arguments.Seed = None,
    prefix: arguments.Prefix = None,
    must_include: arguments.MustInclude = None,
    ordered: arguments.Ordered = False,
    avoid: arguments.Avoid = None,
    shortlist: arguments.Shortlist = False,
    rerank: arguments.Rerank = None,
    candidates: arguments.Candidates = None,
    tag: arguments.Tag = "",
    others: arguments.With = None,
    weights: arguments.Weights = "",
    dtype: arguments.Dtype = "auto",
    device: arguments.Device = "auto",
    workers: arguments.Workers = None,
    on_bad: arguments.BadLines = arguments.OnBad.error,
) -> None:
    """Translate text: as many lines out as in; what is piped or typed is answered as it comes.

    With --output a file of any size: stopped or killed, the same command goes on where it was. On several GPUs:
    torchrun --nproc-per-node 8 -m qkv translate RUN FILE -o OUTPUT
    """
    from qkv.api import CHUNK, Translator
    from qkv.api.file_translation import Crew, translate_file

    how = {name: value for name, value in context.params.items() if name not in AROUND and _is_given(value)}
    runs, crew = [run, *(others or [])], Crew.here()
    if workers is None and not others and crew.world == 1:
        workers = _enough_workers(file)
    translator = Translator(
        run, weights=weights, device=crew.device(device), dtype=dtype, workers=workers, others=runs[1:]
    )
    if shortlist:
        _learn_shortlist(translator, run)
    lines = _lines(run, file, output, on_bad.value, crew)
    if sys.stderr.isatty() and not crew.rank and not _typed(file):
        _say_engine(translator)
    with _bar(file, output, crew) as advance:
        work = _work(translator, how, as_json, advance)
        if _passes_on(output):
            counts = _pass_on(lines, output, work)
        else:
            task = _task(runs, weights, device=translator.device.type, dtype=dtype, json=as_json, **how)
            about = {"command": arguments.command_line(), "input": file}
            counts = translate_file(
                lines, Path(output), work, size=CHUNK, task=task, about=about, crew=crew, progress=advance
            )
    _tell(file, counts, 0 if crew.rank else lines.bad, "decode.extra_length" if max_length is None else "--max-length")


def _enough_workers(file: str) -> int:
    """As many processes as there are cores for a large file, and none beside this one for a small one."""
    from qkv.decode.workers import worker_count

    return worker_count(Path(file).stat().st_size // BYTES_A_TOKEN if Path(file).is_file() else 0)


def _say_engine(translator: Translator) -> None:
    from qkv.console import say

    say(translator.engine)


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value not in ("", (), [])


def _learn_shortlist(translator: Translator, run: Path) -> None:
    """What --shortlist needs, made once."""
    from qkv.console import say

    if not (run / "shortlist.safetensors").exists():
        say(f"{run}: learning which words those of a source can need, once")
        translator.learn_shortlist()


def _typed(file: str) -> bool:
    """Whether someone types the text."""
    return file == "-" and sys.stdin.isatty()


def _passes_on(output: str) -> bool:
    """Whether the output is a terminal, a pipe or a device: what is written there is gone."""
    return output == "-" or (Path(output).exists() and not Path(output).is_file() and not Path(output).is_dir())


def _lines(run: Path, file: str, output: str, on_bad: str, crew: Crew) -> Lines:
    """The lines of the input, if it can be read as it will have to be."""
    from qkv.data.corpus import PACKED, find, form_of, is_stream
    from qkv.data.lines import Lines

    if " " in file and not Path(file).exists():
        raise UsageError(f"{file}: no such file: to translate a sentence, pipe it: echo … | qkv translate {run}")
    if Path(output).suffix in PACKED:
        raise UsageError(f"{output}: what is written is plain text: name it without {Path(output).suffix}")
    if (form := form_of(file)) != "lines":
        raise UsageError(f"{file}: a .{form} file holds pairs: give a file with a sentence in each line")
    if crew.world > 1 and (_passes_on(output) or is_stream(find(file, ""))):
        raise UsageError("several processes can share neither standard input nor output: give FILE and --output")
    return Lines(file, on_bad)


def _pass_on(lines: Lines, output: str, work: Work) -> Mapping[str, int]:
    """Translate to where nothing can be taken back: what has come, as soon as nothing more comes at once."""
    from qkv.api import CHUNK
    from qkv.api.file_translation import translate_lines
    from qkv.console import writer

    with writer(output) as write:
        return translate_lines(
            lines, lambda text: write(text.removesuffix("\n")), work, size=CHUNK, more=lambda: lines.more
        )


@contextmanager
def _bar(file: str, output: str, crew: Crew) -> Iterator[Callable[[int], None]]:
    """Progress, where it would not mix with the text or with what is typed; of several processes one shows it."""
    from qkv.api.file_translation import count_lines
    from qkv.console import counter

    shown = not crew.rank and not _typed(file) and (output != "-" or not sys.stdout.isatty())
    total = count_lines(file) if shown and sys.stderr.isatty() else None
    with counter("translating", total, shown=shown) as advance:
        yield advance


def _work(translator: Translator, how: Mapping[str, Any], as_json: bool, progress: Callable[[int], None]) -> Work:
    """What is done with every chunk."""
    ranked = how.get("n_best", 1) > 1

    def work(chunk: Chunk) -> tuple[str, dict[str, int]]:
        found = translator.translate(chunk.lines, first=chunk.first, progress=progress, **how)
        rows = [_shown(each, number, ranked, as_json) for number, each in enumerate(found, chunk.first + 1)]
        counts = {name: sum(getattr(each, name) for each in found) for name in ("truncated", "looped")}
        return "".join(f"{row}\n" for row in rows), counts

    return work


def _shown(found: Translation, number: int, ranked: bool, as_json: bool) -> str:
    """A translation as output: JSON, a row for each of the n best, or the text."""
    if as_json:
        return json.dumps({"line": number, **found.to_dict()}, ensure_ascii=False)
    if ranked:
        every = [(found.score, found.text), *((other.score, other.text) for other in found.alternatives)]
        return "\n".join(f"{number}\t{rank}\t{score:.4f}\t{text}" for rank, (score, text) in enumerate(every, 1))
    return found.text


def _task(runs: list[Path], weights: str, **how: Any) -> dict[str, Any]:
    """All that decides what is written; an unfinished file is only gone on with if it was begun with the same."""
    from qkv.api.file_translation import fingerprint
    from qkv.assembly import Run

    return {"qkv": __version__, "models": [fingerprint(Run.open(run), weights) for run in runs], **how}


def _tell(file: str, counts: Mapping[str, int], bad: int, limit: str) -> None:
    """What the reader of the output should know."""
    from qkv.console import say

    if ended_early := counts.get("truncated"):
        say(f"{file}: {ended_early:,} translations reached the longest length allowed ({limit})")
    if looped := counts.get("looped"):
        say(f"{file}: {looped:,} translations ran in a loop and were made again (--json shows which)")
    if bad:
        say(f"{file}: {bad:,} lines were not UTF-8 and stay empty")
