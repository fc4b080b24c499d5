"""mrb tune decide: finds the fastest implementation of each size and writes the file that impl="auto"
follows.

mrb results regret: shows how much slower impl="auto" is than the fastest implementation.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from moe_routing_bench.bench.verdict import Regret
from moe_routing_bench.cli.options import Json, reading, show_json
from moe_routing_bench.core.paths import default_results
from moe_routing_bench.core.text import printable
from moe_routing_bench.ops.auto import VARIABLE
from moe_routing_bench.report.console import show
from moe_routing_bench.report.finding import at_hand
from moe_routing_bench.report.overview import left_out_json, show_left_out, table_of
from moe_routing_bench.results.decisions import Decided, SizeDecision, decide, write_decisions
from moe_routing_bench.results.objects import url_of
from moe_routing_bench.results.regrets import NOTABLE, CellRegret, GroupRegret, read_regrets
from moe_routing_bench.results.winners import Contest

MAX_REGRETS = 5


def decide_command(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A results folder. Default: where `mrb bench` saves.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Default: DIR/decisions.json.")
    ] = None,
    cache: Annotated[
        str | None, typer.Option("--cache", help="Use results with these caches: hot, cold or weights-cold.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest implementation of each size and write the file that impl="auto" follows.

    \b
    Examples:
      mrb tune decide
      mrb tune decide results -o decisions.json
      MRB_DECISIONS=decisions.json mrb explain expert_ffn --tokens 16
    """
    folder = default_results() if folder is None else folder
    with reading():
        target = output or (folder if url_of(folder) is None else Path()) / "decisions.json"
        folder = at_hand(folder)
        decided = decide(folder, cache=cache)
        document = write_decisions(decided, folder, target)
    if as_json:
        show_json({"file": str(target), "decisions": document, **decided_document(decided)})
        return
    for answer in decided.answers:
        show(Text(printable(answer.question), "bold cyan"), _table(answer))
        show(Text(printable(f"  {_sentence(answer.overall)}"), "dim"), "")
    for op, ranked in decided.regrets.items():
        show(f"{op}: one implementation for every case")
        for row in ranked[:MAX_REGRETS]:
            show(Text(printable(f"  {_sentence(row)}")))
        if len(ranked) > MAX_REGRETS:
            show(f"  and {len(ranked) - MAX_REGRETS:,} more; --json shows all")
        show("")
    for note in decided.notes:
        show(Text(printable(f"note: {note}"), "yellow"))
    show(
        Text(
            printable(
                f"Written to {target}. Use it with {VARIABLE}={target} or use_decisions({str(target)!r})."
            )
        )
    )
    show_left_out(decided.left_out)


def _table(answer: SizeDecision) -> Any:
    rows = [
        (
            contest.T,
            contest.chosen,
            _ratio(contest),
            ", ".join(name for name in contest.ties if name != contest.chosen) or "-",
            len(contest.ratios),
            contest.case,
        )
        for contest in answer.contests
    ]
    return table_of(
        ("T", "winner", "ratio to baseline", "ties", "implementations", "case"),
        rows,
        words=("winner", "ties", "case"),
    )


def _ratio(contest: Contest) -> str:
    one = contest.against_baseline.get(contest.chosen)
    interval = "" if one is None else f" ({one.interval[0]:.3f} to {one.interval[1]:.3f})"
    return f"{contest.ratios[contest.chosen]:.3f}{interval}"


def _sentence(row: Regret) -> str:
    if row.missing:
        return f"{row.implementation} everywhere is impossible: it has no time in {_cells(row.missing)}"
    if row.worst_loss == 0:
        return f"{row.implementation} everywhere loses nothing"
    return (
        f"{row.implementation} everywhere loses {100 * row.median_loss:.1f} % at the median, "
        f"{100 * row.worst_loss:.1f} % at worst (in {row.worst_cell})"
    )


def _cells(names: tuple[str, ...]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def decided_document(decided: Decided) -> dict[str, Any]:
    return {
        "contests": [
            {
                "question": str(answer.question),
                "T": contest.T,
                "case": contest.case,
                "winner": contest.winner,
                "chosen": contest.chosen,
                "ties": contest.ties,
                "ratios": contest.ratios,
                "against_baseline": {name: vars(one) for name, one in contest.against_baseline.items()},
                "against_winner": {name: vars(one) for name, one in contest.against_winner.items()},
            }
            for answer in decided.answers
            for contest in answer.contests
        ],
        "regret": {
            op: [{name: _finite(value) for name, value in vars(row).items()} for row in ranked]
            for op, ranked in decided.regrets.items()
        },
        "notes": decided.notes,
        "left_out": left_out_json(decided.left_out),
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


MAX_CELLS = 12


def regret_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The results of `mrb sweep regret`.")],
    as_json: Json = False,
) -> None:
    """Show how much slower impl="auto" is than the fastest implementation, by group.

    \b
    Examples:
      mrb sweep regret --out regret --seconds 20 --target 0.02
      mrb results regret regret
      mrb results regret regret --json

    A regret of 1.10 means that auto takes 1.10 times as long as the fastest. A
    regret within the noise counts too; the column "undecided" says how many.
    """
    with reading():
        found = read_regrets(at_hand(folder))
    if as_json:
        show_json(
            {
                "groups": [vars(group) for group in found.groups],
                "cells": [_regret_document(one) for one in found.cells],
                "without": found.without,
                "left_out": left_out_json(found.left_out),
            }
        )
        return
    names = (
        "group",
        "cells",
        "median",
        "95 %",
        "worst",
        f"over {NOTABLE}",
        "undecided",
        "HF faster",
        "undecided",
    )
    show(table_of(names, [_row(group) for group in found.groups], words=("group",)), "")
    worst = sorted((one for one in found.cells if one.regret > NOTABLE), key=lambda one: -one.regret)
    if worst:
        columns = ("cell", "auto picked", "fastest", "regret", "")
        show(table_of(columns, [_cell(one) for one in worst[:MAX_CELLS]], words=("cell", "fastest")))
    if len(worst) > MAX_CELLS:
        show(f"and {len(worst) - MAX_CELLS} more cells over {NOTABLE}; --json shows all")
    for reason in found.without[:MAX_CELLS]:
        show(printable(f"without a regret: {reason}"))
    if len(found.without) > MAX_CELLS:
        show(f"and {len(found.without) - MAX_CELLS} more cells without a regret; --json shows all")
    show_left_out(found.left_out)


def _row(group: GroupRegret) -> tuple[Any, ...]:
    times = (f"{value:.2f}" for value in (group.median, group.p95, group.worst))
    theirs = group.slower_than_transformers, group.slower_undecided
    return (group.group, group.cells, *times, group.over, group.undecided, *theirs)


def _cell(one: CellRegret) -> tuple[str, ...]:
    case = f"{one.record.experiment.case}{' frozen' if one.group.endswith(' frozen') else ''}"
    shown = "" if one.shown else "undecided"
    return case, one.picked, one.contest.winner, f"{one.regret:.2f}", shown


def _regret_document(one: CellRegret) -> dict[str, Any]:
    return {
        "group": one.group,
        "case": one.record.experiment.case,
        "picked": one.picked,
        "fastest": one.contest.winner,
        "regret": one.regret,
        "shown": one.shown,
        "over_transformers": one.transformers,
        "slower_than_transformers": one.loses,
        "ratios": one.contest.ratios,
    }
