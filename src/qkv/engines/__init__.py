"""The same mathematics, faster, by compiled code. Everything that an engine does not support takes the plain path.

An engine's `supports(...)` returns None, or the reason why it refuses: it checks the options against an
`options.AllowList`.
"""

from __future__ import annotations

from qkv.options import Allowed, number

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
