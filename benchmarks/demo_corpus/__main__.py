"""Write the built-in corpus: `cd benchmarks && python -m demo_corpus ../src/qkv/data/demo [SEED]`."""

from __future__ import annotations

import sys
from pathlib import Path

from demo_corpus import write

if not 2 <= len(sys.argv) <= 3:
    sys.exit("usage: python -m demo_corpus FOLDER [SEED]")
print(*write(Path(sys.argv[1]), int((sys.argv + ["0"])[2])), sep="\n")
