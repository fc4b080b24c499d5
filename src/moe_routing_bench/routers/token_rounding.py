"""Token rounding (SonicMoE): top-k, then tokens are added or removed until experts have whole tiles.

    z = x W,  p = softmax(z),  a token chooses the K experts with the largest z;  c_e tokens chose expert e
    target_e = c_e rounded to a multiple of `tile`: "nearest" (half to even, as torch.round), "up" or "down"
    expert e ranks all tokens, first those that chose it (by gate), then the others (by p), and takes target_e
    gate = p_e / sum of p over the token's K choices if it chose e, else p_e

No row of a tile is wasted. An expert gets or loses fewer than `tile` tokens, those with the highest p or the
lowest gates. A token can end with fewer than K experts, with none, or with up to E. `most` limits them (the
largest z), and an expert that loses tokens by this limit does not have whole tiles.

An expert cannot take more tokens than exist: with fewer than a tile, "up" gives it all of them, which is part
of a tile. Masked tokens are not counted and never taken; all others rank before them.

The tokens that an expert takes depend on all others, also on later ones, so it is not causal. `tile` belongs
to the kernel: 128 in the authors' code; the default here is 16, the rows of an AMX tile.

Of equal gates the earlier token comes first; the authors do not define this. Their code ranks added tokens by
p - 1 in x's dtype, where small p become equal; here they are ranked by log p.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core.names import one_of
from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.routers.losses import switch_loss
from moe_routing_bench.routers.router import Router

ROUNDINGS = ("nearest", "up", "down")


class TokenRoundingRouter(Router):
    causal = False
    batch_dependent = True
    paper = "SonicMoE, Guo et al. 2025, arXiv:2512.14080"
    gate_sum = "any"
    loss_names = ("switch", "z")
    experts_per_token = "0 to E, near K on average"

    def __init__(
        self,
        D: int,
        E: int,
        K: int,
        *,
        tile: int = 16,
        rounding: str = "nearest",
        most: int | None = None,
        **options: Any,
    ):
        super().__init__(D, E, K, **options)
        if tile < 1:
            raise ValueError(f"tile must be at least 1 row, not {tile}")
        one_of("rounding", rounding, ROUNDINGS)
        self.most = self.widest(most)
        self.tile, self.rounding = tile, rounding
        self.w_DE = nn.Parameter(torch.empty(D, E))
        self.reset_parameters()

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        logits_TE = self.project(self.prepare(x_TD, info), self.w_DE)
        score_TE = logits_TE.softmax(-1)
        _, order_TE = self.topk(logits_TE, self.E)
        choice_TK = order_TE[:, : self.K]
        exists_T1 = torch.ones_like(choice_TK[:, :1], dtype=torch.bool)
        if info.mask_T is not None:
            exists_T1 = info.mask_T.bool().unsqueeze(1)
        chose_TE = torch.zeros_like(score_TE, dtype=torch.bool).scatter(1, choice_TK, True) & exists_T1
        share_T1 = score_TE.gather(1, choice_TK).sum(1, keepdim=True)
        gate_TE = torch.where(chose_TE, score_TE / share_T1, score_TE)

        # gates are at least 0, and log p of an expert that was not chosen is below 0, so one sort ranks both
        wish_TE = torch.where(chose_TE, gate_TE, logits_TE.log_softmax(-1)).detach()
        wish_TE = torch.where(exists_T1, wish_TE, float("-inf"))
        taken_TE = first_TE(wish_TE, rounded(chose_TE.sum(0), self.tile, self.rounding))
        expert_TK = in_order(order_TE, taken_TE, self.most)
        chosen_TK = expert_TK >= 0
        gate_TK = torch.where(chosen_TK, gate_TE.gather(1, expert_TK.clamp_min(0)), 0.0)
        losses = {"switch": lambda: switch_loss(score_TE, choice_TK, self.E, info.mask_T)}
        return self.routed(expert_TK, gate_TK, logits_TE, info, losses, ragged=True)


def rounded(count_E: Tensor, tile: int, rounding: str) -> Tensor:
    """Rounds to a multiple of tile. 8, 12, 20 with tile 8: nearest 8, 16, 16; up 8, 16, 24; down 8, 8, 16."""
    tiles_E, rest_E = count_E // tile, count_E % tile
    if rounding == "up":
        tiles_E = tiles_E + (rest_E > 0)
    if rounding == "nearest":
        half_to_even_E = (2 * rest_E == tile) & (tiles_E % 2 == 1)
        tiles_E = tiles_E + ((2 * rest_E > tile) | half_to_even_E)
    return tiles_E * tile


def first_TE(wish_TE: Tensor, number_E: Tensor) -> Tensor:
    """True for the number_e highest of each column; of equal numbers the earlier token comes first."""
    # a CPU sorts rows 2x faster than columns
    wish_ET = wish_TE.T.contiguous()
    order_ET = wish_ET.sort(dim=1, descending=True, stable=True).indices
    place_T = torch.arange(wish_ET.shape[1], device=wish_ET.device)
    first_ET = torch.zeros_like(wish_ET, dtype=torch.bool)
    return first_ET.scatter(1, order_ET, place_T < number_E.unsqueeze(1)).T


def in_order(order_TE: Tensor, taken_TE: Tensor, most: int) -> Tensor:
    """At most `most` of the taken experts of each token, in the given order, then -1."""
    taken_TE = taken_TE.gather(1, order_TE)
    place_TE = taken_TE.cumsum(1) - 1
    # experts that are not taken, or one too many, go to a last column that is removed
    place_TE = torch.where(taken_TE, place_TE.clamp_max(most), most)
    none_TK = order_TE.new_full((order_TE.shape[0], most + 1), -1)
    return none_TK.scatter(1, place_TE, order_TE)[:, :most]
