"""Calls Transformers' own experts modules as a model calls them, for the hf_* implementations."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.plan import RoutingPlan

# our names and those of a model's config; both gelus are the exact (erf) form
ACTIVATION = {"swiglu": "silu", "geglu": "gelu"}


def freeze(weights: ExpertWeights) -> ExpertWeights:
    """The weights in the layout of a loaded model, gate_up_proj (E, 2F, D) and down_proj (E, D, F), as views
    with our shapes. There is no copy if they have this layout already."""
    w_in_EDG, w_out_EFD = (_output_first(w.detach()) for w in (weights.w_in_EDG, weights.w_out_EFD))
    return replace(weights, w_in_EDG=w_in_EDG, w_out_EFD=w_out_EFD)


def _output_first(w_EKN: Tensor) -> Tensor:
    if w_EKN.transpose(1, 2).is_contiguous():
        return w_EKN
    E, K, N = w_EKN.shape
    w_ENK = w_EKN.new_empty(E, N, K)
    for to_NK, w_KN in zip(w_ENK, w_EKN, strict=True):  # one expert at a time is 4x faster than all at once
        to_NK.copy_(w_KN.t())
    return w_ENK.transpose(1, 2)


def why_absent() -> str | None:
    if importlib.util.find_spec("transformers") is None:
        return "needs transformers; pip install 'moe-routing-bench[hf]'"
    return None


def why_not(weights: ExpertWeights) -> str | None:
    """Why Transformers cannot compute these experts; None if it can."""
    if (reason := why_absent()) is not None:
        return reason
    if weights.activation not in ACTIVATION:
        return f"Transformers' Qwen3 experts are gated: swiglu or geglu, not {weights.activation}"
    if weights.b_in_EG is not None or weights.b_out_ED is not None:
        return "Transformers' Qwen3 experts have no biases"
    return None


def run(name: str, x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    """Runs the experts function `name` with the choices of a plan."""
    expert_TK = plan.expert_TK()
    if not plan.filled:
        gate_TK = torch.where(expert_TK >= 0, gate_TK, 0.0)
        expert_TK = torch.where(expert_TK >= 0, expert_TK, weights.num_experts)
    return experts(name, x_TD, expert_TK, gate_TK, weights, absent=not plan.filled)


def experts(
    name: str,
    x_TD: Tensor,
    expert_TK: Tensor,
    gate_TK: Tensor,
    weights: ExpertWeights,
    *,
    absent: bool = False,
) -> Tensor:
    """Calls the experts module as a model does: with ids and gates from the router, without a plan.

    absent=True: the id num_experts means no expert, as in Transformers' expert parallelism. This needs extra
    passes over the rows, so a model on one machine does not use it. The module works on views of our weights
    and is as fast as in a model if they have its layout (`freeze`).
    """
    module = _module(name, weights)
    module.gate_up_proj = weights.w_in_EDG.transpose(1, 2)
    module.down_proj = weights.w_out_EFD.transpose(1, 2)
    module._is_expert_parallel = absent
    # Transformers' router rounds the gates to the model's dtype before the experts see them
    return module(x_TD, expert_TK, gate_TK.to(x_TD.dtype))


def _module(name: str, weights: ExpertWeights) -> Any:
    sizes = weights.num_experts, weights.D, weights.F
    return copy.copy(_without_weights(name, *sizes, ACTIVATION[weights.activation]))


@cache
def _without_weights(name: str, E: int, D: int, F: int, hidden_act: str) -> Any:
    """Transformers' experts module of Qwen3-MoE, without weights. Every call runs the function that
    config._experts_implementation names."""
    modeling = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = modeling.Qwen3MoeConfig(
        num_experts=E, hidden_size=D, moe_intermediate_size=F, hidden_act=hidden_act
    )
    config._experts_implementation = name
    with torch.device("meta"):
        module = modeling.Qwen3MoeExperts(config)
    # plain attributes replace them, because a view of weights that are trained elsewhere is not a parameter
    del module.gate_up_proj, module.down_proj
    return module
