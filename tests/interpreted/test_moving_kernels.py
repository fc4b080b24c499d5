"""dispatch.triton_gather and combine.triton_gather_sum: against C++ on the same data, and at their edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from child_process import python
from moe_routing_bench import RoutingPlan
from moe_routing_bench.core.accuracy import judge
from moe_routing_bench.ops.implementation import Implementation
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

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("compact", "padded(capacity=7)", "block(8)")
# several programs along both sides of the result: 3 blocks of columns, the last one cut
SMALL_TILES = "block_d=16,{tall}=4,num_warps=1"


def gather(options: str = "") -> Implementation:
    return DISPATCH.get(f"triton_gather({options or SMALL_TILES.format(tall='block_r')})")


def gather_sum(options: str = "") -> Implementation:
    return COMBINE.get(f"triton_gather_sum({options or SMALL_TILES.format(tall='block_t')})")


def nan_where_no_pair(rows: Tensor, plan: RoutingPlan) -> Tensor:
    return rows.masked_fill((plan.pair_R < 0).unsqueeze(1), torch.nan)


def native(op, *arguments: object) -> Implementation:
    if (reason := op.why_not("native", *arguments)) is not None:
        pytest.skip(reason)
    return op.get("native")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dispatch_equals_native_to_the_bit(watched, dtype: torch.dtype, layout: str) -> None:
    plan = plan_of(T=11, K=3, layout=layout)
    x_TD = torch.randn(11, 40).to(dtype)
    dx_RD = nan_where_no_pair(torch.randn(plan.num_rows, 40).to(dtype), plan)
    ours = with_gradients(gather(), (x_TD,), plan, dx_RD)
    theirs = with_gradients(native(DISPATCH, x_TD, plan), (x_TD,), plan, dx_RD)
    assert watched.programs > 12
    for got, want in zip(ours, theirs, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("gate_dtype", ["float32", "the rows'"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combine_equals_native(watched, dtype: torch.dtype, layout: str, gate_dtype: str) -> None:
    if dtype == torch.float32 and gate_dtype != "float32":
        pytest.skip("the same as float32")
    plan = plan_of(T=11, K=3, layout=layout)
    y_RD = nan_where_no_pair(torch.randn(plan.num_rows, 40).to(dtype), plan)
    gate_TK = torch.rand(11, 3).to(torch.float32 if gate_dtype == "float32" else dtype)
    dy_TD = torch.randn(11, 40).to(dtype)
    y_TD, dy_RD, dgate_TK = with_gradients(gather_sum(), (y_RD, gate_TK), plan, dy_TD)
    run = native(COMBINE, y_RD, gate_TK, plan)
    their_y_TD, their_dy_RD, their_dgate_TK = with_gradients(run, (y_RD, gate_TK), plan, dy_TD)
    assert watched.programs > 12
    # one product, rounded once
    assert torch.equal(dy_RD, their_dy_RD)
    # native fuses product and sum, the interpreter rounds each: in float32, so 16 bits seldom show it
    if dtype != torch.float32:
        assert (y_TD != their_y_TD).float().mean() < 0.02
    wide_RD, wide_TK = y_RD.double(), gate_TK.double()
    oracle = with_gradients(COMBINE.reference, (wide_RD, wide_TK), plan, dy_TD.double())
    for got, want, theirs in zip((y_TD, dgate_TK), oracle[::2], (their_y_TD, their_dgate_TK), strict=True):
        verdict = judge(got, want, theirs)
        assert verdict.passed, verdict.sentence


def test_any_strides_are_read_in_place(watched) -> None:
    check_strides(gather(), gather_sum())


@pytest.mark.parametrize("layout", ["compact", "padded(capacity=0)", "padded(capacity=2)"])
@pytest.mark.parametrize("T,K,D", [(0, 2, 8), (5, 2, 1), (5, 1, 33), (3, 5, 17), (5, 2, 0)])
def test_edges(watched, T: int, K: int, D: int, layout: str) -> None:
    check_edges(DISPATCH.get("triton_gather"), COMBINE.get("triton_gather_sum"), T, K, D, layout)


def test_a_gradient_that_nobody_wants_is_not_computed(watched) -> None:
    check_gradients_nobody_wants(gather_sum(), lambda: watched.lanes)


def test_a_second_derivative_is_refused(watched) -> None:
    plan = plan_of(T=3, K=2)
    x_TD = torch.randn(3, 8, requires_grad=True)
    (dx_TD,) = torch.autograd.grad(gather()(x_TD, plan).square().sum(), x_TD, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dx_TD.sum().backward()


def test_a_pair_without_a_row_adds_nothing_whatever_its_gate_is(watched) -> None:
    plan = plan_of(T=6, K=2, layout="padded(capacity=1)")
    y_RD, gate_TK = torch.randn(plan.num_rows, 8), torch.rand(6, 2)
    poisoned_TK = gate_TK.masked_fill(plan.row_TK < 0, float("nan"))
    assert bool(poisoned_TK.isnan().any())
    assert torch.equal(gather_sum()(y_RD, poisoned_TK, plan), gather_sum()(y_RD, gate_TK, plan))


def test_narrow_rows_make_taller_tiles(watched) -> None:
    plan = plan_of(T=64, K=2, layout="compact", absent=0.0)
    DISPATCH.get("triton_gather")(torch.randn(64, 8), plan)
    assert watched.programs == 1


def test_mistakes_are_told() -> None:
    plan = plan_of(T=3, K=2)
    x_TD, y_RD, gate_TK = torch.randn(3, 8), torch.randn(plan.num_rows, 8), torch.rand(3, 2)
    with pytest.raises(ValueError, match="block_d is 24"):
        gather("block_d=24")(x_TD, plan)
    with pytest.raises(ValueError, match="num_warps is 3"):
        gather_sum("num_warps=3")(y_RD, gate_TK, plan)
    check_mistakes(gather(), gather_sum())


def test_the_registered_ops_keep_torchs_rules() -> None:
    plan = plan_of(T=4, K=2, layout="padded(capacity=3)")
    x_TD = torch.randn(4, 8, requires_grad=True)
    y_RD, gate_TK = torch.randn(plan.num_rows, 8, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    gather(), gather_sum()  # loaded, so registered
    ops = torch.ops.moe_routing_bench
    # an interpreted kernel cannot be traced through, so AOTAutograd's tests are left out
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    tile = (16, 4, 1)
    torch.library.opcheck(
        ops.dispatch_triton_gather.default, (x_TD, plan.row_TK, plan.pair_R, *tile), test_utils=tests
    )
    torch.library.opcheck(
        ops.combine_triton_gather_sum.default,
        (y_RD, gate_TK, plan.row_TK, plan.pair_R, *tile),
        test_utils=tests,
    )
    fixed = (torch.randn(4, 8), y_RD.detach(), gate_TK.detach(), plan.pair_R)
    for wants in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(
            ops.combine_triton_gather_sum_backward.default,
            (*fixed, *wants, *tile),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_compiles_without_graph_breaks() -> None:
    plan, out, back = plan_of(T=4, K=2), gather(), gather_sum()

    def there_and_back(x_TD: Tensor, gate_TK: Tensor) -> Tensor:
        return back(out(x_TD, plan), gate_TK, plan)

    x_TD, gate_TK = torch.randn(4, 8), torch.rand(4, 2)
    compiled = torch.compile(there_and_back, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x_TD, gate_TK), there_and_back(x_TD, gate_TK))


SEEN_THROUGH = """
import types, torch, triton
from triton.backends.compiler import GPUTarget
from torch._subclasses.fake_tensor import FakeTensorMode
from functorch.compile import aot_function, make_boxed_func
from moe_routing_bench import Layout, RoutingPlan
from moe_routing_bench.ops.combine import triton_gather_sum
from moe_routing_bench.ops.dispatch import triton_gather

# torch asks the driver for the architecture only to read in the compiled kernel what it writes
triton.runtime.driver.set_active(types.SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 80, 32)))

def there_and_back(x_TD, gate_TK, row_TK, pair_R, per_expert):
    plan = RoutingPlan(
        row_TK=row_TK, pair_R=pair_R, offset_E1=per_expert, count_E=per_expert, dropped_E=per_expert,
        layout=Layout.compact(),
    )
    return triton_gather_sum.run(triton_gather.run(x_TD, plan), gate_TK, plan)

def tell(graph, inputs):
    for node in graph.graph.nodes:
        if "triton_kernel_wrapper" in str(node.target):
            print("launch, writes", *node.kwargs["tensors_to_clone"])
        elif "moe_routing_bench" in str(node.target):
            print("opaque", node.target)
    return make_boxed_func(graph)

with FakeTensorMode():
    x_TD = torch.empty(16, 64, dtype=torch.bfloat16, requires_grad=True)
    gate_TK = torch.empty(16, 2, requires_grad=True)
    ints = [torch.empty(size, dtype=torch.int64) for size in ((16, 2), (32,), (4,))]
    traced = aot_function(there_and_back, fw_compiler=tell, bw_compiler=tell)
    traced(x_TD, gate_TK, *ints).sum().backward()
"""


def test_torch_compile_sees_the_kernels_and_what_they_write() -> None:
    # not interpreted, so in a process of its own; on tensors without values nothing is launched
    told = python(SEEN_THROUGH, without="TRITON_INTERPRET")
    assert told.stdout.splitlines() == [
        "launch, writes x_RD",
        "launch, writes y_TD",
        "launch, writes dy_RD dgate_TK",
        "launch, writes dx_TD",
    ]
