"""The outcome of a cell as people read it: best first, ratio, interval, verdict, and what did not run."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from moe_routing_bench.bench.outcome import CellOutcome, SubjectOutcome
from moe_routing_bench.bench.repro import repro_command
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.bench.status import Status
from moe_routing_bench.cli.terminal import heading, show, two_columns
from moe_routing_bench.machine import this_machine

STYLES = {"FASTER": "green", "SLOWER": "red", "SAME": "cyan", "UNDECIDED": "yellow"}


def show_outcome(outcome: CellOutcome, *, repro: bool = False, roofs: Roofs | None = None) -> None:
    cell, s = outcome.cell, outcome.cell.case.shape
    show(
        "",
        heading(
            cell.case.name,
            f"{cell.case.span}, T={s.T} D={s.D} F={s.F} E={s.E} K={s.K}, {cell.case.dtype}, {cell.workload}",
        ),
    )
    ranked = sorted((o for o in outcome.subjects if o.samples), key=_order(outcome))
    if ranked:
        show(_ranking(outcome, ranked))
        for table in _layouts(ranked), _stages(ranked):
            if table is not None:
                show("", table)
    rest = [o for o in outcome.subjects if not o.samples]
    if rest:
        show("", "Not timed")
        absent = two_columns(20)
        for one in rest:
            style = "yellow" if one.status is Status.UNSUPPORTED else "red"
            absent.add_row(f"  {_name(one, outcome)}", Text.assemble((one.status, style), f"  {one.reason}"))
        show(absent)
    show("", *(Text(note, "dim") for note in _notes(outcome, roofs)))
    if repro:
        for one in ranked:
            show(Text(f"{_name(one, outcome)}: {repro_command(cell, one.subject)}", "dim"))


def _order(outcome: CellOutcome) -> Any:
    def ratio(one: SubjectOutcome) -> float:
        return 1.0 if one.comparison is None else one.comparison.ratio

    return ratio


def _ranking(outcome: CellOutcome, ranked: list[SubjectOutcome]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("implementation", overflow="fold")
    for name in ("ms", "ratio", "99 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    shares = any(one.floor_seconds for one in ranked)
    if shares:
        table.add_column("of roof", justify="right", no_wrap=True)
    table.add_column("peak MiB", justify="right", no_wrap=True)
    for one in ranked:
        found = one.comparison
        cells: list[Any] = [_name(one, outcome), f"{1e3 * median(one.samples):.3f}"]
        if found is None:
            cells += ["1", "", Text("baseline", "bold")]
        else:
            low, high = found.interval
            cells += [f"{found.ratio:.3f}", f"{low:.3f} to {high:.3f}"]
            more = f" ({found.more_rounds} more rounds)" if found.more_rounds else ""
            cells.append(Text(f"{found.verdict}{more}", STYLES[found.verdict]))
        if shares:
            floor = one.floor_seconds
            cells.append(f"{100 * min(1.0, floor / median(one.samples)):.0f} %" if floor else "")
        cells.append(f"{one.peak_rss_bytes / 2**20:,.0f}" if one.peak_rss_bytes else "")
        table.add_row(*cells)
    return table


def _layouts(ranked: list[SubjectOutcome]) -> Table | None:
    """What each layout pads and drops, if there are several or one that does."""
    facts = {one.subject.layout: one.load for one in ranked}
    if len(facts) == 1 and not any(
        load.get("padded_rows") or load.get("dropped_pairs") for load in facts.values()
    ):
        return None
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("layout")
    for name in ("padding waste", "dropped pairs", "max / mean load"):
        table.add_column(name, justify="right")
    for layout, load in facts.items():
        if load.get("tile_efficiency") is None:
            continue
        table.add_row(
            layout,
            f"{100 * (1 - float(load['tile_efficiency'] or 0)):.1f} %",
            f"{load['dropped_pairs']:,}",
            f"{load['max_over_mean']:.2f}",
        )
    return table


def _stages(ranked: list[SubjectOutcome]) -> Table | None:
    """The share of each stage of their sum, and how the sum compares with the whole."""
    names = list(dict.fromkeys(name for one in ranked for name in one.stages))
    if not names:
        return None
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("time share of stages", overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("sum / whole", justify="right", no_wrap=True)
    for one in ranked:
        total = sum(one.stages.values())
        shares = [f"{100 * one.stages[n] / total:.1f} %" if n in one.stages else "" for n in names]
        name = f"{short_label(one.label)} @ {one.subject.layout}"
        table.add_row(name, *shares, f"{total / median(one.samples):.2f}")
    return table


PLACES = {
    "cpu": "{}",
    "cuda": "a GPU, between CUDA events",
    "pretend": "a pretended GPU (the CPU; no GPU was there, so these times say nothing about one)",
}


def _notes(outcome: CellOutcome, roofs: Roofs | None) -> list[str]:
    policy = outcome.cell.policy
    notes = list(outcome.notes)
    if outcome.aa_floor is not None:
        checked = sum(one.checked_timed_calls for one in outcome.subjects)
        threads = "1 thread" if policy.threads == 1 else f"{policy.threads} threads"
        place = PLACES[policy.device].format(threads)
        notes.append(
            f"{outcome.rounds} interleaved rounds on {place}, {policy.cache} caches "
            f"({outcome.stop_reason}); the baseline's own twin is {100 * outcome.aa_floor:.1f} % away; "
            f"{checked} timed results judged; {outcome.seconds:.0f} s in all."
        )
    if outcome.weather is not None:
        notes += [
            f"Weather: {told}." for told in outcome.weather.complaints(this_machine().cores, policy.threads)
        ]
    if roofs is None:
        notes.append("`mrb doctor` measures this machine's roofs; times are then also shares of them.")
    return notes


def _name(one: SubjectOutcome, outcome: CellOutcome) -> str:
    several = len({o.subject.layout for o in outcome.subjects}) > 1
    return f"{short_label(one.label)} @ {one.subject.layout}" if several else short_label(one.label)


def short_label(label: str) -> str:
    """Without the parts that are defaults: staged(combine=gather_sum,...) is plain staged."""
    for default in ("combine=gather_sum", "dispatch=index_select", "grouped_gemm=expert_loop"):
        label = label.replace(f"{default},", "").replace(f",{default}", "").replace(f"({default})", "")
    return label


def outcome_document(outcome: CellOutcome) -> dict[str, Any]:
    cell = outcome.cell
    return {
        "case": cell.case.name,
        "scaled_from": cell.case.scaled_from,
        "span": cell.case.span,
        "shape": vars(cell.case.shape),
        "dtype": cell.case.dtype,
        "workload": cell.workload,
        "seed": cell.seed,
        "cell_key": outcome.key,
        "policy": vars(cell.policy),
        "rounds": outcome.rounds,
        "stop_reason": outcome.stop_reason,
        "aa_floor": outcome.aa_floor,
        "seconds": outcome.seconds,
        "weather": None if outcome.weather is None else outcome.weather.to_dict(),
        "notes": outcome.notes,
        "implementations": [_subject_document(one, outcome) for one in outcome.outcomes],
    }


def _subject_document(one: SubjectOutcome, outcome: CellOutcome) -> dict[str, Any]:
    return {
        "implementation": one.label,
        "spec": one.subject.spec,
        "layout": one.subject.layout,
        "role": one.role,
        "status": one.status,
        "reason": one.reason,
        "median_seconds": median(one.samples) if one.samples else None,
        "comparison": None if one.comparison is None else vars(one.comparison),
        "calls_per_sample": one.calls_per_sample,
        "samples": one.samples,
        "stages": dict(one.stages),
        "load": dict(one.load),
        "cost": vars(one.cost),
        "floor_seconds": one.floor_seconds,
        "peak_rss_bytes": one.peak_rss_bytes,
        "max_error": one.max_error,
        "max_bound": one.max_bound,
        "checked_timed_calls": one.checked_timed_calls,
        "repro": repro_command(outcome.cell, one.subject),
    }
