"""What an outcome says beside its times: rates, and the records made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe_routing_bench.bench.outcome import Rates
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.results.folder import Session
from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.writing import record_outcome
from moe_routing_bench.workloads.experiment import ImplementationRef
from sample_outcomes import an_outcome


def test_rates_are_of_the_median_time() -> None:
    outcome = an_outcome(
        0.01, "OOM", implementations=(ImplementationRef(name="staged"), ImplementationRef(name="eager_loop"))
    )
    timed, failed = outcome.implementations
    assert outcome.rates(timed) == Rates(
        tokens_per_second=pytest.approx(1e4),
        flops_per_second=pytest.approx(4e8),  # useful, not executed
        bytes_per_second=pytest.approx(1e7),
    )
    assert outcome.rates(failed) == Rates()


def test_packing_has_both_conventions_and_what_does_not_multiply_no_operations() -> None:
    both = (ImplementationRef(name="index_select+gather_sum"),)
    outcome = an_outcome(0.01, implementations=both, span="pack", cost=Cost(activation_bytes=1000))
    rates = outcome.rates(outcome.implementations[0])
    assert rates.flops_per_second is None and rates.bytes_per_second == pytest.approx(1e5)
    assert rates.bw_2pass == pytest.approx(100 * 2 * 2 * 64 * 4 / 0.01)
    assert rates.bw_strict == pytest.approx(100 * 2 * 3 * 64 * 4 / 0.01)
    outcome = an_outcome(0.01, implementations=both, span="pack", direction="backward")
    assert outcome.rates(outcome.implementations[0]).bw_2pass is None


def test_records_say_direction_router_layer_and_rates(tmp_path: Path) -> None:
    chain = ImplementationRef(name="staged", router="switch", layer="chain(iterations=2)")
    plain = replace(chain, router="softmax_topk", layer="")
    outcome = an_outcome(
        0.01, 0.02, "OOM", implementations=(chain, plain, ImplementationRef(name="x")), direction="train"
    )
    with Session.start(tmp_path) as session:
        environment = session.put_environment({"machine": {"name": "here"}})
        records = record_outcome(outcome, session, suite="", environment=environment)
    first, second, third = records
    assert [record.experiment.direction for record in records] == ["train"] * 3
    assert (first.implementation.router, first.implementation.layer) == ("switch", "chain(iterations=2)")
    assert (second.implementation.router, second.implementation.layer) == ("softmax_topk", "")
    assert first.implementation.title == "staged | compact | switch | chain(iterations=2)"
    assert third.implementation.title == "x | compact" and third.work is None
    assert first.work is not None and first.work.tokens_per_second == pytest.approx(1e4)
    assert first.work.flops_per_second == pytest.approx(4e8) and first.work.bw_2pass is None
    columns = "direction, router, layer, tokens_per_second, flops_per_second, bytes_per_second"
    row = run_query(tmp_path, f"SELECT {columns} FROM latest WHERE router = 'switch'")[1]
    assert row == [("train", "switch", "chain(iterations=2)", *(pytest.approx(n) for n in (1e4, 4e8, 1e7)))]
