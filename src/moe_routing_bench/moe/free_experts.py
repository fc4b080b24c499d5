"""Experts without cost (MoE++, arXiv:2410.07348): discard a token, copy it, or add a learned vector.

    zero       E(x) = 0
    copy       E(x) = x
    constant   E(x) = a x + b v,   (a, b) = softmax(x W),  v a learned vector, W of D x 2

The router chooses among the E experts and these. For kernels an id of E or more means "no expert", so a plan
has no rows for them. The loss weights experts and free experts differently: with f and P as in switch_loss,

    L = N sum_e eta_e f_e P_e,   eta_e = 1 for an expert, tau for a free one,   N = E + free ones

which is switch_loss if tau = 1; the paper omits the factor N / K. tau < 1 sends more tokens to free experts.

The authors' code (SkyworkAI/MoE-plus-plus) orders ids as experts, constant, copy, zero. It gives the gate of
a zero expert to the token's other choices (`zero_keeps_gate=False` here; the paper's formula keeps it). It
multiplies the layer's input by K, and adds a map of the previous layer's logits to this layer's logits; this
is not done here. LongCat-Flash's "zero experts" are copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from moe_routing_bench.core.routing import Routing
from moe_routing_bench.routers.losses import switch_loss


@dataclass(frozen=True, kw_only=True)
class FreeExperts:
    """How many free experts of each kind a layer has, and how they are balanced.

    FreeExperts(zero=1, copy=1, constant=2) in a layer of E=8 experts. The router chooses among 12:
      ids 0-7 experts, 8 zero, 9 copy, 10 and 11 constant
    With loss_weight=0.01 the loss above is in routing.losses["free"], and 0.01 times it in routing.aux_loss.

    >>> free = mrb.FreeExperts(zero=1, copy=1, constant=2)
    >>> mrb.MoE(D=8, F=16, E=8, K=2, free_experts=free).router.E
    12
    """

    zero: int = 0
    copy: int = 0
    constant: int = 0
    zero_keeps_gate: bool = True  # False: the other choices of a token share the gate of its zero experts
    loss_weight: float | None = None  # None: no loss
    tau: float = 0.75

    def __post_init__(self) -> None:
        if min(self.zero, self.copy, self.constant) < 0 or self.total == 0:
            raise ValueError("give at least one of zero, copy and constant, and none below 0")
        if self.tau <= 0:
            raise ValueError(
                f"tau is the weight of free experts in the loss and must be above 0, not {self.tau}"
            )

    @property
    def total(self) -> int:
        return self.zero + self.copy + self.constant


class FreeExpertPart(nn.Module):
    """The part of a layer that computes its free experts.

    state_dict, only with constant experts: v_eD, one vector each, and w_2De, their W as two D x e matrices
    (e: the constant experts).
    """

    def __init__(
        self,
        D: int,
        E: int,
        free: FreeExperts,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.E, self.free = E, free
        self.first_copy = E + free.zero
        self.first_constant = self.first_copy + free.copy
        self.v_eD = self.w_2De = None
        if free.constant:
            self.v_eD = nn.Parameter(torch.empty(free.constant, D, device=device, dtype=dtype))
            self.w_2De = nn.Parameter(torch.empty(2, D, free.constant, device=device, dtype=dtype))
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # as in the authors' code: v from N(0, 1), W as in nn.Linear
        if self.v_eD is not None and self.w_2De is not None:
            self.v_eD.normal_()
            bound = self.w_2De.shape[1] ** -0.5
            self.w_2De.uniform_(-bound, bound)

    def settle(self, routing: Routing, mask_T: Tensor | None) -> Routing:
        """The router's choice with gates and loss adjusted for free experts."""
        if not self.free.zero_keeps_gate:
            zero_TK = (routing.expert_TK >= self.E) & (routing.expert_TK < self.first_copy)
            left_TK = torch.where(zero_TK, 0.0, routing.gate_TK)
            before_T1, after_T1 = routing.gate_TK.sum(1, keepdim=True), left_TK.sum(1, keepdim=True)
            # a token with only zero experts has no other choice that could get the gate
            gate_TK = left_TK * before_T1 / torch.where(after_T1 > 0, after_T1, 1.0)
            routing = replace(routing, gate_TK=gate_TK)
        if self.free.loss_weight is None:
            return routing
        if routing.logits_TE is None:
            raise ValueError("this router has no logits for the loss of free experts; set loss_weight=None")
        N = self.E + self.free.total
        eta_E = routing.logits_TE.new_ones(N)
        eta_E[self.E :] = self.free.tau
        loss = switch_loss(routing.logits_TE.softmax(-1) * eta_E, routing.expert_TK, N, mask_T)
        weighted = self.free.loss_weight * loss
        aux_loss = weighted if routing.aux_loss is None else routing.aux_loss + weighted
        return replace(routing, losses={**routing.losses, "free": loss}, aux_loss=aux_loss)

    def for_kernels(self, routing: Routing) -> Routing:
        """The same routing for kernels, which know only the E experts."""
        return replace(routing, num_experts=self.E, ragged=True)

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """The sum over a token's free experts of gate * expert(x)."""
        free_T1 = (routing.expert_TK >= self.E).any(1, keepdim=True)
        x_TD = torch.where(free_T1, x_TD, 0.0)  # values of masked tokens must not reach the result
        keep_T1 = self._gates(routing, self.first_copy, self.free.copy).sum(1, keepdim=True)
        if self.v_eD is None or self.w_2De is None:
            return keep_T1 * x_TD
        gate_Te = self._gates(routing, self.first_constant, self.free.constant)
        a_Te, b_Te = (x_TD @ self.w_2De).to(gate_Te.dtype).softmax(0)
        keep_T1 = keep_T1 + (gate_Te * a_Te).sum(1, keepdim=True)
        return keep_T1 * x_TD + (gate_Te * b_Te) @ self.v_eD.to(gate_Te.dtype)

    def _gates(self, routing: Routing, first: int, count: int) -> Tensor:
        """gate_Te of the experts first .. first + count - 1; 0 if a token did not choose one."""
        id_e = torch.arange(first, first + count, device=routing.expert_TK.device)
        here_TKe = routing.expert_TK.unsqueeze(2) == id_e
        return torch.where(here_TKe, routing.gate_TK.unsqueeze(2), 0.0).sum(1)

    def extra_repr(self) -> str:
        return f"zero={self.free.zero}, copy={self.free.copy}, constant={self.free.constant}"
