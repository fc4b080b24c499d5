"""mrb explain: says what would run for these sizes and why, and why not the others. It computes nothing."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.text import Text

from moe_routing_bench.cli.options import (
    IncludePath,
    Json,
    fail,
    pick,
    show_json,
    user_mistakes,
)
from moe_routing_bench.conformance.explain import SHOWN, explained, explained_isolated
from moe_routing_bench.conformance.outside import IsolatedError, found_outside
from moe_routing_bench.core.experts import ACTIVATIONS
from moe_routing_bench.core.names import MistakeError
from moe_routing_bench.core.published import model as model_named
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.ops.targets import TARGETS
from moe_routing_bench.report.console import heading, show, two_columns

STYLES = {"could run": "green", "no": "yellow", "broken": "red", "cannot tell": "red"}


def _sizes_of(context: typer.Context, name: str) -> str:
    """Sets the sizes of a model as the defaults of the other options."""
    if name:
        with user_mistakes():
            one = model_named(name)
        context.default_map = {
            "width": one.D, "hidden": one.F, "experts": one.E, "topk": one.K, "activation": one.activation,
            "bias": one.bias,
        }  # fmt: skip
    return name


def explain_command(
    op_name: Annotated[str, typer.Argument(metavar="OP", help="An operation of `mrb list ops`.")],
    tokens: Annotated[int, typer.Option(help="T, tokens in the batch")] = 128,
    width: Annotated[int, typer.Option(help="D, the model's width")] = 2048,
    hidden: Annotated[int, typer.Option(help="F, an expert's hidden width")] = 768,
    experts: Annotated[int, typer.Option(help="E, experts of the layer")] = 128,
    topk: Annotated[int, typer.Option("--topk", "--choices", help="K, experts per token")] = 8,
    model: Annotated[
        str,
        typer.Option(
            is_eager=True,
            callback=_sizes_of,
            show_default=False,
            help="Sizes of a published model (mrb list models); other options change single ones.",
        ),
    ] = "",
    layout: Annotated[
        str, typer.Option(help="compact, padded(capacity_factor=1.25) or block(64)")
    ] = "compact",
    dtype: Annotated[str, typer.Option(help=", ".join(SHOWN))] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; this machine need not have it")] = "cpu",
    arch: Annotated[
        str, typer.Option(help=f"A GPU, here or not: {', '.join(TARGETS)}.", show_default=False)
    ] = "",
    activation: Annotated[str, typer.Option(help=", ".join(ACTIVATIONS))] = "swiglu",
    bias: Annotated[bool, typer.Option("--bias/--no-bias", help="Experts with biases.")] = False,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Inputs need gradients.")] = False,
    impl: Annotated[str, typer.Option(help="A name, a name with options, or auto.")] = "auto",
    as_json: Json = False,
    include_path: IncludePath = None,
) -> None:
    """Say what would run for these sizes and why, and why not the others. This needs no memory and no GPU.

    \b
    Examples:
      mrb explain expert_ffn --tokens 16
      mrb explain expert_ffn --model olmoe-1b-7b --tokens 1
      mrb explain grouped_gemm --layout "padded(capacity_factor=1.25)" --device cuda --train
      mrb explain expert_ffn --impl "staged(grouped_gemm=padded_bmm)"
      mrb explain expert_ffn --arch sm_90a              or sm_80, sm_100a, gfx942, ...
    """
    with user_mistakes():
        outside = found_outside(include_path)
    pick("op", op_name, [*all_ops(), *(file.op for file in outside.ops)])
    pick("dtype", dtype, SHOWN)
    pick("activation", activation, ACTIVATIONS)
    if arch:
        pick("architecture", arch, TARGETS)
        if torch.device(device).type not in ("cpu", "cuda"):
            fail(f"--arch {arch} is a GPU that torch calls cuda; leave --device {device} out")
        device = "cuda"
    asked = {
        "op": op_name, "T": tokens, "D": width, "F": hidden, "E": experts, "K": topk, "layout": layout,
        "dtype": dtype, "device": device, "arch": arch, "activation": activation, "bias": bias,
        "train": train,
    }  # fmt: skip
    try:
        if include_path:
            document, broken = explained_isolated(asked, impl, outside)
        else:
            document, broken = next(explained(asked, impl)), False
    except MistakeError as mistake:
        fail(str(mistake))
    except IsolatedError as reason:
        show(Text.assemble((f"{op_name} {impl}", "bold"), " is broken: ", (str(reason), "red")))
        raise typer.Exit(1) from None
    if as_json:
        show_json(document)
    else:
        _show(document)
    raise typer.Exit(int(broken))


def _show(document: dict[str, Any]) -> None:
    given = two_columns()
    for name, text in document["arguments"].items():
        given.add_row(f"  {name}", text)
    place = (
        f"{document['arch']}, {TARGETS[document['arch']].usual}" if document["arch"] else document["device"]
    )
    given.add_row("  device", f"{place}, {'training' if document['train'] else 'inference'}")
    show(heading(document["op"], document["summary"]), given, "")

    chosen = document["chosen"]
    verdict = {
        "could run": Text("It can run this.", "green"),
        "no": Text(f"It cannot run this, and there is no fallback: {chosen['reason']}.", "red"),
        "broken": Text(f"It is broken: {chosen['reason']}", "red"),
        "cannot tell": Text(f"It is not known whether it can run this: {chosen['reason']}", "red"),
    }[chosen["answer"]]
    arrow, why = "auto -> " if document["asked_for"] == "auto" else "", document["why_chosen"]
    show(Text.assemble(arrow, (chosen["implementation"], "bold"), f", {why}. ", verdict), "")

    others = two_columns()
    for one in document["others"]:
        text = one["answer"] if one["reason"] is None else f"{one['answer']}: {one['reason']}"
        others.add_row(f"  {one['spec']}", Text(text, STYLES[one["answer"]]))
    show("The others", others)
    if document["caution"]:
        show("", Text(document["caution"], "yellow"))
