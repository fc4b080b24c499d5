"""Tables of outcomes: one cell with its failures, the fastest first, or many cells in one ranking."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, get_args

from rich.console import RenderableType
from rich.text import Text

from moe_routing_bench.bench.outcome import CellOutcome, Direction, ImplementationOutcome
from moe_routing_bench.bench.repro import repro_command
from moe_routing_bench.bench.roofs import Roofs, percent_of_roof
from moe_routing_bench.bench.spans.span import all_threads, span_named
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.verdict import OPEN
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.names import short_label, slots_of
from moe_routing_bench.report.ceiling import ceilings
from moe_routing_bench.report.console import Cells, fitted, heading, show, two_columns
from moe_routing_bench.workloads.axes import values_of
from moe_routing_bench.workloads.experiment import Experiment, device_kind

STYLES = {"FASTER": "green", "SLOWER": "red", "SAME": "cyan"} | dict.fromkeys(OPEN, "yellow")
PLAIN_LAYER = "moe"
# values that may differ between the rows of a ranking
FACTS: dict[str, Callable[[CellOutcome, ImplementationOutcome], str]] = {
    "span": lambda outcome, one: outcome.experiment.span,
    "direction": lambda outcome, one: outcome.direction,
    "router": lambda outcome, one: _router(outcome.experiment, one.implementation.router),
    "layer": lambda outcome, one: (
        one.implementation.layer or (PLAIN_LAYER if span_named(outcome.experiment.span).routed else "")
    ),
    "layout": lambda outcome, one: one.implementation.layout,
    "implementation": lambda outcome, one: short_label(one.label),
    "T": lambda outcome, one: str(outcome.experiment.T),
    "D": lambda outcome, one: str(outcome.experiment.D),
    "F": lambda outcome, one: str(outcome.experiment.F),
    "E": lambda outcome, one: str(outcome.experiment.E),
    "K": lambda outcome, one: str(outcome.experiment.K),
    "dtype": lambda outcome, one: outcome.experiment.dtype,
    "weights": lambda outcome, one: _stored(outcome),
    "workload": lambda outcome, one: outcome.experiment.workload,
}


def show_outcome(outcome: CellOutcome, *, repro: bool = False, roofs: Roofs | None = None) -> None:
    experiment = outcome.experiment
    span = experiment.span if outcome.direction == "forward" else f"{experiment.span} {outcome.direction}"
    sizes, *more = span_named(experiment.span).sizes(experiment)
    words = (span, sizes, experiment.dtype, _stored(outcome), *more)
    show("", heading(experiment.case, ", ".join(filter(None, words))))
    ranked = sorted((o for o in outcome.implementations if o.samples), key=_ratio)
    if ranked:
        show(*_ranking(outcome, ranked))
        for table in _loads(outcome, ranked), _stages(outcome, ranked):
            if table:
                show("", *table)
        for one in ranked:
            show(*(f"{_name(one, outcome)}: {limit}." for limit in ceilings(one.stages)))
    _show_not_timed(outcome)
    show("", *(Text(note, "dim") for note in _notes(outcome, ranked, roofs)))
    if repro:
        for one in ranked:
            show(Text(f"{_name(one, outcome)}: {repro_command(experiment, one.implementation)}", "dim"))


def _router(case: Experiment, name: str) -> str:
    """Returns the router, with the work of Soft-MoE: its time alone would make it look faster."""
    s = case.shape
    slots = slots_of(name, T=s.T, E=s.E, K=s.K, sequences=case.sequences)
    return f"{name}: {slots}" if slots else name


def _stored(outcome: CellOutcome) -> str:
    """Returns "weights stored as int8", or "" if they are not stored in a format."""
    return f"weights stored as {store}" if (store := outcome.experiment.store) else ""


def _show_not_timed(outcome: CellOutcome) -> None:
    """Shows a line for each reason, with the names of the implementations."""
    names: dict[tuple[Status, str], list[str]] = {}
    for one in outcome.implementations:
        if not one.samples:
            # a reason may begin with the name: "topk.triton_select: needs triton"
            reason = re.sub(rf"^\w+\.{re.escape(one.implementation.name)}: ", "", one.reason)
            names.setdefault((one.status, reason), []).append(_name(one, outcome))
    if not names:
        return
    show("", "Not timed")
    table = two_columns()
    for (status, reason), those in names.items():
        style = "yellow" if status is Status.UNSUPPORTED else "red"
        table.add_row(Text(f"  {status}", style), f"{', '.join(those)}: {reason}")
    show(table)


def show_summary(outcomes: Sequence[CellOutcome]) -> None:
    """Shows one ranking of several cells, with the most tokens per second first in each span and direction.
    Values that all rows share are shown above the table."""
    rows = [(outcome, one) for outcome in outcomes for one in outcome.implementations if one.samples]
    if not rows:
        show("", "Nothing was timed in any of the cells.")
        return
    order = get_args(Direction)
    rows.sort(key=lambda row: (row[0].experiment.span, order.index(row[0].direction), -_tokens(*row)))
    columns = {name: [fact(*row) for row in rows] for name, fact in FACTS.items()}
    varying = {name: values for name, values in columns.items() if len(set(values)) > 1}
    if len(set(zip(*varying.values(), strict=True))) < len(rows):
        varying["case"] = [outcome.experiment.case for outcome, _ in rows]
    same = [
        f"{name}={values[0]}" if len(name) == 1 else values[0]
        for name, values in columns.items()
        if name not in varying and values[0]
    ]
    show("", heading(f"{len(outcomes)} cells", ", ".join(same)))
    words = {name: values for name, values in varying.items() if len(name) > 1}
    numbers: dict[str, Cells] = {name: values for name, values in varying.items() if len(name) == 1}
    ratios, intervals, verdicts = zip(*(_compared(one) for _, one in rows), strict=True)
    numbers |= {
        "ms": [_ms(one) for _, one in rows],
        "tokens/s": [per_second(_tokens(*row)) for row in rows],
        "ratio": ratios,
        "99 % interval": intervals,
        "verdict": verdicts,
    }
    show(*fitted(words, numbers), "")
    show(Text("Each ratio compares with the baseline of the same cell, timed in the same rounds.", "dim"))


def per_second(rate: float) -> str:
    """Writes a rate with three digits, because times are not more precise: 12.3 k, 4.56 M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= 0.9995 * size:
            return f"{_digits(rate / size)} {letter}"
    return _digits(rate)


def _digits(value: float) -> str:
    if value < 0.9995:
        return f"{value:#.2g}"
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def _ms(one: ImplementationOutcome) -> str:
    return f"{1e3 * median(one.samples):.3f}"


def _tokens(outcome: CellOutcome, one: ImplementationOutcome) -> float:
    return outcome.rates(one).tokens_per_second or 0.0


def _ratio(one: ImplementationOutcome) -> float:
    return 1.0 if one.comparison is None else one.comparison.ratio


def _compared(one: ImplementationOutcome) -> tuple[str, str, Text]:
    """Returns ratio, interval and verdict."""
    if (compared := one.comparison) is None:
        return "1", "", Text("baseline", "bold")
    (low, high), verdict = compared.interval, compared.verdict
    return f"{compared.ratio:.3f}", f"{low:.3f} to {high:.3f}", Text(verdict, STYLES[verdict])


def _ranking(outcome: CellOutcome, ranked: list[ImplementationOutcome]) -> list[RenderableType]:
    ratios, intervals, verdicts = zip(*map(_compared, ranked), strict=True)
    numbers: dict[str, Cells] = {
        "ms": [_ms(one) for one in ranked],
        **_errors(outcome, ranked),
        **_rates(outcome, ranked),
        **_beside(outcome, ranked),
        "ratio": ratios,
        "99 % interval": intervals,
        "verdict": verdicts,
    }
    if any(one.roof_seconds for one in ranked):
        numbers["of roof"] = [_share(one) for one in ranked]
    numbers["peak MiB"] = [
        f"{one.peak_rss_bytes / 2**20:,.0f}" if one.peak_rss_bytes else "" for one in ranked
    ]
    once = [one for one in outcome.implementations if one.trial_ms]
    below: dict[str, Cells] = {
        "ms": [one.trial_ms for one in once],
        "verdict": [Text(one.status, "red") for one in once],
    }
    numbers = {head: [*cells, *below.get(head, [""] * len(once))] for head, cells in numbers.items()}
    names = [_name(one, outcome) for one in [*ranked, *once]]
    return fitted({"implementation": names}, numbers, spare=("peak MiB", "GB/s", "of roof"))


def _beside(outcome: CellOutcome, ranked: list[ImplementationOutcome]) -> dict[str, list[str]]:
    """Returns the baseline's times for code from outside. Such code and its copy of the baseline are timed in
    another process, so the row shows both times of its ratio."""
    pairs = [outcome.against(one) for one in ranked]
    if not any(pair is not None and pair.role == "beside" for pair in pairs):
        return {}
    return {"baseline's ms": ["" if pair is None else _ms(pair) for pair in pairs]}


def _errors(outcome: CellOutcome, ranked: list[ImplementationOutcome]) -> dict[str, list[str]]:
    """Returns the column of errors: with stored weights implementations differ in accuracy."""
    errors = ["" if one.error is None else f"{one.error:.2g}" for one in ranked]
    return {"error": errors} if outcome.experiment.store else {}


def _share(one: ImplementationOutcome) -> str:
    return "" if one.share_of_roof is None else percent_of_roof(one.share_of_roof, one.roof_busy)


def _rates(outcome: CellOutcome, ranked: list[ImplementationOutcome]) -> dict[str, list[str]]:
    """Returns the columns of rates: bytes by both conventions if the span packs, operations if it has weights
    or more of them than bytes."""
    rates = [outcome.rates(one) for one in ranked]
    fields = {"tokens/s": "tokens_per_second"}
    if rates[0].bw_2pass is not None:
        fields |= {"bw_2pass\nGB/s": "bw_2pass", "bw_strict\nGB/s": "bw_strict"}
    elif rates[0].bytes_per_second is not None:
        fields["GB/s"] = "bytes_per_second"
    if (cost := ranked[0].cost).weight_bytes or cost.useful_flops > cost.activation_bytes:
        fields["TFLOP/s"] = "flops_per_second"
    units = {"tokens/s": 1.0, "TFLOP/s": 1e12}
    columns = {}
    for head, field in fields.items():
        values = [(getattr(rate, field) or 0.0) / units.get(head, 1e9) for rate in rates]
        columns[head] = [per_second(value) if head == "tokens/s" else _digits(value) for value in values]
    return columns


def _loads(outcome: CellOutcome, ranked: list[ImplementationOutcome]) -> list[RenderableType]:
    """Shows what each layout and router pads and drops. Empty if there is only one and it does neither."""
    names = [name for name in ("router", "layer", "layout") if name == "layout" or _varies(name, outcome)]
    facts = {tuple(FACTS[name](outcome, one) for name in names): one.load for one in ranked}
    if len(facts) == 1 and not any(
        load.get("padded_rows") or load.get("dropped_pairs") for load in facts.values()
    ):
        return []
    known = {values: load for values, load in facts.items() if load.get("tile_efficiency") is not None}
    if not known:
        return []
    words = dict(zip(names, zip(*known, strict=True), strict=True))
    wasted = [1 - float(load["tile_efficiency"] or 0) for load in known.values()]
    numbers = {
        "padding waste": [f"{100 * share:.1f} %" for share in wasted],
        "dropped pairs": [f"{load['dropped_pairs']:,}" for load in known.values()],
        "max / mean load": [f"{load['max_over_mean']:.2f}" for load in known.values()],
    }
    return fitted(words, numbers)


def _stages(outcome: CellOutcome, ranked: list[ImplementationOutcome]) -> list[RenderableType]:
    """Shows each stage as a share of the sum of stages, and this sum divided by the time of the whole
    call."""
    ranked = [one for one in ranked if one.stages]
    names = list(dict.fromkeys(name for one in ranked for name in one.stages))
    if not names:
        return []
    totals = [sum(one.stages.values()) for one in ranked]
    numbers = {
        name: [
            f"{100 * one.stages[name] / total:.1f} %" if name in one.stages else ""
            for one, total in zip(ranked, totals, strict=True)
        ]
        for name in names
    }
    numbers["sum / whole"] = [
        f"{total / median(one.samples):.2f}" for one, total in zip(ranked, totals, strict=True)
    ]
    return fitted({"time share of stages": [_name(one, outcome) for one in ranked]}, numbers)


PLACES = {
    "cpu": "{}",
    "cuda": "a GPU",
    "pretend": "a pretended GPU (it runs on the CPU, so these times say nothing about a GPU)",
}


def _notes(outcome: CellOutcome, ranked: list[ImplementationOutcome], roofs: Roofs | None) -> list[str]:
    experiment = outcome.experiment
    notes = list(outcome.notes)
    wanting = {_name(o, outcome): o.comparison.more_rounds for o in ranked if o.comparison is not None}
    if more := ", ".join(f"{rounds} for {name}" for name, rounds in wanting.items() if rounds):
        notes.append(f"More rounds needed for a verdict, about: {more}.")
    if outcome.aa_floor is not None:
        checked = sum(one.checked_timed_calls for one in outcome.implementations)
        number = all_threads(outcome.experiment)
        threads = "1 thread" if number == 1 else f"{number} threads"
        place = PLACES[device_kind(experiment.device)].format(threads)
        notes.append(
            f"{outcome.rounds} interleaved rounds on {place}, {experiment.cache} caches "
            f"({outcome.stop_reason}); noise: two copies of the baseline differed by "
            f"{100 * outcome.aa_floor:.1f} %; {checked} timed results checked; {outcome.seconds:.0f} s."
        )
    if outcome.weather is not None:
        complaints = outcome.weather.complaints(this_machine().cores, all_threads(outcome.experiment))
        notes += [f"Noise: {complaint}." for complaint in complaints]
    if roofs is None:
        notes.append(
            "Run `mrb doctor` once while the machine is idle: it measures the machine's roofs, and then "
            "times are shown as shares of them."
        )
    elif roofs.busy:
        notes.append(
            f"Shares of roofs (~) are too high: when the roofs were measured, {roofs.busy}. They are "
            "measured again when the machine is idle."
        )
    return notes


def _name(one: ImplementationOutcome, outcome: CellOutcome) -> str:
    """Returns the label with the layout, router and layer if they differ in the cell: staged @ compact,
    switch."""
    names = [name for name in ("layout", "router", "layer") if _varies(name, outcome)]
    facts = {name: FACTS[name](outcome, one) for name in names}
    place = f" @ {facts.pop('layout')}" if "layout" in facts else ""
    return ", ".join([f"{short_label(one.label)}{place}", *facts.values()])


def _varies(fact: str, outcome: CellOutcome) -> bool:
    return len({FACTS[fact](outcome, one) for one in outcome.implementations}) > 1


def outcome_document(outcome: CellOutcome) -> dict[str, Any]:
    experiment = outcome.experiment
    return {
        "case": experiment.case,
        "scaled_from": experiment.scaled_from,
        "span": experiment.span,
        "direction": outcome.direction,
        "shape": vars(experiment.shape),
        "dtype": experiment.dtype,
        "store": experiment.store,
        "workload": experiment.workload,
        "seed": experiment.seed,
        "cell_key": outcome.identity.key,
        "policy": values_of(experiment, "how"),
        "rounds": outcome.rounds,
        "stop_reason": outcome.stop_reason,
        "aa_floor": outcome.aa_floor,
        "seconds": outcome.seconds,
        "weather": None if outcome.weather is None else outcome.weather.to_dict(),
        "notes": outcome.notes,
        "implementations": [_implementation_document(one, outcome) for one in outcome.outcomes],
    }


def _implementation_document(one: ImplementationOutcome, outcome: CellOutcome) -> dict[str, Any]:
    return {
        "implementation": one.label,
        "runs": one.runs or one.label,
        "spec": one.implementation.text,
        "layout": one.implementation.layout,
        "router": one.implementation.router,
        "layer": one.implementation.layer,
        "role": one.role,
        "status": one.status,
        "reason": one.reason,
        "median_seconds": median(one.samples) if one.samples else None,
        **vars(outcome.rates(one)),
        "comparison": None if one.comparison is None else vars(one.comparison),
        "baseline_seconds": None if (pair := outcome.against(one)) is None else median(pair.samples),
        "calls_per_sample": one.calls_per_sample,
        "samples": one.samples,
        "stages": dict(one.stages),
        "load": dict(one.load),
        "cost": vars(one.cost),
        "floor_seconds": one.floor_seconds,
        "roof_seconds": one.roof_seconds,
        "roof_busy": one.roof_busy,
        "share_of_roof": one.share_of_roof,
        "peak_rss_bytes": one.peak_rss_bytes,
        "max_error": one.max_error,
        "max_bound": one.max_bound,
        "error": one.error,
        "checked_timed_calls": one.checked_timed_calls,
        "repro": repro_command(outcome.experiment, one.implementation),
    }
