"""mrb regret: how much slower impl="auto" is than the fastest that can run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.cli.results import at_hand, left_out_json, reading, show_left_out, table_of
from moe_routing_bench.cli.terminal import Json, show, show_json
from moe_routing_bench.results.regrets import NOTABLE, CellRegret, GroupRegret, read_regrets
from moe_routing_bench.text import printable

MOST_CELLS = 12


def regret_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The results of `mrb sweep regret`.")],
    as_json: Json = False,
) -> None:
    """Is impl="auto" the fastest that can run? The time of what it picked over the fastest's, by group.

    \b
    Examples:
      mrb sweep regret --out regret --seconds 20 --target 0.02
      mrb regret regret
      mrb regret regret --json

    A regret of 1.10 means: auto takes 1.10 times as long as the fastest. Within
    the noise it counts as measured, and the table says how many these are.
    """
    with reading():
        found = read_regrets(at_hand(folder))
    if as_json:
        show_json(
            {
                "groups": [vars(group) for group in found.groups],
                "cells": [_document(one) for one in found.cells],
                "without": found.without,
                "left_out": left_out_json(found.left_out),
            }
        )
        return
    names = ("group", "cells", "median", "95 %", "worst", f"over {NOTABLE}", "undecided", "HF faster")
    show(table_of(names, [_row(group) for group in found.groups], words=("group",)), "")
    worst = sorted((one for one in found.cells if one.regret > NOTABLE), key=lambda one: -one.regret)
    if worst:
        columns = ("cell", "auto picked", "fastest", "regret", "")
        show(table_of(columns, [_cell(one) for one in worst[:MOST_CELLS]], words=("cell", "fastest")))
    if len(worst) > MOST_CELLS:
        show(f"and {len(worst) - MOST_CELLS} more cells over {NOTABLE}; all of them: --json")
    for reason in found.without[:MOST_CELLS]:
        show(printable(f"without a regret: {reason}"))
    if len(found.without) > MOST_CELLS:
        show(f"and {len(found.without) - MOST_CELLS} more cells without a regret; all of them: --json")
    show_left_out(found.left_out)


def _row(group: GroupRegret) -> tuple[Any, ...]:
    times = (f"{value:.2f}" for value in (group.median, group.p95, group.worst))
    return (group.group, group.cells, *times, group.over, group.undecided, group.slower_than_transformers)


def _cell(one: CellRegret) -> tuple[str, ...]:
    case = f"{one.record.workload.case}{' frozen' if one.group.endswith(' frozen') else ''}"
    shown = "" if one.shown else "undecided"
    return case, one.picked, one.contest.winner, f"{one.regret:.2f}", shown


def _document(one: CellRegret) -> dict[str, Any]:
    return {
        "group": one.group,
        "case": one.record.workload.case,
        "picked": one.picked,
        "fastest": one.contest.winner,
        "regret": one.regret,
        "shown": one.shown,
        "over_transformers": one.transformers,
        "ratios": one.contest.ratios,
    }
