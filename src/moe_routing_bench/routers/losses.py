"""Auxiliary losses of routers, named by dialect. They are unweighted; a router multiplies by its weights.

    score_TE    what the loss trains, rows summing to 1 (p = softmax(z) for softmax routers)
    expert_TK   the chosen experts; ids outside 0 .. E-1 are not counted
    mask_T      False: the token does not exist. T below is the number of tokens that exist
They are computed in float32 (float64 for float64 inputs). Without tokens a loss is 0.

z, entropy and l1 are means over tokens, and deepseek is a mean over sequences, so the mean over equal
micro-batches is the loss of the batch. The others are products of two sums over the batch, where this is not
true.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.core.routing import TokenInfo


def switch_loss(
    score_TE: Tensor,
    expert_TK: Tensor,
    num_experts: int,
    mask_T: Tensor | None = None,
    *,
    choices_per_token: Tensor | float | None = None,
) -> Tensor:
    """Switch, Megatron: E sum_e f_e P_e, f_e = c_e / (T K), P_e = mean_t score.   1 at balance, at most E.

    c_e, the number of tokens that chose expert e, has no gradient. Megatron, MegaBlocks (one layer) and
    SonicMoE compute the same number. K is the width of expert_TK, or choices_per_token for ragged rows.
    """
    K = expert_TK.shape[1] if choices_per_token is None else choices_per_token
    return hf_loss(score_TE, expert_TK, num_experts, mask_T) / K


def hf_loss(score_TE: Tensor, expert_TK: Tensor, num_experts: int, mask_T: Tensor | None = None) -> Tensor:
    """Transformers' load_balancing_loss_func of one layer: E sum_e (c_e / T) P_e.   K at balance.

    K times switch_loss. Transformers pools the layers of a model before the product; this does not.
    """
    T = _num_tokens(score_TE, mask_T)
    fraction_E = _count_E(expert_TK, num_experts, mask_T).to(_wide(score_TE)) / T
    return num_experts * (fraction_E * _sum_E(score_TE, mask_T) / T).sum()


def deepseek_loss(
    score_TE: Tensor,
    expert_TK: Tensor,
    num_experts: int,
    mask_T: Tensor | None = None,
    *,
    num_sequences: int = 1,
) -> Tensor:
    """DeepSeek: switch_loss of each sequence, mean over sequences with tokens.   1 at balance, at most E.

    Sequences that are unbalanced in opposite ways do not cancel. DeepSeek-V2's code (`seq_aux`) and, without
    padding, Megatron's `seq_aux_loss` compute the same number.
    """
    T, K = expert_TK.shape
    B, E = num_sequences, num_experts
    sequence_T1 = torch.arange(B, device=expert_TK.device).repeat_interleave(T // B).unsqueeze(1)
    chosen_TK = (expert_TK >= 0) & (expert_TK < E)
    count_BE = _count_E(torch.where(chosen_TK, sequence_T1 * E + expert_TK, -1), B * E, mask_T).view(B, E)
    exists_T = torch.ones_like(expert_TK[:, 0], dtype=torch.bool) if mask_T is None else mask_T.bool()
    score_TE = torch.where(exists_T.unsqueeze(1), score_TE.to(_wide(score_TE)), 0.0)
    sum_BE = score_TE.view(B, T // B, E).sum(1)
    length_B = exists_T.view(B, T // B).sum(1)
    loss_B = E / K * (count_BE * sum_BE).sum(1) / length_B.clamp_min(1).square()
    return loss_B.sum() / (length_B > 0).sum().clamp_min(1)


def relu_loss(
    gate_TE: Tensor,
    expert_TK: Tensor,
    num_experts: int,
    mask_T: Tensor | None = None,
    *,
    choices_per_token: Tensor | float,
) -> Tensor:
    """ReMoE: the Switch formula with the score R = ReLU(z): E sum_e (c_e / (T K)) mean_t R.

    K = choices_per_token is the target of the router, not the number it chose. At balance with K choices per
    token this is l1_loss; experts that are chosen more often get a larger gradient.
    """
    return switch_loss(gate_TE, expert_TK, num_experts, mask_T, choices_per_token=choices_per_token)


def l1_loss(gate_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """ReMoE without balance: mean_t sum_e |R|.   It does not measure balance: 0 if no expert is chosen."""
    return _sum_E(gate_TE.abs(), mask_T).sum() / _num_tokens(gate_TE, mask_T)


def entropy_loss(logits_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """Dynamic MoE: mean_t of the entropy of p = softmax(z).   log E if p is flat, 0 if it is certain.

    From logits, because p log p has no finite gradient where p underflows to 0.
    """
    log_TE = logits_TE.to(_wide(logits_TE)).log_softmax(-1)
    return _sum_E(-log_TE.exp() * log_TE, mask_T).sum() / _num_tokens(logits_TE, mask_T)


def z_loss(logits_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """ST-MoE: mean_t (log sum_e exp z)^2.   It does not measure balance: (log E)^2 for z = 0."""
    square_T1 = torch.logsumexp(logits_TE.to(_wide(logits_TE)), dim=1, keepdim=True).square()
    return _sum_E(square_T1, mask_T).sum() / _num_tokens(logits_TE, mask_T)


def importance_loss(
    gate_TK: Tensor, expert_TK: Tensor, num_experts: int, mask_T: Tensor | None = None
) -> Tensor:
    """Shazeer: CV^2 of sum_t gate over the experts.   0 at balance, E - 1 if one expert has it all."""
    chosen_TK = (expert_TK >= 0) & (expert_TK < num_experts)
    gate_TE = gate_TK.new_zeros(gate_TK.shape[0], num_experts).scatter_add(
        1, torch.where(chosen_TK, expert_TK, 0), torch.where(chosen_TK, gate_TK, 0.0)
    )
    return _squared_cv(_sum_E(gate_TE, mask_T))


def load_loss(probability_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """Shazeer: CV^2 of sum_t P(token t uses expert e).   0 at balance, E - 1 if one expert has it all."""
    return _squared_cv(_sum_E(probability_TE, mask_T))


def score_losses(
    seen: Callable[[], tuple[Tensor, Tensor]], num_experts: int, info: TokenInfo
) -> dict[str, Callable[[], Tensor]]:
    """switch, hf and deepseek, by name. seen() gives score_TE and expert_TK; only a loss that is computed
    calls it."""
    E, mask_T = num_experts, info.mask_T
    return {
        "switch": lambda: switch_loss(*seen(), E, mask_T),
        "hf": lambda: hf_loss(*seen(), E, mask_T),
        "deepseek": lambda: deepseek_loss(*seen(), E, mask_T, num_sequences=info.num_sequences),
    }


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _num_tokens(x_TE: Tensor, mask_T: Tensor | None) -> Tensor | int:
    """The number of tokens, at least 1, so that a mean over no tokens is 0."""
    return max(x_TE.shape[0], 1) if mask_T is None else mask_T.bool().sum().clamp_min(1)


def _sum_E(x_TE: Tensor, mask_T: Tensor | None) -> Tensor:
    x_TE = x_TE.to(_wide(x_TE))
    return (x_TE if mask_T is None else torch.where(mask_T.bool().unsqueeze(1), x_TE, 0.0)).sum(0)


def _count_E(expert_TK: Tensor, num_experts: int, mask_T: Tensor | None) -> Tensor:
    counted_TK = (expert_TK >= 0) & (expert_TK < num_experts)
    if mask_T is not None:
        counted_TK = counted_TK & mask_T.bool().unsqueeze(1)
    target_TK = torch.where(counted_TK, expert_TK, 0)
    count_E = torch.zeros(num_experts, dtype=torch.int64, device=expert_TK.device)
    return count_E.scatter_add(0, target_TK.flatten(), counted_TK.flatten().to(torch.int64))


def _squared_cv(total_E: Tensor) -> Tensor:
    """Population variance over squared mean. It has no square root, so its gradient at balance is 0."""
    mean = total_E.mean()
    return ((total_E - mean) / torch.where(mean > 0, mean, 1.0)).square().mean()
