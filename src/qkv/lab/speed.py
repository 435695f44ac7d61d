"""`qkv lab speed`: which speed is measured, of training or of decoding, each in a module of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.core.errors import UsageError
from qkv.lab import decoding, training

DECODING = {"run": "--run", "src": "--src", "beams": "--beam", "batches": "--batch"}  # what training has no use for


def measure(what: str, *, outputs: Sequence[str] = (), tokens: int = 0, **options: Any) -> dict[str, Any]:
    """The speed of training, of decoding, or of both; options are those of their own `measure`."""
    if what not in ("train", "decode", "all"):
        raise UsageError(f"lab speed {what}: choose one of train, decode, all")
    if what == "all" and outputs:
        raise UsageError("--output: one file for one table: measure train and decode one after the other")
    if what == "decode" and tokens:
        raise UsageError("--tokens is for lab speed train: leave it out, or give --batch")
    given = {name: value for name, value in options.items() if name in DECODING and value}
    if what == "train" and given:
        raise UsageError(f"{DECODING[next(iter(given))]} is for lab speed decode: leave it out")
    results = {}
    if what != "decode":
        shared = {name: value for name, value in options.items() if name not in DECODING}
        results["train"] = training.measure(outputs=outputs, tokens=tokens, **shared)
    if what != "train":
        results["decode"] = decoding.measure(outputs=outputs, **options)
    return results
