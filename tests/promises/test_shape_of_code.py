"""The shape of the code: import order, no heavy or optional imports at load, no pickle, limits of length."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC, TESTS = ROOT / "src", ROOT / "tests"
MODULES = sorted((SRC / "qkv").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# The order of imports: a module imports only from its own stage and from stages before it.
STAGES = """
    core options console worker_pool presets data models
    evaluation decoding segmentation training engines assembly explain interop
    documents api server lab cli __main__
""".split()

# Stages that load without waiting for torch, but for the modules that compute with tensors.
LIGHT = "core worker_pool console options presets data evaluation segmentation cli".split()
HEAVY = [
    f"qkv.core.{name}"
    for name in (
        "attention",
        "checkpoint",
        "device",
        "loss",
        "optimizer",
        "run",
        "search",
        "trainer",
        "transformer",
        "translate",
        "validation",
    )
]
HEAVY += ["qkv.core.batches", "qkv.data.lm_data", "qkv.data.pair_updates"]
VERBS = """
    train translate augment complete fill score evaluate explain align heads report serve export config doctor average
    lab
""".split()


def name_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def targets(node: ast.AST) -> list[str]:
    """The modules an import statement names; `from qkv import options` names qkv.options."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "write imports in full: from qkv.core.tokenizer import …"
        base = node.module or ""
        inner = [f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in NAMES]
        return inner or [base]
    return []


def imports(path: Path) -> set[str]:
    """Every import of a module, those inside functions and for the type checker too."""
    return {target for node in ast.walk(tree_of(path)) for target in targets(node)}


def imports_at_load(path: Path) -> set[str]:
    """The modules imported while a module is loaded, not inside its functions."""

    def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from statements(node.orelse)
                continue
            yield node
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)

    return {target for node in statements(tree_of(path).body) for target in targets(node)}


def stage(module: str) -> int:
    part = module.split(".")[1]
    assert part in STAGES, f"{module}: give the stage {part} its place in STAGES"
    return STAGES.index(part)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_only_from_stages_before(path: Path) -> None:
    if path == SRC / "qkv" / "__init__.py":
        return  # its public names are imported at first use
    name = name_of(path)
    backward = {t for t in imports(path) if t.startswith("qkv.") and stage(t) > stage(name)}
    assert not backward, f"{name} imports from a later stage: {sorted(backward)}"


def test_the_core_is_read_in_the_order_of_its_imports() -> None:
    package = SRC / "qkv" / "core" / "__init__.py"
    text = (ast.get_docstring(tree_of(package)) or "").partition("\n    ")[2].partition("\n\n")[0]
    order = [word for line in text.splitlines() for word in re.match(r"[a-z, ]+?(?=  |$)", line.strip())[0].split(", ")]
    assert sorted(order) == sorted(path.stem for path in package.parent.glob("*.py") if path != package)
    for number, name in enumerate(order):
        earlier = {f"qkv.core.{other}" for other in order[:number]} | {"qkv.core", "qkv"}
        loaded = {target for target in imports_at_load(package.with_name(f"{name}.py")) if target.startswith("qkv")}
        assert loaded <= earlier, f"{name} uses {sorted(loaded - earlier)}, which the reader has not seen"


def test_no_import_goes_in_a_circle() -> None:
    # A package's own __init__ gathers names from its modules, so it comes after them.
    graph = {name_of(path): imports(path) & NAMES - {name_of(path)} for path in MODULES if name_of(path) != "qkv"}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)


# The server's modules import its extra at load; no other module imports the server at load.
EXTRA_OF = {"qkv.server": {"fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client"}}


def room_of(module: str) -> str:
    return next((room for room in EXTRA_OF if module == room or module.startswith(f"{room}.")), "")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_core_dependencies_load_with_a_module(path: Path) -> None:
    core = {re.split(r"[<>=\[]", requirement)[0] for requirement in PROJECT["dependencies"]}
    room, loaded = room_of(name_of(path)), imports_at_load(path)
    roots = {target.split(".")[0] for target in loaded}
    extra = roots - core - set(sys.stdlib_module_names) - {"qkv"} - EXTRA_OF.get(room, set())
    assert not extra, f"{name_of(path)}: import {sorted(extra)} inside the function that needs it"
    foreign = {target for target in loaded if room_of(target) not in ("", room)}
    assert not foreign, f"{name_of(path)}: import {sorted(foreign)} inside the function that needs it"


@pytest.mark.parametrize("path", sorted((TESTS / "core").glob("*.py")), ids=lambda path: path.stem)
def test_tests_of_the_core_import_nothing_of_the_rings(path: Path) -> None:
    """Neither do the modules of tests/ that they import, so that they test the core by itself."""
    waiting, seen = [path], set[Path]()
    while waiting:
        seen.add(file := waiting.pop())
        for target in imports(file) if file == path else imports_at_load(file):
            assert target == "qkv.core" or not re.match(r"qkv(\.(?!core\.)|$)", target), f"{file.name}: {target}"
            if (helper := TESTS / f"{target}.py").is_file() and helper not in seen:
                waiting.append(helper)


def test_every_module_of_the_core_has_its_tests() -> None:
    names = {path.stem for path in (TESTS / "core").glob("test_*.py")}
    core = [path.stem for path in MODULES if path.parent.name == "core" and path.stem != "__init__"]
    assert not [name for name in core if not any(each.startswith(f"test_{name}") for each in names)]


def test_names_of_test_files_are_unique() -> None:
    names = [path.name for path in TESTS.rglob("*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_is_pickled(path: Path) -> None:
    picklers = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    found = picklers & {target.split(".")[0] for target in imports(path)}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
            found.add(ast.unparse(node))
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.add("allow_pickle")
    assert not found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_and_functions_are_of_a_size_to_read(path: Path) -> None:
    assert not {"utils", "util", "helpers", "misc", "common"} & set(name_of(path).split(".")), "say what it is"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 450
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            # Only the body counts: the signature of a verb spells out every option.
            assert node.end_lineno - node.body[0].lineno < 70, f"{node.name} is longer than a screen"


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=SRC, capture_output=True, text=True, check=False)


def test_light_modules_do_not_wait_for_torch() -> None:
    light = [name for name in sorted(NAMES - {"qkv", *HEAVY}) if name.split(".")[1] in LIGHT]
    done = python(f"import sys, qkv, {', '.join(light)}; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_no_gpu_module_is_loaded_on_a_cpu(tmp_path: Path) -> None:
    for name, word in (("train.en", "one"), ("train.it", "uno")):
        (tmp_path / name).write_text("".join(f"{word} {i}\n" for i in range(40)), encoding="utf-8")
    done = python(f"""
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from qkv.cli import main
folder = {str(tmp_path)!r}
small = ["steps=2", "validate_every=2", "tokens_per_step=512", "tensorboard=false"]
sets = ["model.d_model=8", "model.d_ff=8", "tokenizer.vocab=300", *(f"train.{{each}}" for each in small)]
text = ["--src", folder + "/train.en", "--tgt", folder + "/train.it", "--run", folder + "/run"]
for arguments in (
    ["train", *text, *(word for each in sets for word in ("--set", each))],
    ["translate", folder + "/run", folder + "/train.en", "-o", folder + "/out.it"],
):
    sys.argv = ["qkv", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
print(*(name for name in sys.modules if name.startswith("qkv.engines.cuda_")))
""")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.it").exists()
    assert not done.stdout.split()


def test_every_package_has_an_init() -> None:
    folders = {path.parent for path in MODULES}
    assert not [str(folder) for folder in folders if folder / "__init__.py" not in MODULES]


def test_a_module_name_occurs_once_in_the_tree() -> None:
    names = [path.stem for path in MODULES if not path.name.startswith("__")]
    names += [path.parent.name for path in MODULES if path.name == "__init__.py" and path.parent != SRC / "qkv"]
    assert sorted(names) == sorted(set(names))


def test_no_function_has_the_name_of_a_package() -> None:
    """`import qkv.training.distributed` works beside `qkv.train(…)`, in any order."""
    folders = {path.parent.name for path in MODULES if path.name == "__init__.py" and path.parent.parent == SRC / "qkv"}
    functions = "import qkv; print(*(n for n in qkv.__all__ if callable(getattr(qkv, n))))"
    assert not folders & set(python(functions).stdout.split())


def test_public_names_exist() -> None:
    done = python("import qkv; [getattr(qkv, name) for name in qkv.__all__]; print(qkv.__version__)")
    assert done.stdout.strip() == PROJECT["version"], done.stderr


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_every_verb_has_help_without_torch(verb: str) -> None:
    code = f"""
import sys
from qkv.cli import main
sys.argv = ["qkv", *{[verb] if verb else []!r}, "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
    if not verb:
        assert not [other for other in VERBS if other not in done.stdout]
