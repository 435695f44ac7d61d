"""The verb doctor, and the verbs of `qkv lab`, which reproduce the published measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.arguments import Device, Settings, command_line, given, option, with_pairs

Output = Annotated[list[str] | None, option("Also write the table (.json, .md); repeatable.", "--output", "-o")]
WorkFolder = Annotated[Path, option("Working folder; repeat the command with the same folder to resume.", "--out")]
Src = Annotated[str, option("Source text; default: the demo corpus.")]
Tgt = Annotated[str, option("Target text.")]
ValidSrc = Annotated[str, option("Validation source.")]
ValidTgt = Annotated[str, option("Validation target.")]
Steps = Annotated[int, option("Updates per training; 0: chosen by the device.")]
Tokens = Annotated[int, option("Tokens per side and update; 0: chosen by the device.")]
Seeds = Annotated[int, option("Number of seeds: trainings per row.", min=1)]
Jobs = Annotated[int, option("Parallel trainings; 0: chosen by the device.", min=0)]


def doctor() -> None:
    """Show versions and devices, and run a short self-test."""
    from qkv.lab.doctor import examine

    raise typer.Exit(0 if examine(print) else 1)


def speed(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="train, decode or all.")] = "all",
    model: Annotated[str, option("Model size with random weights: tiny, small, base, big or demo.")] = "",
    tokens: Annotated[
        int, option("Tokens per side of a training batch; default: 25,000 on a GPU, else 2,048.", show_default=False)
    ] = 0,
    run: Annotated[str, option("Decode with this run instead of random weights; needs --src.")] = "",
    src: Annotated[str, option("Text to decode with --run.")] = "",
    beams: Annotated[list[int] | None, option("Beam size; repeatable; default: 1 and 4.", "--beam")] = None,
    batches: Annotated[
        list[int] | None, option("Sentences per batch; repeatable; default: 1, 64 and 512.", "--batch")
    ] = None,
    only: Annotated[list[str] | None, option("Measure only contenders with this in their name; repeatable.")] = None,
    seconds: Annotated[float, option("Seconds per setting, at least three rounds.")] = 10.0,
    folder: Annotated[Path, option("Other software to measure, one module each.", "--peers", metavar="FOLDER")] = Path(
        "benchmarks/peers"
    ),
    device: Device = "auto",
    outputs: Output = None,
) -> None:
    """Compare training and decoding speed with other software.

    All contenders have the same weights, and their outputs are compared first.
    """
    from qkv.lab.decoding_speed import measure_speed

    measure_speed(**given(context.params), command=command_line())


def table1(
    context: typer.Context,
    seconds: Annotated[float, option("Approximate duration in seconds.")] = 60.0,
    device: Device = "auto",
    output: Output = None,
    plot: Annotated[str | None, option("Also draw .png or .svg.")] = None,
) -> None:
    """Measure the paper's Table 1: complexity of layer types.

    Complexity per layer, sequential operations and maximum path length of self-attention, recurrence and convolutions.
    """
    from qkv.lab.table1 import measure

    measure(**given(context.params), command=command_line())


def table2(
    context: typer.Context,
    out: WorkFolder = Path("runs/table2"),
    src: Src = "",
    tgt: Tgt = "",
    valid_src: ValidSrc = "",
    valid_tgt: ValidTgt = "",
    test_src: Annotated[str, option("Test source.")] = "",
    test_tgt: Annotated[str, option("Test references.")] = "",
    equal: Annotated[str, option("Budget that is equal for all models: flops, time or steps.")] = "flops",
    steps: Steps = 0,
    tokens: Tokens = 0,
    seeds: Seeds = 3,
    norm: Annotated[str, option("Layer norm of the Transformer: post, as in the paper, or pre.")] = "post",
    jobs: Jobs = 0,
    device: Device = "auto",
    output: Output = None,
) -> None:
    """Measure the paper's Table 2: RNN, ConvS2S, Transformer.

    All models have the same number of parameters and the same training cost.
    """
    from qkv.lab.table2 import measure

    measure(**given(context.params), command=command_line())


def table3(
    context: typer.Context,
    out: WorkFolder = Path("runs/table3"),
    src: Src = "",
    tgt: Tgt = "",
    valid_src: ValidSrc = "",
    valid_tgt: ValidTgt = "",
    rows: Annotated[list[str] | None, option("Train only this row; repeatable.", "--row")] = None,
    width: Annotated[float, option("Factor on the paper's widths; 0: chosen by the device.")] = 0.0,
    depth: Annotated[float, option("Factor on the paper's layers; 0: chosen by the device.")] = 0.0,
    steps: Steps = 0,
    tokens: Tokens = 0,
    seeds: Seeds = 3,
    jobs: Jobs = 0,
    device: Device = "auto",
    output: Output = None,
) -> None:
    """Measure the paper's Table 3: variations of the base model.

    Widths, layers and text are scaled down to fit the device.
    """
    from qkv.lab.table3 import measure

    measure(**given(context.params), command=command_line())


def ablate(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="CONFIG", help="Recipe: a preset, a TOML file or a run folder.")],
    changes: Annotated[
        list[str],
        option("Change to measure, e.g. train.r_drop=5; several options separated by spaces; repeatable.", "--try"),
    ],
    out: WorkFolder = Path("runs/ablation"),
    src: Src = "",
    tgt: Tgt = "",
    valid_src: ValidSrc = "",
    valid_tgt: ValidTgt = "",
    settings: Settings = None,
    steps: Annotated[int, option("Updates of the unchanged recipe; 0: as in the recipe.")] = 0,
    equal: Annotated[str, option("Budget that is equal for all rows: time or steps.")] = "time",
    seeds: Seeds = 3,
    jobs: Jobs = 0,
    device: Device = "auto",
    output: Output = None,
) -> None:
    """Measure what each change of a training recipe gains.

    Each change is compared with the unchanged recipe, at equal time, over several seeds.
    """
    from qkv.presets import find_config

    sources, targets = ([each] if each else [] for each in (src, tgt))
    config = with_pairs(find_config(what), sources, targets, valid_src or None, valid_tgt or None)
    from qkv.lab.ablation import measure

    own = {"what", "changes", "settings", "src", "tgt", "valid_src", "valid_tgt"}
    shared = {name: value for name, value in given(context.params).items() if name not in own}
    measure(config.assign(settings or []), changes, **shared, command=command_line())
