"""Verbs for models of plain text: complete goes on with a text, fill closes its gaps."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.options import AsJson, Device, RunArgument, Weights

if TYPE_CHECKING:
    from qkv.api.completing import Draws


def complete(
    run: RunArgument,
    prompt: Annotated[
        str, typer.Argument(help="Text to go on with; - is standard input, nothing begins a new text.")
    ] = "",
    tokens: Annotated[int, typer.Option(min=0, help="How many to add; 0: without end, until interrupted.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="Below 1 safer, above wilder; 0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among this many of the likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw among the likeliest that hold this share.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw among tokens this many times as likely as the likeliest.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same text.", show_default=False)] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="How many continuations; more than one with --json.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated; with --json.")] = None,
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Go on with a text, as it is written; the context slides, so it need not end."""
    from qkv.api import Completer
    from qkv.core.errors import UsageError

    if not as_json and (n > 1 or stop):
        raise UsageError("-n and --stop need whole continuations: add --json")
    if as_json and not tokens:
        raise UsageError("--tokens 0 never ends, so nothing can be shown as JSON: give a number")
    completer = Completer(run, weights=weights, device=device)
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    if prompt != prompt.encode("utf-8", "replace").decode():
        raise UsageError("the prompt is not UTF-8: convert it")
    draws: Draws = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    if as_json:
        for found in completer.complete(prompt, max_tokens=tokens, n=n, stop=stop or [], **draws):
            print(json.dumps({"prompt": prompt, **found.to_dict()}, ensure_ascii=False))
        return
    print(prompt, end="", flush=True)
    try:
        for piece in completer.stream(prompt, max_tokens=tokens or None, **draws):
            print(piece, end="", flush=True)
    finally:
        print()


def fill(
    run: RunArgument,
    text: Annotated[str, typer.Argument(help="A sentence with <mask> for each token that is missing.")],
    n: Annotated[int, typer.Option("-n", min=1, help="How many tokens to try in each gap.")] = 5,
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Fill the gaps of a sentence: for each the likeliest tokens, their probability, and the text with them."""
    from qkv.api import Filler

    for gap in Filler(run, weights=weights, device=device).fill(text, n):
        for found in gap:
            if as_json:
                print(json.dumps(found.to_dict(), ensure_ascii=False))
            else:
                print(f"{found.gap}\t{found.probability:.4f}\t{found.token}\t{found.text}")
