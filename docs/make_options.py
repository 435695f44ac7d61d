"""Write docs/options.md from the declarations in qkv.core.config and qkv.options: `make docs`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from qkv.options import MODEL_KINDS, Config, CorpusConfig

INTRODUCTION = """\
# Options

Every option of a run, made by `make docs` from `src/qkv/core/config.py` and `src/qkv/options.py`. A config file has one
table for each section; options that it does not set have their defaults. On the command line an option is
`--set section.key=value`:

```
qkv train config.toml --set train.steps=20000 --set model.dropout=0.3
```

An unknown option, a wrong type or a value out of bounds is an error that names the nearest right one. The run folder
keeps all of them, resolved, in its `config.toml`.
"""


def page() -> str:
    """Return the page as Markdown."""
    sections: list[tuple[str, Any]] = []
    for spec in dataclasses.fields(Config):
        if spec.name == "model":
            sections += [(f'[model] kind = "{kind}"', cls) for kind, cls in MODEL_KINDS.items()]
        else:
            sections.append((f"[{spec.name}]", spec.default_factory))
        if spec.name == "data":
            sections.append(("[[data.train]], [[data.valid]]", CorpusConfig))
    return "\n".join([INTRODUCTION, *(section(title, cls) for title, cls in sections)])


def section(title: str, cls: Any) -> str:
    """Return heading and table of one section."""
    rows = [
        f"| `{spec.name}` | {allowed(spec)} | {default(spec)} | {spec.metadata['help']} |"
        for spec in dataclasses.fields(cls)
    ]
    return "\n".join(
        [f"## `{title}`", "", cls.__doc__, "", "| option | value | default | meaning |", "|---|---|---|---|", *rows, ""]
    )


def allowed(spec: dataclasses.Field[Any]) -> str:
    """Return the allowed values: choices, or type and bounds."""
    choices, low, high = (spec.metadata[key] for key in ("choices", "low", "high"))
    if choices:
        return " ".join(f'`"{choice}"`' for choice in choices)
    names = {bool: "true or false", int: "whole number", float: "number", str: "string", tuple: "tables"}
    bounds = f" {low:g} to {high:g}" if high is not None else f" ≥ {low:g}" if low is not None else ""
    return names[type(spec.default)] + bounds


def default(spec: dataclasses.Field[Any]) -> str:
    """Return the default in TOML notation."""
    return "none" if spec.default == () else f"`{json.dumps(spec.default)}`"


if __name__ == "__main__":
    Path(__file__).with_name("options.md").write_text(page(), encoding="utf-8")
