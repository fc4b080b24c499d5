"""What a router chose: Routing (each token has experts) and SoftRouting (each slot mixes tokens)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenInfo:
    """What a router may know about tokens besides their vectors. Everything is optional.

    Two sequences of three tokens each, where the last token is padding:
      num_sequences = 2                        tokens 0-2 and 3-5 belong together
      token_id_T    = [17, 4, 9, 17, 4, 0]     the vocabulary ids, for hash routing
      mask_T        = [1, 1, 1, 1, 1, 0]       False: send this token nowhere, ignore it in losses

    >>> info = mrb.TokenInfo(mask_T=torch.tensor([True, False]))
    >>> mrb.all_routers()["switch"](D=8, E=4, K=1)(torch.randn(2, 8), info).expert_TK[1].tolist()
    [-1]
    """

    token_id_T: Tensor | None = None
    mask_T: Tensor | None = None
    num_sequences: int = 1


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The experts that each token goes to, and their weights.

    T=3, K=2, E=4. Token 1 uses one expert (a ragged row), token 2 uses none:
      expert_TK = [[0, 2], [3, -1], [-1, -1]]
      gate_TK   = [[0.75, 0.25], [1.0, 0.0], [0.0, 0.0]]
      load_E()  = [1, 0, 1, 1]

    An id below 0 or >= num_experts means "no expert"; its gate is ignored. The experts of one token are
    distinct. With `ragged=False` the router promises that every id is a real expert, so later stages need no
    masks.

    >>> expert_TK = torch.tensor([[0, 2], [3, -1], [-1, -1]])
    >>> mrb.Routing(expert_TK=expert_TK, gate_TK=torch.rand(3, 2), num_experts=4).load_E().tolist()
    [1, 0, 1, 1]
    """

    expert_TK: Tensor  # int64
    gate_TK: Tensor  # floating point; float32 unless the router's dtype option differs
    num_experts: int
    ragged: bool = True
    logits_TE: Tensor | None = None  # router logits before any score function
    losses: Mapping[str, Tensor] = field(default_factory=dict)  # by dialect, unweighted scalars
    aux_loss: Tensor | None = None  # sum of the losses times the router's loss weights

    @property
    def num_tokens(self) -> int:
        return self.expert_TK.shape[0]

    @property
    def num_choices(self) -> int:
        return self.expert_TK.shape[1]

    def chosen_TK(self) -> Tensor:
        """True where the id names a real expert."""
        return (self.expert_TK >= 0) & (self.expert_TK < self.num_experts)

    def load_E(self) -> Tensor:
        """How many tokens chose each expert, before any are dropped. It does not wait for the device."""
        chosen_TK = self.chosen_TK()
        target_TK = torch.where(chosen_TK, self.expert_TK, 0)
        load_E = torch.zeros(self.num_experts, dtype=torch.int64, device=self.expert_TK.device)
        return load_E.scatter_add(0, target_TK.flatten(), chosen_TK.flatten().to(torch.int64))

    def masked(self, mask_T: Tensor | None) -> Routing:
        """The same routing, but tokens where mask_T is False go nowhere."""
        if mask_T is None:
            return self
        keep_T1 = mask_T.bool().unsqueeze(1)
        return replace(
            self,
            expert_TK=torch.where(keep_T1, self.expert_TK, -1),
            gate_TK=torch.where(keep_T1, self.gate_TK, 0.0),
            ragged=True,
        )

    def to(self, device: torch.device | str) -> Routing:
        return replace(self, **_moved(self, device))

    def validate(self) -> Routing:
        """Raises ValueError if this is not a valid routing. It reads values on the host."""
        if self.num_experts < 1:
            raise ValueError(f"num_experts is {self.num_experts}; there must be at least one expert")
        if self.expert_TK.ndim != 2 or self.expert_TK.dtype != torch.int64:
            raise ValueError(
                f"expert_TK must be a 2-dimensional int64 tensor (tokens x choices), "
                f"not {self.expert_TK.dtype} of shape {tuple(self.expert_TK.shape)}"
            )
        if self.gate_TK.shape != self.expert_TK.shape:
            raise ValueError(
                f"gate_TK has shape {tuple(self.gate_TK.shape)} but expert_TK "
                f"{tuple(self.expert_TK.shape)}: one gate per choice"
            )
        if not self.gate_TK.is_floating_point():
            raise ValueError(f"gate_TK must be floating point, not {self.gate_TK.dtype}")
        if self.gate_TK.device != self.expert_TK.device:
            raise ValueError(f"gate_TK is on {self.gate_TK.device}, expert_TK on {self.expert_TK.device}")
        chosen_TK = self.chosen_TK()
        if not self.ragged and not bool(chosen_TK.all()):
            raise ValueError("ragged=False promises a real expert in every place, but some ids are not")
        bad_gate_TK = chosen_TK & ~self.gate_TK.detach().isfinite()
        if bool(bad_gate_TK.any()):
            t, k = bad_gate_TK.nonzero()[0].tolist()
            raise ValueError(f"the gate of token {t}, choice {k} is {self.gate_TK[t, k].item()}")
        # absent choices get distinct ids beyond the experts, so that only real repeats are equal
        stand_in_K = self.num_experts + torch.arange(self.num_choices, device=self.expert_TK.device)
        sorted_TK = torch.where(chosen_TK, self.expert_TK, stand_in_K).sort(dim=1).values
        repeat_TK = sorted_TK[:, 1:] == sorted_TK[:, :-1]
        if bool(repeat_TK.any()):
            t, k = repeat_TK.nonzero()[0].tolist()
            raise ValueError(f"token {t} chose expert {sorted_TK[t, k].item()} twice; choices are distinct")
        return self


@dataclass(frozen=True, kw_only=True)
class SoftRouting:
    """Soft-MoE: every slot is a weighted mean of tokens, every token a weighted mean of slot results.

    One sequence (B=1) of N=2 tokens, S=3 slots (3 experts with one slot each):
      dispatch_BNS[0] = [[.5, .9, .1], [.5, .1, .9]]   columns sum to 1: slot 0 is the mean of both tokens
      combine_BNS[0]  = [[.2, .7, .1], [.2, .1, .7]]   rows sum to 1
    Slots are ordered by expert: with s slots per expert, slot j belongs to expert j // s.

    >>> routing = mrb.all_routers()["soft_moe"](D=8, E=3, K=1)(torch.randn(2, 8))
    >>> routing.dispatch_BNS.shape
    torch.Size([1, 2, 3])
    """

    dispatch_BNS: Tensor
    combine_BNS: Tensor
    num_experts: int
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    aux_loss: Tensor | None = None

    @property
    def slots_per_expert(self) -> int:
        return self.dispatch_BNS.shape[2] // self.num_experts

    def to(self, device: torch.device | str) -> SoftRouting:
        return replace(self, **_moved(self, device))

    def validate(self) -> SoftRouting:
        """Raises ValueError if this is not a valid soft routing. It reads values on the host."""
        if self.dispatch_BNS.ndim != 3 or self.dispatch_BNS.shape != self.combine_BNS.shape:
            raise ValueError(
                f"dispatch_BNS {tuple(self.dispatch_BNS.shape)} and combine_BNS "
                f"{tuple(self.combine_BNS.shape)} must have one shape: sequences x tokens x slots"
            )
        S = self.dispatch_BNS.shape[2]
        if S == 0 or S % self.num_experts:
            raise ValueError(f"{S} slots cannot be shared equally by {self.num_experts} experts")
        for name, weights, dim in (
            ("dispatch", self.dispatch_BNS, 1),
            ("combine", self.combine_BNS, 2),
        ):
            total = weights.detach().double().sum(dim)
            # a masked token has the sum 0, and so has a slot of a sequence whose tokens are all masked
            if not bool((((total - 1).abs() < 1e-2) | (total == 0)).all()):
                who = "slot" if dim == 1 else "token"
                raise ValueError(f"the {name} weights of a {who} must sum to 1, or to 0 if it is masked")
        return self


def _moved(routing: Routing | SoftRouting, device: torch.device | str) -> dict[str, Any]:
    """All its tensors, also those of the losses, on another device."""
    tensors = {name: value.to(device) for name, value in vars(routing).items() if isinstance(value, Tensor)}
    return {**tensors, "losses": {name: loss.to(device) for name, loss in routing.losses.items()}}
