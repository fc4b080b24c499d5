"""A Mixture-of-Experts layer on one page: read this first.

A router gives each token to K of E experts, and each expert is a small feed-forward network. The layer is two
matrix products for each expert between two changes of order: tokens are sorted by expert, and sorted back.
`MoE` in layer.py computes the same with faster kernels; `tests/test_forward.py` compares the two.
"""

from __future__ import annotations

from torch import Tensor

from moe_routing_bench.core.experts import ExpertWeights, activate
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.routing import SoftRouting
from moe_routing_bench.ops.combine.op import combine
from moe_routing_bench.ops.dispatch.op import dispatch
from moe_routing_bench.ops.grouped_gemm.op import grouped_gemm
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.routers.router import Router


def moe_forward(
    x_TD: Tensor, router: Router, experts: ExpertWeights, layout: Layout | str = "compact"
) -> Tensor:
    """Sends each token through the experts that the router chooses for it, step by step.

    The end of a name gives the shape: x_TD has T tokens of width D. E experts, K choices for each token,
    R rows (one for each token and choice, and padding), F the hidden width of an expert, G = 2F if it is
    gated. Each operation has several implementations; the ones used here are plain torch and easy to read.

    >>> layer = mrb.MoE(D=8, F=16, E=4, K=2, layout="block(16)", impl="staged")
    >>> x_TD = torch.randn(5, 8)
    >>> y_TD = mrb.moe_forward(x_TD, layer.router, layer.experts.weights(), layer.layout)
    >>> torch.equal(y_TD, layer(x_TD)[0])
    True
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout

    # route: the K experts of each token (expert_TK), and the weight of each (gate_TK)
    routing = router(x_TD)
    if isinstance(routing, SoftRouting):
        raise ValueError("this router mixes all tokens for every expert and chooses none; use MoE")

    # plan: the row of every pair of token and choice; the rows of an expert are next to each other
    plan = make_plan(routing, layout)

    # dispatch: copy each token to its rows
    x_RD = dispatch(x_TD, plan, impl="index_select")

    # the experts: each multiplies its own rows by its own matrices
    h_RG = grouped_gemm(x_RD, experts.w_in_EDG, plan, experts.b_in_EG, impl="expert_loop")
    h_RF = activate(h_RG, experts.activation)
    y_RD = grouped_gemm(h_RF, experts.w_out_EFD, plan, experts.b_out_ED, impl="expert_loop")

    # combine: y_t is the sum of the token's rows, each times its gate
    return combine(y_RD, routing.gate_TK, plan, impl="gather_sum")
