"""How the memory of a process with a model is managed, for whoever starts one; torch is not needed to know it."""

from __future__ import annotations

import atexit
import gc

# The C library shall keep the memory that every step frees, and lay it in huge pages: 5 to 10 % of the time.
MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_THRESHOLD_": "536870912",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
}


def settle() -> None:
    """What is there now stays to the end, and is no garbage until then."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # what is never collected is reported as leaked, by Triton for one
