"""Plot validation BLEU and loss of runs, and BLEU of peer_loop.py, against elapsed time.

    python benchmarks/curves.py runs/europarl [runs/other …] [peer.json …] -o curves.png

Run folders have the values in their log; the output of benchmarks/peer_loop.py has BLEU only. Seconds count from the
start of training and include validations.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

Curve = list[dict[str, float]]


def read(path: Path) -> Curve:
    """Read the validations of a run folder or of a peer's report."""
    if path.is_file():
        curve: Curve = json.loads(path.read_text(encoding="utf-8"))["curve"]
        return [{"seconds": point["seconds"], "BLEU": point["bleu"]} for point in curve]
    log = [json.loads(line) for line in (path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    names = {"seconds": "seconds", "bleu": "BLEU", "loss": "loss"}
    return [{names[key]: entry[key] for key in names if entry.get(key) is not None} for entry in log if "bleu" in entry]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--output", required=True)
    given = parser.parse_args()
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for path in given.files:
        curve = read(path)
        for panel, what in zip(panels, ("BLEU", "loss"), strict=True):
            known = [point for point in curve if what in point]
            if known:
                times, values = [point["seconds"] for point in known], [point[what] for point in known]
                panel.plot(times, values, marker="o", markersize=3.5, label=path.stem)
    for panel, what in zip(panels, ("BLEU, validation set", "loss, validation set"), strict=True):
        panel.set(xlabel="seconds of training", title=what, xlim=(0, None))
        panel.grid(alpha=0.3)
    panels[0].legend(frameon=False)
    figure.savefig(given.output, dpi=150)


if __name__ == "__main__":
    main()
