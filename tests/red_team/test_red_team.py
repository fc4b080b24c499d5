"""The benchmark against the red team: every cheat and every broken kernel ends in the state it deserves, and
the honest kernel measured beside it is not harmed."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from expectations import EXPECTED, KERNELS, MARKER, Sizes
from moe_routing_bench.bench.cell import Cell, Policy
from moe_routing_bench.bench.executor import LocalExecutor
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.subject import Subject
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.results.store import iterate
from moe_routing_bench.results.sweep import run_sweep
from moe_routing_bench.shapes import MoEShape
from moe_routing_bench.workloads.cases import BenchCase

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
POLICY = Policy(
    min_rounds=12, max_rounds=12, max_seconds=20, step_seconds=10, memory_gib=3, checked=12, target=0.5
)


def cell_of(op: str, name: str, at: Sizes) -> Cell:
    case = BenchCase(
        name=f"red-team/{op}",
        span=op,
        shape=MoEShape(T=at.T, D=at.D, F=at.F, E=at.E, K=at.K),
        dtype="float32",
    )
    specs = (all_ops()[op].default, name)
    return Cell(
        case=case,
        workload=at.workload,
        subjects=tuple(Subject(spec=spec, layout=at.layout) for spec in specs),
        include=(str(KERNELS),),
        policy=POLICY,
    )


def states(outcome: CellOutcome) -> tuple[Status, Status]:
    honest, other = outcome.subjects
    return honest.status, other.status


@pytest.mark.parametrize(("op", "name"), EXPECTED)
def test_it_is_rejected_or_contained(op: str, name: str) -> None:
    expected = EXPECTED[op, name]
    outcome = run_cell(cell_of(op, name, expected.at))
    honest, other = outcome.subjects
    assert honest.status is Status.PASSED, f"the honest kernel was harmed: {honest.reason}"
    assert other.status in expected.states, f"{other.status}: {other.reason}"
    assert other.status is Status.PASSED or (other.reason and not other.samples)
    if other.status is Status.PASSED:
        # contained: what it tried bought it no time. The same work cannot be much faster than itself
        assert median(other.samples) > 0.5 * median(honest.samples)


@pytest.mark.parametrize(("op", "name"), [key for key, row in EXPECTED.items() if row.right_at])
def test_it_passes_where_its_trick_does_not_apply(op: str, name: str) -> None:
    at = EXPECTED[op, name].right_at
    assert at is not None
    assert states(run_cell(cell_of(op, name, at))) == (Status.PASSED, Status.PASSED)


def test_forged_results_are_undone_and_the_forger_is_named(tmp_path: Path) -> None:
    (tmp_path / MARKER).touch()
    cell = cell_of("combine", "writes_results_file", Sizes())
    honest_first = cell.only(cell.subjects[:1])
    outcomes = list(run_sweep([honest_first, cell], tmp_path, LocalExecutor()))
    before = {o.label: median(o.samples) for o in outcomes[0].subjects}
    honest, forger = outcomes[1].subjects
    assert honest.status is Status.PASSED
    assert forger.status is Status.SUSPECT, forger.reason
    assert "records.jsonl" in forger.reason and "no other process may write there" in forger.reason
    records = list(iterate(tmp_path))
    assert len(records) == 5  # two of the first cell (with the twin), three of the second: the forger failed
    first = next(r for r in records if r.implementation.role == "baseline")
    assert first.timing is not None
    assert first.timing.median == pytest.approx(before[first.implementation.label])
    assert list(tmp_path.glob("session=*/records.jsonl.tampered-*"))
