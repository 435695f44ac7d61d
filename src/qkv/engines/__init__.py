"""The same mathematics, faster. Each engine names what it supports; everything else takes the plain path.

An engine's `supports(...)` returns None, or the reason why it refuses. It checks the options against an `AllowList`,
which names every field of a dataclass with the values that the engine implements. A field or a value that the list does
not name is refused, so a new option is never silently ignored by a fast path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

# Every value of the field: the engine implements all of them, or the field does not change the mathematics.
ANY: Final = object()
Allowed = Collection[Any] | Callable[[Any], bool] | Any


class AllowList:
    """The values of every field of some dataclasses that an engine supports.

    A value is allowed if it is in the field's collection or if the field's predicate is true for it; `ANY` allows all.
    """

    def __init__(self, section: str, classes: type | tuple[type, ...], **fields: Allowed) -> None:
        self.section, self.classes, self.fields = section, classes, fields

    def refusal(self, options: Any) -> str | None:
        """Return why these options are not supported, or None if all of them are."""
        if not isinstance(options, self.classes):
            kind = getattr(options, "kind", type(options).__name__)
            return f"{self.section}.kind = {kind!r} is not supported"
        for spec in dataclasses.fields(options):  # type: ignore[arg-type]
            value = getattr(options, spec.name)
            if spec.name not in self.fields:
                return f"{self.section}.{spec.name} is not on the list of supported options"
            allowed = self.fields[spec.name]
            if allowed is ANY:
                continue
            if not (allowed(value) if callable(allowed) else value in allowed):
                return f"{self.section}.{spec.name} = {value!r} is not supported"
        return None


def first_refusal(reasons: Iterable[str | None]) -> str | None:
    """Return the first reason against an engine, or None if there is none."""
    return next((reason for reason in reasons if reason is not None), None)
