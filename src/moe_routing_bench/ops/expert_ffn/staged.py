"""dispatch, grouped_gemm, activation, grouped_gemm, combine: the other operations one after another."""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.experts import ExpertWeights, activate
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.grouped_gemm.op import op as grouped_gemm_op
from moe_routing_bench.ops.implementation import Implementation

BATCH_INVARIANT = {"batch_invariant": True}  # and if its parts are
# each configuration changes one operation; the value is an implementation of the operation of that name
CONFIGS: tuple[dict[str, str], ...] = (
    {},
    {"dispatch": "one_hot_matmul"},
    {"grouped_gemm": "torch_grouped_mm"},
    {"grouped_gemm": "padded_bmm"},
    {"grouped_gemm": "block_sparse"},
    {"combine": "index_add"},
    {"combine": "embedding_bag"},
    {"combine": "one_hot_matmul"},
)


def parts(
    *,
    dispatch: str = "index_select",
    grouped_gemm: str = "expert_loop",
    combine: str = "gather_sum",
    batch_invariant: bool = False,
) -> dict[str, Implementation]:
    """By default the parts are plain torch, which runs everywhere."""
    return {
        "dispatch": dispatch_op.get(dispatch),
        "grouped_gemm": grouped_gemm_op.get(grouped_gemm),
        "combine": combine_op.get(combine),
    }


def unsupported(
    x_TD: Tensor,
    gate_TK: Tensor,
    plan: RoutingPlan,
    weights: ExpertWeights,
    *,
    dispatch: str,
    grouped_gemm: str,
    combine: str,
) -> str | None:
    # stand-ins for the tensors between the stages: same size, dtype and device, but almost no memory
    def rows(width: int) -> Tensor:
        return x_TD.new_empty(1, width).expand(plan.num_rows, width)

    gemm = grouped_gemm_op.get(grouped_gemm)
    for stage, args in (
        (dispatch_op.get(dispatch), (x_TD, plan)),
        (gemm, (rows(weights.D), weights.w_in_EDG, plan, weights.b_in_EG)),
        (gemm, (rows(weights.F), weights.w_out_EFD, plan, weights.b_out_ED)),
        (combine_op.get(combine), (rows(weights.D), gate_TK, plan)),
    ):
        if (reason := stage.why_not(*args)) is not None:
            return f"{stage.op}.{stage.label}: {reason}"
    return None


def run(
    x_TD: Tensor,
    gate_TK: Tensor,
    plan: RoutingPlan,
    weights: ExpertWeights,
    *,
    dispatch: str,
    grouped_gemm: str,
    combine: str,
    batch_invariant: bool = False,
) -> Tensor:
    gemm = grouped_gemm_op.get(grouped_gemm).run
    x_RD = dispatch_op.get(dispatch).run(x_TD, plan)
    h_RG = gemm(x_RD, weights.w_in_EDG, plan, weights.b_in_EG)
    h_RF = activate(h_RG, weights.activation, batch_invariant=batch_invariant)
    y_RD = gemm(h_RF, weights.w_out_EFD, plan, weights.b_out_ED)
    return combine_op.get(combine).run(y_RD, gate_TK, plan)
