"""Ready-made configs, by name: `qkv train NAME`, or `qkv.presets.NAME()` from Python; `presets.toml` declares them."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkv.core.errors import UsageError
from qkv.options import Config

DECLARED: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# Rows (A) to (E) of the paper's Table 3: options that differ from the base model.
TABLE_3: dict[str, dict[str, dict[str, Any]]] = {
    f"table3_{row}": change for row, change in DECLARED.pop("table3").items()
}


def _preset(name: str, about: str, like: str = "", **sections: dict[str, Any]) -> Callable[[], Config]:
    """Return a function that builds the config of a preset; its docstring is `about`."""

    def preset() -> Config:
        tree = (PRESETS[like]() if like else Config()).to_dict()
        for section, values in sections.items():
            tree[section] = values if "kind" in values and section == "model" else tree[section] | values
        tree["train"]["name"] = name
        return Config.from_dict(tree)

    preset.__name__, preset.__doc__ = name, about
    return preset


PRESETS: dict[str, Callable[[], Config]] = {name: _preset(name, **declared) for name, declared in DECLARED.items()}
for row, change in TABLE_3.items():
    differing = ", ".join(f"{key} = {value}" for part in change.values() for key, value in part.items())
    about = f"A row of the paper's Table 3, the base model with {differing}; needs --src and --tgt."
    PRESETS[row] = _preset(row, about, like="paper_base", **change)


def __getattr__(name: str) -> Callable[[], Config]:
    """Return the function of a preset, so that presets are attributes of the module."""
    if name in PRESETS:
        return PRESETS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def find_config(name: str) -> Config:
    """Return a config by the name of a preset, the path of a run folder, or the path of a TOML file."""
    if name in PRESETS:
        return PRESETS[name]()
    if Path(name).is_dir():
        from qkv.core.run import Run

        return Config.load(Run.open(name).path / "config.toml")
    if Path(name).exists():
        if Path(name).suffix != ".toml":
            raise UsageError(f"{name}: not a .toml file: a config is one, and text is given with --src and --tgt")
        return Config.load(name)
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"presets: {', '.join(PRESETS)}"
    raise UsageError(f"{name}: no such preset, config file or run folder: {hint}")
