"""Outcomes of cells as the runner gives them, with times made up for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_routing_bench.bench.identity import Identity
from moe_routing_bench.bench.noise import NoiseDuring, noise_now
from moe_routing_bench.bench.outcome import CellOutcome, SubjectOutcome
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.verdict import compare
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.load import LoadStatistics
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

HASH = "0123456789abcdef" * 4
COST = Cost(useful_flops=4_000_000, executed_flops=5_000_000, weight_bytes=60_000, activation_bytes=40_000)
ROUNDS = 20


def an_outcome(
    *times: float | str,
    subjects: tuple[ImplementationRef, ...],
    span: str = "layer",
    direction: str = "forward",
    workload: str = "zipf(1.2)",
    cost: Cost = COST,
    **sizes: int,
) -> CellOutcome:
    """Each subject has its time in seconds, or its failed status; the first with a time is the baseline."""
    shape = MoEShape(**{"T": 100, "D": 64, "F": 32, "E": 8, "K": 2, **sizes})
    name = f"own/{shape.T}x{shape.D}-e{shape.E}-k{shape.K}"
    case = Experiment(case=name, span=span, **vars(shape), dtype="float32", direction=direction)
    experiment = replace(case, workload=workload, implementations=subjects)
    load: Any = dict.fromkeys(LoadStatistics.__dataclass_fields__, 0)
    found: list[SubjectOutcome] = []
    base: tuple[float, ...] = ()
    for subject, time in zip(subjects, times, strict=True):
        label = subject.name
        if isinstance(time, str):
            about: dict[str, Any] = {"status": Status[time], "reason": "why"}
        else:
            samples = tuple(time * (1 + 0.0001 * (n - ROUNDS / 2)) for n in range(ROUNDS + 1))
            about = {"status": Status.PASSED, "samples": samples, "load": load, "first_call": 0.1}
            about["role"] = "candidate" if base else "baseline"
            about["comparison"] = compare(base, samples) if base else None
            about["peak_rss_bytes"] = 300 * 2**20
            base = base or samples
        found.append(SubjectOutcome(subject=subject, label=label, cost=cost, **about))
    hashes = dict.fromkeys(subjects, HASH)
    identity = Identity(key=HASH, harness=HASH, contracts=hashes, sources=hashes)
    now = noise_now()
    return CellOutcome(
        experiment=experiment, identity=identity, outcomes=tuple(found), rounds=ROUNDS + 1, aa_floor=0.001,
        routing_checksum=HASH, weather=NoiseDuring(before=now, after=now), stop_reason="precision reached",
    )  # fmt: skip
