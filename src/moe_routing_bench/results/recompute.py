"""Derives again what the records of a bundle say: from samples, from the experiment, from the other records
of the cell. What follows from none of them its author claims.

read.py holds times against samples whenever records are read. Here the statistics of a whole cell are
computed again, with the same function that the runner uses: about 3 ms a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.bench.floor import too_fast
from moe_routing_bench.bench.hosts.children import HELD, HELD_BEFORE
from moe_routing_bench.bench.measure import WARM_SAMPLES
from moe_routing_bench.bench.spans.span import all_threads, is_ours, ranked, span_named
from moe_routing_bench.bench.verdict import TARGET, Paired, compare_cell
from moe_routing_bench.core.machine import Machine
from moe_routing_bench.core.published import MODELS
from moe_routing_bench.core.text import one_line
from moe_routing_bench.results.folder import environments, iterate, samples_of
from moe_routing_bench.results.read import command_of, measurable
from moe_routing_bench.results.record import ComparisonFacts, Record
from moe_routing_bench.workloads.axes import axes_of
from moe_routing_bench.workloads.experiment import Experiment

# parts of a record, or fields, that follow from nothing else in a bundle
CLAIMED = {
    "record_id": "a name",
    "cell_key": "a hash of files that are not in the bundle",
    "suite": "a name",
    "suite_version": "of code that is not in the bundle",
    "created_at": "a clock",
    "harness_version": "of code that is not in the bundle",
    "harness_hash": "of code that is not in the bundle",
    "included": "what the span held in that version",
    "excluded": "what the span held in that version",
    "experiment": "what was asked for; the same in all records of a cell",
    "routing": "the routing itself is not in the bundle",
    "implementation": "which code ran is not in the bundle; its name must be that of the experiment",
    "protocol.calls_per_sample": "samples are seconds per call",
    "protocol.stop_reason": "a clock",
    "protocol.fresh_inputs": "inputs are not in the bundle",
    "protocol.held": "what a process was held by leaves no trace",
    "timing.first_call": "it is no sample",
    "timing.stages": "samples of stages are not kept",
    "timing.clock": "a name",
    "timing.launch": "samples of launches are not kept",
    "work.useful_flops": "counted from the routing",
    "work.executed_flops": "counted from the routing",
    "work.weight_bytes": "counted from the routing",
    "work.activation_bytes": "counted from the routing",
    "work.floor_seconds": "from the roofs of a machine",
    "work.roof_seconds": "from the roofs of a machine",
    "work.roof_busy": "from the roofs of a machine",
    "work.wire_bytes": "counted from the routing",
    "work.least_wire_bytes": "counted from the routing",
    "correctness": "results are not in the bundle; an error must be within its bound",
    "peak_rss_bytes": "of a process that ended",
    "weather": "of a moment that is over",
    "engine": "a name",
    "cell_seconds": "a clock",
    "log_tail": "words of the code that ran",
}
# the same in all records of a cell
OF_THE_CELL = (
    "suite", "suite_version", "harness_version", "harness_hash", "model", "included", "excluded", "weather",
    "engine", "cell_seconds", "environment",
)  # fmt: skip
CLOSE = 1e-6
Floats = NDArray[np.float64]


def check_cells(folder: Path) -> None:
    """ValueError, in a sentence, if a record says something else than what follows from the others."""
    for name, _, machine in environments(folder):
        if sentence := _machine(machine):
            raise ValueError(f"the description {name[:12]} of a machine: {sentence}")
    for _, cell in groupby(iterate(folder), lambda one: (one.session, one.cell_key, one.created_at)):
        records = list(cell)
        for record, sentence in _whats_wrong(folder, records):
            raise ValueError(f"{record.record_id}: {one_line(sentence, 600)}")


def _machine(machine: Mapping[str, Any]) -> str:
    """Compares the name of the machine with its facts, of which it has a hash."""
    known: dict[str, Any] = {field.name: machine.get(field.name) for field in fields(Machine)}
    lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    derived = Machine(**{**known, **lists}).name if isinstance(known["cpu"], str) else ""
    stated = machine["name"]
    return "" if stated == derived else f"it is called {stated}, and its facts say {derived or 'nothing'}"


def _whats_wrong(folder: Path, records: Sequence[Record]) -> Iterator[tuple[Record, str]]:
    """(record, what is wrong with it) of one cell."""
    first, seconds = records[0], {}
    for record in records:
        if record.timing is not None:
            seconds[record.record_id] = samples_of(folder, record)
        other = next((name for name in OF_THE_CELL if getattr(record, name) != getattr(first, name)), None)
        if other or _asked(record) != _asked(first):
            yield record, f"its {other or 'experiment'} is another than that of its cell's first record"
        yield from ((record, sentence) for sentence in _alone(record))
    timed = [record for record in records if record.timing is not None]
    baselines, twins = ([r for r in timed if r.implementation.role == role] for role in ("baseline", "twin"))
    if timed and (len(baselines), len(twins)) != (1, 1):
        yield timed[0], "its cell has not one baseline with one twin, which say how large the noise was"
        return
    rounds = len(seconds[twins[0].record_id]) if timed else 0
    for record in records:
        if record.protocol.rounds != rounds:
            yield record, f"it says {record.protocol.rounds} rounds where its cell has {rounds} samples"
    if timed:
        yield from _compared(timed, baselines[0], twins[0], seconds)
        yield from _too_fast(timed)


def _asked(record: Record) -> tuple[Any, Any]:
    """The experiment but for its own implementation."""
    known = {one.name: getattr(record.experiment, one.name) for one, _ in axes_of(Experiment)}
    baseline, *_ = known.pop("implementations") or (None,)
    return known, baseline


def _alone(record: Record) -> Iterator[str]:
    """Checks what follows from the record's own experiment and times."""
    experiment, timing, protocol = record.experiment, record.timing, record.protocol
    group = experiment.case.partition("/")[0]
    if record.model != (group if group in MODELS else ""):
        yield f"its model {record.model!r} is not that of its case {experiment.case}"
    if protocol.warmup_calls != WARM_SAMPLES * protocol.calls_per_sample:
        yield f"it says {protocol.warmup_calls} calls to warm up, and it makes {WARM_SAMPLES} samples of them"
    error, bound = record.correctness.max_error, record.correctness.max_bound
    if timing is not None and ((error is None) != (bound is None) or (error or 0.0) > (bound or 0.0)):
        yield f"it is PASSED with an error of {error} where {bound} is the bound"
    if (known := command_of(record)) and record.repro != known:
        yield f"it says it is repeated by {one_line(record.repro, 200)!r}, and its experiment says {known!r}"
    try:
        case, span = measurable(experiment), span_named(experiment.span)
    except (ValueError, NotImplementedError):  # old, or of an operation that is not here
        return
    if protocol.all_threads != all_threads(case):
        yield f"it says {protocol.all_threads} threads, and its experiment {all_threads(case)}"
    one, own = record.implementation, case.implementations[-1]
    if (one.spec, one.layout, one.router, one.layer) != (own.text, own.layout, own.router, own.layer):
        yield f"it is of {one.spec} {one.setting}, and its experiment asks for {own.title}"
    if timing is None or record.work is None:
        return
    if timing.stages and not (case.stages or ranked(case)):
        yield "it has times of stages, and its experiment did not ask for them"
    rates = span.bandwidths(case, timing.median) if case.direction == "forward" else {}
    for name in ("bw_2pass", "bw_strict"):
        if _differs(getattr(record.work, name), rates.get(name)):
            yield f"its {name} is not that of its median"


def _compared(
    timed: Sequence[Record], baseline: Record, twin: Record, seconds: Mapping[str, Floats]
) -> Iterator[tuple[Record, str]]:
    """All statistics of the cell, computed again."""
    candidates = [one for one in timed if one.implementation.role == "candidate"]
    for record in timed:
        if (record.comparison is not None) != (record in candidates or record is twin):
            yield record, "of a cell, every candidate and the twin have a comparison, and nothing else has"
            return
    if len(seconds[baseline.record_id]) != len(seconds[twin.record_id]):
        yield twin, "it has not as many samples as the baseline, whose twin it is"
        return
    pairs = [_paired(one, _partner(one, baseline, timed, seconds), baseline, seconds) for one in candidates]
    target = baseline.experiment.target
    found = compare_cell(
        pairs, _paired(twin, baseline, baseline, seconds), target=TARGET if target is None else target
    )
    for record, compared in zip([*candidates, twin], found, strict=True):
        derived = ComparisonFacts.of(baseline.implementation.label, compared, compared.aa_floor)
        for name, value in dict(derived).items():
            stated = getattr(record.comparison, name)
            if _differs(stated, value):
                yield record, f"it says {name} {stated} where the samples of its cell say {value}"


def _partner(
    record: Record, baseline: Record, timed: Sequence[Record], seconds: Mapping[str, Floats]
) -> Record:
    """The baseline, or that beside it: of several, that which gives its ratio (read.py: one does)."""
    beside = [
        one
        for one in timed
        if one.implementation.role == "beside"
        and one.correctness.reason.startswith(f"the baseline beside {record.implementation.spec}, ")
    ]
    own = seconds[record.record_id]

    def off(one: Record) -> float:
        against = seconds[one.record_id][: len(own)]
        ratio = math.exp(float(np.median(np.log(own) - np.log(against)))) if len(against) == len(own) else 0.0
        assert record.comparison is not None
        return abs(ratio - record.comparison.ratio)

    return min(beside, key=off, default=baseline)


def _paired(record: Record, partner: Record, baseline: Record, seconds: Mapping[str, Floats]) -> Paired:
    own = seconds[record.record_id]
    # records before the field `held` was there say it in words
    isolated = bool(record.protocol.held) or partner.correctness.reason.endswith(", timed as it is")
    shares = partner is not baseline and not isolated
    return Paired(
        own=own,
        against=seconds[partner.record_id][: len(own)],
        isolated=isolated,
        elsewhere=seconds[baseline.record_id][: len(own)] if shares else None,
        # records before the axis `trust` was there were not asked
        trusted=is_ours(record.implementation.origin)
        or record.protocol.held in (HELD, HELD_BEFORE)
        or record.experiment.trust is not False,
    )


def _too_fast(timed: Sequence[Record]) -> Iterator[tuple[Record, str]]:
    """Code from outside faster than the machine would not have passed."""
    implementations = [one for one in timed if one.implementation.role in ("baseline", "candidate")]
    by_name = {
        one.record_id: one for one in implementations if one.timing is not None and one.work is not None
    }
    outside = {name for name, one in by_name.items() if not is_ours(one.implementation.origin)}
    times = {name: one.timing.median for name, one in by_name.items() if one.timing is not None}
    floors = {name: one.work.floor_seconds for name, one in by_name.items() if one.work is not None}
    for name, sentence in too_fast(times, floors, outside).items():
        yield by_name[name], sentence


def _differs(stated: Any, derived: Any) -> bool:
    if isinstance(stated, float) and isinstance(derived, float):
        return not math.isclose(stated, derived, rel_tol=CLOSE, abs_tol=1e-12)
    return bool(stated != derived)
