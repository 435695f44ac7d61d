"""The C of this package as a library: compiled for this processor on first use, and kept in the user's cache.

Whatever goes wrong is a reason and no error: torch's kernels serve instead. QKV_NATIVE=0 turns it off.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path

from qkv.terminal import say

FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-pthread", "-fno-math-errno")
OWN = "-march=native"  # all that this processor can do
COMPILERS = ("cc", "gcc", "clang")
PATIENCE = 120  # seconds for the compiler


class Unavailable(Exception):
    """Why there is no library."""


def library() -> ctypes.CDLL | str:
    """The library, or in a few words why there is none."""
    if os.environ.get("QKV_NATIVE", "1") == "0":
        return "QKV_NATIVE=0"
    return _library(os.environ.get("PATH", ""))


@cache
def _library(path: str) -> ctypes.CDLL | str:
    """Once for every path to compilers there is."""
    try:
        return build(path)
    except Unavailable as reason:
        return str(reason)


def build(path: str) -> ctypes.CDLL:
    """Load the library from the cache; compile it first if it is not there."""
    compiler = next(filter(None, (shutil.which(name, path=path) for name in COMPILERS)), None)
    if compiler is None:
        raise Unavailable("no C compiler")
    name = f"native-{fingerprint(compiler)}.so"
    if (folder := cache_folder()) is not None:
        with suppress(OSError):  # not there yet, or damaged
            return ctypes.CDLL(str(folder / name))
        with suppress(OSError):  # a cache that cannot be written, or that nothing may be loaded from
            folder.mkdir(parents=True, exist_ok=True)
            return compiled(compiler, folder / name)
    try:
        with tempfile.TemporaryDirectory(prefix="qkv-") as passing:  # what is loaded may be deleted
            return compiled(compiler, Path(passing, name))
    except OSError as error:
        said = error.strerror or str(error).split(": ", 1)[-1]  # without the name of the file
        raise Unavailable(f"the library cannot be loaded ({said:.80})") from None


def cache_folder() -> Path | None:
    with suppress(RuntimeError):  # a user without a home
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "qkv")
    return None


def sources() -> list[Path]:
    """The files of C, headers first."""
    here = Path(str(resources.files(__package__)))
    return sorted([*here.glob("*.h"), *here.glob("*.c")], key=lambda file: (file.suffix != ".h", file.name))


def fingerprint(compiler: str) -> str:
    """Of all that the library is made of: sources, compiler, flags and what the processor can do."""
    digest = hashlib.sha256("\0".join([*FLAGS, OWN]).encode())
    digest.update(_run([compiler, "--version"]).encode())
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        digest.update("".join(sorted({line for line in lines if line.lower().startswith(("flags", "feat"))})).encode())
    for file in sources():
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:20]


def compiled(compiler: str, target: Path) -> ctypes.CDLL:
    """Under another name until it is loaded: several processes may do the same at once, and what fails is not kept."""
    if sys.stderr.isatty():
        say("compiling the CPU engine for this processor, once")
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        files = [str(file) for file in sources() if file.suffix == ".c"]
        command = [compiler, *FLAGS, "-o", temporary, *files, "-lm"]
        try:
            _run([*command, OWN])
        except Unavailable:  # some compilers for ARM do not know it; NEON, like SSE2, is there without it
            _run(command)
        loaded = ctypes.CDLL(temporary)
        os.replace(temporary, target)
        return loaded
    finally:
        Path(temporary).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    english = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, env=english, capture_output=True, encoding="utf-8", errors="replace", timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the C compiler cannot be run ({type(error).__name__})") from None
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
        raise Unavailable(f"the C compiler failed ({said.strip():.80})")
    return done.stdout
