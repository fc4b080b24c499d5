"""Measures cells of somebody's records on this machine, and says whether the ratios agree.

Nothing of what a record says is run or opened: a cell is built from its sizes and from names of our own
implementations, and refused if it needs a file, too much memory or code that is not the same here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moe_routing_bench.bench.identity import identify
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.bench.spans.span import is_ours, span_named
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.text import one_line
from moe_routing_bench.results.folder import environments, iterate
from moe_routing_bench.results.record import Record, RecordedExperiment
from moe_routing_bench.workloads.axes import axes_of, defaults_of, names_of
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from moe_routing_bench.workloads.workload import file_of

MAX_CELL_BYTES = 4 << 30
MAX_ROUNDS = 1000
MIN_SLACK = 0.02  # between two sittings on the same machine, beside the noise of both


@dataclass(frozen=True, kw_only=True)
class Remeasured:
    """Remeasured(cell="own/16 uniform", what="agrees", sentence="index_add: 1.31 then, 1.29 now")"""

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
        name = one_line(records[0].experiment.case, 100)
        try:
            experiment = _same_here(records, machines[records[0].environment])
        except (ValueError, NotImplementedError) as reason:
            answers.append(Remeasured(cell=name, what="not compared", sentence=one_line(str(reason), 300)))
            continue
        measured += 1
        answers.append(_held_against(run(experiment), records))
    return answers


def measurable(recorded: RecordedExperiment) -> Experiment:
    """The experiment of a record. What an old record does not know has its default; ValueError if that is its
    routing."""
    known = {one.name: getattr(recorded, one.name) for one, _ in axes_of(Experiment)}
    known = {name: value for name, value in known.items() if value is not None}
    if "workload" not in known:
        raise ValueError("its worker died before it was known how tokens were routed")
    known.setdefault("weights", span_named(recorded.span).weights)
    known["implementations"] = tuple(ImplementationRef(**dict(one)) for one in known["implementations"])
    return Experiment(**known)


def experiment_of(records: Sequence[Record]) -> Experiment:
    """What these records of one cell measured, the baseline first."""
    ordered = sorted(records, key=lambda record: record.implementation.role != "baseline")
    asked = [_implementation(r) for r in ordered if r.implementation.role in ("baseline", "candidate")]
    return replace(measurable(records[0].experiment), implementations=tuple(dict.fromkeys(asked)))


def _implementation(record: Record) -> ImplementationRef:
    one = record.implementation
    return ImplementationRef.read(one.spec, layout=one.layout, router=one.router, layer=one.layer)


def _same_here(records: Sequence[Record], machine: str) -> Experiment:
    """The experiment of these records; ValueError if it cannot be measured here as it was there."""
    here = this_machine()
    if machine != here.name:
        raise ValueError(f"it was measured on {one_line(machine, 100)}, and this is {here.name}")
    timed = [record for record in records if record.timing is not None]
    experiment = experiment_of(timed or records)
    if experiment.device != "cpu" or experiment.W > 1:
        raise ValueError("it was measured on another device than the processor, or on several ranks")
    if experiment.checkpoint or (experiment.workload and file_of(experiment.workload) is not None):
        raise ValueError("it reads a recorded trace or a checkpoint, which a bundle does not hold")
    if experiment.held_bytes + experiment.activation_bytes > MAX_CELL_BYTES:
        raise ValueError(f"it needs more than {MAX_CELL_BYTES >> 30} GiB")
    if len(timed) < 2 or len(experiment.implementations) < 2:
        raise ValueError("it has nothing that was compared")
    rounds = min(max(8, records[0].protocol.rounds), MAX_ROUNDS)
    how = {name: getattr(experiment, name) for name in names_of(Experiment, "how", "agree")}
    how = {**defaults_of(Experiment, "how"), **how, "min_rounds": min(20, rounds), "max_rounds": rounds}
    experiment = replace(experiment, **how, include=())
    span = span_named(experiment.span)
    if not all(is_ours(origin) for one in experiment.implementations for origin in span.origins(one.name)):
        raise ValueError("it has an implementation that is not one of ours")
    then = {_implementation(record): record.implementation.source_hash for record in timed}
    sources = identify(experiment, here).sources
    if other := next((one.name for one in experiment.implementations if sources[one] != then[one]), None):
        raise ValueError(f"{one_line(other, 100)} is other code here: its source has another hash")
    return experiment


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
