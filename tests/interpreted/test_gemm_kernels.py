"""The grouped GEMM kernels where the kit's small cases do not reach: many tiles each way, any order."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_routing_bench.conformance.instrumented import instrumented
from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.ops.gpu_gemm import grouped_order, outer_product, row_sums
from moe_routing_bench.ops.grouped_gemm import triton_blocks, triton_ragged
from moe_routing_bench.ops.grouped_gemm.op import op, reference
from moe_routing_bench.ops.make_plan.op import reference as make_plan
from moe_routing_bench.ops.targets import TARGETS

SMALL_TILES = "block_m=16,block_n=16,block_k=16,group_m=2"
SKEWED = (37, 0, 5, 1)
SPECS = [
    (f"triton_ragged({SMALL_TILES})", "compact", SKEWED),
    (f"triton_ragged({SMALL_TILES},persistent=0)", "padded(capacity=40)", SKEWED),
    (f"triton_ragged({SMALL_TILES},tma=1)", "compact", SKEWED),
    ("triton_blocks(block_n=16,block_k=16,group_m=2)", "block(20)", SKEWED),
    ("triton_blocks(block_n=16,block_k=16,group_m=1)", "block(130)", (130, 2)),  # two tiles in a block
]


def plan_of(pairs_E: tuple[int, ...], layout: str) -> RoutingPlan:
    expert_P = torch.repeat_interleave(torch.arange(len(pairs_E)), torch.tensor(pairs_E))
    order_P = torch.randperm(len(expert_P), generator=torch.Generator().manual_seed(0))
    expert_TK = expert_P[order_P].unsqueeze(1)
    gate_TK = torch.ones(expert_TK.shape)
    routing = Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=len(pairs_E))
    return make_plan(routing, Layout.parse(layout))


def problem(plan: RoutingPlan, D: int, F: int) -> tuple[Tensor, Tensor, Tensor]:
    """x with zeros in padding and NaN in rows of no expert, weights stored output-first, biases."""
    generator = torch.Generator().manual_seed(1)
    x_RD = torch.randn(plan.num_rows, D, generator=generator)
    x_RD[plan.pair_R < 0] = 0.0
    x_RD[plan.expert_R() == plan.num_experts] = float("nan")
    w_EFD = torch.randn(plan.num_experts, F, D, generator=generator) * D**-0.5
    return x_RD, w_EFD.transpose(1, 2), torch.randn(plan.num_experts, F, generator=generator)


def results(run, plan: RoutingPlan, tensors: tuple[Tensor, ...], dy_RF: Tensor) -> list[Tensor]:
    """y and the gradients; of y and dx the rows that hold a pair."""
    x_RD, w_EDF, b_EF = leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    y_RF = run(x_RD, w_EDF, plan, b_EF)
    y_RF.backward(dy_RF.to(y_RF.dtype))
    holds_R = plan.pair_R >= 0
    dx_RD, dw_EDF, db_EF = (leaf.grad for leaf in leaves)
    return [y_RF.detach()[holds_R], dx_RD[holds_R], dw_EDF, db_EF]


@pytest.mark.parametrize("spec,layout,pairs_E", SPECS)
def test_many_tiles_of_rows_columns_and_depth(spec: str, layout: str, pairs_E: tuple[int, ...]) -> None:
    plan = plan_of(pairs_E, layout)
    D, F = (48, 32) if "tma" in spec else (40, 24)  # by descriptors only whole tiles are read
    tensors = problem(plan, D, F)
    dy_RF = torch.randn(plan.num_rows, F, generator=torch.Generator().manual_seed(2))
    dy_RF[plan.pair_R < 0] = 0.0
    with instrumented(order="random", seed=3) as seen:
        found = results(op.get(spec), plan, tensors, dy_RF)
    assert seen.programs > 6
    exact = results(reference, plan, tuple(tensor.double() for tensor in tensors), dy_RF)
    for got, true in zip(found, exact, strict=True):
        torch.testing.assert_close(got.double(), true, rtol=1e-5, atol=1e-5)


def test_the_bits_do_not_depend_on_the_order_of_programs() -> None:
    plan = plan_of((18, 0, 3), "compact")
    tensors = problem(plan, 24, 24)
    dy_RF = torch.randn(plan.num_rows, 24)
    seen = []
    for order, persistent in (("forward", 1), ("reversed", 0)):
        with instrumented(order=order):
            run = op.get(f"triton_ragged({SMALL_TILES},persistent={persistent})")
            seen.append(results(run, plan, tensors, dy_RF))
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_weight_and_bias_gradients_of_several_tiles() -> None:
    """The gradient kernels have large tiles: 2 x 2 of them here, more rows than a step, an empty expert."""
    plan = plan_of((70, 0, 3), "compact")
    upper_RA, lower_RB = torch.randn(73, 130), torch.randn(73, 136)
    with instrumented(order="random"):
        out_EAB = outer_product(upper_RA, lower_RB, plan.offset_E1, plan.count_E)
        sum_EB = row_sums(lower_RB, plan.offset_E1, plan.count_E)
    for e, (begin, end) in enumerate(((0, 70), (70, 70), (70, 73))):
        torch.testing.assert_close(
            out_EAB[e], upper_RA[begin:end].T @ lower_RB[begin:end], rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(sum_EB[e], lower_RB[begin:end].sum(0), rtol=1e-4, atol=1e-4)
    assert not out_EAB[1].any() and not sum_EB[1].any()


@pytest.mark.parametrize("output_first", [True, False])
def test_the_weight_gradient_is_stored_as_the_weights_are(output_first: bool) -> None:
    plan = plan_of((3, 2), "compact")
    x_RD, w_EDF, _ = problem(plan, 16, 8)
    w_EDF = (w_EDF if output_first else w_EDF.contiguous()).requires_grad_()
    with instrumented():
        y_RF = op.get("triton_ragged")(x_RD, w_EDF, plan)
        (dw_EDF,) = torch.autograd.grad(y_RF, w_EDF, torch.ones_like(y_RF))
    assert dw_EDF.stride() == w_EDF.stride()


@pytest.mark.parametrize(
    "spec,layout", [("triton_ragged", "padded(capacity=6)"), ("triton_blocks", "block(6)")]
)
def test_rows_of_padding_are_not_read(spec: str, layout: str) -> None:
    plan = plan_of((4, 2), layout)
    x_RD, w_EDF, b_EF = problem(plan, 16, 8)
    x_RD[plan.pair_R < 0] = float("nan")
    with instrumented():
        y_RF = op.get(spec)(x_RD, w_EDF, plan, b_EF)
    for e in range(2):
        begin, end = plan.offset_E1[e] + plan.count_E[e], plan.offset_E1[e + 1]
        assert torch.equal(y_RF[begin:end], b_EF[e].expand(int(end - begin), -1))


@triton.jit
def _visit(m_out, n_out, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    tile = tl.program_id(0)
    m, n = grouped_order(tile, tiles_m, tiles_n, GROUP_M)
    tl.store(m_out + tile, m)
    tl.store(n_out + tile, n)


@pytest.mark.parametrize("tiles_m,tiles_n,group", [(3, 2, 2), (5, 3, 4), (1, 4, 8), (8, 1, 3)])
def test_every_tile_is_visited_once(tiles_m: int, tiles_n: int, group: int) -> None:
    m, n = torch.zeros(2, tiles_m * tiles_n, dtype=torch.int32)
    with instrumented():
        _visit[(tiles_m * tiles_n,)](m, n, tiles_m, tiles_n, GROUP_M=group)
    visited = list(zip(m.tolist(), n.tolist(), strict=True))
    assert sorted(visited) == [(i, j) for i in range(tiles_m) for j in range(tiles_n)]
    if (tiles_m, tiles_n, group) == (3, 2, 2):
        assert visited == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


def test_reasons_are_sentences() -> None:
    plan = plan_of((3, 2), "compact")
    x_RD, w_EDF, _ = problem(plan, 16, 8)
    assert "block layout" in op.get("triton_blocks").why_not(x_RD, w_EDF, plan)
    assert "float64" in op.get("triton_ragged").why_not(x_RD.double(), w_EDF.double(), plan)
    assert "float16" in op.get("triton_ragged").why_not(x_RD.half(), w_EDF, plan)
    odd_x_RD, odd_w_EDF, _ = problem(plan, 7, 8)
    assert "16 bytes" in op.get("triton_ragged(tma=1)").why_not(odd_x_RD, odd_w_EDF, plan)
    assert op.get("triton_ragged").why_not(odd_x_RD, odd_w_EDF, plan) is None


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("module", [triton_ragged, triton_blocks])
def test_compilations_name_every_argument_once(module, target: str) -> None:
    shape = MoEShape(T=4096, D=2048, F=768, E=128, K=8)
    found = list(module.compilations(shape, TARGETS[target]))
    names = [compilation.name for compilation in found]
    assert {"forward", "input_gradient", "weight_gradient", "bias_gradient"} <= set(names)
    for compilation in found:
        told = [*compilation.signature, *compilation.constexprs]
        assert sorted(told) == sorted(compilation.kernel.arg_names), compilation.name


@pytest.mark.parametrize("options,why", [({"tma": 1}, "no TMA"), ({"store": "e4m3"}, "from sm_89 on")])
def test_what_an_architecture_has_not_is_not_compiled_for_it(options: dict[str, int | str], why: str) -> None:
    shape = MoEShape(T=4096, D=2048, F=768, E=128, K=8)
    with pytest.raises(NotImplementedError, match=why):
        list(triton_ragged.compilations(shape, TARGETS["sm_80"], **options))
    assert next(triton_ragged.compilations(shape, TARGETS["sm_90a"], **options)).name == "forward"


@pytest.mark.parametrize("name,layout", [("triton_ragged", "compact"), ("triton_blocks", "block(4)")])
def test_rows_too_far_apart_for_32_bits_are_refused(name: str, layout: str) -> None:
    plan, w_EDF = plan_of((3, 1), layout), torch.randn(2, 4, 4)
    near, far = (torch.empty_strided((plan.num_rows, 4), (stride, 1), device="meta") for stride in (4, 2**24))
    assert "too far" in str(op.why_not(name, far, w_EDF, plan))
    assert "too far" not in str(op.why_not(name, near, w_EDF, plan))


def test_tma_reads_whole_tiles_or_says_no() -> None:
    plan = plan_of((3, 2), "compact")
    for D, F, ok in ((64, 32, True), (48, 32, False), (64, 16, False)):
        x_RD, w_EDF, _ = problem(plan, D, F)
        reason = op.get("triton_ragged(tma=1,block_k=128)").why_not(x_RD, w_EDF, plan)
        assert (reason is None) if ok else "depth 32" in reason  # float32: a quarter
    x_RD, w_EDF, _ = problem(plan, 48, 32)
    assert op.get("triton_ragged(tma=1)").why_not(x_RD, w_EDF, plan) is None


@pytest.mark.parametrize("name,layout", [("triton_ragged", "compact"), ("triton_blocks", "block(4)")])
def test_a_matrix_too_large_for_32_bits_is_refused(name: str, layout: str) -> None:
    plan, x_RD = plan_of((3, 1), layout), torch.zeros(8, 4)
    near, far = (torch.empty(16).as_strided((2, 4, 4), (0, 0, 0)), torch.randn(1).expand(2, 4, 2**29))
    assert op.why_not(name, x_RD[: plan.num_rows], near, plan) is None
    assert "2^31" in str(op.why_not(name, x_RD[: plan.num_rows], far, plan))
