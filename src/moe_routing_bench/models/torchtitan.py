"""The override for torchtitan: its experts' products by grouped_gemm, with gradients.

    --override.imports moe_routing_bench.models.torchtitan.experts
    --override.imports 'moe_routing_bench.models.torchtitan.experts={"impl": "triton_ragged"}'

Without `impl` it is "auto" as everywhere, which on a CPU is the C++ kernel. On a GPU name an implementation,
because none of ours has been timed there. Parameters, their names, their sharding, the cast to bfloat16 and
the order of rows stay torchtitan's, so checkpoints fit. Experts of another class (MXFP8) are not changed.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.metadata import version

import torch
from torch import Tensor

if importlib.util.find_spec("torchtitan") is None:
    raise NotImplementedError("this override needs torchtitan; pip install torchtitan==0.3.0")
if not version("torchtitan").startswith("0.3."):
    raise NotImplementedError(
        f"this override was tried with torchtitan 0.3 alone and this is {version('torchtitan')}; "
        "pip install torchtitan==0.3.0"
    )

from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts

from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.ops.grouped_gemm.op import grouped_gemm
from moe_routing_bench.ops.grouped_gemm.op import op as grouped_gemm_op


class Experts(GroupedExperts):
    """torchtitan's experts with our grouped product."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        impl: str = "auto"

    def __init__(self, config: Config):
        super().__init__(config)
        self.impl = config.impl
        if self.impl != "auto":
            grouped_gemm_op.get(self.impl)  # raises if there is none of that name

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return grouped_gemm(A, B_t, plan_of(A.shape[0], offs), impl=self.impl)


def plan_of(R: int, end_E: Tensor) -> RoutingPlan:
    """Returns the plan of R rows that are sorted by expert: those of expert e end before row end_E[e], and
    rows after the last expert's have no expert. It reads no values on the host."""
    offset_E1 = torch.cat((end_E.new_zeros(1), end_E)).long()
    row_R = torch.arange(R, device=end_E.device)
    row_R = torch.where(row_R < offset_E1[-1], row_R, -1)
    count_E = offset_E1.diff()
    return RoutingPlan(
        row_TK=row_R.unsqueeze(1), pair_R=row_R, offset_E1=offset_E1, count_E=count_E,
        dropped_E=torch.zeros_like(count_E), layout=Layout.compact(),
    )  # fmt: skip


@override(target=GroupedExperts.Config, exact=True, description="moe-routing-bench's grouped_gemm")
def experts(config: GroupedExperts.Config, impl: str = "auto") -> Experts.Config:
    return derive(config, Experts.Config, impl=impl)
