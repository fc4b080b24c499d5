"""Reads Transformers' experts modules: which of our activations they compute, and their weights.

Transformers 5 keeps all experts of a layer in one module. Flags (is_transposed, has_bias, has_gate,
has_post_expert_norm) and the functions `_apply_gate` and `act_fn` say what it computes. Models replace these
functions; we recognise them by module and name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.core.experts import OAI_ALPHA, OAI_LIMIT, ExpertWeights
from moe_routing_bench.core.frozen import Frozen, as_experts

# an activation -> our name for the gated form, act(gate) * up
GATED_BY = {"silu": "swiglu", "gelu": "geglu"}
FUNCTIONS = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu"}
# by module and name, so that Transformers need not be imported; GELUActivation is always the exact form
DEFAULT_GATE = "transformers.integrations.moe._default_apply_gate"
CLASSES = {
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.ReLU": "relu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.ReLUSquaredActivation": "relu2",
}


@dataclass(frozen=True, kw_only=True)
class Overridden:
    """A model's own `_apply_gate` that we know. For example gpt-oss keeps alpha and limit as attributes of
    the module, and gate and up in alternating columns."""

    alpha: str
    limit: str
    interleaved: bool = False


# all three compute swiglu_oai
MODELS = "transformers.models"
OVERRIDDEN = {
    f"{MODELS}.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate": Overridden(
        alpha="alpha", limit="limit", interleaved=True
    ),
    f"{MODELS}.openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts._apply_gate": (
        Overridden(alpha="alpha", limit="limit")
    ),
    f"{MODELS}.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts._apply_gate": Overridden(
        alpha="swiglu_alpha", limit="swiglu_limit"
    ),
}


@dataclass(frozen=True, kw_only=True)
class ExpertsReading:
    """Qwen3-MoE: ExpertsReading(activation="swiglu"). A module with functions of its own:
    ExpertsReading(activation=None, why="its _apply_gate is Step3p7TextMoeExperts._apply_gate, not ours")."""

    activation: str | None
    why: str = ""
    interleaved: bool = False


def read(module: nn.Module) -> ExpertsReading:
    """Returns what an experts module computes; activation is None if we have no name for it.

    torch.compile guards every value read here, so one graph may serve many layers.
    """
    m: Any = module
    if getattr(m, "has_post_expert_norm", False):
        return ExpertsReading(activation=None, why="it normalises an expert's output before the gates")
    if not m.has_gate:
        plain = plain_activation(m.act_fn)
        return ExpertsReading(activation=plain, why="" if plain else f"its activation is {_name(m.act_fn)}")
    gate = "its own" if "_apply_gate" in m.__dict__ else where(type(m), "_apply_gate")
    if gate == DEFAULT_GATE:
        plain = plain_activation(m.act_fn)
        if plain in GATED_BY:
            return ExpertsReading(activation=GATED_BY[plain])
        return ExpertsReading(activation=None, why=f"its activation is {_name(m.act_fn)}, with a gate")
    if (known := OVERRIDDEN.get(gate)) is not None:
        alpha, limit = getattr(m, known.alpha), getattr(m, known.limit)
        if alpha == OAI_ALPHA and limit == OAI_LIMIT:
            return ExpertsReading(activation="swiglu_oai", interleaved=known.interleaved)
        why = f"its alpha is {alpha} and its limit {limit}, not {OAI_ALPHA} and {OAI_LIMIT}"
        return ExpertsReading(activation=None, why=why)
    return ExpertsReading(activation=None, why=f"its _apply_gate is {gate}, not one we know")


def plain_activation(act_fn: Any) -> str | None:
    """Returns our name for a model's activation function; None if we have none."""
    if isinstance(act_fn, nn.GELU):
        return "gelu" if type(act_fn) is nn.GELU and act_fn.approximate == "none" else None
    if isinstance(act_fn, nn.Module):
        return CLASSES.get(where(type(act_fn)))
    return FUNCTIONS.get(act_fn)


@torch.compiler.assume_constant_result
def where(cls: type, attribute: str = "") -> str:
    """Returns where a class or one of its functions was defined: module and name."""
    thing = getattr(cls, attribute) if attribute else cls
    return f"{thing.__module__}.{thing.__qualname__}"


def _name(act_fn: Any) -> str:
    return where(type(act_fn)) if isinstance(act_fn, nn.Module) else str(act_fn)


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields every experts module that Transformers' registry serves, with its path."""
    for path, module in model.named_modules():
        if hasattr(module, "_apply_gate") and hasattr(module, "is_concatenated"):
            yield path, module


def tensors_of(module: nn.Module) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the first and second projection and their biases, as the module keeps them."""
    m: Any = module
    first = "gate_up_proj" if m.has_gate else "up_proj"
    if not m.has_bias:
        return getattr(m, first), m.down_proj, None, None
    return getattr(m, first), m.down_proj, getattr(m, f"{first}_bias"), m.down_proj_bias


def make_weights(
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    *,
    activation: str,
    is_transposed: bool,
    interleaved: bool,
) -> ExpertWeights:
    """Returns the module's tensors as ExpertWeights. They are views; only alternating columns that are not
    frozen are copied into halves, at every call."""
    if isinstance(w_in, Frozen) or isinstance(w_out, Frozen):
        w_in, w_out = as_experts(w_in), as_experts(w_out)
    elif not is_transposed:
        w_in, w_out = w_in.transpose(1, 2), w_out.transpose(1, 2)
    if interleaved:
        w_in = w_in if isinstance(w_in, Frozen) else _halves(w_in)
        b_in = None if b_in is None else _halves(b_in)
    return ExpertWeights(w_in_EDG=w_in, w_out_EFD=w_out, b_in_EG=b_in, b_out_ED=b_out, activation=activation)


def _halves(alternating: Tensor) -> Tensor:
    return torch.cat((alternating[..., 0::2], alternating[..., 1::2]), dim=-1)


def weights_of(module: nn.Module, reading: ExpertsReading) -> ExpertWeights:
    m: Any = module
    return make_weights(
        *tensors_of(module),
        activation=reading.activation or "silu",  # unused if we have no name for it
        is_transposed=m.is_transposed,
        interleaved=reading.interleaved,
    )
