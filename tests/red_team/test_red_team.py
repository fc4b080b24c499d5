"""The benchmark against the red team: every cheat and every broken kernel ends in the state it deserves, and
the honest kernel measured beside it is not harmed."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from expectations import EXPECTED, KERNELS, MARKER, Sizes
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.bench.status import Status
from moe_routing_bench.fleet.executor import LocalExecutor
from moe_routing_bench.fleet.sweep import run_sweep
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.results.folder import iterate
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from timing import had_time

pytestmark = [pytest.mark.slow, pytest.mark.timing, pytest.mark.timeout(600)]
# the default but for less memory, so that what grows is stopped sooner, and no more rounds than the default's
# fewest. A machine that is busy with other things takes ten times as long, and honest kernels pass there too
HOW = {"max_seconds": 120, "max_rounds": 20, "step_seconds": 60, "memory_gib": 3}
# for what hangs: nobody waits a minute for it
SHORT = {**HOW, "max_seconds": 45, "step_seconds": 20}


def one_of_each(groups: dict[Any, Hashable]) -> list[Any]:
    """Every key; all but the first of a group are left to the night."""
    first = {group: key for key, group in reversed(groups.items())}
    return [
        pytest.param(
            *(key if isinstance(key, tuple) else [key]),
            marks=[] if first[group] == key else [pytest.mark.nightly],
        )
        for key, group in groups.items()
    ]


def how_for(states: Collection[str]) -> dict[str, float]:
    return SHORT if "TIMEOUT" in states else HOW


def cell_of(op: str, name: str, at: Sizes, how: Mapping[str, float] = HOW) -> Experiment:
    case = Experiment(
        case=f"red-team/{op}",
        span=op,
        T=at.T,
        D=at.D,
        F=at.F,
        E=at.E,
        K=at.K,
        dtype="float32",
    )
    specs = (all_ops()[op].default, name)
    return replace(
        case,
        workload=at.workload,
        implementations=tuple(ImplementationRef(name=spec, layout=at.layout) for spec in specs),
        include=(str(KERNELS),),
        **how,
    )


@pytest.mark.parametrize(("op", "name"), one_of_each({key: row.trap for key, row in EXPECTED.items()}))
def test_it_is_rejected_or_contained(op: str, name: str) -> None:
    expected = EXPECTED[op, name]
    outcome = run_cell(cell_of(op, name, expected.at, how_for(expected.states)))
    honest, other = outcome.implementations
    had_time(honest)
    assert honest.status is Status.PASSED, f"the honest kernel was harmed: {honest.reason}"
    assert other.status in expected.states, f"{other.status}: {other.reason}"
    assert other.status is Status.PASSED or (other.reason and not other.samples)
    if other.status is Status.PASSED:
        # contained: what it tried bought it no time. The same work cannot be much faster than itself
        assert median(other.samples) > 0.5 * median(honest.samples)


@pytest.mark.parametrize(
    ("op", "name"), one_of_each({key: row.trap for key, row in EXPECTED.items() if row.right_at})
)
def test_it_passes_where_its_trick_does_not_apply(op: str, name: str) -> None:
    at = EXPECTED[op, name].right_at
    assert at is not None
    honest, other = run_cell(cell_of(op, name, at)).implementations
    had_time(honest, other)
    assert honest.status is Status.PASSED
    # the kit of hard cases may have one in which its trick does apply
    assert other.status is Status.PASSED or "hard cases" in other.reason, other.reason


def test_forged_results_are_undone_and_the_forger_is_named(tmp_path: Path) -> None:
    (tmp_path / MARKER).touch()
    experiment = cell_of("combine", "writes_results_file", Sizes())
    honest_first = replace(experiment, implementations=experiment.implementations[:1])
    outcomes = list(run_sweep([honest_first, experiment], tmp_path, LocalExecutor()))
    before = {o.label: median(o.samples) for o in outcomes[0].implementations}
    honest, forger = outcomes[1].implementations
    had_time(honest)
    assert honest.status is Status.PASSED
    assert forger.status is Status.SUSPECT, forger.reason
    assert "records.jsonl" in forger.reason and "no other process may write there" in forger.reason
    records = list(iterate(tmp_path))
    assert len(records) == 5  # two of the first cell (with the twin), three of the second: the forger failed
    first = next(r for r in records if r.implementation.role == "baseline")
    assert first.timing is not None
    assert first.timing.median == pytest.approx(before[first.implementation.label])
    assert list(tmp_path.glob("session=*/records.jsonl.tampered-*"))
