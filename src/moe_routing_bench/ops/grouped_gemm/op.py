"""grouped_gemm: each expert's rows times its matrix.   x_RD, w_EDF, plan, b_EF -> y_RF

Row r of expert e's span is x_r @ w_e (+ b_e), summed in at least float32. Padding rows inside a span come
out as any finite number. Rows that no expert owns come out as anything, and so does their gradient; the
gradient that arrives there may be NaN and must not reach w_EDF or b_EF.
"D" and "F" stand for the inputs and outputs of either projection. w_EDF may be a transposed view.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op
from moe_routing_bench.plan import RoutingPlan


def reference(x_RD: Tensor, w_EDF: Tensor, plan: RoutingPlan, b_EF: Tensor | None = None) -> Tensor:
    offset = plan.offset_E1.tolist()
    spans = []
    for e in range(plan.num_experts):
        y_rF = x_RD[offset[e] : offset[e + 1]] @ w_EDF[e]
        spans.append(y_rF if b_EF is None else y_rF + b_EF[e])
    spans.append(x_RD.new_zeros(plan.num_rows - offset[-1], w_EDF.shape[2]))
    return torch.cat(spans)


op = Op(__package__, reference, default="expert_loop", stage=4)


def grouped_gemm(
    x_RD: Tensor,
    w_EDF: Tensor,
    plan: RoutingPlan,
    b_EF: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    return resolve(op, impl)(x_RD, w_EDF, plan, b_EF)
