"""mrb model formats: shows the error of weights of 8 and 4 bits, and the error that the kernel adds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.cli.options import Json, show_json, user_mistakes
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.report.console import fitted, show
from moe_routing_bench.studies.format_losses import layer_losses, trained_losses
from moe_routing_bench.train.text import read_texts


def formats_command(
    d: Annotated[int, typer.Option("--width", min=1, max=1 << 16, help="D, width of the model.")] = 2048,
    f: Annotated[
        int, typer.Option("--hidden", min=1, max=1 << 16, help="F, hidden width of an expert.")
    ] = 768,
    e: Annotated[int, typer.Option("--experts", min=1, max=512, help="E, experts of the layer.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, max=1 << 16, help="T, tokens in the batch.")] = 64,
    seed: Annotated[int, typer.Option(help="Random seed of weights and tokens.")] = 0,
    text: Annotated[
        list[Path] | None, typer.Option(help="Also train a small model on this text; may be repeated.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Steps of that training.")] = 300,
    as_json: Json = False,
) -> None:
    """Show the error of each format for expert weights, compared with float32.

    \b
    Examples:
      mrb model formats                                        the width of Qwen3-30B-A3B
      mrb model formats --width 2880 --hidden 2880             the width of gpt-oss
      mrb model formats --text book.txt --steps 600            also the held-out loss

    weights, layer: the error of the stored weights, and of a layer's result with
    them. kernel: the error that expert_ffn.native adds in bfloat16. int8 rows:
    the error that it adds if it also rounds rows to 8 bits (store=..._a8). All
    errors are root mean squares relative to float32. The weights are random,
    with tails and column sizes like those of trained weights. With --text: the
    held-out loss in nats per byte, the increase over float32, and the increase
    with rows of 8 bits.
    """
    with user_mistakes():
        shape = MoEShape(T=tokens, D=d, F=f, E=e, K=min(2, e))
        losses = list(layer_losses(shape, seed=seed))
        trained = list(trained_losses(read_texts(text), steps=steps, seed=seed)) if text else []
    if as_json:
        show_json({"layer": [asdict(one) for one in losses], "trained": [asdict(one) for one in trained]})
        return
    show(
        *fitted(
            {"format": [one.name for one in losses]},
            {
                "bits": [f"{one.bits:.2f}" for one in losses],
                "weights": [f"{one.weights:.4f}" for one in losses],
                "layer": [f"{one.layer:.4f}" for one in losses],
                "kernel": [_or_none(one.kernel) for one in losses],
                "int8 rows": [_or_none(one.int8_rows) for one in losses],
            },
        )
    )
    if trained:
        columns = {
            "held-out loss": [f"{one.loss:.4f}" for one in trained],
            "more": [f"{one.more:+.4f}" for one in trained],
            "int8 rows": ["-" if one.int8_rows is None else f"{one.int8_rows:+.4f}" for one in trained],
        }
        show("", *fitted({"format": [one.name for one in trained]}, columns))


def _or_none(error: float | None) -> str:
    return "-" if error is None else f"{error:.4f}"
