"""Arguments of every operation with real sizes but almost no memory, to find out what would run."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_routing_bench.core.experts import GATED, ExpertWeights
from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.parallel.traffic import Traffic


def weights_without_values(
    shape: MoEShape, activation: str, *, bias: bool, train: bool, dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> ExpertWeights:  # fmt: skip
    """Weights of these sizes. Their memory is never written, so the system does not provide it."""
    D, F, E = shape.D, shape.F, shape.E
    G = 2 * F if activation in GATED else F

    def floats(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device, requires_grad=train)

    return ExpertWeights(
        w_in_EDG=floats(E, D, G),
        w_out_EFD=floats(E, F, D),
        b_in_EG=floats(E, G) if bias else None,
        b_out_ED=floats(E, D) if bias else None,
        activation=activation,
    )


class StandIns:
    """The arguments that a layer with these weights passes to operations: StandIns(weights, K, layout,
    T).x_TD

    Gates and logits are float32, as routers make them. With `train` the activations require gradients; the
    weights are unchanged.
    """

    def __init__(
        self, weights: ExpertWeights, K: int, layout: Layout, T: int, *, train: bool = False,
        rule: object = None, heads: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ):  # fmt: skip
        E, D, w_in = weights.num_experts, weights.D, weights.w_in_EDG
        R = layout.num_rows(T, K, E)

        def row(dtype: torch.dtype, *size: int) -> Tensor:
            """A single row (or number) expanded to `size`."""
            expanded = torch.empty((1, *size[1:]), dtype=dtype, device=w_in.device).expand(size)
            return expanded.requires_grad_(train and dtype.is_floating_point)

        self.K, self.layout, self.rule = K, layout, rule
        self.score_TE, self.logits_TE = row(w_in.dtype, T, E), row(torch.float32, T, E)
        self.bias_E = torch.empty(E, device=w_in.device)
        self.gate_TK, expert_TK = row(torch.float32, T, K), row(torch.int64, T, K)
        self.routing = Routing(expert_TK=expert_TK, gate_TK=self.gate_TK, num_experts=E, ragged=False)
        self.plan = RoutingPlan(
            row_TK=expert_TK,
            pair_R=row(torch.int64, R),
            offset_E1=row(torch.int64, E + 1),
            count_E=row(torch.int64, E),
            dropped_E=row(torch.int64, E),
            layout=layout,
            filled=layout.kind == "compact",
        )
        self.x_TD, self.x_RD = row(w_in.dtype, T, D), row(w_in.dtype, R, D)
        self.y_RD = self.y_QD = self.x_RD
        self.traffic = Traffic(sent=(R,), received=(R,), place_Q=self.plan.pair_R)
        # the first of the two projections
        self.weights, self.w_EDF, self.b_EF = weights, weights.w_in_EDG, weights.b_in_EG
        # of the layers around the experts
        self.norm_D, self.eps = torch.empty(D, dtype=w_in.dtype, device=w_in.device), 1e-6
        self.w_FD = row(w_in.dtype, weights.F, D)
        self.b_F = None if weights.b_in_EG is None else row(w_in.dtype, weights.F)
        self.causal, self.window, self.rotary = True, 0, None
        queries, keys = heads or ((1, 1, T, D), (1, 1, T, D))
        self.q_BHNA, self.k_BJMA, self.v_BJMA = (row(w_in.dtype, *size) for size in (queries, keys, keys))
