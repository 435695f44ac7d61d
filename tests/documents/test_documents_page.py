"""docs/documents.md: its example of a new format works, and it describes every format."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from qkv.documents import FORMATS, read_document
from qkv.documents import __name__ as package

PAGE = (Path(__file__).parents[2] / "docs" / "documents.md").read_text(encoding="utf-8")
TEXT = b"# One comment.\r\ntitle = The cat\r\n\r\nempty=\r\nbody=  Runs & sees = yes.  \r\n"


def test_the_new_format_works(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    ((suffix, name),) = re.findall(r'`"(\w+)": "(\w+)",`', PAGE)
    module = types.ModuleType(f"{package}.{name}")
    exec(compile(code, f"{name}.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, f"{package}.{name}", module)
    monkeypatch.setitem(FORMATS, suffix, name)
    document = read_document(f"a.{suffix}", TEXT)
    assert document.segments == ["The cat", "Runs & sees = yes."]
    assert document.skipped == {"comment": 1}
    assert document.build(document.segments) == TEXT
    assert document.build(["Il gatto", "Corre"]) == (
        b"# One comment.\r\ntitle = Il gatto\r\n\r\nempty=\r\nbody=  Corre  \r\n"
    )


def test_every_format_is_described() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert set(FORMATS) <= {suffix for row in rows for suffix in re.findall(r"`(\w+)`", row)}
