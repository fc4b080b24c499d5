"""The protocol of feed-forward layers in a decoder block, and the dense network as a control.

MoE, ChainOfExperts, Perft and DenseFeedForward follow it. A block uses nothing else of them.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from moe_routing_bench.core.routing import Routing, SoftRouting, TokenInfo
from moe_routing_bench.moe.layer import Experts, Routings

Chosen = Routing | SoftRouting | Routings | None


class FeedForward(Protocol):
    """y, chosen = feed_forward(x, info): x and y are (..., D); `chosen` is None if the layer has no
    router."""

    @property
    def D(self) -> int: ...

    @property
    def causal(self) -> bool:
        """False if a token's result can depend on later tokens."""

    @property
    def carries_input(self) -> bool:
        """True if y already contains x, so that a block adds no residual of its own."""

    @property
    def like(self) -> Tensor:
        """One of its matrices. Norms and attention in the block get the same dtype and device."""

    def __call__(self, x: Tensor, info: TokenInfo = ...) -> tuple[Tensor, Any]: ...


class DenseFeedForward(nn.Module):
    """One network for every token:  y, None = DenseFeedForward(D=64, F=256)(x).

    state_dict: experts.* as in an MoE layer with a single expert.
    """

    causal, carries_input = True, False

    def __init__(self, D: int, F: int, **options: Any):
        super().__init__()
        self.D = D
        self.experts = Experts(D, F, 1, **options)

    @property
    def like(self) -> Tensor:
        return self.experts.w_in_EDG

    def forward(self, x: Tensor, info: TokenInfo = TokenInfo()) -> tuple[Tensor, None]:
        return self.experts.on_every_token(x.reshape(-1, self.D)).view(x.shape), None


def routings_of(chosen: Chosen) -> tuple[Routing | SoftRouting, ...]:
    """Returns the routings of one layer, in the order in which its routers ran."""
    if chosen is None:
        return ()
    return tuple(chosen) if isinstance(chosen, Routings) else (chosen,)
