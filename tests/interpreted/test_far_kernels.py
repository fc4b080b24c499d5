"""Places past 2^31: what is read stands 2^30 elements apart, what is written is as large as a big model's.

Memory that nobody touches costs nothing, so gigabytes are only asked for. Of a grid whose results are too
many to compute, the last program runs, the one that is farthest. A 32-bit offset reads before the memory:
the process dies, or the numbers are wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from moe_routing_bench import ExpertWeights, Layout, Routing, all_ops
from moe_routing_bench.conformance.interpreting import repaired, replaced
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine import triton_gather_sum
from moe_routing_bench.ops.dispatch import triton_gather
from moe_routing_bench.ops.expert_ffn import triton_fused
from moe_routing_bench.ops.gpu_gemm import outer_product, row_sums
from moe_routing_bench.ops.grouped_gemm import triton_blocks, triton_ragged
from moe_routing_bench.ops.make_plan.op import reference as make_plan
from moe_routing_bench.ops.score_topk.op import ScoreRule

GIB = 2**30
ENOUGH = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") > 15 * GIB
pytestmark = pytest.mark.skipif(not ENOUGH, reason="asks for 13 GB of memory, though it uses little of it")

OPS = all_ops()
# rows times columns pass 2^31 by a little
ROWS, WIDE = 2**16 + 8, 2**15
TILE = (1024, 4, 4)  # columns, rows, warps


def apart(values: Tensor) -> Tensor:
    """The same values, those of the first dimension 2^30 elements from each other."""
    n, *rest = values.shape
    memory = torch.empty(GIB * (n - 1) + values[0].numel(), dtype=values.dtype)
    far = memory.as_strided(values.shape, (GIB, *torch.empty(rest, device="meta").stride()))
    return far.copy_(values)


@contextmanager
def last_program_only() -> Iterator[None]:
    """Of every launch, the programs that are last along the first side of the grid."""
    call, shift = GridExecutor.__call__, [0]

    def launch(self: Any, *args: Any, **named: Any) -> Any:
        shift[0] = self.grid[0] - 1
        self.grid = (1, *self.grid[1:])
        return call(self, *args, **named)

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        self.grid_idx = (x + shift[0], y, z)

    with (
        replaced(GridExecutor, __call__=launch),
        replaced(InterpreterBuilder, set_grid_idx=set_grid_idx),
        in_place(),
    ):
        yield


@contextmanager
def in_place() -> Iterator[None]:
    """The interpreter copies arguments onto themselves after a launch, all of their memory."""
    with replaced(GridExecutor, _restore_args_dev=lambda *args: None), repaired():
        yield


def plan_of(experts: list[int], num_experts: int, layout: str = "compact") -> RoutingPlan:
    expert_TK = torch.tensor(experts).unsqueeze(1)
    routing = Routing(expert_TK=expert_TK, gate_TK=torch.ones(len(experts), 1), num_experts=num_experts)
    return make_plan(routing, Layout.parse(layout))


def large(columns: int = WIDE) -> Tensor:
    """Asked for and never touched but for its last rows."""
    rows = torch.empty(ROWS, columns, dtype=torch.float16)
    rows[-8:] = torch.randn(8, columns).half()
    return rows


def straight() -> tuple[Tensor, Tensor]:
    """row_TK and pair_R of one choice a token, all of one expert."""
    return torch.arange(ROWS).unsqueeze(1), torch.arange(ROWS)


def test_dispatch_reads_far_rows() -> None:
    plan = plan_of([1, 0, 1], 2)
    x_TD, dx_RD = torch.randn(3, 8).half(), torch.randn(3, 8).half()
    with in_place():
        got_RD = triton_gather._gather(apart(x_TD), plan.row_TK, plan.pair_R, *TILE)
        got_TD = triton_gather._gather_backward(apart(dx_RD), plan.row_TK, *TILE)
    assert torch.equal(got_RD, x_TD[plan.pair_R])
    assert torch.equal(got_TD, dx_RD[plan.row_TK[:, 0]])


def test_dispatch_writes_far_rows() -> None:
    row_TK, pair_R = straight()
    x_TD = torch.randn(8, WIDE).half()
    with last_program_only():
        # tokens ROWS-8 .. are rows 0 .. of x, so that only what is written is large
        x_RD = triton_gather._gather(x_TD, row_TK, (pair_R - (ROWS - 8)).clamp_min(0), *TILE)
        dx_TD = triton_gather._gather_backward(x_TD, (row_TK - (ROWS - 8)).clamp_min(0), *TILE)
    for written in (x_RD, dx_TD):
        assert torch.equal(written[-4:, -1024:], x_TD[-4:, -1024:])


def test_combine_reads_far_rows() -> None:
    plan = plan_of([1, 0, 1], 2)
    y_RD, gate_TK, dy_TD = torch.randn(3, 8).half(), torch.rand(3, 1).half(), torch.randn(3, 8).half()
    with in_place():
        y_TD = triton_gather_sum._gather_sum(apart(y_RD), apart(gate_TK), plan.row_TK, plan.pair_R, *TILE)
        dy_RD, dgate_TK = triton_gather_sum._gather_sum_backward(
            apart(dy_TD), apart(y_RD), apart(gate_TK), plan.pair_R, True, True, *TILE
        )
    assert torch.equal(y_TD, gate_TK * y_RD[plan.row_TK[:, 0]])
    assert torch.equal(dy_RD, (gate_TK * dy_TD)[plan.pair_R])
    want_TK = (dy_TD.float() * y_RD[plan.row_TK[:, 0]].float()).sum(1, keepdim=True)
    torch.testing.assert_close(dgate_TK.float(), want_TK, rtol=2e-3, atol=2e-3)


def test_combine_writes_far_rows() -> None:
    row_TK, pair_R = straight()
    near_TD, near_TK = torch.randn(8, WIDE).half(), torch.full((ROWS, 1), 0.5, dtype=torch.float16)
    with last_program_only():
        y_TD = triton_gather_sum._gather_sum(
            near_TD, near_TK, (row_TK - (ROWS - 8)).clamp_min(0), pair_R, *TILE
        )
        dy_TD = large()
        dy_RD, _ = triton_gather_sum._gather_sum_backward(dy_TD, dy_TD, near_TK, pair_R, True, False, *TILE)
    assert torch.equal(y_TD[-2:, -1024:], 0.5 * near_TD[-2:, -1024:])
    assert torch.equal(dy_RD[-4:], 0.5 * dy_TD[-4:])


@pytest.mark.parametrize("far", ["rows", "weights"])
@pytest.mark.parametrize("file,layout", [(triton_ragged, "compact"), (triton_blocks, "block(4)")])
def test_grouped_gemm_reads_far_rows_and_weights(file: Any, layout: str, far: str) -> None:
    plan = plan_of([2, 0, 1], 3, layout)  # each tile begins where its expert does: far, for the last one
    x_RD, w_EDF = torch.randn(plan.num_rows, 16).half(), torch.randn(3, 16, 16).half()
    here = OPS["grouped_gemm"].reference(x_RD, w_EDF, plan)
    if far == "weights":
        w_EDF = apart(w_EDF)
    elif layout == "compact":
        x_RD = apart(x_RD)
    else:  # of 12 rows and more: nearer to each other, the last one past 2^31
        memory = torch.empty(GIB // 4 * plan.num_rows, dtype=torch.float16)
        x_RD = memory.as_strided(x_RD.shape, (GIB // 4, 1)).copy_(x_RD)
    with in_place():
        y_RF = OPS["grouped_gemm"].get(file.__name__.rpartition(".")[2]).run(x_RD, w_EDF, plan)
    holds_R = plan.pair_R >= 0
    torch.testing.assert_close(y_RF[holds_R], here[holds_R], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("file,options", [
    (triton_ragged, [128, 128, 64, 8, 8, 3, 0, 0]), (triton_blocks, [8, 128, 64, 8, 4, 3]),
])  # fmt: skip
def test_grouped_gemm_writes_far_rows(file: Any, options: list[int]) -> None:
    x_RD, w_EDF = torch.randn(ROWS, 16).half(), torch.randn(1, 16, WIDE).half()
    with last_program_only():
        y_RF = file.multiply(x_RD, w_EDF, None, torch.tensor([0, ROWS]), torch.tensor([ROWS]), options)
    want = (x_RD[-8:].float() @ w_EDF[0, :, -128:].float()).half()
    torch.testing.assert_close(y_RF[-8:, -128:], want, rtol=2e-3, atol=2e-3)


def test_the_gradients_of_weights_and_biases_are_far() -> None:
    offset_E1, count_E = torch.tensor([0, 2, 4, 5]), torch.tensor([2, 2, 1])
    upper_RA, lower_RB = torch.randn(5, WIDE).half(), torch.randn(5, WIDE).half()
    with last_program_only():
        out_EAB = outer_product(upper_RA, lower_RB, offset_E1, count_E)
    want = (upper_RA[4, -128:, None].float() * lower_RB[4, None, -128:].float()).half()
    assert torch.equal(out_EAB[2, -128:, -128:], want)
    with in_place():
        sum_EB = row_sums(apart(lower_RB[2:, :16]), torch.tensor([0, 2, 3]), torch.tensor([2, 1]))
        small = outer_product(
            apart(upper_RA[2:, :16]), apart(lower_RB[2:, :16]), torch.tensor([0, 2, 3]), torch.tensor([2, 1])
        )
    assert torch.equal(sum_EB[1], lower_RB[4, :16])
    assert torch.equal(small[1], (upper_RA[4, :16, None].float() * lower_RB[4, None, :16].float()).half())


@pytest.mark.parametrize("name", ["triton_fused", "triton_decode"])
@pytest.mark.parametrize("far", ["x_TD", "w_in_EDG", "w_out_EFD", "b_out_ED"])
def test_expert_ffn_reads_far(name: str, far: str) -> None:
    plan = plan_of([2, 0, 1], 3)
    given = {
        "x_TD": torch.randn(3, 16),
        "gate_TK": torch.rand(3, 1),
        "w_in_EDG": torch.randn(3, 16, 32) / 4,
        "w_out_EFD": torch.randn(3, 16, 16) / 4,
        "b_in_EG": torch.randn(3, 32),
        "b_out_ED": torch.randn(3, 16),
    }
    results = []
    for run, change in ((OPS["expert_ffn"].reference, lambda t: t), (OPS["expert_ffn"].get(name).run, apart)):
        tensors = {key: value.half() for key, value in given.items()}
        tensors[far] = change(tensors[far])
        x_TD, gate_TK = tensors.pop("x_TD"), tensors.pop("gate_TK")
        with in_place():
            results.append(run(x_TD, gate_TK, plan, ExpertWeights(**tensors)))
    torch.testing.assert_close(*results, rtol=5e-3, atol=5e-3)


def test_expert_ffn_writes_far_rows() -> None:
    row_TK, pair_R = straight()
    w_in_EDG, w_out_EFD = torch.randn(1, WIDE, 8).half() / 180, torch.randn(1, 8, WIDE).half()
    x_TD, gate_TK = large(), torch.ones(ROWS, 1).half()
    blocks = (128, 128, 1024, 4, 1, 8)
    with last_program_only():
        y_TD = triton_fused._fused(
            x_TD, gate_TK, row_TK, pair_R, torch.tensor([0, ROWS]), torch.tensor([ROWS]), w_in_EDG, w_out_EFD,
            None, None, "relu", *blocks, 0, 0, 0,
        )  # fmt: skip
    hidden = (x_TD[-4:].float() @ w_in_EDG[0].float()).relu().half()
    want = hidden.float() @ w_out_EFD[0, :, -128:].float()
    torch.testing.assert_close(y_TD[-4:, -128:].float(), want, rtol=5e-3, atol=5e-3)


def test_choosing_reads_and_writes_far_tokens() -> None:
    logits_TE = torch.randn(3, 8).half()
    topk, fused = OPS["topk"].get("triton_select"), OPS["score_topk"].get("triton_fused")
    far_TE = apart(logits_TE).requires_grad_()
    near_TE = logits_TE.clone().requires_grad_()
    with in_place():
        value_TK, expert_TK = topk.run(far_TE.detach(), 2)
        gate_TK, chosen_TK = fused.run(far_TE, None, 2, ScoreRule())
        (d_far_TE,) = torch.autograd.grad(gate_TK[:, 0].sum(), far_TE)
    best = OPS["topk"].reference(logits_TE, 2)
    assert torch.equal(value_TK, best[0]) and torch.equal(expert_TK, best[1])
    gates = OPS["score_topk"].reference(near_TE, None, 2, ScoreRule())
    assert torch.equal(chosen_TK, gates[1])
    torch.testing.assert_close(gate_TK, gates[0])
    torch.testing.assert_close(d_far_TE, torch.autograd.grad(gates[0][:, 0].sum(), near_TE)[0])
