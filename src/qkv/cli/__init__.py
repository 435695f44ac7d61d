"""The command line `qkv`: its verbs, exit codes and the one-line report of a failure.

A verb is a plain function in a module of this package. It hands its options to the library and contains no logic; torch
is imported inside the verbs that need it, so that `qkv --help` is immediate. The order of `qkv --help` is at the end.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from typing import Annotated

import typer

from qkv import __version__
from qkv.cli.inspection_verbs import align, evaluate, explain, heads, report, score
from qkv.cli.lab_verbs import ablate, doctor, speed, table1, table2, table3
from qkv.cli.serving_verbs import export, serve
from qkv.cli.text_verbs import complete, fill, translate
from qkv.cli.training_verbs import augment, average, config, train

app = typer.Typer(
    name="qkv",
    help="Train, run, explain and serve Transformer models from raw text files.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
lab = typer.Typer(help="Reproduce published measurements on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(lab, name="lab")

INTERRUPTED = 128 + signal.SIGINT

# OpenMP reads these once, when torch is loaded. By default a waiting thread spins, which takes the processor from the
# threads it waits for as soon as another program runs; with this setting it spins only for a moment.
THREADS = {"GOMP_SPINCOUNT": "2000"}


def main() -> None:
    """Run a verb. Exit codes: 0 done, 1 the work failed, 2 the call was wrong, 128 + n stopped by signal n."""
    os.environ.update({**THREADS, **os.environ})
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    for stream in (sys.stdout, sys.stderr):  # UTF-8 and \n on every platform
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", newline="\n")
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # unwinds, so that draft files are removed
    try:
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()
        if code == INTERRUPTED:  # typer's exit code for Ctrl-C
            raise KeyboardInterrupt
    except BrokenPipeError:  # the reader closed the pipe: `qkv translate … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (Exception, KeyboardInterrupt) as error:
        code = _report_failure(error, debug)
    sys.exit(code)


def _report_failure(error: BaseException, debug: bool) -> int:
    """Print a failure as one line (--debug: and its traceback) and return the exit code; raise unknown errors."""
    code: int | None = getattr(error, "exit_code", None)
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        code, message = INTERRUPTED, "interrupted"
    elif isinstance(error, OSError):
        code, message = 1, f"{error.filename or 'input or output'}: {error.strerror or error}"
    elif _out_of_memory(error):
        code, message = 1, "out of memory: lower train.micro_tokens, or decode.batch_tokens or --beam"
    if code is None:
        raise error
    if debug:
        traceback.print_exception(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message)
    elif message:
        print(f"qkv: {' '.join(message.split())}", file=sys.stderr)
    return code


def _out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch raises its own class on a GPU, a RuntimeError with a message on a CPU."""
    named = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    return named or isinstance(error, MemoryError)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"qkv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
) -> None:
    """Train, run, explain and serve Transformer models from raw text files."""


# The order of `qkv --help`: as one uses them.
for verbs in (
    (train, translate, augment, complete, fill),
    (score, evaluate, explain, align, heads, report),
    (serve, export, average, config, doctor),
):
    for verb in verbs:
        app.command()(verb)
for measurement in (table1, table2, table3, ablate, speed):
    lab.command()(measurement)
