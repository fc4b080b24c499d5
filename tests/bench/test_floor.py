"""The least time of a call by stated roofs: the floor of all that is honest, the roof that people read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_routing_bench.bench.floor import floor_seconds, roof_seconds, too_fast
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

STAGED = ImplementationRef(name="staged")


def cell_of(cache: str, dtype: str = "float32", threads: int = 1, device: str = "cpu") -> Experiment:
    shape = MoEShape(T=24, D=32, F=16, E=8, K=2)
    case = Experiment(case="own/x", span="expert_ffn", **vars(shape), dtype=dtype)
    view = "host_wall" if device == "cpu" else "cuda_events"
    how = {"cache": cache, "threads": threads, "device": device, "view": view}
    return replace(case, workload="uniform", implementations=(STAGED,), **how)


LADDER = Roofs(
    machine="m",
    read_bytes={1: 1e10},
    copy_bytes={1: 8e9},
    gemm_flops={"float32": {1: 1e11}, "bfloat16": {1: 6e11}},
    ladder={1: {2**20: 1e11, 2**25: 2e10, 2**27: 1e10}},
    units={"fma": {1: 1e11}, "amx_bf16": {1: 6e11}},
    seconds=1.0,
    how="C++",
)


def test_the_roof_takes_the_bandwidth_of_the_working_set_and_the_peak_of_the_unit() -> None:
    """The weights of a call that fit into the host's caches are read nevertheless."""
    MB = 2**20

    def roof(weights: int, rows: int, again: int = 0, flops: int = 0, cache: str = "hot") -> float | None:
        cost = Cost(
            useful_flops=flops, executed_flops=flops, weight_bytes=weights, activation_bytes=rows,
            again_bytes=again,
        )  # fmt: skip
        return roof_seconds(cell_of(cache), STAGED, cost, LADDER)

    assert roof(0, 0) is None
    assert roof(31 * MB, MB) == pytest.approx(32 * MB / 2e10)
    assert roof(127 * MB, MB) == pytest.approx(128 * MB / 1e10)
    assert roof(31 * MB, MB, cache="cold") == pytest.approx(32 * MB / 1e10)
    assert roof(31 * MB, MB, cache="weights-cold") == pytest.approx(31 * MB / 1e10)
    # 16 MB of the 48 are written and read back: all are moved, but 32 are the working set
    assert roof(0, 48 * MB, again=16 * MB) == pytest.approx(48 * MB / 2e10)
    assert roof(0, 48 * MB, again=16 * MB, cache="cold") == pytest.approx(32 * MB / 1e10)
    assert roof(31 * MB, MB, flops=10**9) == pytest.approx(0.01)
    # nothing honest is below the floor: float32 may be computed as three products of bfloat16
    cost = Cost(useful_flops=10**9, executed_flops=10**9, weight_bytes=31 * MB)
    assert floor_seconds(cell_of("hot"), cost, LADDER) == pytest.approx(0.005)


def test_the_unit_is_that_of_the_dtype() -> None:
    cost = Cost(useful_flops=6 * 10**9, executed_flops=6 * 10**9)
    assert roof_seconds(cell_of("hot", "bfloat16"), STAGED, cost, LADDER) == pytest.approx(0.01)
    assert roof_seconds(cell_of("hot"), STAGED, cost, LADDER) == pytest.approx(0.06)


def test_there_is_no_roof_where_none_was_measured() -> None:
    cost = Cost(useful_flops=10**9, executed_flops=10**9, weight_bytes=10**9)
    for experiment in (cell_of("hot", threads=2), cell_of("hot", "float16"), cell_of("hot", device="cuda")):
        assert roof_seconds(experiment, STAGED, cost, LADDER) is None
        assert floor_seconds(experiment, cost, LADDER) is None
    assert roof_seconds(cell_of("hot"), STAGED, cost, None) is None
    # a busy machine's: for people, with a mark, and never to reject anything
    busy = LADDER.model_copy(update={"busy": "others used 0.9 cores"})
    assert roof_seconds(cell_of("hot"), STAGED, cost, busy) == pytest.approx(0.1)
    assert floor_seconds(cell_of("hot"), cost, busy) is None


def test_without_a_ladder_only_bytes_that_no_cache_holds_count() -> None:
    torch_alone = LADDER.model_copy(update={"ladder": {}, "units": {}, "how": "torch"})
    little, much = Cost(weight_bytes=2**20), Cost(weight_bytes=2**40)
    assert roof_seconds(cell_of("hot"), STAGED, little, torch_alone) is None
    assert roof_seconds(cell_of("cold"), STAGED, little, torch_alone) == pytest.approx(2**20 / 1e10)
    assert roof_seconds(cell_of("hot"), STAGED, much, torch_alone) == pytest.approx(2**40 / 1e10)


@pytest.mark.parametrize("cache", ["hot", "cold", "weights-cold"])
def test_a_cheat_that_skips_the_weights_is_below_the_floor_and_honest_code_is_not(cache: str) -> None:
    cost = Cost(useful_flops=10**6, executed_flops=10**6, weight_bytes=2**36)
    floor = floor_seconds(cell_of(cache), cost, LADDER)
    roof = roof_seconds(cell_of(cache), STAGED, cost, LADDER)
    assert floor is not None and roof is not None and floor <= roof
    floors: dict[int, float | None] = dict.fromkeys(range(3), floor)
    ours, theirs, cheat = 3 * roof, roof, 0.5 * roof
    assert list(too_fast({0: ours, 1: theirs, 2: cheat}, floors, {1, 2})) == [2]
