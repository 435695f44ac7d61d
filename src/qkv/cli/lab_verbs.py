"""Verbs that measure: doctor examines this machine, those under lab what is claimed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.arguments import Device, Settings, command_line, with_pairs

Output = Annotated[
    list[str] | None,
    typer.Option("--output", "-o", help="Also write .json or .md; repeatable.", show_default=False),
]
WorkFolder = Annotated[Path, typer.Option("--out", help="Working folder; given again, the table goes on from there.")]
Src = Annotated[str, typer.Option(help="Source text; the demo corpus by default.", show_default=False)]
Tgt = Annotated[str, typer.Option(help="Target text.", show_default=False)]
ValidSrc = Annotated[str, typer.Option(help="Validation source.", show_default=False)]
ValidTgt = Annotated[str, typer.Option(help="Validation target.", show_default=False)]
Steps = Annotated[int, typer.Option(help="Updates of each training; 0: chosen by the device.")]
Tokens = Annotated[int, typer.Option(help="Tokens a side in one update; 0: chosen by the device.")]
Seeds = Annotated[int, typer.Option(min=1, help="Trainings of each model.")]
Jobs = Annotated[int, typer.Option(min=0, help="Trainings side by side; 0: chosen by the device.")]


def doctor() -> None:
    """Versions, devices, and a self-test of a few seconds."""
    from qkv.lab.doctor import examine

    raise typer.Exit(0 if examine(print) else 1)


def speed(
    what: Annotated[str, typer.Argument(help="train, decode or all.")] = "all",
    model: Annotated[
        str,
        typer.Option(
            show_default=False, help="Random weights: small or base; to train also tiny, big; to decode demo."
        ),
    ] = "",
    tokens: Annotated[
        int,
        typer.Option(help="Tokens a side in a training batch; 25,000 on a GPU, 2,048 elsewhere.", show_default=False),
    ] = 0,
    run: Annotated[str, typer.Option(help="Or a run to decode with.", show_default=False)] = "",
    src: Annotated[str, typer.Option(help="The text that it decodes.", show_default=False)] = "",
    beam: Annotated[list[int] | None, typer.Option(help="1 and 4; repeatable.", show_default=False)] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Sentences at once: 1, 64 and 512; repeatable.", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only those whose names hold this; repeatable.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure each setting, in three rounds at least.")] = 10.0,
    device: Device = "auto",
    output: Output = None,
) -> None:
    """Speed on the same weights: training against other implementations, decoding against other engines."""
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
    )


def table1(
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 60.0,
    device: Device = "auto",
    output: Annotated[str | None, typer.Option("--output", "-o", help="Also write JSON.", show_default=False)] = None,
    plot: Annotated[str | None, typer.Option(help="Also draw .png or .svg.", show_default=False)] = None,
) -> None:
    """The paper's Table 1 measured: complexity, sequential operations and path length of each type of layer."""
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
    equal: Annotated[str, typer.Option(help="What all models are given alike: flops, time or steps.")] = "flops",
    steps: Steps = 0,
    tokens: Tokens = 0,
    seeds: Seeds = 3,
    norm: Annotated[str, typer.Option(help="The Transformer's: post, as in the paper, or pre.")] = "post",
    jobs: Jobs = 0,
    device: Device = "auto",
    output: Output = None,
) -> None:
    """The paper's Table 2 measured: RNN, ConvS2S and Transformer at equal parameters and equal training cost."""
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
        list[str] | None, typer.Option("--row", help="Only this row; may be repeated.", show_default=False)
    ] = None,
    width: Annotated[float, typer.Option(help="Factor on the paper's widths; 0: chosen by the device.")] = 0.0,
    depth: Annotated[float, typer.Option(help="Factor on its layers; 0: chosen by the device.")] = 0.0,
    steps: Steps = 0,
    tokens: Tokens = 0,
    seeds: Seeds = 3,
    jobs: Jobs = 0,
    device: Device = "auto",
    output: Output = None,
) -> None:
    """The paper's Table 3 measured: every variation of the base model, at a scale that fits the device."""
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
    what: Annotated[str, typer.Argument(metavar="CONFIG", help="The recipe: a preset, a .toml file or a run.")],
    changes: Annotated[
        list[str],
        typer.Option("--try", help="A change of it, e.g. train.r_drop=5; several with spaces between; repeatable."),
    ],
    out: WorkFolder = Path("runs/ablation"),
    src: Src = "",
    tgt: Tgt = "",
    valid_src: ValidSrc = "",
    valid_tgt: ValidTgt = "",
    settings: Settings = None,
    steps: Annotated[int, typer.Option(help="Updates of the recipe as it is; 0: as it says.")] = 0,
    equal: Annotated[str, typer.Option(help="What all are given alike: time or steps.")] = "time",
    seeds: Seeds = 3,
    jobs: Jobs = 0,
    device: Device = "auto",
    output: Output = None,
) -> None:
    """What changes of a recipe are worth: each against the recipe as it is, at equal time, with several seeds."""
    from qkv.config import assign
    from qkv.presets import find_config

    sources, targets = ([each] if each else [] for each in (src, tgt))
    config = with_pairs(find_config(what), sources, targets, valid_src or None, valid_tgt or None)
    from qkv.lab.ablation import measure

    measure(
        assign(config, settings or []),
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
