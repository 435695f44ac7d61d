"""The README's commands run, on small files of the names it uses; all pages name existing modules and functions."""

from __future__ import annotations

import ast
import contextlib
import io
import lzma
import re
import shlex
import shutil
from pathlib import Path

import pytest

import qkv
from qkv import cli
from qkv.options import Config, CorpusConfig, DataConfig, TokenizerConfig, TrainConfig, TransformerConfig
from serving import serving

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = ["--set", "train.steps=4", "--set", "train.tensorboard=false"]
SMALLER = [
    "--set",
    "tokenizer.vocab=300",
    "--set",
    "model.d_model=16",
    "--set",
    "model.d_ff=16",
    "--set",
    "model.heads=2",
]


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    animals = {"cat": "Katze", "dog": "Hund", "bird": "Vogel", "horse": "Pferd", "fish": "Fisch", "bee": "Biene"}
    verbs = {"sees": "sieht", "hears": "hört", "likes": "mag", "finds": "findet"}
    pairs = [
        (f"A {a} {v} a {b}.", f"{x} {w} {y}.")
        for a, x in animals.items()
        for v, w in verbs.items()
        for b, y in animals.items()
    ]
    for name, side in (("en", 0), ("de", 1)):
        (tmp_path / f"train.{name}").write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
        (tmp_path / f"test.{name}").write_text("".join(pair[side] + "\n" for pair in pairs[::30]), encoding="utf-8")
    (tmp_path / "big.en.xz").write_bytes(lzma.compress((tmp_path / "test.en").read_bytes()))
    (tmp_path / "book.txt").write_text("".join(f"{source}\n" for source, _ in pairs), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_run(folder: Path) -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("qkv ")]
    assert len(commands) >= 8
    for command in commands:
        words, _, target = command.partition(" > ")
        arguments = shlex.split(words, comments=True)[1:]
        if arguments[0] == "train":
            arguments += SMALL + (SMALLER if "base.toml" in arguments else [])
            arguments += ["--set", "data.max_length=32"] if "--text" in arguments else []
        if "runs/other" in arguments:  # another model with the same tokenizer
            shutil.copytree("runs/mine", "runs/other")
        if arguments[0] == "serve":  # which would never end
            with serving(*arguments[1:]) as server:
                assert len(server.request("/models").json["models"]) == len(arguments[1:])
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            cli.app(arguments, standalone_mode=False)
        if target:
            (folder / target).write_text(out.getvalue(), encoding="utf-8")
    assert (folder / "map.html").exists()
    assert len((folder / "big.de").read_text(encoding="utf-8").splitlines()) == 5


def test_the_python_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Config(
        data=DataConfig(train=(CorpusConfig(src="train.en", tgt="train.de"),)),
        tokenizer=TokenizerConfig(vocab=300),
        model=TransformerConfig(d_model=16, d_ff=16, heads=2, encoder_layers=1, decoder_layers=1),
        train=TrainConfig(steps=4, tokens_per_step=1024, tensorboard=False, name="demo"),
    )
    monkeypatch.setattr(qkv.presets, "demo", lambda: small)
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    assert (folder / "map.html").exists()


def test_the_map_names_existing_modules() -> None:
    """The map of the README has exactly the packages and modules of the tree."""
    (code_map,) = [block for block in blocks("") if block.startswith("src/qkv/")]
    lines = re.sub(r"\n {19}", " ", code_map).splitlines()
    mapped: dict[str, set[str]] = {}
    for line in lines:
        if found := re.match(r"  (\w+)/ +(.*)", line):
            folder, listed = found[1], found[2]
            for inner, modules in re.findall(r"(\w+)/ \(([^)]*)\)", listed):
                mapped[f"{folder}/{inner}"] = set(modules.split(", "))
            mapped[folder] = set(re.sub(r"\w+/ \([^)]*\)", "", listed).replace("·", " ").split())
        elif line.startswith("  "):
            mapped[""] = mapped.get("", set()) | {name.removesuffix(".py") for name in line.replace("·", " ").split()}
    package = ROOT / "src" / "qkv"
    folders = [path.parent for path in package.rglob("__init__.py")]
    there = {
        "" if folder == package else folder.relative_to(package).as_posix(): {
            module.stem for module in folder.glob("*.py") if not module.name.startswith("__")
        }
        for folder in folders
    }
    assert mapped == there


def defined_in(path: Path) -> set[str]:
    """Return the functions, classes, methods, fields and constants that a module defines, also without their class."""

    def names(body: list[ast.stmt], prefix: str = "") -> set[str]:
        defined = set()
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                defined |= names(node.body, f"{node.name}.")
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                defined |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
        return defined

    defined = names(ast.parse(path.read_text(encoding="utf-8")).body)
    return defined | {name.split(".")[-1] for name in defined}


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"], ids=lambda p: p.stem
)
def test_pages_name_existing_files_and_functions(page: Path) -> None:
    """`path.py` has to exist, and in `path.py` (`name`, `Class.method`) the names have to be defined there."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for name, inside in re.findall(r"`((?:\w+/)*\w+\.py)`((?: \([^()]*\)|(?:, `[\w.]+`(?=[);,]))+)?)", text):
        files = [path for root in ("", "src/qkv", "tests") if (path := ROOT / root / name).is_file()]
        assert files, name
        functions = set(re.findall(r"`([A-Za-z_]\w*(?:\.(?!py\b)\w+)?)`", inside))
        assert functions <= defined_in(files[0]), name
