"""The verb doctor, and the verbs of `qkv lab`, which reproduce the published measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.arguments import Device, Settings, command_line, with_pairs

Output = Annotated[
    list[str] | None,
    typer.Option("--output", "-o", help="Also write the table (.json, .md); repeatable.", show_default=False),
]
WorkFolder = Annotated[
    Path, typer.Option("--out", help="Working folder; repeat the command with the same folder to resume.")
]
Src = Annotated[str, typer.Option(help="Source text; default: the demo corpus.", show_default=False)]
Tgt = Annotated[str, typer.Option(help="Target text.", show_default=False)]
ValidSrc = Annotated[str, typer.Option(help="Validation source.", show_default=False)]
ValidTgt = Annotated[str, typer.Option(help="Validation target.", show_default=False)]
Steps = Annotated[int, typer.Option(help="Updates per training; 0: chosen by the device.")]
Tokens = Annotated[int, typer.Option(help="Tokens per side and update; 0: chosen by the device.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of seeds: trainings per row.")]
Jobs = Annotated[int, typer.Option(min=0, help="Parallel trainings; 0: chosen by the device.")]


def doctor() -> None:
    """Show versions and devices, and run a short self-test."""
    from qkv.lab.doctor import examine

    raise typer.Exit(0 if examine(print) else 1)


def speed(
    what: Annotated[str, typer.Argument(help="train, decode or all.")] = "all",
    model: Annotated[
        str,
        typer.Option(
            show_default=False,
            help="Model size with random weights: small, base; train: also tiny, big; decode: also demo.",
        ),
    ] = "",
    tokens: Annotated[
        int,
        typer.Option(
            help="Tokens per side of a training batch; default: 25,000 on a GPU, else 2,048.", show_default=False
        ),
    ] = 0,
    run: Annotated[
        str, typer.Option(help="Decode with this run instead of random weights; needs --src.", show_default=False)
    ] = "",
    src: Annotated[str, typer.Option(help="Text to decode with --run.", show_default=False)] = "",
    beam: Annotated[
        list[int] | None, typer.Option(help="Beam size; repeatable; default: 1 and 4.", show_default=False)
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Sentences per batch; repeatable; default: 1, 64 and 512.", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Measure only contenders with this in their name; repeatable.", show_default=False),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds per setting, at least three rounds.")] = 10.0,
    peers: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Modules for other software, in a checkout of qkv.")
    ] = Path("benchmarks/peers"),
    device: Device = "auto",
    output: Output = None,
) -> None:
    """Compare training and decoding speed with other software.

    All contenders have the same weights, and their outputs are compared first.
    """
    from qkv.lab.decoding_speed import measure_speed

    measure_speed(
        what,
        model=model,
        tokens=tokens,
        run=run,
        src=src,
        beams=beam or (),
        batches=batch or (),
        only=only or (),
        seconds=seconds,
        device=device,
        outputs=output or (),
        command=command_line(),
        folder=peers,
    )


def table1(
    seconds: Annotated[float, typer.Option(help="Approximate duration in seconds.")] = 60.0,
    device: Device = "auto",
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Also write the results as JSON.", show_default=False)
    ] = None,
    plot: Annotated[str | None, typer.Option(help="Also draw .png or .svg.", show_default=False)] = None,
) -> None:
    """Measure the paper's Table 1: complexity of layer types.

    Complexity per layer, sequential operations and maximum path length of self-attention, recurrence and convolutions.
    """
    from qkv.lab.table1 import measure

    measure(device=device, seconds=seconds, output=output, plot=plot)


def table2(
    out: WorkFolder = Path("runs/table2"),
    src: Src = "",
    tgt: Tgt = "",
    valid_src: ValidSrc = "",
    valid_tgt: ValidTgt = "",
    test_src: Annotated[str, typer.Option(help="Test source.", show_default=False)] = "",
    test_tgt: Annotated[str, typer.Option(help="Test references.", show_default=False)] = "",
    equal: Annotated[str, typer.Option(help="Budget that is equal for all models: flops, time or steps.")] = "flops",
    steps: Steps = 0,
    tokens: Tokens = 0,
    seeds: Seeds = 3,
    norm: Annotated[str, typer.Option(help="Layer norm of the Transformer: post, as in the paper, or pre.")] = "post",
    jobs: Jobs = 0,
    device: Device = "auto",
    output: Output = None,
) -> None:
    """Measure the paper's Table 2: RNN, ConvS2S, Transformer.

    All models have the same number of parameters and the same training cost.
    """
    from qkv.lab.table2 import measure

    measure(
        out=out,
        src=src,
        tgt=tgt,
        valid_src=valid_src,
        valid_tgt=valid_tgt,
        test_src=test_src,
        test_tgt=test_tgt,
        equal=equal,
        steps=steps,
        tokens=tokens,
        seeds=seeds,
        norm=norm,
        jobs=jobs,
        device=device,
        output=output or [],
        command=command_line(),
    )


def table3(
    out: WorkFolder = Path("runs/table3"),
    src: Src = "",
    tgt: Tgt = "",
    valid_src: ValidSrc = "",
    valid_tgt: ValidTgt = "",
    rows: Annotated[
        list[str] | None, typer.Option("--row", help="Train only this row; repeatable.", show_default=False)
    ] = None,
    width: Annotated[float, typer.Option(help="Factor on the paper's widths; 0: chosen by the device.")] = 0.0,
    depth: Annotated[float, typer.Option(help="Factor on the paper's layers; 0: chosen by the device.")] = 0.0,
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

    measure(
        out=out,
        src=src,
        tgt=tgt,
        valid_src=valid_src,
        valid_tgt=valid_tgt,
        rows=rows or [],
        width=width,
        depth=depth,
        steps=steps,
        tokens=tokens,
        seeds=seeds,
        jobs=jobs,
        device=device,
        output=output or [],
        command=command_line(),
    )


def ablate(
    what: Annotated[str, typer.Argument(metavar="CONFIG", help="Recipe: a preset, a TOML file or a run folder.")],
    changes: Annotated[
        list[str],
        typer.Option(
            "--try", help="Change to measure, e.g. train.r_drop=5; several options separated by spaces; repeatable."
        ),
    ],
    out: WorkFolder = Path("runs/ablation"),
    src: Src = "",
    tgt: Tgt = "",
    valid_src: ValidSrc = "",
    valid_tgt: ValidTgt = "",
    settings: Settings = None,
    steps: Annotated[int, typer.Option(help="Updates of the unchanged recipe; 0: as in the recipe.")] = 0,
    equal: Annotated[str, typer.Option(help="Budget that is equal for all rows: time or steps.")] = "time",
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

    measure(
        config.assign(settings or []),
        changes,
        out=out,
        steps=steps,
        equal=equal,
        seeds=seeds,
        jobs=jobs,
        device=device,
        output=output or [],
        command=command_line(),
    )
