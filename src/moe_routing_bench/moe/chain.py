"""ChainOfExperts (arXiv:2506.18945): the same experts several times in a row, each time with a new router.

    x_0 = x
    x_c = sum over the K / C experts chosen by router c of gate * E(x_(c-1))  +  x_(c-1)      c = 1 .. C
    y   = x_C

The last term, the inner residual, can be turned off. Shared experts are part of every iteration and read its
input, as in the authors' code (ZihanWang314/coe). With the inner residual y contains x, the output of the
norm, and the authors' decoder layer adds no other residual around the block. Their configuration gives the
experts per iteration; here K is the sum over all iterations, as in the paper. Their gates are probabilities
that are not renormalised: router_options={"order": "softmax_then_topk"}.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moe_routing_bench.core.routing import TokenInfo
from moe_routing_bench.moe.layer import MoE, Routings
from moe_routing_bench.routers.router import build


class ChainOfExperts(nn.Module):
    """y, routings = ChainOfExperts(D=64, F=128, E=8, K=4, iterations=2)(x): two experts, then two more.

    It takes the arguments of MoE; `router` must be a name, because every iteration builds its own router.
    With iterations=1 and inner_residual=False its results have the same bits as MoE.

    state_dict: layer.* as in MoE (with the first router), later_routers.0.* for the second, and so on.

    >>> y, routings = mrb.ChainOfExperts(D=64, F=128, E=8, K=4, iterations=2)(torch.randn(3, 64))
    >>> [tuple(routing.expert_TK.shape) for routing in routings]
    [(3, 2), (3, 2)]
    """

    def __init__(
        self,
        D: int,
        F: int,
        E: int,
        K: int,
        *,
        iterations: int = 2,
        inner_residual: bool = True,
        router: str = "softmax_topk",
        router_options: dict | None = None,
        **options: Any,
    ):
        super().__init__()
        if iterations < 1:
            raise ValueError(f"a chain has at least 1 iteration, not {iterations}")
        if K % iterations:
            raise ValueError(
                f"K={K} experts per token cannot be shared equally by {iterations} iterations; "
                f"make K a multiple of {iterations}"
            )
        if not isinstance(router, str):
            raise ValueError("give the router by name, because a chain builds one for each iteration")
        self.inner_residual = inner_residual
        self.layer = MoE(D, F, E, K // iterations, router=router, router_options=router_options, **options)
        first = self.layer.router
        self.later_routers = nn.ModuleList(
            build(router, D, first.E, first.K, **(router_options or {})) for _ in range(iterations - 1)
        )
        if (device := options.get("device")) is not None:
            self.later_routers.to(device)

    @property
    def D(self) -> int:
        return self.layer.D

    @property
    def like(self) -> Tensor:
        return self.layer.like

    @property
    def carries_input(self) -> bool:
        """With the inner residual a block adds no other residual, as in the authors' decoder layer."""
        return self.inner_residual

    @property
    def causal(self) -> bool:
        return self.layer.causal

    @property
    def batch_dependent(self) -> bool:
        return self.layer.batch_dependent

    def forward(self, x: Tensor, info: TokenInfo = TokenInfo()) -> tuple[Tensor, Routings]:
        x_TD = self.layer.tokens(x)
        routings = []
        for router in (self.layer.router, *self.later_routers):
            routing = self.layer.route(router, x_TD, info)
            y_TD = self.layer.compute(x_TD, routing)
            x_TD = x_TD + y_TD if self.inner_residual else y_TD
            routings.append(routing)
        return x_TD.view(x.shape), Routings(tuple(routings))

    def extra_repr(self) -> str:
        return f"iterations={1 + len(self.later_routers)}, inner_residual={self.inner_residual}"
