"""again: measures cells of somebody's records on this machine, and says whether the ratios agree.

Nothing of what a record says is run or opened: a cell is built from its sizes and from names of our own
implementations, and refused if it needs a file, too much memory or code that is not the same here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moe_routing_bench.bench.identity import identify
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.bench.spans.span import is_ours, span_named
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.core.text import one_line
from moe_routing_bench.results.folder import environments, iterate
from moe_routing_bench.results.record import Record
from moe_routing_bench.workloads.axes import axes_of, names_of
from moe_routing_bench.workloads.cases import cases
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from moe_routing_bench.workloads.workload import file_of

MAX_CELL_BYTES = 4 << 30
MAX_ROUNDS = 1000
MIN_SLACK = 0.02  # between two sittings on the same machine, beside the noise of both


@dataclass(frozen=True, kw_only=True)
class Remeasured:
    """Answer(cell="own/16 uniform", what="agrees", sentence="index_add: 1.31 then, 1.29 now")"""

    cell: str
    what: Literal["agrees", "differs", "not compared"]
    sentence: str


def measure_again(
    folder: Path, count: int, *, seed: int | None = None, run: Callable[[Experiment], CellOutcome] = run_cell
) -> list[Remeasured]:
    """A random `count` of the cells that can be measured here alike; the others met, with the reason."""
    by_cell: dict[tuple[str, str], list[Record]] = {}
    for record in iterate(folder):
        by_cell.setdefault((record.session, record.cell_key), []).append(record)
    machines = {key: machine["name"] for key, _, machine in environments(folder)}
    keys = sorted(by_cell)
    random.Random(seed).shuffle(keys)
    answers: list[Remeasured] = []
    measured = 0
    for key in keys:
        if measured >= count:
            break
        records = by_cell[key]
        name = one_line(records[0].workload.case, 100)
        try:
            experiment = experiment_of(records, machines[records[0].environment])
        except (ValueError, NotImplementedError) as reason:
            answers.append(Remeasured(cell=name, what="not compared", sentence=one_line(str(reason), 300)))
            continue
        measured += 1
        answers.append(_held_against(run(experiment), records))
    return answers


def experiment_of(records: Sequence[Record], machine: str) -> Experiment:
    """The cell of these records; ValueError if it cannot be measured here as it was there."""
    here, first = this_machine(), records[0]
    if machine != here.name:
        raise ValueError(f"it was measured on {one_line(machine, 100)}, and this is {here.name}")
    where, spec = first.workload, first.routing.spec if first.routing else ""
    policy = first.protocol
    if policy.device != "cpu" or where.W > 1:
        raise ValueError("it was measured on another device than the processor, or on several ranks")
    if spec and file_of(spec) is not None:
        raise ValueError("its workload is a recorded trace, which a bundle does not hold")
    case = _case(first)
    if case.held_bytes + case.activation_bytes > MAX_CELL_BYTES:
        raise ValueError(f"it needs more than {MAX_CELL_BYTES >> 30} GiB")
    asked = [
        r for r in records if r.implementation.role in ("baseline", "candidate") and r.timing is not None
    ]
    asked_for = {_implementation(r): r.implementation.source_hash for r in _baseline_first(asked)}
    if len(asked_for) < 2:
        raise ValueError("it has nothing that was compared")
    rounds = min(max(8, policy.rounds), MAX_ROUNDS)
    experiment = replace(
        case,
        workload=spec,
        implementations=tuple(asked_for),
        seed=policy.seed,
        **{name: getattr(policy, name) for name in names_of(Experiment, "how", "agree")},
        min_rounds=min(20, rounds),
        max_rounds=rounds,
    )
    span = span_named(experiment.span)
    if not all(is_ours(origin) for one in experiment.implementations for origin in span.origins(one.name)):
        raise ValueError("it has an implementation that is not one of ours")
    sources = identify(experiment, here).sources
    if other := next((one.name for one, source in asked_for.items() if sources[one] != source), None):
        raise ValueError(f"{one_line(other, 100)} is other code here: its source has another hash")
    return experiment


def _case(record: Record) -> Experiment:
    where = record.workload
    sizes = MoEShape(T=where.T, D=where.D, F=where.F, E=where.E, K=where.K)
    try:
        named = cases(where.case)
    except ValueError:
        named = []
    for case in named:
        like = (case.shape, case.dtype, case.store, case.span)
        if like == (sizes, where.dtype, where.store, record.what.span):
            return case
    return Experiment(
        case=where.case,
        span=record.what.span,
        **vars(sizes),
        direction=record.what.direction,
        **{
            one.name: value
            for one, _ in axes_of(Experiment, "what")
            if (value := getattr(where, one.name)) is not None
        },
    )


def _implementation(record: Record) -> ImplementationRef:
    what = record.what
    setting = {"layout": what.layout, "router": what.router, "layer": what.layer}
    return ImplementationRef.read(record.implementation.spec, **setting)


def _baseline_first(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.implementation.role != "baseline")


def _held_against(now: CellOutcome, records: Sequence[Record]) -> Remeasured:
    """Ratios agree if their intervals meet once each is widened by the noise of both sittings."""
    then = {
        _implementation(r): r.comparison
        for r in records
        if r.comparison and r.implementation.role == "candidate"
    }
    sentences, differs = [], False
    for one in now.subjects:
        old, new = then.get(one.subject), one.comparison
        if old is None or new is None:
            continue
        slack = 1 + MIN_SLACK + old.aa_floor + (now.aa_floor or 0.0)
        meet = old.low <= new.interval[1] * slack and new.interval[0] <= old.high * slack
        differs |= not meet
        sentences.append(f"{one.subject.name}: {old.ratio:.3f} then, {new.ratio:.3f} now")
    if not sentences:
        return Remeasured(
            cell=now.experiment.title, what="not compared", sentence="nothing passed both times"
        )
    what: Literal["agrees", "differs"] = "differs" if differs else "agrees"
    return Remeasured(cell=now.experiment.title, what=what, sentence=one_line("; ".join(sentences), 500))
