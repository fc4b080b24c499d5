"""A Triton kernel through the whole benchmark, worker to record, interpreted on a pretended GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import mrb
from moe_routing_bench.bench.status import Status
from moe_routing_bench.results.folder import iterate


@pytest.mark.timeout(600)  # 10 s on a quiet machine
def test_a_kernel_is_judged_timed_and_recorded_for_what_it_is(tmp_path: Path) -> None:
    words = (
        "bench", "combine", "--device", "pretend", "--tokens", "8", "--width", "32", "--experts", "4",
        "--choices", "2", "--dtype", "float32", "--impl", "gather_sum,triton_gather_sum", "--rounds", "8",
        "--min-rounds", "8", "--out", tmp_path,
    )  # fmt: skip
    assert "say nothing about a GPU" in mrb(*words).output
    found = [record for record in iterate(tmp_path) if record.implementation.role != "twin"]
    records = {record.implementation.spec: record for record in found}
    assert set(records) == {"gather_sum", "triton_gather_sum"}
    for record in records.values():
        assert record.correctness.status is Status.PASSED, record.correctness.reason
        assert (record.experiment.device, record.experiment.view) == ("pretend", "cuda_events")
