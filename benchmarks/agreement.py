"""Train with the fast path and the plain path on the same batches, and plot both loss curves.

    python benchmarks/agreement.py train.en train.de valid.en valid.de -o curves.png [--draw-only curves.json]

The fast path is bf16 with CUDA graphs on a GPU, the plain path is fp32 (selected by activation checkpointing, which
changes no bit). Dropout is 0, because the paths draw their masks differently.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import qkv
from qkv.options import Config, CorpusConfig, DataConfig, TokenizerConfig

PATHS: dict[str, dict[str, Any]] = {
    "fast path, bf16": {"precision": "auto"},
    "plain path, fp32": {"precision": "fp32", "checkpointing": True},
}


def curves(files: list[str], steps: int, small: bool) -> dict[str, list[float]]:
    """Return the training loss of every step of both paths."""
    train_src, train_tgt, valid_src, valid_tgt = files
    losses_of = {}
    with tempfile.TemporaryDirectory() as folder:
        data = DataConfig(
            train=(CorpusConfig(src=train_src, tgt=train_tgt),),
            valid=(CorpusConfig(src=valid_src, tgt=valid_tgt),),
            store=f"{folder}/store",
            max_length=100,
        )
        model = qkv.presets.paper_base().model
        sizes = {"d_model": 32, "d_ff": 64, "heads": 4, "encoder_layers": 1, "decoder_layers": 1} if small else {}
        recipe: dict[str, Any] = {
            "steps": steps,
            "tokens_per_step": 8000,
            "micro_tokens": 4000,  # by default the paths divide updates differently
            "validate_every": steps,
            "log_every": 1,
        }
        recipe |= {"schedule": "cosine", "learning_rate": 1e-3, "warmup": steps // 6, "clip": 1.0}
        recipe |= {"metric": "loss", "average": 0, "tensorboard": False}
        settings = Config(data=data, tokenizer=TokenizerConfig(), model=model).replace(
            model={"dropout": 0.0, "norm": "pre"} | sizes,
            train=recipe,
        )
        for name, options in PATHS.items():
            run = qkv.train(settings.replace(train=options), Path(folder) / name)
            lines = [json.loads(line) for line in run.log.read_text(encoding="utf-8").splitlines()]
            losses_of[name] = [line["loss"] for line in lines if line["event"] == "train"]
    return losses_of


def draw(losses_of: dict[str, list[float]], path: str) -> None:
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), height_ratios=[3, 1], layout="constrained")
    for (name, losses), style in zip(losses_of.items(), ("-", "--"), strict=True):
        above.plot(range(1, len(losses) + 1), losses, style, label=name, linewidth=1.2)
    above.set_ylabel("training loss")
    above.legend()
    fast, plain = losses_of.values()
    below.plot(range(1, len(fast) + 1), [abs(a - b) / b for a, b in zip(fast, plain, strict=True)], linewidth=1.0)
    below.set_ylabel("relative\ndifference")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="training source and target, validation source and target")
    parser.add_argument(
        "-o", "--output", default="curves.png", help="plot to write; its data is written next to it as .json"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--small", action="store_true", help="a small model, to test this script")
    parser.add_argument("--draw-only", help="plot the data of an earlier run (.json)")
    given = parser.parse_args()
    if given.draw_only:
        losses_of = json.loads(Path(given.draw_only).read_text(encoding="utf-8"))
    elif len(given.files) == 4:
        losses_of = curves(given.files, given.steps, given.small)
        Path(given.output).with_suffix(".json").write_text(json.dumps(losses_of), encoding="utf-8")
    else:
        parser.error("give four files, or --draw-only")
    fast, plain = losses_of.values()
    print(f"largest relative difference: {max(abs(a - b) / b for a, b in zip(fast, plain, strict=True)):.2g}")
    draw(losses_of, given.output)


if __name__ == "__main__":
    main()
