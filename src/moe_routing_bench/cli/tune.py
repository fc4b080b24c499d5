"""mrb tune layer, mrb tune op: finds the settings of a kernel that are faster here, and says if none is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.api import run_tuning
from moe_routing_bench.bench.budget import command_start
from moe_routing_bench.bench.choosing import MeasureOptions, SizeOptions, WhatOptions
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.cli.bench import stopped
from moe_routing_bench.cli.decide import decided_document
from moe_routing_bench.cli.options import Json, fail, include_all, show_json, user_mistakes, with_options
from moe_routing_bench.report.console import show
from moe_routing_bench.tuning.search import SEARCHES
from moe_routing_bench.tuning.tune import Tuned, tuning_experiments

Minutes = Annotated[float, typer.Option(help="For all cases together; kernels are built before.")]
Out = Annotated[Path, typer.Option(help="The results folder; the same command goes on with what it holds.")]
How = Annotated[
    str, typer.Option("--search", help=f"{', '.join(SEARCHES)}; tpe needs optuna and a large space.")
]


@with_options
def layer_command(
    sizes: SizeOptions, what: WhatOptions, measure: MeasureOptions, out: Out, minutes: Minutes = 10.0,
    search: How = "greedy", as_json: Json = False,
) -> None:  # fmt: skip
    """Search the settings of the experts' kernel for one that is faster than its own rules.

    \b
    Examples:
      mrb tune layer --model qwen3-30b-a3b --minutes 10 --out tuned
      mrb tune layer --model olmoe-1b-7b --impl "frozen(native)" --out tuned
      mrb tune layer --model mixtral-8x7b --tokens 1,64 --dtype float32 --out tuned

    The default is always one of them, the ten best are timed again with it, and a tie keeps it. Writes
    decisions.json, which impl="auto" follows if MRB_DECISIONS names it. Stop it at any time; the same
    command goes on.
    """
    _tune("layer", sizes, what, measure, out, minutes, search, as_json)


@with_options
def op_command(
    op: Annotated[str, typer.Argument(help="An operation (`mrb list ops`).")],
    sizes: SizeOptions, what: WhatOptions, measure: MeasureOptions, out: Out, minutes: Minutes = 10.0,
    search: How = "greedy", as_json: Json = False,
) -> None:  # fmt: skip
    """Search the settings of one operation, as `mrb tune layer` does.

    \b
    Examples:
      mrb tune op expert_ffn --tokens 64 --out tuned
      mrb tune op combine --impl "native,gather_sum" --model olmoe-1b-7b --out tuned

    An operation without knobs needs --impl: then the implementations are the settings.
    """
    _tune(op, sizes, what, measure, out, minutes, search, as_json)


def _tune(
    span: str, sizes: SizeOptions, what: WhatOptions, measure: MeasureOptions, out: Path, minutes: float,
    search: str, as_json: bool,
) -> None:  # fmt: skip
    include_all(what.include_path)
    done: list[CellOutcome] = []
    try:
        with user_mistakes():
            tuning = run_tuning(
                tuning_experiments(span, sizes, what, measure), out, minutes=minutes, search=search,
                began=command_start(), progress=True, on_outcome=done.append,
            )  # fmt: skip
    except KeyboardInterrupt:
        stopped(len(done), len(done), "The same command goes on from here.")
    except NotImplementedError as reason:  # of a search
        fail(str(reason))
    if as_json:
        tuned = [_document(one) for one in tuning.tuned]
        show_json({"tuned": tuned, **decided_document(tuning.decided)})
        return
    tuning._show()
    show(f"`mrb results report {out}` draws it.")


def _document(one: Tuned) -> dict[str, Any]:
    facts = {name: value for name, value in asdict(one).items() if name not in ("experiment", "seen")}
    ten = sorted(one.seen, key=one.seen.__getitem__)[:10]
    return {
        "case": one.experiment.case, "T": one.experiment.T, "dtype": one.experiment.dtype,
        "workload": one.experiment.workload, **facts, "settings": len(one.seen),
        "best": {name: one.seen[name] for name in ten},
    }  # fmt: skip
