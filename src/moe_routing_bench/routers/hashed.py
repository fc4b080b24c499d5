"""Hash layer: a fixed hash of the token's vocabulary id gives its experts; nothing is learned.

    K distinct experts drawn by Floyd's method from h_j = mix(mix(id ^ mix(seed)) + j * golden), gate = 1 / K

For j = E-K .. E-1 the draw is h_j mod (j + 1), or j if that was drawn before, so every set of K experts is
equally likely. `mix` is an xorshift-multiply hash of 32 bits in int64, so no product exceeds 2^59 and no
remainder is negative.

K = 1 is the paper's random hash, with gate 1. The paper stores a random table of the vocabulary; a computed
hash needs no vocabulary size. Its balanced hash, a table made from token frequencies for equal shares, is not
here. For K > 1 this is the mean of K whole experts. The paper's MultiHash instead builds one hidden layer of
K segments, each from another hash.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.routers.router import Router

BITS_32 = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
Number = TypeVar("Number", int, Tensor)


class HashedRouter(Router):
    causal = True
    batch_dependent = False
    paper = "Hash Layers For Large Sparse Models, Roller et al. 2021, arXiv:2106.04426"
    gate_sum = "one"

    def __init__(self, D: int, E: int, K: int, *, seed: int = 0, **options: Any):
        super().__init__(D, E, K, **options)
        self.seed = seed

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        self.check_shapes(x_TD, info)
        if info.token_id_T is None:
            raise ValueError("hash routing reads vocabulary ids; give TokenInfo(token_id_T=...)")
        hash_T = mix(info.token_id_T.to(torch.int64) ^ mix(self.seed))
        drawn: list[Tensor] = []
        for j in range(self.E - self.K, self.E):
            draw_T = mix(hash_T + j * GOLDEN) % (j + 1)
            for earlier_T in drawn:
                draw_T = torch.where(earlier_T == draw_T, j, draw_T)
            drawn.append(draw_T)
        expert_TK = torch.stack(drawn, dim=1)
        gate_TK = torch.full(expert_TK.shape, 1 / self.K, dtype=self.dtype, device=x_TD.device)
        routing = Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=self.E, ragged=False)
        return self.finish(routing, {}, info)


def mix(x: Number) -> Number:
    """Mixes 32 bits; higher bits of x are ignored."""
    x = x & BITS_32
    x = ((x >> 16) ^ x) * 0x45D9F3B & BITS_32
    x = ((x >> 16) ^ x) * 0x45D9F3B & BITS_32
    return (x >> 16) ^ x
