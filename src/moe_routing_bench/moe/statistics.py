"""RoutingStatistics: numbers about the balance and specialisation of a routing."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.load import LoadStatistics
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.core.routing import Routing

# tokens that are processed together; 10^6 tokens with 512 experts would need 2 GB at once
CHUNK = 65_536


@dataclass(frozen=True, kw_only=True)
class RoutingStatistics:
    """Numbers about balance and specialisation, each a tensor on the routing's device.

    T=4, K=2, E=3, expert_TK = [[0, 1], [0, 1], [0, 2], [2, -1]], logits_TE = [[log 2, 0, 0]] * 4, a padded
    plan of capacity 2, `previous` with expert_TK = [[1, 0], [0, 2], [0, 2], [1, -1]], label_T = [0, 0, 1, 1]:
      load              = LoadStatistics of [3, 2, 2]: cv, gini, entropy, max violation, dead experts
      share_E           = [3/7, 2/7, 2/7]   of all pairs
      experts_per_token = 1.75              7 pairs of 4 tokens
      drop_rate         = 1/7               expert 0 has 2 rows for 3 pairs; None without a plan
      confidence        = 0.5               mean of the tokens' largest softmax(logits); None without logits
      agreement         = 0.5833            mean over tokens of |A and B| / |A or B|, A and B the experts now
                                            and before: (2/2 + 1/3 + 2/2 + 0/2) / 4; None without `previous`
      co_EE             = [[3, 2, 1], [2, 2, 0], [1, 0, 2]]   tokens that use both; diagonal: the load
      label_bits        = 0.5917            mutual information of expert and label over the pairs, in bits:
                                            counts [[2, 1], [2, 0], [0, 2]] of 7; None without labels
      label_share       = 0.6005            label_bits over the entropy of the label (0.9852 bits): 0 if the
                                            experts are independent of the label, 1 if they determine it

    Tokens without an expert in both routings do not count for agreement. By chance there are about
    (E - 1)(L - 1) / (2 ln 2 * pairs) label_bits for L labels: compare only numbers from equally many pairs.

    >>> expert_TK = torch.tensor([[0, 1], [0, 1], [0, 2], [2, -1]])
    >>> routing = mrb.Routing(expert_TK=expert_TK, gate_TK=torch.ones(4, 2), num_experts=3)
    >>> mrb.RoutingStatistics.of(routing).experts_per_token.item()
    1.75
    """

    load: LoadStatistics
    share_E: Tensor
    experts_per_token: Tensor
    drop_rate: Tensor | None
    confidence: Tensor | None
    agreement: Tensor | None
    co_EE: Tensor
    label_bits: Tensor | None
    label_share: Tensor | None

    @staticmethod
    def of(
        routing: Routing,
        plan: RoutingPlan | None = None,
        *,
        previous: Routing | None = None,
        label_T: Tensor | None = None,
        num_labels: int | None = None,
        mask_T: Tensor | None = None,
        num_ranks: int = 1,
    ) -> RoutingStatistics:
        """Does not wait for the device. O(T K^2 + T E) time, O(E^2 + E L) memory besides a chunk of tokens.

        previous: another routing of the same tokens, for instance of the previous step.
        label_T: a label 0 .. num_labels - 1 for each token (its domain, its position); others are ignored.
        mask_T: False where there is no token, as in TokenInfo.
        """
        routing = routing.masked(mask_T)
        _check(routing, previous, label_T, num_labels)
        load = LoadStatistics.of(routing, plan, num_ranks=num_ranks)
        co_EE = _co_EE(routing)
        load_E = co_EE.diagonal()
        pairs = load_E.sum()
        any_pair = pairs.clamp(min=1).double()
        T = max(routing.num_tokens, 1) if mask_T is None else mask_T.bool().sum().clamp(min=1)
        label_bits = label_share = None
        if label_T is not None and num_labels is not None:
            label_bits, label_share = _label_information(routing, label_T, num_labels)
        return RoutingStatistics(
            load=load,
            share_E=load_E / any_pair,
            experts_per_token=pairs / T,
            drop_rate=None if load.dropped_pairs is None else load.dropped_pairs / any_pair,
            confidence=None if routing.logits_TE is None else _confidence(routing.logits_TE, mask_T) / T,
            agreement=None if previous is None else _agreement(routing, previous.masked(mask_T)),
            co_EE=co_EE,
            label_bits=label_bits,
            label_share=label_share,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for a record. It reads values on the host."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value.to_dict()
            if isinstance(value, LoadStatistics)
            else value
            if value is None
            else value.tolist()
            for name, value in values.items()
        }


def _check(
    routing: Routing, previous: Routing | None, label_T: Tensor | None, num_labels: int | None
) -> None:
    T, E = routing.num_tokens, routing.num_experts
    if previous is not None and (previous.num_tokens, previous.num_experts) != (T, E):
        raise ValueError(
            f"agreement needs two routings of the same tokens and experts: this one has T={T} and E={E}, the "
            f"previous one T={previous.num_tokens} and E={previous.num_experts}"
        )
    if (label_T is None) != (num_labels is None):
        raise ValueError("give label_T and num_labels together, or neither")
    if num_labels is not None and num_labels < 1:
        raise ValueError(f"num_labels is {num_labels}; labels are 0 .. num_labels - 1")
    if label_T is not None and label_T.shape != (T,):
        raise ValueError(f"label_T has shape {tuple(label_T.shape)}, but there are T={T} tokens")


def _chunks(T: int) -> list[slice]:
    return [slice(begin, begin + CHUNK) for begin in range(0, T, CHUNK)]


def _ids_and_chosen(routing: Routing, rows: slice) -> tuple[Tensor, Tensor]:
    """The choices of some tokens, with E for an absent expert, and whether each is present."""
    expert_tK = routing.expert_TK[rows]
    chosen_tK = replace(routing, expert_TK=expert_tK).chosen_TK()
    return torch.where(chosen_tK, expert_tK, routing.num_experts), chosen_tK


def _co_EE(routing: Routing) -> Tensor:
    """Counts pairs of choices, K (K + 1) / 2 per token; E x E per token would be too many."""
    E = routing.num_experts
    # one extra place, for pairs in which an expert is absent
    count = torch.zeros(E * E + 1, dtype=torch.int64, device=routing.expert_TK.device)
    for rows in _chunks(routing.num_tokens):
        expert_tK, chosen_tK = _ids_and_chosen(routing, rows)
        for k in range(routing.num_choices):
            both = chosen_tK[:, k:] & chosen_tK[:, k : k + 1]
            place = torch.where(both, expert_tK[:, k : k + 1] * E + expert_tK[:, k:], E * E).flatten()
            count.scatter_add_(0, place, torch.ones_like(place))
    half_EE = count[:-1].view(E, E)
    return half_EE + half_EE.T - torch.diag(half_EE.diagonal())


def _confidence(logits_TE: Tensor, mask_T: Tensor | None) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=logits_TE.device)
    for rows in _chunks(logits_TE.shape[0]):
        logits_tE = logits_TE.detach()[rows].float()
        top_t = (logits_tE.amax(1) - logits_tE.logsumexp(1)).exp()
        kept_t = top_t if mask_T is None else torch.where(mask_T.bool()[rows], top_t, 0.0)
        total = total + kept_t.double().sum()
    return total


def _agreement(now: Routing, before: Routing) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=now.expert_TK.device)
    tokens = torch.zeros((), dtype=torch.int64, device=now.expert_TK.device)
    for rows in _chunks(now.num_tokens):
        (now_tK, chosen_tK), (before_tK, used_tK) = _ids_and_chosen(now, rows), _ids_and_chosen(before, rows)
        # a place for each expert and one for absent choices; one look-up per choice finds what both use
        used_tE1 = used_tK.new_zeros(used_tK.shape[0], now.num_experts + 1).scatter_(1, before_tK, True)
        both_t = (used_tE1.gather(1, now_tK) & chosen_tK).sum(1)
        either_t = chosen_tK.sum(1) + used_tK.sum(1) - both_t
        total = total + (both_t / either_t.clamp(min=1)).double().sum()
        tokens = tokens + (either_t > 0).sum()
    return torch.where(tokens > 0, total / tokens.clamp(min=1), 1.0)


def _label_information(routing: Routing, label_T: Tensor, num_labels: int) -> tuple[Tensor, Tensor]:
    E = routing.num_experts
    known_TK = routing.chosen_TK() & ((label_T >= 0) & (label_T < num_labels)).unsqueeze(1)
    place_TK = routing.expert_TK * num_labels + label_T.unsqueeze(1)
    place = torch.where(known_TK, place_TK, E * num_labels).flatten()
    count = torch.zeros(E * num_labels + 1, dtype=torch.int64, device=place.device)
    count.scatter_add_(0, place, torch.ones_like(place))
    count_EL = count[:-1].view(E, num_labels)
    share_EL = count_EL / count_EL.sum().clamp(min=1).double()
    marginals = (share_EL.sum(1), share_EL.sum(0), share_EL)
    of_expert, of_label, of_both = (torch.special.entr(share).sum() / math.log(2) for share in marginals)
    # rounding may leave the bounds: the information is between 0 and the entropy of the label
    bits = torch.minimum((of_expert + of_label - of_both).clamp(min=0), of_label)
    return bits, torch.where(of_label > 0, bits / torch.where(of_label > 0, of_label, 1.0), 0.0)
