"""Do the fast path and the plain one learn alike? Train both on the same text in the same order, and draw their curves.

    python benchmarks/agreement.py train.en train.de valid.en valid.de -o curves.png [--draw-only curves.json]

The fast path is bf16 in CUDA graphs on a GPU, the plain one fp32, one operation after the other (activation
checkpointing, which changes no bit, keeps it plain). Dropout is 0, because the two draw it differently.
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
    """The training loss of every step, for both."""
    train_src, train_tgt, valid_src, valid_tgt = files
    found = {}
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
            "micro_tokens": 4000,  # left to itself, each path cuts its updates otherwise
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
            found[name] = [line["loss"] for line in lines if line["event"] == "train"]
    return found


def draw(found: dict[str, list[float]], path: str) -> None:
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), height_ratios=[3, 1], layout="constrained")
    for (name, losses), style in zip(found.items(), ("-", "--"), strict=True):
        above.plot(range(1, len(losses) + 1), losses, style, label=name, linewidth=1.2)
    above.set_ylabel("training loss")
    above.legend()
    fast, plain = found.values()
    below.plot(range(1, len(fast) + 1), [abs(a - b) / b for a, b in zip(fast, plain, strict=True)], linewidth=1.0)
    below.set_ylabel("relative\ndifference")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="training source and target, validation source and target")
    parser.add_argument("-o", "--output", default="curves.png", help="the picture; the figures lie beside it as .json")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--small", action="store_true", help="a small model, to try this script out")
    parser.add_argument("--draw-only", help="draw a .json that was made before")
    asked = parser.parse_args()
    if asked.draw_only:
        found = json.loads(Path(asked.draw_only).read_text(encoding="utf-8"))
    elif len(asked.files) == 4:
        found = curves(asked.files, asked.steps, asked.small)
        Path(asked.output).with_suffix(".json").write_text(json.dumps(found), encoding="utf-8")
    else:
        parser.error("give four files, or --draw-only")
    fast, plain = found.values()
    print(f"largest relative difference: {max(abs(a - b) / b for a, b in zip(fast, plain, strict=True)):.2g}")
    draw(found, asked.output)


if __name__ == "__main__":
    main()
