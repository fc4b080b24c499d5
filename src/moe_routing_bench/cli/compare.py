"""mrb compare and mrb gate: two results folders side by side, for people and for CI."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from moe_routing_bench.cli.results import left_out_json, printable, reading, table_of, tell_left_out
from moe_routing_bench.cli.terminal import Json, show, show_json
from moe_routing_bench.results.comparing import Change, RunComparison, Turned, compare_runs
from moe_routing_bench.results.matching import LIKE

COLOURS = {"FASTER": "green", "SLOWER": "red", "SAME": "", "UNDECIDED": "yellow"}
MOST_NAMES = 20

Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="DIM",
        help=f"Compare although this differs; again for more. One of {', '.join(LIKE)}.",
    ),
]


def compare_command(
    a: Annotated[Path, typer.Argument(metavar="A", help="A results folder: before.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one: after.")],
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """What became faster or slower from A to B? Only like is compared with like, unless --allow says so.

    \b
    Examples:
      mrb compare results/monday results/tuesday
      mrb compare results/laptop results/server --allow machine
      mrb compare old new --json | jq '.changes[] | select(.verdict == "SLOWER")'
    """
    with reading() as status:
        found = compare_runs(
            a,
            b,
            allow=allow or (),
            on_progress=lambda done, total: status.update(f"{done} of {total} compared"),
        )
    if as_json:
        show_json({"a": str(a), "b": str(b), **_document(found)})
        return
    if found.changes:
        show(_table(found.changes), "")
    _show_turned("PASSED in A and not in B", found.broken)
    _show_turned("PASSED in B and not in A", found.fixed)
    _show_rest(found)
    show(_summary(found))
    tell_left_out(found.left_out)


def gate_command(
    current: Annotated[Path, typer.Argument(metavar="CURRENT", help="The results to judge.")],
    baseline: Annotated[Path, typer.Option("--baseline", metavar="A", help="The results to hold it to.")],
    max_regression: Annotated[
        str, typer.Option("--max-regression", metavar="PERCENT", help="How much slower is still fine.")
    ] = "3%",
    require_all: Annotated[
        bool, typer.Option("--require-all", help="Fail also if something of A was not measured.")
    ] = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Is anything slower than before, or broken? The answer is the exit code: 0 no, 1 yes, 2 a mistake.

    \b
    Examples:
      mrb gate --baseline results/main results/branch
      mrb gate --baseline results/main results/branch --max-regression 5% --require-all

    \b
    Only what is confirmed fails: the ratio above the limit and above the noise of either run, the 99 %
    interval on one side of 1, and p at most 1 % after correction. UNDECIDED is counted and does not fail.
    """
    with reading() as status:
        limit = _fraction(max_regression)
        found = compare_runs(
            baseline, current, allow=allow or (), delta=limit,
            on_progress=lambda done, total: status.update(f"{done} of {total} compared"),
        )  # fmt: skip
    regressions = tuple(change for change in reversed(found.changes) if change.verdict == "SLOWER")
    missing = require_all and bool(found.only_a or found.unreadable)
    failed = bool(regressions or found.broken or missing)
    if as_json:
        document = _document(found)
        judged = {"passed": not failed, "max_regression": limit, "require_all": require_all}
        show_json({"baseline": str(baseline), "current": str(current), **judged, **document})
    else:
        if regressions:
            show(f"Slower by more than {100 * limit:g} %:", _table(regressions))
            for change in regressions:
                show(Text(printable(f"  {change.repro}"), "dim"))
            show("")
        _show_turned("PASSED in the baseline and not now", found.broken)
        _show_rest(found)
        show(_summary(found))
        why = f"{len(regressions)} slower, {len(found.broken)} broken"
        if missing:
            why += f", {len(found.only_a) + len(found.unreadable)} missing"
        show(Text(f"gate: failed: {why}", "bold red") if failed else Text("gate: passed", "bold green"))
        tell_left_out(found.left_out)
    if failed:
        raise typer.Exit(1)


def _fraction(text: str) -> float:
    """3%, 3 % and 3.0% are 0.03. A bare 0.03 could mean either, so the sign is needed."""
    given = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*%\s*", text)
    if given is None or not 0 < float(given[1]) <= 1000:
        raise ValueError(
            f"--max-regression is a percentage above 0 such as 3%, not {printable(ascii(text[:40]))}"
        )
    return float(given[1]) / 100


def _document(found: RunComparison) -> dict[str, Any]:
    verdicts = {verdict: found.count(verdict) for verdict in COLOURS}  # type: ignore[arg-type]
    return {
        "method": "runs were not interleaved: samples of A and B are not paired",
        "counts": verdicts,
        "geometric_mean": found.geometric_mean,
        "compared": len(found.changes),
        **{name: [asdict(one) for one in getattr(found, name)] for name in ("changes", "broken", "fixed")},
        **{name: list(getattr(found, name)) for name in ("only_a", "only_b", "unreadable", "notes")},
        "left_out": left_out_json(found.left_out),
    }


def _table(changes: tuple[Change, ...]) -> Any:
    rows = [
        (
            change.where,
            change.contender,
            f"{change.ratio:.3f}",
            "-" if change.interval is None else f"{change.interval[0]:.3f} to {change.interval[1]:.3f}",
            Text(change.verdict, COLOURS[change.verdict]),
            change.method,
        )
        for change in changes
    ]
    return table_of(("case", "implementation", "B / A", "99 % interval", "verdict", "by"), rows)


def _show_turned(title: str, turned: tuple[Turned, ...]) -> None:
    if not turned:
        return
    show(f"{title}:")
    for one in turned[:MOST_NAMES]:
        show(Text.assemble("  ", (one.status, "red"), printable(f" {one.name}: {one.reason}")))
        show(Text(printable(f"    {one.repro}"), "dim"))
    if len(turned) > MOST_NAMES:
        show(f"  and {len(turned) - MOST_NAMES:,} more; all of them: --json")
    show("")


def _show_rest(found: RunComparison) -> None:
    undecided = [
        f"{one.where}: {one.contender}: {one.reason}" for one in found.changes if one.verdict == "UNDECIDED"
    ]
    for title, names in (
        ("Undecided", undecided),
        ("Only in A", found.only_a),
        ("Only in B", found.only_b),
        ("Not compared, because samples cannot be read", found.unreadable),
        ("Note", found.notes),
    ):
        if not names:
            continue
        show(f"{title}:")
        for name in names[:MOST_NAMES]:
            show(Text(printable(f"  {name}")))
        if len(names) > MOST_NAMES:
            show(f"  and {len(names) - MOST_NAMES:,} more; all of them: --json")
        show("")


def _summary(found: RunComparison) -> Text:
    if found.geometric_mean is None:
        return Text("Nothing passed in both, so no times were compared.")
    counts = ", ".join(f"{found.count(verdict)} {verdict}" for verdict in COLOURS)  # type: ignore[arg-type]
    growth = f"geometric mean of {len(found.changes)} ratios {found.geometric_mean:.3f}"
    lines = [f"{counts}; {growth}."]
    raw = sum(change.method == "times" for change in found.changes)
    lines.append("The two runs were not interleaved, so samples of A and B are not paired.")
    if raw:
        lines.append(
            f"{raw} by times alone: what the machine did between the runs is in them, so unchanged code "
            "there is never FASTER or SLOWER."
        )
    moved = sum(change.same_code and change.verdict in ("FASTER", "SLOWER") for change in found.changes)
    if moved:
        lines.append(
            f"Of the FASTER and SLOWER, {moved} with the same source in both: look at what it calls."
        )
    drift = [
        math.log(change.ratio) for change in found.changes if change.same_code and change.method == "times"
    ]
    if drift:
        ratio = math.exp(math.fsum(drift) / len(drift))
        lines.append(
            f"Unchanged source took {ratio:.3f} times as long in B (geometric mean of {len(drift)})."
        )
    return Text("\n".join(lines))
