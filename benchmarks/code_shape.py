"""Measure the shape of the code: sizes, imports, and the files and lines that a training and a translation execute.

    python benchmarks/code_shape.py                 # sizes and imports of src/qkv
    python benchmarks/code_shape.py --trace         # also trace `qkv train demo` and `qkv translate` (about a minute)
    python benchmarks/code_shape.py --trace --unused    # also list the lines of the core that neither executes

The trace runs `qkv train demo` with default options, apart from 12 updates with one validation, and
`qkv translate` of ten lines. A file is entered when one of its functions runs; loading a module does not count.
"""

from __future__ import annotations

import argparse
import ast
import dis
import os
import statistics
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SRC = Path(__file__).resolve().parents[1] / "src"
PACKAGE = str(SRC / "qkv")
CORE = str(SRC / "qkv" / "core")
CO_OPTIMIZED = 0x1  # code of functions, not of modules and classes


def sizes(files: list[Path]) -> None:
    """Print counts and medians of modules, functions and imports."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    bodies = [
        node.end_lineno - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]
    names = {".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__") for path in files}
    imports = []
    for tree in trees.values():
        own = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qkv"):
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & names
                own |= inner or {str(node.module)}
            elif isinstance(node, ast.Import):
                own |= {alias.name for alias in node.names} & names
        imports.append(len(own))
    core = sum(count for path, count in lines.items() if str(path).startswith(CORE))
    print(f"files {len(files)}, lines {sum(lines.values()):,}, of the core {core:,}")
    print(f"median module {statistics.median(lines.values()):g} lines, {sum(n < 90 for n in lines.values())} under 90")
    print(f"functions {len(bodies):,}, median {statistics.median(bodies):g} lines")
    print(f"own modules that a module imports: mean {statistics.mean(imports):.1f}, most {max(imports)}")


def executable_lines(code: CodeType) -> tuple[set[int], set[int]]:
    """Return the lines of a code object: of all functions in it, and of modules and classes, which run on loading."""
    own = {line for _, line in dis.findlinestarts(code) if line}
    functions, loading = (own - {code.co_firstlineno}, set[int]()) if code.co_flags & CO_OPTIMIZED else (set(), own)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = executable_lines(constant)
            functions, loading = functions | inner[0], loading | inner[1]
    return functions - loading, loading


class Trace:
    """Records files with functions that run, and the executed lines of the core."""

    def __init__(self) -> None:
        self.entered: dict[str, None] = {}  # in order
        self.executed: set[tuple[str, int]] = set()
        self.before_first_update: list[str] = []

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code, file = frame.f_code, frame.f_code.co_filename
        if file.startswith(PACKAGE) and code.co_flags & CO_OPTIMIZED and not code.co_name.startswith("<"):
            self.entered.setdefault(file)
        return self.line if file.startswith(CORE) else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.executed.add((frame.f_code.co_filename, frame.f_lineno))
        return self.line

    def note_update(self, *_: object) -> None:
        """Keep the files that were entered before the first optimizer step."""
        self.before_first_update = self.before_first_update or list(self.entered)

    def run(self, *arguments: str) -> None:
        """Run a command line of qkv inside the trace."""
        from qkv.cli import main

        sys.argv = ["qkv", *arguments]
        threading.settrace(self.call)
        sys.settrace(self.call)
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]


def trace(unused: bool) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    found = Trace()
    register_optimizer_step_pre_hook(found.note_update)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # so that the text is prepared
        run, lines = Path(folder, "run"), Path(folder, "lines.en")
        lines.write_text("Your cat is a lovely cat.\n" * 9 + "\n", encoding="utf-8")
        small = ("train.steps=12", "train.validate_every=12", "train.log_every=6")
        found.run("train", "demo", "--run", str(run), *(word for each in small for word in ("--set", each)))
        found.run("translate", str(run), str(lines), "-o", str(Path(folder, "out.it")))
    print(f"files entered before the first update of `qkv train demo`: {len(found.before_first_update)}")
    for path in found.before_first_update:
        print(f"  {Path(path).relative_to(PACKAGE)}")
    of_functions = ran_of_functions = on_loading = 0
    for path in sorted(Path(CORE).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        functions, loading = executable_lines(compile(source, str(path), "exec"))
        ran = {line for file, line in found.executed if file == str(path)} & functions
        of_functions, ran_of_functions = of_functions + len(functions), ran_of_functions + len(ran)
        on_loading += len(loading)
        print(f"{path.stem:>14}: {len(ran):4} of {len(functions):4} lines of functions, {len(loading)} on loading")
        for line in sorted(functions - ran) if unused else ():
            print(f"{'':16}{line:4} {source.splitlines()[line - 1].strip()}")
    lines, executed = of_functions + on_loading, ran_of_functions + on_loading
    inside = f"{ran_of_functions} of {of_functions} ({100 * ran_of_functions / of_functions:.1f} %)"
    print(f"lines of the core executed: {executed} of {lines} ({100 * executed / lines:.1f} %); in functions {inside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="trace a training and a translation")
    parser.add_argument("--unused", action="store_true", help="list the lines of the core that are not executed")
    given = parser.parse_args()
    sys.path.insert(0, str(SRC))
    sizes(sorted((SRC / "qkv").rglob("*.py")))
    if given.trace:
        trace(given.unused)


if __name__ == "__main__":
    main()
