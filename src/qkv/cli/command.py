"""The command itself: what holds for every verb, how failures are told, and the exit codes."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from typing import Annotated

import typer

from qkv import __version__

app = typer.Typer(
    name="qkv",
    help="The Transformer, from raw text files to a model that translates.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
lab = typer.Typer(help="What is claimed, measured on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(lab, name="lab")

INTERRUPTED = 128 + signal.SIGINT

# Read once, when torch is loaded. A thread that waits for others first turns in circles, and takes the processor from
# those it waits for as soon as anything else runs beside them; so it does for a moment only.
THREADS = {"GOMP_SPINCOUNT": "2000"}


def main() -> None:
    """Run a verb. Exit codes: 0 done, 1 the work failed, 2 the call was wrong, 128 + n stopped by signal n."""
    os.environ.update({**THREADS, **os.environ})
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    for stream in (sys.stdout, sys.stderr):  # text is UTF-8 with bare newlines, whatever the machine's custom
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", newline="\n")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that drafts are cleared away
    try:
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()
        if code == INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
    except BrokenPipeError:  # the reader of our output has gone: `qkv translate … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (Exception, KeyboardInterrupt) as error:
        code = _explain(error, debug)
    sys.exit(code)


def _explain(error: BaseException, debug: bool) -> int:
    """Tell of a failure in one line, after a traceback if wanted; returns the exit code. The unforeseen is raised."""
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
    """Whether there was not enough memory; torch has a class for that on a GPU, and only words on a CPU."""
    named = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    return named or isinstance(error, MemoryError)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"qkv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
) -> None:
    """The Transformer, from raw text files to a model that translates."""
