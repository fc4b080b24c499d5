"""The roofline limits of a call. The floor is so low that no honest time is below it. The roof is the best
estimate of the least time, for people to read.

Code from outside that is faster than the machine is SUSPECT. Our own code has a clock we trust, so if it is
faster, the roofs are too low: that is a note, the other implementations of the cell are held to a floor as
much lower, and the roof is raised for later.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from contextlib import suppress
from typing import TypeVar

from moe_routing_bench.bench.clock import last_level_cache_bytes
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.roofs import Roofs, store_roofs, stored_roofs
from moe_routing_bench.bench.spans.span import all_threads, is_ours, span_named
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

# below the floor by no more than this factor may be noise, since roofs are measured too
TOLERANCE = 1.05
# our own code may beat torch's matmul, with which roofs are measured, but not by this much: then the work is
# counted wrongly, and no roof may be raised by that
MAX_RAISED = 1.5
Name = TypeVar("Name", bound=Hashable)  # of an implementation


def floor_seconds(experiment: Experiment, cost: Cost, roofs: Roofs | None) -> float | None:
    """Returns the time that no honest call can beat, under the cell's cache policy. None if the roofs are not
    known: only the CPU's are measured, and those of a busy machine do not count.

    With hot caches, only bytes beyond what the caches can hold count. For stored weights nothing but bytes
    does: a table of 16 products takes the place of products of 4 bits.
    """
    if roofs is None or roofs.busy or not _known(experiment, roofs):
        return None
    threads, dtype = all_threads(experiment), experiment.dtype
    beyond = max(0, cost.working_set - 2 * last_level_cache_bytes())
    moved = {"cold": cost.working_set, "weights-cold": cost.weight_bytes, "hot": beyond}[experiment.cache]
    if experiment.store:
        return moved / roofs.memory(threads) or None
    products = roofs.gemm_flops[dtype][threads]
    if dtype == "float32":  # three products of bfloat16 parts are one of float32
        products = max(products, roofs.gemm_flops.get("bfloat16", {}).get(threads, 0.0) / 3)
    return max(moved / roofs.memory(threads), cost.useful_flops / products)


def roof_seconds(
    experiment: Experiment, implementation: ImplementationRef, cost: Cost, roofs: Roofs | None
) -> float | None:
    """Returns the best estimate of the least time; tables show what share of a measured time it is. It uses
    the bandwidth of the working set under the cell's cache policy, or the peak rate of the unit that this
    dtype uses here. None if the roofs are not known. A value from the roofs of a busy machine must be marked.

    A call that touches 100 MB at 13 GB/s and has 1 GFLOP at 160 GFLOP/s: 7.7 ms.
    """
    if roofs is None or not _known(experiment, roofs):
        return None
    threads, cache = all_threads(experiment), experiment.cache
    far = roofs.memory(threads)
    moved = {"cold": cost.working_set, "weights-cold": cost.weight_bytes, "hot": 0}[cache] / far
    if roofs.ladder:
        moved = max(moved, cost.bytes / roofs.bandwidth(cost.working_set, threads))
    elif cost.working_set > 2 * last_level_cache_bytes():  # torch measured memory alone
        moved = max(moved, cost.bytes / far)
    peak = roofs.gemm_flops.get(_multiplied(experiment, implementation), {}).get(threads, math.inf)
    return max(moved, cost.useful_flops / peak) or None


def _known(experiment: Experiment, roofs: Roofs) -> bool:
    threads, dtype = all_threads(experiment), experiment.dtype
    return experiment.device == "cpu" and threads in roofs.gemm_flops.get(dtype, {})


def _multiplied(experiment: Experiment, implementation: ImplementationRef) -> str:
    """Returns the dtype that is multiplied: the case's, or integers if weights are stored and rows are
    rounded too. For code from outside with stored weights it assumes integers, which have the higher roof."""
    if not experiment.store:
        return experiment.dtype
    ours = all(map(is_ours, span_named(experiment.span).origins(implementation.name)))
    return experiment.dtype if ours and not implementation.int8_rows else "int8"


def too_fast(
    times: Mapping[Name, float], floors: Mapping[Name, float | None], outside: Collection[Name]
) -> dict[Name, str]:
    """Returns the implementations from outside that are faster than the machine, each with the reason."""
    beaten = {index: (floors[index] or 0.0) / seconds for index, seconds in times.items()}
    too_low = max([1.0, *(beaten[index] for index in times if index not in outside)])
    return {
        index: f"it says {1e3 * times[index]:.3g} ms, but this machine cannot do the work in less than "
        f"{1e3 * times[index] * share / too_low:.3g} ms: {100 * share / too_low:.0f} % of the highest rate "
        "ever seen here. The timer or the cost model is wrong, or the roofs are (`mrb doctor --again`)"
        for index, share in beaten.items()
        if index in outside and share / too_low > TOLERANCE
    }


def beaten_roofs(timed: Mapping[str, tuple[float, float | None]]) -> list[str]:
    """Returns a note if a time is above its roof. `timed` holds seconds and least seconds by name."""
    shares = {name: (floor or 0.0) / seconds for name, (seconds, floor) in timed.items()}
    names = [f"{name} ({100 * share:.0f} %)" for name, share in shares.items() if share > TOLERANCE]
    if not names:
        return []
    return [f"Above this machine's measured roofs, which are too low for this: {', '.join(names)}."]


def raise_stored(outcome: CellOutcome) -> None:
    """Raises this machine's stored roof of arithmetic to the rate that our own code has just shown.

    Bytes raise nothing: some may have come from the caches. Nor do weights kept in fewer bits.
    """
    if outcome.environment is not None:  # it ran elsewhere
        return
    if outcome.experiment.store:
        return
    experiment, threads, dtype = outcome.experiment, all_threads(outcome.experiment), outcome.experiment.dtype
    roofs = stored_roofs(this_machine().name) if experiment.device == "cpu" else None
    if roofs is None or threads not in roofs.gemm_flops.get(dtype, {}):
        return
    roof = roofs.gemm_flops[dtype][threads]
    rates = [
        outcome.rates(one).flops_per_second or 0.0
        for one in outcome.implementations
        if all(map(is_ours, span_named(experiment.span).origins(one.implementation.name)))
        and "store=" not in one.implementation.name
    ]
    best = max((rate for rate in rates if roof < rate <= MAX_RAISED * roof), default=roof)
    if best > roof:
        higher = {**roofs.gemm_flops, dtype: {**roofs.gemm_flops[dtype], threads: best}}
        with suppress(OSError):  # a home that cannot be written keeps the roofs it has
            store_roofs(roofs.model_copy(update={"gemm_flops": higher}))
