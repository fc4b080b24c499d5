"""The CuTe kernels at their edges, and what their watch notices."""

from __future__ import annotations

import pytest
import torch

from moe_routing_bench import Layout, RoutingPlan, all_ops
from moe_routing_bench.ops import cute_threads as on
from moe_routing_bench.ops.combine import cute_gather_sum
from moe_routing_bench.ops.cute_threads import KernelMemoryError, cuda, cute, cutlass
from moe_routing_bench.ops.dispatch import cute_gather
from moving_rows import (
    COMBINE,
    DISPATCH,
    check_edges,
    check_gradients_nobody_wants,
    check_mistakes,
    check_strides,
    plan_of,
    with_gradients,
)
from tiny_layers import MAKE_PLAN, routing_of

GATHER, SUM = DISPATCH.get("cute_gather"), COMBINE.get("cute_gather_sum")


def test_any_strides_are_read_in_place() -> None:
    check_strides(GATHER, SUM)


@pytest.mark.parametrize("layout", ["compact", "padded(capacity=90)", "block(16)"])
@pytest.mark.parametrize("E", [3, 12, 200])
def test_plans_of_several_tiles_and_more_experts_than_threads(E: int, layout: str) -> None:
    routing = routing_of(700, 3, E, absent=0.1)
    got = all_ops()["make_plan"].get("cute_counting")(routing, Layout.parse(layout))
    want = MAKE_PLAN(routing, Layout.parse(layout))
    for name in ("row_TK", "pair_R", "offset_E1", "count_E", "dropped_E"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.filled == want.filled


@pytest.mark.parametrize("layout", ["padded(capacity=0)", "padded(capacity=2)"])
@pytest.mark.parametrize("T,K,D", [(0, 2, 8), (5, 1, 33), (3, 5, 17), (5, 2, 0)])
def test_edges(T: int, K: int, D: int, layout: str) -> None:
    check_edges(GATHER, SUM, T, K, D, layout)


def test_many_choices_and_rows_that_many_threads_share() -> None:
    plan = plan_of(T=40, K=9, E=12, absent=0.5)
    x_TD, dx_RD = torch.randn(40, 520).half(), torch.randn(plan.num_rows, 520).half()
    got = with_gradients(GATHER, (x_TD,), plan, dx_RD)
    want = with_gradients(DISPATCH.get("index_select"), (x_TD,), plan, dx_RD)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=2e-3, atol=2e-3)


def test_sums_are_taken_in_float32_and_rounded_once() -> None:
    """The kit cannot ask for it: plain torch sums gradients in the rows' dtype."""
    plan = plan_of(T=30, K=9, E=12, layout="compact", absent=0.0)
    x_TD, dx_RD = torch.randn(30, 16).bfloat16(), torch.randn(plan.num_rows, 16).bfloat16()
    _, dx_TD = with_gradients(GATHER, (x_TD,), plan, dx_RD)
    total_TD = torch.zeros(30, 16)
    for k in range(9):
        total_TD += dx_RD[plan.row_TK[:, k]].float()
    assert torch.equal(dx_TD, total_TD.bfloat16())


def test_a_gradient_that_nobody_wants_is_not_computed() -> None:
    check_gradients_nobody_wants(SUM)


def test_places_past_2_31() -> None:
    """Memory that is only asked for: one row of a tensor of 2^31 elements and more is touched."""
    D, T = 2**16, 2**15 + 2
    x_TD = torch.empty(T, D, dtype=torch.float16)
    x_TD[T - 1, -8:] = torch.arange(8).half()
    pair_R = torch.tensor([T - 1])
    plan = RoutingPlan(
        row_TK=torch.full((T, 1), -1).index_fill_(0, pair_R, 0),
        pair_R=pair_R,
        offset_E1=torch.tensor([0, 1]),
        count_E=torch.tensor([1]),
        dropped_E=torch.tensor([0]),
        layout=Layout.padded(capacity=1),
    )
    assert GATHER(x_TD, plan)[0, -8:].tolist() == list(range(8))


def test_mistakes_are_told() -> None:
    check_mistakes(GATHER, SUM)


def test_a_plan_that_points_outside_is_noticed() -> None:
    plan = plan_of(T=3, K=2, absent=0.0)
    plan.pair_R[0] = 3 * 2  # of token 3
    with pytest.raises(KernelMemoryError, match="loads lie outside"):
        GATHER(torch.randn(3, 8), plan)
    plan.row_TK[0, 0] = plan.num_rows
    with pytest.raises(KernelMemoryError, match="loads lie outside"):
        SUM(torch.randn(plan.num_rows, 8), torch.rand(3, 2), plan)


def test_the_registered_ops_keep_torchs_rules() -> None:
    plan = plan_of(T=4, K=2, layout="padded(capacity=3)")
    x_TD = torch.randn(4, 8, requires_grad=True)
    y_RD, gate_TK = torch.randn(plan.num_rows, 8, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    ops = torch.ops.moe_routing_bench
    torch.library.opcheck(ops.dispatch_cute_gather.default, (x_TD, plan.row_TK, plan.pair_R))
    torch.library.opcheck(ops.combine_cute_gather_sum.default, (y_RD, gate_TK, plan.row_TK, plan.pair_R))


@cute.jit
def _copy(thread, source, target, watch, stored, FAULT: cutlass.Constexpr):
    """Thread i copies four numbers; FAULT says what it does wrong."""
    values = on.piece(4, source.element_type)
    on.load(values, source, cutlass.Int64(0), thread + (1 if FAULT == "load" else 0), watch)
    if cutlass.const_expr(FAULT == "twice"):
        on.store(values, target, cutlass.Int64(0), thread // 2, watch, stored)
    elif cutlass.const_expr(FAULT == "store"):
        on.store(values, target, cutlass.Int64(0), thread * 2, watch, stored)
    else:
        on.store(values, target, cutlass.Int64(0), thread, watch, stored)


@cute.jit
def _copy_all(
    x: cute.Pointer, out: cute.Pointer, faults: cute.Pointer, stores: cute.Pointer, stream: cuda.CUstream,
    FAULT: cutlass.Constexpr, ON_CPU: cutlass.Constexpr,
):  # fmt: skip
    source, target = (on.matrix(memory, 1, 32, cutlass.Int64(32), 1, 4) for memory in (x, out))
    watch = on.vector(faults, len(on.FAULTS))
    stored = on.matrix(stores, 1, 32, cutlass.Int64(32), 1, 1)
    for thread in cutlass.range(8):
        _copy(thread, source, target, watch, stored, FAULT)


@pytest.mark.parametrize(
    "fault,told",
    [
        ("none", None),
        ("load", "1 loads lie outside"),
        ("store", "4 stores lie outside"),
        ("twice", "16 elements were stored twice"),
        ("misaligned", "8 accesses are not aligned"),
    ],
)
def test_the_watch_sees_each_fault(fault: str, told: str | None) -> None:
    memory = torch.zeros(64)
    source, target = memory[1:33] if fault == "misaligned" else memory[:32], torch.zeros(1, 32)
    watch = on.Watch(target.device, target)
    arguments = [on.pointer(source, width=1), on.pointer(target, width=4), *watch.pointers()]
    if fault == "misaligned":  # the kernel believes what it is told
        arguments[0] = on.make_ptr(
            cutlass.Float32, source.data_ptr(), cute.AddressSpace.gmem, assumed_align=4
        )
    on.Launch(_copy_all, arguments, (fault,), "cpu")(target.device, *arguments)
    if told is None:
        watch.check("copy")
        return
    with pytest.raises(KernelMemoryError, match=told):
        watch.check("copy")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_compiles_with_wide_accesses(arch: str) -> None:
    bf16, D, K = torch.bfloat16, 2048, 8
    kernels = {
        "gather": cute_gather.compiled("gather", arch, bf16, D, K, 8),
        "sum_rows": cute_gather.compiled("sum_rows", arch, bf16, D, K, 8),
        "weighted_sum": cute_gather_sum.compiled("weighted_sum", arch, bf16, torch.float32, D, K, 8),
        "spread": cute_gather_sum.compiled("spread", arch, bf16, torch.float32, D, K, 8, True, True),
    }
    for name, kernel in kernels.items():
        ptx = kernel.ptx
        assert f".target {arch}" in ptx, name
        assert "ld.global.v4" in ptx or "ld.global.v2.b64" in ptx, f"{name}: no load of 128 bits"
        assert "st.global.v4" in ptx or "st.global.v2.b64" in ptx, f"{name}: no store of 128 bits"
