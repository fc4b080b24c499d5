"""Text about results: a comparison of two runs, a metric over commits, training runs and their progress."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from moe_routing_bench.bench.verdict import OPEN
from moe_routing_bench.core.text import printable
from moe_routing_bench.report.console import Bar, fitted, show
from moe_routing_bench.report.overview import table_of
from moe_routing_bench.results.compare import Change, RunComparison, Turned
from moe_routing_bench.results.history import METRICS, History
from moe_routing_bench.results.trainings import Training
from moe_routing_bench.train.loop import Stepped
from moe_routing_bench.train.pareto import Pareto
from moe_routing_bench.train.settings import Run
from moe_routing_bench.train.study import Ongoing, said_step

COLOURS = {"FASTER": "green", "SLOWER": "red", "SAME": ""} | dict.fromkeys(OPEN, "yellow")
MAX_NAMES = 20
MAX_SERIES = 40


def show_comparison(runs: RunComparison) -> None:
    if runs.changes:
        show(changes_table(runs.changes), "")
    show_turned("Passed in A but not in B", runs.broken)
    show_turned("Passed in B but not in A", runs.fixed)
    show_rest(runs)
    show(comparison_summary(runs))


def changes_table(changes: tuple[Change, ...]) -> Any:
    rows = [
        (
            change.where,
            change.title,
            f"{change.ratio:.3f}",
            "-" if change.interval is None else f"{change.interval[0]:.3f} to {change.interval[1]:.3f}",
            Text(change.verdict, COLOURS[change.verdict]),
            change.kind if change.confirmed else "",
            change.method,
        )
        for change in changes
    ]
    return table_of(
        ("case", "implementation", "B / A", "99 % interval", "verdict", "kind", "by"),
        rows,
        words=("case", "implementation", "kind", "by"),
    )


def show_turned(title: str, turned: tuple[Turned, ...]) -> None:
    if not turned:
        return
    show(f"{title}:")
    for one in turned[:MAX_NAMES]:
        show(Text.assemble("  ", (one.status, "red"), printable(f" {one.name}: {one.reason}")))
        show(Text(printable(f"    {one.repro}"), "dim"))
    if len(turned) > MAX_NAMES:
        show(f"  and {len(turned) - MAX_NAMES:,} more; --json shows all")
    show("")


def show_rest(runs: RunComparison) -> None:
    apart = [f"{one.name}: {'; '.join(one.differences)}" for one in runs.apart]
    undecided = [f"{one.where}: {one.title}: {one.reason}" for one in runs.changes if one.verdict in OPEN]
    for title, names in (
        ("Undecided", undecided),
        ("Measured in different ways, so there is no ratio", apart),
        ("Only in A", runs.only_a),
        ("Only in B", runs.only_b),
        ("Not compared, because samples cannot be read", runs.unreadable),
        ("Note", runs.notes),
    ):
        if not names:
            continue
        show(f"{title}:")
        for name in names[:MAX_NAMES]:
            show(Text(printable(f"  {name}")))
        if len(names) > MAX_NAMES:
            show(f"  and {len(names) - MAX_NAMES:,} more; --json shows all")
        show("")


def comparison_summary(runs: RunComparison) -> Text:
    if runs.geometric_mean is None:
        return Text("Nothing passed in both, so no times were compared.")
    counts = ", ".join(f"{runs.count(verdict)} {verdict}" for verdict in COLOURS)  # type: ignore[arg-type]
    growth = f"geometric mean of {len(runs.changes)} ratios {runs.geometric_mean:.3f}"
    lines = [f"{counts}; {growth}."]
    raw = sum(change.method == "times" for change in runs.changes)
    lines.append("The two runs were not interleaved, so samples of A and B are not paired.")
    if raw:
        lines.append(
            f"Compared by times alone: {raw}. Times also change with the machine, so there unchanged code is "
            "never called FASTER or SLOWER."
        )
    moved = sum(change.same_code and change.verdict in ("FASTER", "SLOWER") for change in runs.changes)
    if moved:
        lines.append(
            f"{moved} of the FASTER and SLOWER have the same source in both runs, so called code may be the "
            "cause."
        )
    drift = [
        math.log(change.ratio) for change in runs.changes if change.same_code and change.method == "times"
    ]
    if drift:
        ratio = math.exp(math.fsum(drift) / len(drift))
        lines.append(
            f"Unchanged source took {ratio:.3f} times as long in B (geometric mean of {len(drift)})."
        )
    return Text("\n".join(lines))


def show_history(past: History) -> None:
    from moe_routing_bench.report.over_commits import series_table, steps_table  # it draws

    series, steps = series_table(past.series), steps_table(past)
    if steps.rows:
        show("Steps:", table_of(steps.head, steps.rows[:MAX_SERIES], words=steps.head[:2]), "")
    show(table_of(series.head, series.rows[:MAX_SERIES], words=series.head[:3]))
    if len(past.series) > MAX_SERIES:
        show(f"and {len(past.series) - MAX_SERIES:,} more series; --json shows all")
    single = sum(len(one.points) < 2 for one in past.series)
    lines = [
        f"Series: {len(past.series):,}, steps: {len(past.steps):,}. {METRICS[past.metric].capitalize()}."
    ]
    lines += [f"{single:,} series have only one commit."] if single else []
    lines += (
        [f"{past.without:,} records name no commit, so their version and code are used instead."]
        if past.without
        else []
    )
    show("", Text(printable("\n".join(lines)), "dim"))


def show_runs(runs: Sequence[Training]) -> None:
    words = {"rule": [one.rule for one in runs], "study": [one.study for one in runs]}
    numbers = {
        "seed": [str(one.seed) for one in runs],
        "steps": [str(one.steps) for one in runs],
        "rate": [f"{one.learning_rate:g}" for one in runs],
        "held-out": [f"{one.loss:.4f}" for one in runs],
        "training": [f"{one.training_loss:.4f}" for one in runs],
        "ms/step": [f"{1e3 * one.step_seconds:.0f}" for one in runs],
        "tokens/s": [f"{one.tokens_per_second:,.0f}" for one in runs],
        "MiB": [f"{one.peak_bytes / 2**20:.0f}" for one in runs],
    }
    show(*fitted(words, numbers))


def pareto_table(reached: Pareto) -> list[RenderableType]:
    rows = reached.standings
    numbers = {
        "held-out": [one.loss.said() for one in rows],
        f"from {reached.baseline}": [
            "-" if one.rule == reached.baseline else one.difference.said("+") for one in rows
        ],
        "equal seconds": [f"{one.at_equal_seconds.mean:.3f}" for one in rows],
        "ms/step": [f"{1e3 * one.step_seconds:.0f}" for one in rows],
        "ratio": [f"{one.step_ratio:.2f}" for one in rows],
        "MFLOP": [f"{one.flops_per_token / 1e6:.2f}" for one in rows],
        "params": [f"{one.parameters / 1e6:.2f} M" for one in rows],
        "MiB": [f"{one.peak_bytes / 2**20:.0f}" for one in rows],
        "experts": [f"{one.experts_per_token:.2f}" if one.max_violation is not None else "-" for one in rows],
        "max vio": ["-" if one.max_violation is None else f"{one.max_violation:.2f}" for one in rows],
        "rate": [f"{one.learning_rate:g}" for one in rows],
        "decode 8": [f"{one.decode[8]:,.0f}" if 8 in one.decode else "-" for one in rows],
    }
    return fitted(
        {"rule": [one.title for one in rows]},
        numbers,
        spare=("rate", "MiB", "max vio", "experts", "decode 8", "MFLOP"),
    )


def show_study(shown: Bar, ongoing: Ongoing) -> None:
    shown.update(ongoing.share, 1, phase=ongoing.phase, now="; ".join(ongoing.now))


def show_step(shown: Bar, run: Run, event: Stepped) -> None:
    rate = run.batch * run.size.sequence / sum(event.seconds.values())
    now = f"{said_step(event.step, run.steps, event.loss)}, {rate:,.0f} tokens/s"
    shown.update(event.step, run.steps, phase="training", now=now)
