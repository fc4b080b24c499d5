"""Measures cells of somebody's records again on this machine, and says whether the ratios agree.

It runs no command and opens no file that a record names. It builds a cell from its sizes and the names of our
own implementations. It refuses a cell that needs a file, too much memory, or code that differs here.
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
from moe_routing_bench.results.read import measurable
from moe_routing_bench.results.record import Record
from moe_routing_bench.workloads.axes import defaults_of, names_of
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from moe_routing_bench.workloads.workload import file_of

MAX_CELL_BYTES = 4 << 30
MAX_ROUNDS = 1000
MIN_SLACK = 0.02  # between two runs on the same machine, in addition to the noise of both


@dataclass(frozen=True, kw_only=True)
class Remeasured:
    """The answer for one cell:
    Remeasured(cell="own/16 uniform", what="agrees", sentence="index_add: 1.31 then, 1.29 now")"""

    cell: str
    what: Literal["agrees", "differs", "not compared"]
    sentence: str


def measure_again(
    folder: Path, count: int, *, seed: int | None = None, run: Callable[[Experiment], CellOutcome] = run_cell
) -> list[Remeasured]:
    """Measures `count` random cells again. It also returns the cells that it refused, with the reason."""
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


def experiment_of(records: Sequence[Record]) -> Experiment:
    """Returns the experiment that these records of one cell measured, the baseline first."""
    ordered = sorted(records, key=lambda record: record.implementation.role != "baseline")
    asked = [_implementation(r) for r in ordered if r.implementation.role in ("baseline", "candidate")]
    return replace(measurable(records[0].experiment), implementations=tuple(dict.fromkeys(asked)))


def _implementation(record: Record) -> ImplementationRef:
    one = record.implementation
    return ImplementationRef.read(one.spec, layout=one.layout, router=one.router, layer=one.layer)


def _same_here(records: Sequence[Record], machine: str) -> Experiment:
    """Returns the experiment of these records. A ValueError says why it cannot be measured in the same way
    here."""
    here = this_machine()
    if machine != here.name:
        raise ValueError(f"it was measured on {one_line(machine, 100)}, and this is {here.name}")
    timed = [record for record in records if record.timing is not None]
    experiment = experiment_of(timed or records)
    if experiment.device != "cpu" or experiment.W > 1:
        raise ValueError("it was measured on another device than the CPU, or on several ranks")
    if experiment.checkpoint or (experiment.workload and file_of(experiment.workload) is not None):
        raise ValueError("it reads a recorded trace or a checkpoint, and a bundle does not contain these")
    if experiment.held_bytes + experiment.activation_bytes > MAX_CELL_BYTES:
        raise ValueError(f"it needs more than {MAX_CELL_BYTES >> 30} GiB")
    if len(timed) < 2 or len(experiment.implementations) < 2:
        raise ValueError("it compares fewer than two implementations")
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
        raise ValueError(f"{one_line(other, 100)} is different code here: its source has another hash")
    return experiment


def _held_against(now: CellOutcome, records: Sequence[Record]) -> Remeasured:
    """Ratios agree if their intervals overlap after each was widened by the noise of both runs."""
    then = {
        _implementation(r): r.comparison
        for r in records
        if r.comparison and r.implementation.role == "candidate"
    }
    sentences, differs = [], False
    for one in now.implementations:
        old, new = then.get(one.implementation), one.comparison
        if old is None or new is None:
            continue
        slack = 1 + MIN_SLACK + old.aa_floor + (now.aa_floor or 0.0)
        meet = old.low <= new.interval[1] * slack and new.interval[0] <= old.high * slack
        differs |= not meet
        sentences.append(f"{one.implementation.name}: {old.ratio:.3f} then, {new.ratio:.3f} now")
    if not sentences:
        return Remeasured(
            cell=now.experiment.title, what="not compared", sentence="nothing passed both times"
        )
    what: Literal["agrees", "differs"] = "differs" if differs else "agrees"
    return Remeasured(cell=now.experiment.title, what=what, sentence=one_line("; ".join(sentences), 500))
