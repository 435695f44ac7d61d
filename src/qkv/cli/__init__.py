"""The command line: verbs and their options, handed to functions; torch is imported only by the verbs that need it.

A verb is a plain function in one of the modules here, and takes its place in the order of `qkv --help` below.
"""

from __future__ import annotations

from qkv.cli.command import app, lab, main
from qkv.cli.explain_verbs import align, explain, heads, report
from qkv.cli.lab_verbs import ablate, doctor, speed, table1, table2, table3
from qkv.cli.serving_verbs import export, serve
from qkv.cli.text_verbs import complete, evaluate, fill, score
from qkv.cli.training_verbs import augment, average, config, train
from qkv.cli.translation_verbs import translate

__all__ = ["app", "main"]

for verb in (
    train,
    translate,
    augment,
    complete,
    fill,
    score,
    evaluate,
    explain,
    align,
    heads,
    report,
    serve,
    export,
    average,
    config,
    doctor,
):
    app.command()(verb)
for measurement in (table1, table2, table3, ablate, speed):
    lab.command()(measurement)
