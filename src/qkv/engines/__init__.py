"""The same mathematics, faster. Each engine names the options it supports; everything else takes the plain path.

An engine's `supports(...)` returns None, or the reason why it refuses. It checks the options against an `AllowList`,
which names every field of a dataclass with the values that the engine implements. A field or a value that the list does
not name is refused, so a new option is never silently ignored by a fast path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

Allowed = Collection[Any] | Callable[[Any], bool]

FLAG = (False, True)


def number(value: Any) -> bool:
    """Allow every number: the engine implements all, or the field does not change the mathematics."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def text(value: Any) -> bool:
    """Allow every string: a name or a device."""
    return isinstance(value, str)


class AllowList:
    """The values of every field of some dataclasses that an engine supports.

    A value is allowed if it is in the collection of its field, or if the predicate of its field is true for it.
    """

    def __init__(self, section: str, classes: type | tuple[type, ...], **fields: Allowed) -> None:
        self.section, self.classes, self.fields = section, classes, fields

    def refusal(self, options: Any) -> str | None:
        """Return why these options are not supported, or None if all of them are."""
        if not isinstance(options, self.classes):
            return f"{self.section}.kind = {getattr(options, 'kind', type(options).__name__)!r} is not supported"
        for spec in dataclasses.fields(options):  # type: ignore[arg-type]
            value = getattr(options, spec.name)
            if spec.name not in self.fields:
                return f"{self.section}.{spec.name} is not on the list of supported options"
            allowed = self.fields[spec.name]
            if not (allowed(value) if callable(allowed) else value in allowed):
                return f"{self.section}.{spec.name} = {value!r} is not supported"
        return None


SIZES: dict[str, Allowed] = {  # fields of a stack of attention layers that are sizes or probabilities
    **dict.fromkeys(("d_model", "d_ff", "heads", "d_k", "d_v", "max_positions"), number),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "layers"), number),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "token_dropout"), number),
    "tie": ("all", "output", "none"),
}

LAYERS: dict[str, Allowed] = {  # options of a stack of attention layers that every engine implements
    **SIZES,
    "norm": ("post", "pre"),
    "rms_norm": FLAG,
    "activation": ("relu", "gelu", "swiglu"),
    "positions": ("sinusoidal", "learned", "rotary", "none"),
    "bias": FLAG,
}

# Search options of the plain steps in C and in Triton: sampling, groups, coverage and phrases have steps of their own
# (`decoding.beam_variants`). A search with processors leaves the plain steps by itself.
SEARCH_STEP: dict[str, Allowed] = {
    **dict.fromkeys(("beam", "n_best", "alpha", "extra_length", "batch_tokens", "min_length"), number),
    **dict.fromkeys(("repetition_penalty", "no_repeat_ngram", "diversity"), number),
    "length_penalty": ("gnmt", "average", "none"),
    "max_length": lambda value: value is None or number(value),
    "processors": lambda value: isinstance(value, tuple),
    "groups": (1,),
    "coverage": (0.0,),
    "sampling": (None,),
    "required": (None,),
}
