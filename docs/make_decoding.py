"""Run the commands in docs/decoding.md and replace the output below each command.

python docs/make_decoding.py runs/demo runs/half

The page is its own source: in its code blocks a line that begins with $ is a command, and the lines below it are its
output. The commands run in a folder with the two runs, runs/demo and runs/half (the same training, stopped half-way),
one sentence as cold.txt and many sentences as many.txt.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import qkv
from qkv.data.formats import LineReader

PAGE = Path(__file__).with_name("decoding.md")
SENTENCE = "Was that waitress cold?"
MANY = 5_000
BLOCK = re.compile(r"(?<=^```\n)\$.*?(?=^```$)", re.DOTALL | re.MULTILINE)


def commands(page: str) -> Iterator[str]:
    """Yield the commands of the page in order."""
    for block in BLOCK.findall(page):
        yield from (line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ "))


def prepare(folder: Path, runs: Sequence[str]) -> None:
    """Fill the working folder of the commands."""
    for run, name in zip(runs, ("demo", "half"), strict=True):
        shutil.copytree(run, folder / "runs" / name, ignore=shutil.ignore_patterns("state", "tensorboard"))
    (folder / "cold.txt").write_text(f"{SENTENCE}\n", encoding="utf-8")
    lines = (line for _, line in zip(range(MANY), LineReader("demo:train.en"), strict=False))
    (folder / "many.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    ours = folder / "bin"
    ours.mkdir()
    (ours / "qkv").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m qkv "$@"\n', encoding="utf-8")
    (ours / "qkv").chmod(0o755)


def answer(command: str, folder: Path) -> str:
    """Run a command and return its output and error streams together."""
    search = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    package = str(Path(qkv.__file__).parents[1])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PATH": search, "PYTHONPATH": package}
    print(f"$ {command}", file=sys.stderr, flush=True)
    done = subprocess.run(
        ["timeout", "600", "sh", "-c", command],  # terminates child processes too
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    output = done.stdout.decode()
    if "Traceback" in output or done.returncode == 124:
        sys.exit(f"{output}\nthis command failed, the page is unchanged: {command}")
    return output


def fresh(page: str, runs: Sequence[str]) -> str:
    """Return the page with the current output of its commands."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, runs)

        def block(found: re.Match[str]) -> str:
            return "".join(f"$ {command}\n{answer(command, folder)}" for command in commands(f"```\n{found[0]}```\n"))

        return BLOCK.sub(block, page)


if __name__ == "__main__":
    PAGE.write_text(fresh(PAGE.read_text(encoding="utf-8"), sys.argv[1:]), encoding="utf-8")
