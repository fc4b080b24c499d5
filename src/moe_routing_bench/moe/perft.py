"""PERFT (arXiv:2411.08212): small adapters that are trained beside a frozen MoE layer, in four kinds.

    kind "R"  routed    y = MoE(x) + sum over top-K of g_j(x) A_j(x)       g: a router of their own, trained
    kind "E"  embedded  y = sum_e gate_e(x) (E_e(x) + A_e(x))              one per expert, the frozen gates
    kind "D"  dense     y = MoE(x) + sum_j A_j(x)                          no router, no gates
    kind "S"  shared    y = MoE(x) + A(x)                                  "D" with one adapter

    adapter "lora"      A(x) = alpha / rank * (x U) V                      U: D x rank,  V: rank x D
    adapter "parallel"  A(x) = silu(x U) V

V starts at 0, so a new Perft computes exactly what the frozen layer computes. U starts at U(-1, 1) / sqrt(D),
as in LoRA's own code. In the authors' code (liuyilun2000/PERFUME) V starts at 1e-6 N(0, 1) and U at N(0, 2 /
rank), and alpha is twice the rank. The gates of "R" are renormalised after top-k for Mixtral, and for OLMoE
if its configuration says so (here `router_options={"order": ...}`). It has dropout, which is not here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.core.names import one_of
from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing, SoftRouting, TokenInfo
from moe_routing_bench.moe.layer import MoE, Routings
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.grouped_gemm.op import op as grouped_gemm_op
from moe_routing_bench.routers.router import Router, build

KINDS = ("R", "E", "D", "S")
ADAPTERS = ("lora", "parallel")


class Adapters(nn.Module):
    """E adapters of width F = rank. state_dict: down_EDF (U above) and up_EFD (V above)."""

    def __init__(self, w_in_EDG: Tensor, E: int, rank: int, *, silu: bool, scale: float, grouped_gemm: str):
        super().__init__()
        D = w_in_EDG.shape[1]
        self.silu, self.scale = silu, scale
        self.down_EDF = nn.Parameter(w_in_EDG.new_empty(E, D, rank))
        self.up_EFD = nn.Parameter(w_in_EDG.new_zeros(E, rank, D))
        nn.init.uniform_(self.down_EDF, -(D**-0.5), D**-0.5)
        self.dispatch = resolve(dispatch_op, "auto")
        self.grouped_gemm = resolve(grouped_gemm_op, grouped_gemm)
        self.combine = resolve(combine_op, "auto")

    def routed(self, x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
        h_RF = self.grouped_gemm(self.dispatch(x_TD, plan), self.down_EDF, plan, None)
        y_RD = self.grouped_gemm(self._between(h_RF), self.up_EFD, plan, None)
        return self.combine(y_RD, gate_TK, plan)

    def on_every_token(self, x_TD: Tensor) -> Tensor:
        """The sum of all adapters, computed as one network of width E * rank."""
        h_TF = x_TD @ self.down_EDF.transpose(0, 1).flatten(1)
        return self._between(h_TF) @ self.up_EFD.flatten(0, 1)

    def _between(self, h: Tensor) -> Tensor:
        return F.silu(h) if self.silu else self.scale * h


class Perft(nn.Module):
    """A frozen MoE layer with adapters:  y, routings = Perft(moe, kind="R", rank=8, num_adapters=4, K=2)(x).

    kind          R, E, D or S, see above
    adapter       "lora" or "parallel"
    num_adapters  for R and D; E has one per expert, S one
    K             adapters per token, for R
    alpha         for LoRA; None: no scaling, which is alpha = rank
    router        for R: a name, with router_options, or a Router
    grouped_gemm  an implementation of grouped_gemm, for the adapters

    The parameters of `moe` are frozen; only the new ones train. routings[0] is the frozen router's choice,
    routings[1] that of R's own router.

    state_dict: moe.* as in MoE, adapters.* (see Adapters), router.* with R. adapter_state_dict() has only the
    new part.

    >>> layer = mrb.Perft(mrb.MoE(D=8, F=16, E=4, K=2), kind="R", rank=2, num_adapters=4, K=2)
    >>> sorted({name.split(".")[0] for name, weight in layer.named_parameters() if weight.requires_grad})
    ['adapters', 'router']
    """

    carries_input = False

    def __init__(
        self,
        moe: MoE,
        kind: str = "R",
        *,
        adapter: str = "lora",
        rank: int = 8,
        num_adapters: int | None = None,
        K: int | None = None,
        alpha: float | None = None,
        router: str | Router = "softmax_topk",
        router_options: dict | None = None,
        grouped_gemm: str = "auto",
    ):
        super().__init__()
        one_of("kind", kind, KINDS)
        one_of("adapter", adapter, ADAPTERS)
        if adapter == "parallel" and alpha is not None:
            raise ValueError("alpha scales LoRA; a parallel adapter has none")
        if rank < 1:
            raise ValueError(f"rank is the width of an adapter, at least 1, not {rank}")
        weight = moe.experts.w_in_EDG
        count = {"E": weight.shape[0], "S": 1}.get(kind, num_adapters)
        if count is None or count < 1:
            raise ValueError(f"kind {kind} needs num_adapters, at least 1")
        if num_adapters not in (None, count):
            raise ValueError(f"kind {kind} has {count} adapters here, not num_adapters={num_adapters}")
        if (kind == "R") != (K is not None):
            raise ValueError("K, the adapters per token, is for kind R, and R needs it")
        self.moe = moe.requires_grad_(False)
        self.kind = kind
        self.adapters = Adapters(
            weight.detach(),
            count,
            rank,
            silu=adapter == "parallel",
            scale=1.0 if alpha is None else alpha / rank,
            grouped_gemm=grouped_gemm,
        )
        self.router = None
        if K is not None:
            if isinstance(router, str):
                router = build(router, moe.D, count, K, **(router_options or {}))
            elif router_options:
                raise ValueError("router_options are for a router given by name")
            if (router.D, router.E, router.K) != (moe.D, count, K):
                raise ValueError(f"the router must be for D={moe.D}, E={count} adapters and K={K}")
            moves = any(p.device != weight.device for p in router.parameters())
            self.router = router.to(weight.device) if moves else router
            self.make_plan = moe.make_plan

    @property
    def D(self) -> int:
        return self.moe.D

    @property
    def like(self) -> Tensor:
        return self.moe.like

    @property
    def causal(self) -> bool:
        return self.moe.causal and (self.router is None or self.router.causal)

    def forward(self, x: Tensor, info: TokenInfo = TokenInfo()) -> tuple[Tensor, Routings]:
        moe = self.moe
        x_TD = moe.tokens(x)
        routing = moe.route(moe.router, x_TD, info)
        routings: tuple[Routing | SoftRouting, ...] = (routing,)
        plan = None
        if self.kind == "E":
            if isinstance(routing, SoftRouting):
                raise ValueError("kind E follows the experts a token chose; under Soft-MoE use R, D or S")
            plan = moe.plan(routing)
            new_TD = self.adapters.routed(x_TD, routing.gate_TK, plan)
        elif self.router is not None:
            own = self.router(x_TD, info)
            if isinstance(own, SoftRouting):
                raise ValueError("kind R needs a router that chooses adapters; Soft-MoE mixes them all")
            routings += (own,)
            new_TD = self.adapters.routed(x_TD, own.gate_TK, self.make_plan(own, Layout.compact()))
        else:
            new_TD = self.adapters.on_every_token(x_TD)
        y_TD = moe.compute(x_TD, routing, plan) + new_TD
        return y_TD.view(x.shape), Routings(routings)

    def adapter_state_dict(self) -> dict[str, Tensor]:
        """Returns the new parameters alone, to be saved after fine-tuning."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith("moe.")}

    def load_adapter_state_dict(self, state: Mapping[str, Tensor]) -> None:
        mine = self.adapter_state_dict()
        if state.keys() != mine.keys():
            raise ValueError(
                f"these are {', '.join(sorted(state))}; a Perft of kind {self.kind} has "
                f"{', '.join(sorted(mine))}"
            )
        self.load_state_dict(state, strict=False)

    def extra_repr(self) -> str:
        return f"kind={self.kind}"
