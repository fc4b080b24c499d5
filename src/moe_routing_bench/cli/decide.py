"""mrb decide: which implementation for which size, and the file that impl="auto" follows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from moe_routing_bench.bench.verdict import Regret
from moe_routing_bench.cli.results import at_hand, left_out_json, reading, show_left_out, table_of
from moe_routing_bench.cli.terminal import Json, show, show_json
from moe_routing_bench.ops.auto import VARIABLE
from moe_routing_bench.places import default_results
from moe_routing_bench.results.deciding import Answer, Decided, decide, write_decisions
from moe_routing_bench.results.objects import url_of
from moe_routing_bench.text import printable

MOST_REGRETS = 5


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
    """Which implementation wins for which size? Writes the file that impl="auto" follows on this machine.

    \b
    Examples:
      mrb decide
      mrb decide results -o decisions.json
      MRB_DECISIONS=decisions.json mrb explain expert_ffn --tokens 16
    """
    folder = default_results() if folder is None else folder
    with reading():
        target = output or (folder if url_of(folder) is None else Path()) / "decisions.json"
        folder = at_hand(folder)
        decided = decide(folder, cache=cache)
        document = write_decisions(decided, folder, target)
    if as_json:
        show_json({"file": str(target), "decisions": document, **_document(decided)})
        return
    for answer in decided.answers:
        show(Text(printable(answer.question), "bold cyan"), _table(answer))
        show(Text(printable(f"  {_sentence(answer.overall)}"), "dim"), "")
    for op, ranked in decided.regrets.items():
        show(f"{op}: one implementation for every case")
        for row in ranked[:MOST_REGRETS]:
            show(Text(printable(f"  {_sentence(row)}")))
        if len(ranked) > MOST_REGRETS:
            show(f"  and {len(ranked) - MOST_REGRETS:,} more; all of them: --json")
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


def _table(answer: Answer) -> Any:
    rows = [
        (
            contest.T,
            contest.winner,
            f"{contest.ratios[contest.winner]:.3f}",
            ", ".join(contest.ties) or "-",
            len(contest.ratios),
            contest.case,
        )
        for contest in answer.contests
    ]
    return table_of(
        ("T", "winner", "ratio to baseline", "ties", "contenders", "case"),
        rows,
        words=("winner", "ties", "case"),
    )


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


def _document(decided: Decided) -> dict[str, Any]:
    return {
        "contests": [
            {
                "question": str(answer.question),
                "T": contest.T,
                "case": contest.case,
                "winner": contest.winner,
                "ties": contest.ties,
                "ratios": contest.ratios,
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
