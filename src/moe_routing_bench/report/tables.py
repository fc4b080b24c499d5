"""The tables of a report: rows of text from chapters, cells and studies. Nothing is computed here: ratios,
intervals and verdicts come from the records, ties and regrets from results/winners.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from moe_routing_bench.bench.roofs import percent_of_roof, stored_roofs
from moe_routing_bench.bench.verdict import OPEN
from moe_routing_bench.core.names import slots_of
from moe_routing_bench.core.text import one_line
from moe_routing_bench.report.drawing import Table, rate
from moe_routing_bench.report.reading import Cell, Chapter, Group, Study, milliseconds
from moe_routing_bench.report.timing_figures import dropped_percent
from moe_routing_bench.results.record import Record
from moe_routing_bench.results.winners import regrets
from moe_routing_bench.train.pareto import Pareto

MAX_REGRETS = 20


def verdict_of(record: Record) -> str:
    if record.timing is None:
        return str(record.correctness.status)
    return "baseline" if record.comparison is None else record.comparison.verdict


def interval_of(record: Record) -> str:
    comparison = record.comparison
    return "" if comparison is None else f"{comparison.low:.3f} to {comparison.high:.3f}"


def ranking(cell: Cell) -> Table:
    """Makes the table of the timed implementations of a cell, the fastest first."""
    columns: dict[str, list[str]] = {
        "implementation": [],
        **{name: [] for name in ("ms", "ratio", "99 % interval", "verdict")},
        **{name: [] for name in ("computes", "tokens/s", "of roof", "dropped", "padding", "MiB")},
    }
    for record in cell.passed:
        timing, work, routing, comparison = record.timing, record.work, record.routing, record.comparison
        assert timing is not None and work is not None and routing is not None
        columns["implementation"].append(cell.names[record.record_id])
        columns["ms"].append(milliseconds(timing.median))
        columns["ratio"].append("1" if comparison is None else f"{comparison.ratio:.3f}")
        columns["99 % interval"].append(interval_of(record))
        columns["verdict"].append(verdict_of(record))
        w = record.experiment
        slots = slots_of(record.implementation.router, T=w.T, E=w.E, K=w.K, sequences=w.sequences)
        columns["computes"].append(slots)
        columns["tokens/s"].append(rate(record.experiment.T / timing.median))
        share = record.share_of_roof
        columns["of roof"].append("" if share is None else percent_of_roof(share, work.roof_busy))
        columns["dropped"].append(f"{dropped_percent(record):.1f} %" if routing.dropped_pairs else "")
        waste = 1 - (routing.tile_efficiency if routing.tile_efficiency is not None else 1)
        columns["padding"].append(f"{100 * waste:.1f} %" if waste > 1e-9 else "")
        peak = record.peak_rss_bytes
        columns["MiB"].append("" if peak is None else f"{peak / 2**20:,.0f}")
    kept = {name: values for name, values in columns.items() if any(values)}
    return Table(head=tuple(kept), rows=tuple(zip(*kept.values(), strict=True)))


def regret_table(group: Group) -> Table | None:
    """Makes the table of the cost of one choice for all cells of a group, the best first."""
    contests = {
        f"{cell.title} T={cell.first.experiment.T} {place}": cell.contest
        for place, cell in enumerate(group.cells)
        if cell.contest is not None and len(cell.contest.ratios) > 1
    }
    if len(contests) < 2 or not group.decides:
        return None
    rows = []
    for one in regrets(contests)[:MAX_REGRETS]:
        missing = len(one.missing)
        worst = contests[one.worst_cell]
        assert worst is not None
        rows.append(
            (
                one.implementation,
                f"{len(one.ties):,} of {len(contests):,}",
                _percent(one.median_loss),
                _percent(one.worst_loss),
                worst.case if 0 < one.worst_loss < math.inf else "",
                f"{missing:,}" if missing else "",
            )
        )
    head = (
        "always this one",
        "best or tied",
        "median loss",
        "worst loss",
        "worst at",
        "cells it lacks",
    )
    return Table(head=head, rows=tuple(rows), title=group.title)


def _percent(loss: float) -> str:
    return f"{100 * loss:.1f} %" if math.isfinite(loss) else "no time"


def machine_table(chapter: Chapter) -> Table:
    """Makes the table of the machine and of the roofs that its records were checked against."""
    said = chapter.machine
    facts: list[tuple[str, str]] = [
        (name, value) for name, value in chapter.setting.items() if value != "none"
    ]
    for name in ("cpu", "cores", "memory_gib", "instructions", "gpus", "system"):
        value = said.get(name)
        words = ", ".join(map(str, value[:40])) if isinstance(value, list) else str(value or "")
        if words:
            facts.append((name.replace("_gib", ", GiB"), one_line(words, 300)))
    facts += [("source", ", ".join(chapter.commits))] if chapter.commits else []
    return Table(head=("", "value"), rows=(*facts, *_roofs(chapter)), words=2)


def _roofs(chapter: Chapter) -> list[tuple[str, str]]:
    """Returns the roofs of `mrb doctor` if this is the machine, else the rates that the records were checked
    against. With hot caches these are only the rates of products."""
    threads = int(chapter.setting["threads"])
    try:
        stored = stored_roofs(chapter.setting["machine"])
    except (ValueError, OSError):
        stored = None
    if stored is not None and threads in stored.read_bytes:
        known = {dtype: rates[threads] for dtype, rates in stored.gemm_flops.items()}
        facts = [("roof of memory", f"{stored.memory(threads) / 1e9:.1f} GB/s"), *_products(known)]
        return [*facts, ("measured while", stored.busy)] if stored.busy else facts
    products: dict[str, float] = {}
    for cell in chapter.cells:
        for record in cell.passed:
            work, dtype = record.work, record.experiment.dtype
            if work is not None and work.least_seconds and not (record.experiment.store or work.roof_busy):
                products[dtype] = max(products.get(dtype, 0.0), work.useful_flops / work.least_seconds)
    return _products(products)


def _products(by_dtype: dict[str, float]) -> list[tuple[str, str]]:
    return [
        (f"roof of {dtype} products", f"{value / 1e9:,.0f} GFLOP/s")
        for dtype, value in sorted(by_dtype.items())
        if value
    ]


def noise_table(chapter: Chapter) -> Table | None:
    """Makes the table of verdicts on second copies of baselines. The code is the same, so FASTER and SLOWER
    are false alarms."""
    counts: dict[str, int] = {}
    for cell in chapter.cells:
        for record in cell.cell.records:
            if record.implementation.role == "twin" and record.comparison is not None:
                counts[record.comparison.verdict] = counts.get(record.comparison.verdict, 0) + 1
    if not counts:
        return None
    order = ("SAME", *OPEN, "FASTER", "SLOWER")
    rows = tuple((name, f"{counts.get(name, 0):,}") for name in order)
    return Table(
        head=("verdict on a copy of the baseline", "cells"),
        rows=rows,
        note="FASTER and SLOWER here are false alarms.",
    )


def study_table(reached: Pareto) -> Table:
    rows = []
    for one in reached.standings:
        difference = "" if one.rule == reached.baseline else one.difference.said("+")
        interval = f"{one.step_interval[0]:.2f} to {one.step_interval[1]:.2f}"
        rows.append(
            (
                one.title,
                one.loss.said(),
                difference,
                f"{one.at_equal_seconds.mean:.3f}",
                f"{1e3 * one.step_seconds:.0f}",
                "1" if one.rule == reached.baseline else f"{one.step_ratio:.2f}",
                "" if one.rule == reached.baseline else interval,
                f"{one.peak_bytes / 2**20:.0f}",
                "" if one.max_violation is None else f"{one.max_violation:.2f}",
                one.dominated_by.get("seconds", ""),
            )
        )
    head = (
        "rule", "held-out, nats per byte", f"from {reached.baseline}", "at equal seconds", "ms per step",
        "paired ratio", "its interval", "MiB", "max violation", "dominated by",
    )  # fmt: skip
    return Table(head=head, rows=tuple(rows))


def study_answer(reached: Pareto) -> str:
    """Returns sentences such as "Study routers (13 rules, 3 seeds): the lowest held-out loss is that of relu,
    1.775 ±0.041 nats per byte. That is clearly better than softmax_topk."."""
    best = next((one for one in reached.standings if not one.sees_future), None)
    if best is None:
        return f"Study {reached.study}: every rule sees later tokens, so none can write text."
    seeds = f"{len(reached.standings)} rules, {best.seeds} seed{'s' * (best.seeds > 1)}"
    sure = "" if best.difference.clear else "not "
    than = "" if best.rule == reached.baseline else f" That is {sure}clearly better than {reached.baseline}."
    said = f"the lowest held-out loss is that of {best.title}, {best.loss.said()} nats per byte."
    return f"Study {reached.study} ({seeds}): {said}{than}"


def study_notes(study: Study) -> list[str]:
    reached = study.pareto
    if reached is None:
        return [f"{study.source.name}: {study.why}."]
    made: dict[str, Any] = reached.made
    seeds = reached.standings[0].seeds
    changed = ", changed since" if made.get("dirty") else ""
    return [
        f"{reached.question} {reached.tokens:,} bytes, {seeds} seed{'s' if seeds > 1 else ''}; "
        f"{made.get('machine')}, {made.get('threads')} thread, "
        f"commit {str(made.get('commit'))[:10]}{changed}.",
        f"Command: mrb train study {reached.study} --seeds {seeds} --out DIR",
    ]


def failures(cells: Sequence[Cell]) -> Table | None:
    """Makes the table of reasons why an implementation has no time, with the number of cells."""
    counts: dict[tuple[str, str, str], int] = {}
    first: dict[tuple[str, str, str], str] = {}
    for cell in cells:
        for record in cell.records:
            if record.timing is None:
                why = record.correctness.reason
                # the same sentence with other numbers is the same reason; the first one is shown
                key = (cell.names[record.record_id], verdict_of(record), re.sub(r"\d[\d.,]*", "0", why))
                first.setdefault(key, why)
                counts[key] = counts.get(key, 0) + 1
    if not counts:
        return None
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rows = tuple((*key[:2], first[key], f"{count:,}") for key, count in ordered[:200])
    more = f"{len(ordered) - 200:,} more reasons are in the records." if len(ordered) > 200 else ""
    return Table(
        head=("implementation", "status", "why it has no time", "cells"), rows=rows, words=3, note=more
    )
