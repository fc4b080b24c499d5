"""Outcomes of cells as the runner gives them, with times made up for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_routing_bench.bench.identity import Identity
from moe_routing_bench.bench.noise import NoiseDuring, noise_now
from moe_routing_bench.bench.outcome import CellOutcome, ImplementationOutcome
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.verdict import Paired, compare, compare_cell
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.load import LoadStatistics
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

HASH = "0123456789abcdef" * 4
COST = Cost(useful_flops=4_000_000, executed_flops=5_000_000, weight_bytes=60_000, activation_bytes=40_000)
ROUNDS = 20


def an_outcome(
    *times: float | str,
    implementations: tuple[ImplementationRef, ...],
    span: str = "layer",
    direction: str = "forward",
    workload: str = "zipf(1.2)",
    cost: Cost = COST,
    twin: bool = False,
    **sizes: int,
) -> CellOutcome:
    """Each implementation has its time in seconds, or its failed status; the first with a time is the
    baseline.

    twin: as the runner has it, with a twin of the baseline and the statistics of the whole cell
    """
    shape = MoEShape(**{"T": 100, "D": 64, "F": 32, "E": 8, "K": 2, **sizes})
    name = f"own/{shape.T}x{shape.D}-e{shape.E}-k{shape.K}"
    case = Experiment(case=name, span=span, **vars(shape), dtype="float32", direction=direction)
    experiment = replace(case, workload=workload, implementations=implementations)
    load: Any = dict.fromkeys(LoadStatistics.__dataclass_fields__, 0)
    found: list[ImplementationOutcome] = []
    base: tuple[float, ...] = ()
    for implementation, time in zip(implementations, times, strict=True):
        label = implementation.name
        if isinstance(time, str):
            about: dict[str, Any] = {"status": Status[time], "reason": "why"}
        else:
            samples = tuple(time * (1 + 0.0001 * (n - ROUNDS / 2)) for n in range(ROUNDS + 1))
            about = {"status": Status.PASSED, "samples": samples, "load": load, "first_call": 0.1}
            about["role"] = "candidate" if base else "baseline"
            about["comparison"] = compare(base, samples) if base else None
            about["peak_rss_bytes"] = 300 * 2**20
            base = base or samples
        found.append(ImplementationOutcome(implementation=implementation, label=label, cost=cost, **about))
    if twin:
        found = _with_twin(found)
    hashes = dict.fromkeys(implementations, HASH)
    identity = Identity(key=HASH, harness=HASH, contracts=hashes, sources=hashes)
    now = noise_now()
    return CellOutcome(
        experiment=experiment, identity=identity, outcomes=tuple(found), rounds=ROUNDS + 1, aa_floor=0.001,
        routing_checksum=HASH, weather=NoiseDuring(before=now, after=now), stop_reason="precision reached",
    )  # fmt: skip


def _with_twin(found: list[ImplementationOutcome]) -> list[ImplementationOutcome]:
    base = next(one for one in found if one.samples)
    twin = replace(base, role="twin", samples=tuple(1.001 * one for one in base.samples))
    timed = [one for one in [*found, twin] if one.samples and one is not base]
    *pairs, last = (Paired(own=one.samples, against=base.samples) for one in timed)
    compared = dict(zip(map(id, timed), compare_cell(pairs, last), strict=True))
    return [replace(one, comparison=compared.get(id(one))) for one in [*found, twin]]
