"""What an outcome says beside its times: rates, and the records made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from moe_routing_bench.bench.cell import Cell, Subject
from moe_routing_bench.bench.outcome import CellOutcome, Rates, SubjectOutcome
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.verdict import compare
from moe_routing_bench.bench.weather import WeatherSpan, weather
from moe_routing_bench.cost import Cost
from moe_routing_bench.load import LoadStatistics
from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.recording import record_outcome
from moe_routing_bench.results.store import Session
from moe_routing_bench.shapes import MoEShape
from moe_routing_bench.workloads.cases import BenchCase

HASH = "0123456789abcdef" * 4
COST = Cost(useful_flops=4_000_000, executed_flops=5_000_000, weight_bytes=60_000, activation_bytes=40_000)
ROUNDS = 20


@dataclass(frozen=True, kw_only=True)
class RoutedSubject(Subject):
    router: str = ""
    layer: str = ""


@dataclass(frozen=True, kw_only=True)
class DirectedCase(BenchCase):
    direction: str = "forward"


def an_outcome(
    *times: float | str,
    subjects: tuple[Subject, ...],
    span: str = "layer",
    direction: str = "forward",
    workload: str = "zipf(1.2)",
    cost: Cost = COST,
    **sizes: int,
) -> CellOutcome:
    """Each subject has its time in seconds, or its failed status; the first with a time is the baseline."""
    shape = MoEShape(**{"T": 100, "D": 64, "F": 32, "E": 8, "K": 2, **sizes})
    name = f"own/{shape.T}x{shape.D}-e{shape.E}-k{shape.K}"
    case = DirectedCase(name=name, span=span, shape=shape, dtype="float32", direction=direction)
    cell = Cell(case=case, workload=workload, subjects=subjects)
    load: Any = dict.fromkeys(LoadStatistics.__dataclass_fields__, 0)
    found: list[SubjectOutcome] = []
    base: tuple[float, ...] = ()
    for subject, time in zip(subjects, times, strict=True):
        label, source = subject.spec, HASH
        if isinstance(time, str):
            about: dict[str, Any] = {"status": Status[time], "reason": "why"}
        else:
            samples = tuple(time * (1 + 0.0001 * (n - ROUNDS / 2)) for n in range(ROUNDS + 1))
            about = {"status": Status.PASSED, "samples": samples, "load": load, "first_call": 0.1}
            about["role"] = "candidate" if base else "baseline"
            about["comparison"] = compare(base, samples) if base else None
            about["peak_rss_bytes"] = 300 * 2**20
            base = base or samples
        found.append(SubjectOutcome(subject=subject, label=label, source_hash=source, cost=cost, **about))
    now = weather()
    return CellOutcome(
        cell=cell, key=HASH, outcomes=tuple(found), rounds=ROUNDS + 1, aa_floor=0.001, routing_checksum=HASH,
        weather=WeatherSpan(before=now, after=now), stop_reason="precision reached",
    )  # fmt: skip


def test_rates_are_of_the_median_time() -> None:
    outcome = an_outcome(0.01, "OOM", subjects=(Subject(spec="staged"), Subject(spec="eager_loop")))
    timed, failed = outcome.subjects
    assert outcome.rates(timed) == Rates(
        tokens_per_second=pytest.approx(1e4),
        flops_per_second=pytest.approx(4e8),  # useful, not executed
        bytes_per_second=pytest.approx(1e7),
    )
    assert outcome.rates(failed) == Rates()


def test_packing_has_both_conventions_and_what_does_not_multiply_no_operations() -> None:
    both = (Subject(spec="index_select+gather_sum"),)
    outcome = an_outcome(0.01, subjects=both, span="pack", cost=Cost(activation_bytes=1000))
    rates = outcome.rates(outcome.subjects[0])
    assert rates.flops_per_second is None and rates.bytes_per_second == pytest.approx(1e5)
    assert rates.bw_2pass == pytest.approx(100 * 2 * 2 * 64 * 4 / 0.01)
    assert rates.bw_strict == pytest.approx(100 * 2 * 3 * 64 * 4 / 0.01)
    outcome = an_outcome(0.01, subjects=both, span="pack", direction="backward")
    assert outcome.rates(outcome.subjects[0]).bw_2pass is None


def test_a_subject_without_a_router_is_of_the_plain_layer() -> None:
    (one,) = an_outcome(0.01, subjects=(Subject(spec="staged"),)).subjects
    assert (one.router, one.layer) == ("", "")
    (one,) = an_outcome(0.01, subjects=(RoutedSubject(spec="staged", layer="moe"),)).subjects
    assert one.layer == ""


def test_records_say_direction_router_layer_and_rates(tmp_path: Path) -> None:
    chain = RoutedSubject(spec="staged", router="switch", layer="chain(iterations=2)")
    plain = replace(chain, router="softmax_topk", layer="moe")
    outcome = an_outcome(0.01, 0.02, "OOM", subjects=(chain, plain, Subject(spec="x")), direction="train")
    with Session.start(tmp_path) as session:
        environment = session.put_environment({"machine": {"name": "here"}})
        records = record_outcome(outcome, session, suite="", environment=environment)
    first, second, third = records
    assert [record.what.direction for record in records] == ["train"] * 3
    assert (first.what.router, first.what.layer) == ("switch", "chain(iterations=2)")
    assert (second.what.router, second.what.layer) == ("softmax_topk", "")
    assert first.contender == "staged | compact | switch | chain(iterations=2)"
    assert third.contender == "x | compact" and third.work is None
    assert first.work is not None and first.work.tokens_per_second == pytest.approx(1e4)
    assert first.work.flops_per_second == pytest.approx(4e8) and first.work.bw_2pass is None
    columns = "direction, router, layer, tokens_per_second, flops_per_second, bytes_per_second"
    row = run_query(tmp_path, f"SELECT {columns} FROM latest WHERE router = 'switch'")[1]
    assert row == [("train", "switch", "chain(iterations=2)", *(pytest.approx(n) for n in (1e4, 4e8, 1e7)))]
